// SPDX-License-Identifier: Apache-2.0
// The update compiled once per instruction set, and the choice between them at run time.
#pragma once

#include <string>
#include <vector>

#include "adam.h"

namespace dos {

// Defined in kernel_*.cpp; callable only where the CPU has the instruction set.
void update_range_scalar(const Update& update, int64_t begin, int64_t end);
void update_range_avx2(const Update& update, int64_t begin, int64_t end);
void update_range_avx512(const Update& update, int64_t begin, int64_t end);
void update_range_neon(const Update& update, int64_t begin, int64_t end);

struct Isa {
  const char* name;
  RangeKernel update_range;
};

// The instruction sets of this build that this CPU has, best first; "scalar" is always the last.
const std::vector<Isa>& supported_isas();

// The one of that name. Throws std::invalid_argument naming the choices when it is unknown, not built or not supported.
const Isa& find_isa(const std::string& name);

}  // namespace dos
