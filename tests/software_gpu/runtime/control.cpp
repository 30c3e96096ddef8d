// SPDX-License-Identifier: Apache-2.0
#include "control.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "memory.h"
#include "queues.h"

namespace software_gpu {
namespace {

std::mutex mutex;
auto& counts = *new std::map<std::string, std::uint64_t>;
auto& failures = *new std::map<std::string, std::int64_t>;  // name -> calls until the one that fails
auto& said = *new std::set<std::string>;

}  // namespace

void count(const char* name, std::uint64_t amount) {
    std::lock_guard<std::mutex> lock(mutex);
    counts[name] += amount;
}

bool fails(const char* name) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = failures.find(name);
    if (found == failures.end() || found->second-- > 0) return false;
    failures.erase(found);
    return true;
}

void say_once(const char* what, const char* which) {
    std::lock_guard<std::mutex> lock(mutex);
    if (said.insert(std::string(what) + which).second) std::fprintf(stderr, "software GPU: %s: %s\n", what, which);
}

}  // namespace software_gpu

using namespace software_gpu;

extern "C" {

std::uint64_t software_gpu_count(const char* name) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = counts.find(name);
    return found == counts.end() ? 0 : found->second;
}

// The call of this name after `skipped` others fails; a negative number takes that back.
void software_gpu_fail(const char* name, std::int64_t skipped) {
    std::lock_guard<std::mutex> lock(mutex);
    if (skipped < 0) failures.erase(name);
    else failures[name] = skipped;
}

void software_gpu_configure(std::uint64_t seed, double delay_us, int queues) {
    configure(seed, delay_us, static_cast<Queues>(queues));
}

std::int64_t software_gpu_back_offset() { return back_offset(); }

// 1 where the bytes are of one allocation of the device.
int software_gpu_is_device(const void* address, std::uint64_t bytes) { return back_of(address, bytes) != nullptr; }

std::uint64_t software_gpu_pinned_ranges() { return pinned_ranges(); }

// Calls `work(argument)` in the stream's order, on the stream's thread. `stream` is a cudaStream_t.
void software_gpu_enqueue(void* stream, void (*work)(std::int64_t), std::int64_t argument) {
    auto* on = stream ? static_cast<Stream*>(stream) : legacy_stream();
    enqueue(on, [work, argument] { work(argument); });
}

// Memory of the device is about to be freed, by whoever hands it out to others.
void software_gpu_freed() { note_free(); }

// Spoils memory that is handed out: at once where all has ended that may have used it before it was freed, and again in
// the stream's order, as its next user may do.
void software_gpu_spoil(void* stream, void* address, std::uint64_t bytes) {
    auto* on = stream ? static_cast<Stream*>(stream) : legacy_stream();
    char* back = back_of(address, bytes);
    if (!back) return;
    if (users_of_freed_have_ended()) std::memset(back, kSpoiled, bytes);
    enqueue_late(on, [=] { std::memset(back, kSpoiled, bytes); });
}

void software_gpu_synchronize(void* stream) { synchronize(stream ? static_cast<Stream*>(stream) : legacy_stream()); }
}
