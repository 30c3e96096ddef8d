// SPDX-License-Identifier: Apache-2.0
// Memory of the software GPU: what is allocated on the device, and which host memory is page-locked.
//
// The device's memory is mapped twice. Callers see addresses of the front, which no one may read or write; what runs on
// the device uses the back, the same pages at another address. So a host that touches device memory crashes at once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace software_gpu {

constexpr int kSpoiled = 0xFF;  // NaN in every floating-point type, -1 in every integer

enum class Where { Pageable, Pinned, Device };

// Allocates `bytes` of device memory, filled with NaN patterns; its front address, or nullptr where there is no room.
void* device_malloc(std::size_t bytes);
// Frees what `device_malloc` gave and spoils its content; false if `front` is not such an address.
bool device_free(void* front);
void device_memory(std::size_t* free_bytes, std::size_t* total_bytes);

// The back address of `bytes` at a front address that lie in one live allocation; nullptr otherwise.
char* back_of(const void* front, std::size_t bytes);
// What is added to a front address to get its back address.
std::ptrdiff_t back_offset();
bool is_front(const void* address);

// Page-locks memory of the host; false if a part of it is page-locked already.
bool pin(const void* address, std::size_t bytes);
// Undoes `pin`; false if nothing was page-locked from `address` on.
bool unpin(const void* address);
std::size_t pinned_ranges();

// Where `bytes` from `address` on are. Pinned means all of them are.
Where where(const void* address, std::size_t bytes);

}  // namespace software_gpu
