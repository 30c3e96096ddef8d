// SPDX-License-Identifier: Apache-2.0
// A large, page-aligned piece of zeroed host memory.
#pragma once

#include <cstddef>

namespace dos {

// Mapped straight from the kernel: exactly the bytes asked for, rounded up to one page (allocators of page-locked memory
// round up to powers of two), touched lazily, on huge pages where the kernel grants them.
class Slab {
 public:
  // Prefers memory of NUMA node `node`; -1 has no preference. After a fork, parent and child have the same pages when
  // `shared`, and copies of their own, made on writing, when not. Throws std::invalid_argument when bytes is 0,
  // std::system_error when the mapping is refused.
  Slab(size_t bytes, int node, bool shared);
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  void* address() const { return address_; }
  size_t bytes() const { return bytes_; }
  bool huge_pages_asked() const { return huge_pages_asked_; }  // and the kernel knows of them
  bool node_preferred() const { return node_preferred_; }      // the kernel took the preference

 private:
  size_t bytes_;
  size_t mapped_;
  void* address_;
  bool huge_pages_asked_ = false;
  bool node_preferred_ = false;
};

}  // namespace dos
