// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "footprint.h"
#include "fp_environment.h"

namespace dos {
namespace {

// A part is what one thread takes of a job at a time: large enough to pay for waking it and to keep the memory streams
// long, small enough that a thread which lost its core does not hold up the others.
constexpr int64_t kSmallestPart = 64 * 1024;
constexpr int64_t kLargestPart = 1024 * 1024;
constexpr int64_t kPartMultiple = 64;  // parts start on cache lines of every dtype when the arrays do

// Number of forks between this process and the one that loaded the module.
std::atomic<uint64_t> forks{0};
[[maybe_unused]] const int fork_handler =
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

uint64_t fork_generation() { return forks.load(std::memory_order_relaxed); }

// New threads inherit the signal mask: workers take no signals, which belong to Python's main thread.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

 private:
  sigset_t saved_;
};

void restrict_to(std::thread& worker, const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  const int highest = *std::max_element(cpus.begin(), cpus.end());
  const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(highest + 1), [](cpu_set_t* s) { CPU_FREE(s); });
  if (set == nullptr) throw std::bad_alloc();
  const size_t bytes = CPU_ALLOC_SIZE(highest + 1);
  CPU_ZERO_S(bytes, set.get());
  for (const int cpu : cpus) CPU_SET_S(cpu, bytes, set.get());
  const int error = pthread_setaffinity_np(worker.native_handle(), bytes, set.get());
  // Where affinity itself is forbidden (some containers), threads run unpinned.
  if (error == EINVAL)
    throw std::system_error(error, std::generic_category(), "cpus: this process may run on none of them");
}

}  // namespace

// The updates of a job are one range of `count` elements, laid end to end, and parts are cut from that.
struct Job {
  Job(std::vector<Update> list, RangeKernel k, int threads)
      : updates(std::move(list)), kernel(k), generation(fork_generation()) {
    starts.reserve(updates.size());
    for (const Update& u : updates) {
      starts.push_back(count);
      count += u.count;
    }
    const int64_t most = std::max<int64_t>(1, count / kSmallestPart);
    parts = std::min(most, std::max<int64_t>(4 * threads, count / kLargestPart));
    part_size = count / parts / kPartMultiple * kPartMultiple;
    unfinished_parts = parts;
  }

  void run_part(int64_t part) const {
    run(part * part_size, part + 1 == parts ? count : (part + 1) * part_size);
  }

  void run(int64_t begin, int64_t end) const {
    size_t index = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    for (; index < updates.size() && starts[index] < end; ++index) {
      const Update& u = updates[index];
      const int64_t from = std::max<int64_t>(begin - starts[index], 0);
      const int64_t to = std::min(end - starts[index], u.count);
      if (from < to) kernel(u, from, to);
    }
  }

  const std::vector<Update> updates;
  const RangeKernel kernel;
  const uint64_t generation;
  std::vector<int64_t> starts;
  int64_t count = 0;
  int64_t parts;
  int64_t part_size;  // of all parts but the last, which takes the rest
  bool run_by_waiter = false;

  // Under the pool's mutex.
  int64_t next_part = 0;
  int64_t unfinished_parts;
  bool after_all_earlier = false;

  std::atomic<bool> done{false};
};

// What the workers share. Owned by the pool and by its tickets.
class PoolState {
 public:
  PoolState(int threads, const std::vector<int>& cpus) {
    const SignalsBlocked blocked;
    try {
      for (int index = 0; index < threads; ++index) {
        workers_.emplace_back([this] { work(); });
        const std::string name = "dos-adam-" + std::to_string(index);
        pthread_setname_np(workers_.back().native_handle(), name.substr(0, 15).c_str());
        restrict_to(workers_.back(), cpus);
      }
    } catch (...) {
      close();
      throw;
    }
  }

  void submit(const std::shared_ptr<Job>& job) {
    InFlight entry{job, Footprint(job->updates)};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job->after_all_earlier = conflicts(entry.footprint);
      unclaimed_.push_back(job);
      unfinished_.push_back(std::move(entry));
    }
    if (job->parts > 1)
      work_to_do_.notify_all();
    else
      work_to_do_.notify_one();
  }

  void wait(const Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    job_done_.wait(lock, [&] { return job.done.load(std::memory_order_relaxed); });
  }

  void wait_for_conflicts(const Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (unfinished_.empty()) return;
    const Footprint footprint(job.updates);
    job_done_.wait(lock, [&] { return !conflicts(footprint); });
  }

  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    work_to_do_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

 private:
  struct InFlight {
    std::shared_ptr<Job> job;
    Footprint footprint;
  };

  bool conflicts(const Footprint& footprint) const {
    return std::any_of(unfinished_.begin(), unfinished_.end(),
                       [&](const InFlight& earlier) { return earlier.footprint.conflicts_with(footprint); });
  }

  bool can_start_next() const {
    if (unclaimed_.empty()) return false;
    return !unclaimed_.front()->after_all_earlier || unfinished_.front().job == unclaimed_.front();
  }

  void work() {
    const IeeeEnvironment environment;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      work_to_do_.wait(lock, [&] { return can_start_next() || (closing_ && unclaimed_.empty()); });
      if (unclaimed_.empty()) return;
      const std::shared_ptr<Job> job = unclaimed_.front();
      const int64_t part = job->next_part++;
      if (job->next_part == job->parts) unclaimed_.pop_front();
      lock.unlock();
      job->run_part(part);
      lock.lock();
      if (--job->unfinished_parts == 0) finish(job);
    }
  }

  void finish(const std::shared_ptr<Job>& job) {
    unfinished_.erase(std::find_if(unfinished_.begin(), unfinished_.end(),
                                   [&](const InFlight& entry) { return entry.job == job; }));
    job->done.store(true, std::memory_order_release);
    job_done_.notify_all();
    if (!unclaimed_.empty() || closing_) work_to_do_.notify_all();  // the next job may have waited for this one
  }

  std::mutex mutex_;
  std::condition_variable work_to_do_;
  std::condition_variable job_done_;
  std::deque<std::shared_ptr<Job>> unclaimed_;  // with parts that no worker took yet
  std::deque<InFlight> unfinished_;             // in order of submission
  bool closing_ = false;
  std::vector<std::thread> workers_;
};

Ticket::Ticket(std::shared_ptr<PoolState> pool, std::shared_ptr<Job> job)
    : pool_(std::move(pool)), job_(std::move(job)) {}

bool Ticket::done() const { return job_ == nullptr || job_->done.load(std::memory_order_acquire); }

void Ticket::wait() const {
  if (done()) return;
  if (job_->generation != fork_generation())
    throw std::runtime_error("ticket: submitted before this process was forked; only its parent works on it");
  if (job_->run_by_waiter) {
    pool_->wait_for_conflicts(*job_);
    const IeeeEnvironment environment;
    job_->run(0, job_->count);
    job_->done.store(true, std::memory_order_release);
  } else {
    pool_->wait(*job_);
  }
}

Pool::Pool(int threads, std::vector<int> cpus)
    : threads_(threads), cpus_(std::move(cpus)), fork_generation_(fork_generation()) {
  state_ = std::make_shared<PoolState>(threads_, cpus_);
}

Pool::~Pool() { close(); }

PoolState& Pool::state() {
  if (closed_) throw std::runtime_error("pool: it is closed");
  if (fork_generation_ != fork_generation()) {
    // The old state's threads do not exist here and its mutex may be held for ever: leave it alone.
    new std::shared_ptr<PoolState>(std::move(state_));
    state_ = std::make_shared<PoolState>(threads_, cpus_);
    fork_generation_ = fork_generation();
  }
  return *state_;
}

Ticket Pool::submit(std::vector<Update> updates, RangeKernel kernel) {
  PoolState& workers = state();
  auto job = std::make_shared<Job>(std::move(updates), kernel, threads_);
  if (job->count == 0) return Ticket();
  workers.submit(job);
  return Ticket(state_, std::move(job));
}

Ticket Pool::start(std::vector<Update> updates, RangeKernel kernel) {
  PoolState& workers = state();
  auto job = std::make_shared<Job>(std::move(updates), kernel, threads_);
  if (job->count == 0) return Ticket();
  if (threads_ > 1 && job->parts > 1) {
    workers.submit(job);
  } else {
    if (job->updates.size() > 1) (void)Footprint(job->updates);  // refuses pieces that overlap
    job->run_by_waiter = true;
  }
  return Ticket(state_, std::move(job));
}

void Pool::close() {
  if (closed_) return;
  closed_ = true;
  if (fork_generation_ != fork_generation()) {
    new std::shared_ptr<PoolState>(std::move(state_));  // as above
    return;
  }
  state_->close();
}

}  // namespace dos
