// A pool of threads that live as long as the pool, each pinned to one core.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace penstock {

// Threads wait for a job by spinning for some microseconds, then sleep. They start with the default
// floating-point environment (round to nearest, no flushing of denormals) whatever their creator
// uses, and with all signals blocked, so that the process's own threads keep handling signals.
class ThreadPool {
 public:
  // Throws std::invalid_argument for an empty list or an impossible core number and
  // std::runtime_error when a thread cannot be started on its core.
  explicit ThreadPool(const std::vector<int>& cores);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t num_threads() const { return num_threads_; }

  // The right to run jobs, held by one caller at a time. Taking it throws std::runtime_error after
  // close() and in a forked child, which has no threads.
  class Turn {
   public:
    explicit Turn(ThreadPool& pool);
    // Calls job(thread_index) once on every thread and returns when all calls have. The job must
    // not throw.
    void run(const std::function<void(std::size_t)>& job) const;

   private:
    ThreadPool& pool_;
    std::unique_lock<std::mutex> lock_;
  };

  // Waits for a running job, then stops and joins all threads. May be repeated.
  void close();

 private:
  struct Worker {
    ThreadPool* pool;
    std::size_t index;
    pthread_t thread;
  };

  static void* thread_main(void* worker);
  void start(Worker& worker, int core);
  void serve(std::size_t index);
  void await_generation(std::uint64_t last_seen);
  void run(const std::function<void(std::size_t)>& job);
  void stop_and_join();
  bool forked() const;

  const pid_t owner_pid_;
  const std::size_t num_threads_;
  std::unique_ptr<Worker[]> workers_;
  std::size_t num_started_ = 0;

  std::mutex callers_;  // held by a Turn and by close()
  bool closed_ = false;

  std::mutex mutex_;  // protects the two conditions below
  std::condition_variable job_posted_;
  std::condition_variable job_finished_;
  std::atomic<std::uint64_t> generation_{0};  // counts posted jobs; stopping counts as one
  std::atomic<std::size_t> num_running_{0};
  const std::function<void(std::size_t)>* job_ = nullptr;  // null asks the threads to stop
};

}  // namespace penstock
