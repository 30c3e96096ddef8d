// SPDX-License-Identifier: Apache-2.0
#include "slab.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <system_error>
#include <vector>

namespace dos {
namespace {

constexpr size_t kHugePage = 2 * 1024 * 1024;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Maps `bytes` anywhere, or in place of what is mapped at `at`.
void* map(size_t bytes, bool shared, void* at = nullptr) {
  const int flags = (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
  void* address = mmap(at, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (address == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "nbytes: cannot map a slab");
  return address;
}

// Maps `bytes` at a multiple of a huge page, giving the surplus back.
void* map_on_huge_page(size_t bytes, bool shared) {
  char* whole = static_cast<char*>(map(bytes + kHugePage, false));
  char* start = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(whole), kHugePage));
  if (start != whole) munmap(whole, start - whole);
  char* end = start + bytes;
  char* whole_end = whole + bytes + kHugePage;
  if (end != whole_end) munmap(end, whole_end - end);
  if (!shared) return start;
  try {
    // Shared memory gets huge pages only where its own first byte lies on one, so it cannot be cut to fit.
    return map(bytes, true, start);
  } catch (...) {
    munmap(start, bytes);
    throw;
  }
}

// The C library has no mbind, and the policy is only a wish: no reason to depend on libnuma.
bool prefer_node(void* address, size_t bytes, int node) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> nodes(node / kBits + 1);
  nodes[node / kBits] = 1ul << (node % kBits);
  return syscall(SYS_mbind, address, bytes, MPOL_PREFERRED, nodes.data(), nodes.size() * kBits + 1, 0) == 0;
}

}  // namespace

Slab::Slab(size_t bytes, int node, bool shared) : bytes_(bytes) {
  if (bytes == 0) throw std::invalid_argument("nbytes: must be at least 1");
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes > SIZE_MAX - kHugePage - page) throw std::invalid_argument("nbytes: more than there are addresses");
  mapped_ = round_up(bytes, page);
  if (mapped_ < kHugePage) {
    address_ = map(mapped_, shared);
  } else {
    address_ = map_on_huge_page(mapped_, shared);
    huge_pages_asked_ = madvise(address_, mapped_, MADV_HUGEPAGE) == 0;
  }
  if (node >= 0) node_preferred_ = prefer_node(address_, mapped_, node);
}

Slab::~Slab() { munmap(address_, mapped_); }

}  // namespace dos
