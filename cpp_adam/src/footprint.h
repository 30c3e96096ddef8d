// SPDX-License-Identifier: Apache-2.0
// Which memory a set of updates writes and reads, to tell whether two sets may run at the same time.
#pragma once

#include <cstdint>
#include <vector>

#include "adam.h"

namespace dos {

int64_t element_size(DType dtype);  // bytes; 0 for none

class Footprint {
 public:
  // Throws std::invalid_argument when the updates themselves conflict: they run in no particular order.
  explicit Footprint(const std::vector<Update>& updates);

  // Whether one of the two writes what the other one writes or reads.
  bool conflicts_with(const Footprint& other) const;

 private:
  struct Range {
    uintptr_t begin;
    uintptr_t end;
  };
  using Ranges = std::vector<Range>;

  static void add(Ranges& ranges, const void* address, DType dtype, int64_t count);
  static void sort(Ranges& ranges);
  static void join_neighbours(Ranges& ranges);
  static bool overlap(const Ranges& a, const Ranges& b);

  Ranges written_;  // sorted, disjoint
  Ranges read_;     // sorted
};

}  // namespace dos
