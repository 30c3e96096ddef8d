// SPDX-License-Identifier: Apache-2.0
// What tests set and count. The functions of `control.cpp` are called through ctypes by tests/software_gpu.
#pragma once

#include <cstddef>
#include <cstdint>

namespace software_gpu {

// Adds to a named count: calls, copies of each kind, waits of the host.
void count(const char* name, std::uint64_t amount = 1);

// Whether this call is one that a test wants to fail (`software_gpu_fail`).
bool fails(const char* name);

// Writes to stderr, once for each text.
void say_once(const char* what, const char* which);

}  // namespace software_gpu
