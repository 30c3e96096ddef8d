// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "update_range.h"

namespace dos {

void update_range_scalar(const Update& update, int64_t begin, int64_t end) {
  update_range<ScalarLane>(update, begin, end);
}

}  // namespace dos
