// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace software_gpu {
namespace {

constexpr std::size_t kAlignment = 512;
constexpr std::size_t kGuard = 512;  // between allocations, so that a copy past the end of one is noticed

std::mutex mutex;
std::map<std::size_t, std::size_t> used;           // offset -> bytes that were asked for
std::map<std::uintptr_t, std::size_t> registered;  // address of the host -> bytes
std::size_t total = 0, taken = 0;
char* front = nullptr;
char* back = nullptr;
struct sigaction before;

std::size_t rounded(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment + kGuard; }

void write_text(const char* text) { (void)!write(2, text, std::strlen(text)); }

// Says what happened and lets the fault happen again under the handler that was there before (Python's, usually).
void on_fault(int, siginfo_t* info, void*) {
    if (is_front(info->si_addr)) {
        write_text("software GPU: the host touched device memory, at:\n");
        void* frames[64];
        backtrace_symbols_fd(frames, backtrace(frames, 64), 2);
    }
    sigaction(SIGSEGV, &before, nullptr);
}

void map_once() {
    if (front) return;
    const char* given = std::getenv("SOFTWARE_GPU_MEMORY");
    total = given ? std::strtoull(given, nullptr, 10) : std::size_t{4} << 30;
    const int file = memfd_create("software-gpu", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(total)) != 0) std::abort();
    void* hidden = mmap(nullptr, total, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* open = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (hidden == MAP_FAILED || open == MAP_FAILED) std::abort();
    close(file);
    front = static_cast<char*>(hidden);
    back = static_cast<char*>(open);
    void* warm[1];
    backtrace(warm, 1);  // loads what it needs now, not in the handler
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before);
}

}  // namespace

void* device_malloc(std::size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    map_once();
    const std::size_t needed = rounded(bytes);
    std::size_t start = 0;
    for (const auto& [offset, size] : used) {
        if (offset - start >= needed) break;
        start = offset + rounded(size);
    }
    if (start + needed > total) return nullptr;
    used[start] = bytes;
    taken += needed;
    std::memset(back + start, kSpoiled, bytes);
    return front + start;
}

bool device_free(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!is_front(address)) return false;
    const auto found = used.find(static_cast<std::size_t>(static_cast<char*>(address) - front));
    if (found == used.end()) return false;
    std::memset(back + found->first, kSpoiled, found->second);
    taken -= rounded(found->second);
    used.erase(found);
    return true;
}

void device_memory(std::size_t* free_bytes, std::size_t* total_bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    map_once();
    *free_bytes = total - taken;
    *total_bytes = total;
}

bool is_front(const void* address) {
    const auto* at = static_cast<const char*>(address);
    return front && at >= front && at < front + total;
}

std::ptrdiff_t back_offset() {
    std::lock_guard<std::mutex> lock(mutex);
    map_once();
    return back - front;
}

char* back_of(const void* address, std::size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!is_front(address)) return nullptr;
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - front);
    auto found = used.upper_bound(offset);
    if (found == used.begin()) return nullptr;
    --found;
    return offset + bytes <= found->first + found->second ? back + offset : nullptr;
}

bool pin(const void* address, std::size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto start = reinterpret_cast<std::uintptr_t>(address);
    const auto next = registered.lower_bound(start);
    if (next != registered.end() && next->first < start + bytes) return false;
    if (next != registered.begin()) {
        const auto previous = std::prev(next);
        if (previous->first + previous->second > start) return false;
    }
    registered[start] = bytes;
    return true;
}

bool unpin(const void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    return registered.erase(reinterpret_cast<std::uintptr_t>(address)) == 1;
}

std::size_t pinned_ranges() {
    std::lock_guard<std::mutex> lock(mutex);
    return registered.size();
}

Where where(const void* address, std::size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    if (is_front(address)) return Where::Device;
    const auto start = reinterpret_cast<std::uintptr_t>(address);
    auto found = registered.upper_bound(start);
    if (found == registered.begin()) return Where::Pageable;
    --found;
    return start + bytes <= found->first + found->second ? Where::Pinned : Where::Pageable;
}

}  // namespace software_gpu
