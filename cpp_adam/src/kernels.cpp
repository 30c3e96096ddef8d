// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include <stdexcept>

namespace dos {
namespace {

// The builtin also asks whether the operating system saves the wide registers.
#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

std::vector<Isa> detect() {
  std::vector<Isa> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (has_avx512()) found.push_back({"avx512", update_range_avx512});
  if (has_avx2()) found.push_back({"avx2", update_range_avx2});
#elif defined(__aarch64__)
  found.push_back({"neon", update_range_neon});
#endif
  found.push_back({"scalar", update_range_scalar});
  return found;
}

}  // namespace

const std::vector<Isa>& supported_isas() {
  static const std::vector<Isa> isas = detect();
  return isas;
}

const Isa& find_isa(const std::string& name) {
  std::string choices;
  for (const Isa& isa : supported_isas()) {
    if (name == isa.name) return isa;
    choices += choices.empty() ? "" : ", ";
    choices += isa.name;
  }
  throw std::invalid_argument("instruction set '" + name + "' is unknown or not supported by this CPU and build; choose one of: " +
                              choices);
}

}  // namespace dos
