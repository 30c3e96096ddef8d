#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "fp_environment.h"

namespace dos {
namespace {

// A part is one thread's share of an update: large enough to pay for waking a thread and to keep the memory streams
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

int64_t size_of(DType dtype) {
  if (dtype == DType::none) return 0;
  return dtype == DType::float32 ? 4 : 2;
}

struct Range {
  uintptr_t begin;
  uintptr_t end;
};

Range range_of(const void* address, DType dtype, int64_t count) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  return {begin, begin + static_cast<uintptr_t>(count * size_of(dtype))};
}

bool overlap(const Range& a, const Range& b) { return a.begin < b.end && b.begin < a.end; }

// Whether one of the two writes what the other one reads or writes.
bool conflict(const Update& a, const Update& b) {
  struct Touched {
    Range written[4];
    Range read;
  };
  const auto touched = [](const Update& u) {
    return Touched{{range_of(u.param, DType::float32, u.count), range_of(u.exp_avg, u.exp_avg_dtype, u.count),
                    range_of(u.exp_avg_sq, u.exp_avg_sq_dtype, u.count), range_of(u.out, u.out_dtype, u.count)},
                   range_of(u.grad, u.grad_dtype, u.count)};
  };
  const Touched first = touched(a);
  const Touched second = touched(b);
  for (const Range& x : first.written) {
    if (overlap(x, second.read)) return true;
    for (const Range& y : second.written)
      if (overlap(x, y) || overlap(first.read, y)) return true;
  }
  return false;
}

int64_t part_count(int64_t count, int threads) {
  const int64_t most = std::max<int64_t>(1, count / kSmallestPart);
  const int64_t wanted = std::max<int64_t>(4 * threads, count / kLargestPart);
  return std::min(most, wanted);
}

}  // namespace

void run_inline(const Update& update, RangeKernel kernel) {
  const IeeeEnvironment environment;
  kernel(update, 0, update.count);
}

struct Job {
  Job(const Update& u, RangeKernel k, int threads)
      : update(u),
        kernel(k),
        parts(part_count(u.count, threads)),
        part_size(u.count / parts / kPartMultiple * kPartMultiple),
        unfinished_parts(parts),
        generation(fork_generation()) {}

  const Update update;
  const RangeKernel kernel;
  const int64_t parts;
  const int64_t part_size;  // of all parts but the last, which takes the rest
  const uint64_t generation;
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
        set_up(workers_.back(), index, cpus);
      }
    } catch (...) {
      close();
      throw;
    }
  }

  void submit(const std::shared_ptr<Job>& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job->after_all_earlier = conflicts(job->update);
      unclaimed_.push_back(job);
      unfinished_.push_back(job);
    }
    work_to_do_.notify_all();
  }

  void wait_for_conflicts(const Update& update) {
    std::unique_lock<std::mutex> lock(mutex_);
    job_done_.wait(lock, [&] { return !conflicts(update); });
  }

  void wait(const Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    job_done_.wait(lock, [&] { return job.done.load(std::memory_order_relaxed); });
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
  static void set_up(std::thread& worker, int index, const std::vector<int>& cpus) {
    const std::string name = "dos-adam-" + std::to_string(index);
    pthread_setname_np(worker.native_handle(), name.substr(0, 15).c_str());
    if (cpus.empty()) return;
    const int highest = *std::max_element(cpus.begin(), cpus.end());
    cpu_set_t* set = CPU_ALLOC(highest + 1);
    if (set == nullptr) throw std::bad_alloc();
    const size_t bytes = CPU_ALLOC_SIZE(highest + 1);
    CPU_ZERO_S(bytes, set);
    for (const int cpu : cpus) CPU_SET_S(cpu, bytes, set);
    const int error = pthread_setaffinity_np(worker.native_handle(), bytes, set);
    CPU_FREE(set);
    if (error != 0) throw std::system_error(error, std::generic_category(), "cpus: cannot run a worker thread on them");
  }

  bool conflicts(const Update& update) const {
    return std::any_of(unfinished_.begin(), unfinished_.end(),
                       [&](const std::shared_ptr<Job>& earlier) { return conflict(earlier->update, update); });
  }

  bool can_start_next() const {
    if (unclaimed_.empty()) return false;
    return !unclaimed_.front()->after_all_earlier || unfinished_.front() == unclaimed_.front();
  }

  void work() {
    const IeeeEnvironment environment;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      work_to_do_.wait(lock, [&] { return can_start_next() || (closing_ && unclaimed_.empty()); });
      if (!can_start_next()) return;
      const std::shared_ptr<Job> job = unclaimed_.front();
      const int64_t part = job->next_part++;
      if (job->next_part == job->parts) unclaimed_.pop_front();
      lock.unlock();
      const int64_t begin = part * job->part_size;
      const int64_t end = part + 1 == job->parts ? job->update.count : begin + job->part_size;
      job->kernel(job->update, begin, end);
      lock.lock();
      if (--job->unfinished_parts == 0) finish(job);
    }
  }

  void finish(const std::shared_ptr<Job>& job) {
    unfinished_.erase(std::find(unfinished_.begin(), unfinished_.end(), job));
    job->done.store(true, std::memory_order_release);
    job_done_.notify_all();
    work_to_do_.notify_all();  // the next update may have waited for this one
  }

  std::mutex mutex_;
  std::condition_variable work_to_do_;
  std::condition_variable job_done_;
  std::deque<std::shared_ptr<Job>> unclaimed_;   // with parts that no worker took yet
  std::deque<std::shared_ptr<Job>> unfinished_;  // in order of submission
  bool closing_ = false;
  std::vector<std::thread> workers_;
};

Ticket::Ticket(std::shared_ptr<PoolState> pool, std::shared_ptr<Job> job)
    : pool_(std::move(pool)), job_(std::move(job)) {}

bool Ticket::done() const { return job_ == nullptr || job_->done.load(std::memory_order_acquire); }

void Ticket::wait() const {
  if (done()) return;
  if (job_->generation != fork_generation())
    throw std::runtime_error("ticket: submitted before this process was forked, and only the parent process works on it");
  if (job_->run_by_waiter) {
    pool_->wait_for_conflicts(job_->update);
    run_inline(job_->update, job_->kernel);
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
    fork_generation_ = fork_generation();
    state_ = std::make_shared<PoolState>(threads_, cpus_);
  }
  return *state_;
}

Ticket Pool::submit(const Update& update, RangeKernel kernel) {
  PoolState& workers = state();
  if (update.count == 0) return Ticket();
  auto job = std::make_shared<Job>(update, kernel, threads_);
  workers.submit(job);
  return Ticket(state_, std::move(job));
}

Ticket Pool::start(const Update& update, RangeKernel kernel) {
  if (threads_ > 1 && part_count(update.count, threads_) > 1) return submit(update, kernel);
  state();
  auto job = std::make_shared<Job>(update, kernel, threads_);
  job->run_by_waiter = true;
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
