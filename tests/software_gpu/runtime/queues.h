// SPDX-License-Identifier: Apache-2.0
// Streams, events and the order in which operations run: everything that may happen on a GPU, at random times.
//
// A stream is a thread that runs its operations in order. Before each it waits for what the operation has to follow,
// then for a random time. What CUDA does not order, runs in any order here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace software_gpu {

// How operations get from streams to the device.
enum class Queues {
    PerStream,  // a hardware queue for each stream
    One,        // one for all streams (CUDA_DEVICE_MAX_CONNECTIONS=1): nothing starts before all that came earlier has
    PerEngine,  // one for each copy direction: copies of one direction run one at a time, in the order of their calls
};

enum class Engine { None, ToDevice, ToHost };

struct Mark;  // the end of an operation
using MarkPtr = std::shared_ptr<Mark>;

struct Event {  // what cudaEvent_t points to; each record makes a mark of its own, since events are reused
    MarkPtr recorded;
    bool timed = true;
};

struct Stream;

// Starts from the environment: SOFTWARE_GPU_SEED, SOFTWARE_GPU_DELAY_US, SOFTWARE_GPU_QUEUES.
void configure(std::uint64_t seed, double delay_us, Queues queues);

Stream* create_stream(bool blocking, int priority);
Stream* legacy_stream();  // stream 0, which orders itself with all blocking streams
void destroy_stream(Stream* stream);
int priority_of(const Stream* stream);
Stream* by_number(std::uint64_t number);
std::uint64_t number_of(const Stream* stream);

// Runs `work` on the stream, after all that was put there before. Its mark.
MarkPtr enqueue(Stream* stream, std::function<void()> work, Engine engine = Engine::None);
// The same as late as its order allows: when someone waits for it, or something comes behind it, or after a while.
MarkPtr enqueue_late(Stream* stream, std::function<void()> work);
void record(Stream* stream, Event* event);
// What comes on the stream afterwards waits for what the event has recorded by now; nothing if it has recorded nothing.
void wait_event(Stream* stream, const Event* event);

bool is_done(const MarkPtr& mark);
void wait_for(const MarkPtr& mark);  // blocks the caller
double seconds_at(const MarkPtr& mark);
void synchronize(Stream* stream);
bool is_idle(Stream* stream);
void synchronize_device();

// For memory that is freed and used again: what is on the streams at the last free, and whether that has ended.
void note_free();
bool users_of_freed_have_ended();

// A random time that passes in the caller, as an operating system may take it away for a while.
void dawdle();
// Pieces of `bytes` in a random order: offset and size.
std::vector<std::pair<std::size_t, std::size_t>> torn(std::size_t bytes);

}  // namespace software_gpu
