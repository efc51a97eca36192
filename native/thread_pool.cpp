#include "thread_pool.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cfenv>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

namespace penstock {
namespace {

// About 20 microseconds: longer than the gap between the sweeps of two blocks, short enough not to
// be noticed when a core is shared.
constexpr int kSpinsBeforeSleep = 500;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("" ::: "memory");
#endif
}

std::string allowed_cores() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return "unknown";
  std::string text;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) text += (text.empty() ? "" : ", ") + std::to_string(core);
  }
  return text;
}

void check_cores(const std::vector<int>& cores) {
  if (cores.empty()) {
    throw std::invalid_argument("cores is empty: name at least one core, for example [0]");
  }
  for (const int core : cores) {
    if (core < 0 || core >= CPU_SETSIZE) {
      throw std::invalid_argument("core " + std::to_string(core) + " is not in 0.." +
                                  std::to_string(CPU_SETSIZE - 1));
    }
  }
}

// New threads inherit the signal mask of the thread that creates them.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous_);
  }
  ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t previous_;
};

}  // namespace

ThreadPool::ThreadPool(const std::vector<int>& cores)
    : owner_pid_(getpid()), num_threads_(cores.size()), workers_(new Worker[cores.size()]) {
  check_cores(cores);
  const AllSignalsBlocked blocked;
  try {
    for (std::size_t i = 0; i < num_threads_; ++i) {
      workers_[i].pool = this;
      workers_[i].index = i;
      start(workers_[i], cores[i]);
      ++num_started_;
    }
  } catch (...) {
    stop_and_join();
    throw;
  }
}

ThreadPool::~ThreadPool() { close(); }

void ThreadPool::start(Worker& worker, int core) {
  cpu_set_t only_core;
  CPU_ZERO(&only_core);
  CPU_SET(core, &only_core);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setaffinity_np(&attributes, sizeof(only_core), &only_core);
  const int error = pthread_create(&worker.thread, &attributes, &ThreadPool::thread_main, &worker);
  pthread_attr_destroy(&attributes);
  if (error != 0) {
    throw std::runtime_error("cannot start a thread pinned to core " + std::to_string(core) + ": " +
                             std::strerror(error) + "; this process may use cores " +
                             allowed_cores());
  }
  char name[16];
  std::snprintf(name, sizeof(name), "sweeps-core%d", core);
  pthread_setname_np(worker.thread, name);
}

void* ThreadPool::thread_main(void* argument) {
  const Worker& worker = *static_cast<Worker*>(argument);
  worker.pool->serve(worker.index);
  return nullptr;
}

void ThreadPool::serve(std::size_t index) {
  std::fesetenv(FE_DFL_ENV);
  for (std::uint64_t seen = 0;; ++seen) {
    await_generation(seen);
    if (job_ == nullptr) return;
    (*job_)(index);
    if (num_running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_finished_.notify_one();
    }
  }
}

void ThreadPool::await_generation(std::uint64_t last_seen) {
  const auto posted = [&] { return generation_.load(std::memory_order_acquire) != last_seen; };
  for (int spin = 0; spin < kSpinsBeforeSleep; ++spin) {
    if (posted()) return;
    pause_briefly();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  job_posted_.wait(lock, posted);
}

ThreadPool::Turn::Turn(ThreadPool& pool) : pool_(pool) {
  // First of all: in a forked child the mutex may be held by a thread that does not exist.
  if (pool.forked()) {
    throw std::runtime_error("the pool belongs to the parent process: make a new one");
  }
  lock_ = std::unique_lock<std::mutex>(pool.callers_);
  if (pool.closed_) throw std::runtime_error("the pool is closed");
}

void ThreadPool::Turn::run(const std::function<void(std::size_t)>& job) const { pool_.run(job); }

void ThreadPool::run(const std::function<void(std::size_t)>& job) {
  std::unique_lock<std::mutex> lock(mutex_);
  job_ = &job;
  num_running_.store(num_threads_, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  job_posted_.notify_all();
  job_finished_.wait(lock, [&] { return num_running_.load(std::memory_order_acquire) == 0; });
}

void ThreadPool::close() {
  if (forked()) return;  // the threads stayed behind in the parent
  const std::lock_guard<std::mutex> turn(callers_);
  if (closed_) return;
  stop_and_join();
}

void ThreadPool::stop_and_join() {
  closed_ = true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    job_ = nullptr;
    generation_.fetch_add(1, std::memory_order_release);
    job_posted_.notify_all();
  }
  for (std::size_t i = 0; i < num_started_; ++i) pthread_join(workers_[i].thread, nullptr);
  num_started_ = 0;
}

bool ThreadPool::forked() const { return getpid() != owner_pid_; }

}  // namespace penstock
