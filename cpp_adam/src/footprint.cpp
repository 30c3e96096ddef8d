// SPDX-License-Identifier: Apache-2.0
#include "footprint.h"

#include <algorithm>
#include <stdexcept>

namespace dos {

int64_t element_size(DType dtype) {
  if (dtype == DType::none) return 0;
  return dtype == DType::float32 ? 4 : 2;
}

Footprint::Footprint(const std::vector<Update>& updates) {
  written_.reserve(4 * updates.size());
  read_.reserve(updates.size());
  for (const Update& u : updates) {
    add(written_, u.param, DType::float32, u.count);
    add(written_, u.exp_avg, u.exp_avg_dtype, u.count);
    add(written_, u.exp_avg_sq, u.exp_avg_sq_dtype, u.count);
    add(written_, u.out, u.out_dtype, u.count);
    add(read_, u.grad, u.grad_dtype, u.count);
  }
  sort(written_);
  sort(read_);
  for (size_t i = 1; i < written_.size(); ++i)
    if (written_[i].begin < written_[i - 1].end)
      throw std::invalid_argument("pieces: param, exp_avg, exp_avg_sq and out of two pieces overlap in memory");
  join_neighbours(written_);
  join_neighbours(read_);
  if (overlap(written_, read_))
    throw std::invalid_argument("pieces: the grad of one piece overlaps memory that another one writes");
}

bool Footprint::conflicts_with(const Footprint& other) const {
  return overlap(written_, other.written_) || overlap(written_, other.read_) || overlap(read_, other.written_);
}

void Footprint::add(Ranges& ranges, const void* address, DType dtype, int64_t count) {
  const uintptr_t bytes = static_cast<uintptr_t>(count * element_size(dtype));
  if (bytes == 0) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  ranges.push_back({begin, begin + bytes});
}

void Footprint::sort(Ranges& ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
}

// Slices of one slab become one range, so that comparing two large sets stays cheap.
void Footprint::join_neighbours(Ranges& ranges) {
  if (ranges.empty()) return;
  size_t last = 0;
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin <= ranges[last].end)
      ranges[last].end = std::max(ranges[last].end, ranges[i].end);
    else
      ranges[++last] = ranges[i];
  }
  ranges.resize(last + 1);
}

bool Footprint::overlap(const Ranges& a, const Ranges& b) {
  size_t i = 0;
  size_t j = 0;
  while (i < a.size() && j < b.size()) {
    if (a[i].begin < b[j].end && b[j].begin < a[i].end) return true;
    if (a[i].end <= b[j].end)
      ++i;
    else
      ++j;
  }
  return false;
}

}  // namespace dos
