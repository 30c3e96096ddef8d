// SPDX-License-Identifier: Apache-2.0
// A pool of worker threads that runs updates in the background, and the tickets that tell when they are done.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "adam.h"

namespace dos {

class PoolState;
struct Job;

// Handle of one job, that is, of the updates submitted together. Copyable; outlives the pool.
class Ticket {
 public:
  Ticket() = default;  // of a job that is already done

  bool done() const;

  // Blocks until the job is done. Throws std::runtime_error in a forked child, where nobody works on it.
  void wait() const;

 private:
  friend class Pool;
  Ticket(std::shared_ptr<PoolState> pool, std::shared_ptr<Job> job);

  std::shared_ptr<PoolState> pool_;
  std::shared_ptr<Job> job_;
};

// Jobs are worked on in the order of submission, and several may be in flight. One that touches memory which an earlier
// unfinished one writes (or writes what that one reads) starts after all earlier ones. The pool is not thread-safe, its
// tickets are: the caller serialises calls on the pool (Python's lock does).
//
// A forked child has no worker threads: the first call there starts fresh ones.
class Pool {
 public:
  // Workers may run on any of `cpus`; an empty list leaves their affinity alone.
  // Throws std::system_error when the threads cannot be started or may not run there.
  Pool(int threads, std::vector<int> cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Both throw std::runtime_error when the pool is closed, std::invalid_argument when the updates overlap.
  Ticket submit(std::vector<Update> updates, RangeKernel kernel);
  // The same, for a caller that waits at once: a job too small to share is run by the thread that waits.
  Ticket start(std::vector<Update> updates, RangeKernel kernel);

  // Finishes what was submitted and joins the workers. Later calls do nothing.
  void close();

  bool closed() const { return closed_; }
  int threads() const { return threads_; }
  const std::vector<int>& cpus() const { return cpus_; }

 private:
  PoolState& state();

  const int threads_;
  const std::vector<int> cpus_;
  bool closed_ = false;
  uint64_t fork_generation_;
  std::shared_ptr<PoolState> state_;
};

}  // namespace dos
