// SPDX-License-Identifier: Apache-2.0
#include "queues.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>

namespace software_gpu {

struct Mark {
    bool done = false;
    bool awaited = false;
    double at = 0;
    Stream* of = nullptr;
};

namespace {

enum class Pace {
    Random,  // after a random time
    Waits,   // does nothing itself
    Late,    // as late as its order allows
};

constexpr auto kLatest = std::chrono::milliseconds(30);  // of an operation that nothing waits for

struct Operation {
    std::function<void()> work;
    std::vector<MarkPtr> after;
    MarkPtr end;
    Engine engine;
    Pace pace;
    std::uint64_t turn;
};

// One lock for all: at these sizes waiting for it costs nothing, and no order of locks can be wrong.
// Nothing here is ever destroyed, since streams run until the process ends.
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;

struct Random {
    std::mutex mutex;
    std::mt19937_64 engine{0};
    std::uint64_t below(std::uint64_t limit) {
        std::lock_guard<std::mutex> lock(mutex);
        return engine() % limit;
    }
};

Random& dice = *new Random;
auto& streams = *new std::unordered_map<std::uint64_t, Stream*>;
std::uint64_t next_number = 1;
auto& at_last_free = *new std::vector<MarkPtr>;
double longest_us = 200;
Queues kind = Queues::PerStream;
std::uint64_t turns_given[3], turns_taken[3];  // of the one queue, or by engine

int queue_of(const Operation& operation) {
    if (kind == Queues::One) return 0;
    if (kind == Queues::PerEngine && operation.engine != Engine::None) return static_cast<int>(operation.engine);
    return -1;
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Mostly nothing, sometimes a little, seldom long: orders that differ need all three.
void pass_time() {
    if (longest_us <= 0) return;
    const auto roll = dice.below(100);
    double us = 0;
    if (roll >= 97) us = longest_us * 10;
    else if (roll >= 60) us = longest_us;
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(dice.below(static_cast<std::uint64_t>(us) + 1)));
}

}  // namespace

struct Stream {
    std::uint64_t number = 0;
    bool blocking = false;
    int priority = 0;
    std::deque<Operation> waiting;
    MarkPtr last;  // of the newest operation
    bool closing = false;
    std::condition_variable filled{};  // `waiting` or `closing` has changed

    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            filled.wait(lock, [this] { return !waiting.empty() || closing; });
            if (waiting.empty()) return;
            Operation operation = std::move(waiting.front());
            waiting.pop_front();
            const int queue = queue_of(operation);
            if (queue >= 0) changed.wait(lock, [&] { return turns_taken[queue] == operation.turn; });
            for (const auto& mark : operation.after) changed.wait(lock, [&] { return mark->done; });
            if (queue >= 0 && kind == Queues::One) take_turn(queue);  // started: what comes next may start
            if (operation.pace == Pace::Late)
                filled.wait_for(lock, kLatest, [&] { return !waiting.empty() || closing || operation.end->awaited; });
            if (operation.pace != Pace::Waits) {
                lock.unlock();
                if (operation.pace == Pace::Random) pass_time();
                operation.work();
                lock.lock();
            }
            operation.end->at = now();
            operation.end->done = true;
            if (queue >= 0 && kind == Queues::PerEngine) take_turn(queue);  // ended: an engine runs one at a time
            changed.notify_all();
        }
    }

    static void take_turn(int queue) {
        ++turns_taken[queue];
        changed.notify_all();
    }
};

namespace {

// Someone waits for it: what is late is due. Called with the lock held.
void await(const MarkPtr& mark) {
    mark->awaited = true;
    mark->of->filled.notify_all();
}

MarkPtr put(Stream* stream, std::function<void()> work, Engine engine, Pace pace, std::vector<MarkPtr> after) {
    std::lock_guard<std::mutex> lock(mutex);
    Operation operation{std::move(work), std::move(after), std::make_shared<Mark>(), engine, pace, 0};
    operation.end->of = stream;
    for (const auto& [number, other] : streams) {  // the rules of the legacy stream
        const bool ordered = stream->number == 0 ? other->blocking : number == 0 && stream->blocking;
        if (other != stream && ordered && other->last) operation.after.push_back(other->last);
    }
    const int queue = queue_of(operation);
    if (queue >= 0) operation.turn = turns_given[queue]++;
    stream->last = operation.end;
    for (const auto& mark : operation.after) await(mark);
    stream->waiting.push_back(std::move(operation));
    stream->filled.notify_all();
    return stream->last;
}

Stream* add(std::uint64_t number, bool blocking, int priority) {
    auto* stream = new Stream;
    stream->number = number;
    stream->blocking = blocking;
    stream->priority = priority;
    streams[number] = stream;
    std::thread([stream] { stream->run(); }).detach();
    return stream;
}

std::vector<MarkPtr> newest_marks() {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<MarkPtr> marks;
    for (const auto& [number, stream] : streams)
        if (stream->last) marks.push_back(stream->last);
    return marks;
}

}  // namespace

void configure(std::uint64_t seed, double delay_us, Queues queues) {
    synchronize_device();
    std::lock_guard<std::mutex> lock(mutex);
    {
        std::lock_guard<std::mutex> with_dice(dice.mutex);
        dice.engine.seed(seed);
    }
    longest_us = delay_us;
    kind = queues;
    std::memset(turns_given, 0, sizeof turns_given);
    std::memset(turns_taken, 0, sizeof turns_taken);
}

Stream* create_stream(bool blocking, int priority) {
    std::lock_guard<std::mutex> lock(mutex);
    return add(next_number++, blocking, priority);
}

Stream* legacy_stream() {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = streams.find(0);
    return found == streams.end() ? add(0, false, 0) : found->second;
}

void destroy_stream(Stream* stream) {  // as CUDA does it: what was put on it still runs
    std::lock_guard<std::mutex> lock(mutex);
    stream->closing = true;
    stream->filled.notify_all();
}

int priority_of(const Stream* stream) { return stream->priority; }
std::uint64_t number_of(const Stream* stream) { return stream->number; }

Stream* by_number(std::uint64_t number) {
    if (number == 0) return legacy_stream();
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = streams.find(number);
    return found == streams.end() ? nullptr : found->second;
}

MarkPtr enqueue(Stream* stream, std::function<void()> work, Engine engine) {
    return put(stream, std::move(work), engine, Pace::Random, {});
}

MarkPtr enqueue_late(Stream* stream, std::function<void()> work) {
    return put(stream, std::move(work), Engine::None, Pace::Late, {});
}

void record(Stream* stream, Event* event) {
    auto mark = put(stream, nullptr, Engine::None, Pace::Waits, {});
    std::lock_guard<std::mutex> lock(mutex);
    event->recorded = std::move(mark);
}

void wait_event(Stream* stream, const Event* event) {
    MarkPtr mark;
    {
        std::lock_guard<std::mutex> lock(mutex);
        mark = event->recorded;
    }
    if (mark) put(stream, nullptr, Engine::None, Pace::Waits, {std::move(mark)});
}

bool is_done(const MarkPtr& mark) {
    std::lock_guard<std::mutex> lock(mutex);
    return !mark || mark->done;
}

void wait_for(const MarkPtr& mark) {
    if (!mark) return;
    std::unique_lock<std::mutex> lock(mutex);
    await(mark);
    changed.wait(lock, [&] { return mark->done; });
}

double seconds_at(const MarkPtr& mark) {
    std::lock_guard<std::mutex> lock(mutex);
    return mark->at;
}

void synchronize(Stream* stream) {
    MarkPtr last;
    {
        std::lock_guard<std::mutex> lock(mutex);
        last = stream->last;
    }
    wait_for(last);
}

bool is_idle(Stream* stream) {
    std::lock_guard<std::mutex> lock(mutex);
    return !stream->last || stream->last->done;
}

void synchronize_device() {
    for (const auto& mark : newest_marks()) wait_for(mark);
}

void note_free() {
    auto marks = newest_marks();
    std::lock_guard<std::mutex> lock(mutex);
    at_last_free = std::move(marks);
}

bool users_of_freed_have_ended() {
    std::lock_guard<std::mutex> lock(mutex);
    return std::all_of(at_last_free.begin(), at_last_free.end(), [](const MarkPtr& mark) { return mark->done; });
}

void dawdle() { pass_time(); }

std::vector<std::pair<std::size_t, std::size_t>> torn(std::size_t bytes) {
    std::vector<std::pair<std::size_t, std::size_t>> pieces;
    const std::size_t count = bytes < 64 ? 1 : 2 + dice.below(6);
    const std::size_t size = (bytes + count - 1) / count;
    for (std::size_t start = 0; start < bytes; start += size) pieces.emplace_back(start, std::min(size, bytes - start));
    for (std::size_t i = pieces.size(); i > 1; --i) std::swap(pieces[i - 1], pieces[dice.below(i)]);
    return pieces;
}

}  // namespace software_gpu
