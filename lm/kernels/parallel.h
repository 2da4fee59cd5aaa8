// Parallel loops on TensorFlow's intra-op threads, and buffers that are reused in later steps.
#ifndef LM_KERNELS_PARALLEL_H_
#define LM_KERNELS_PARALLEL_H_

#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace lm {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Run fn(step, block) for all steps in order. Within a step, the blocks run in any order on up to
// `threads` threads. A step starts when all threads have finished the previous step.
//
// Threads wait for each other in a spin loop: a step may take only 10 us, which is too short for
// sleeping and waking. The loop cannot deadlock: a block belongs to the first thread that claims
// it, so the calling thread only waits for running threads, never for a thread that must start.
//
// `pool` has the method Schedule(std::function<void()>), like tensorflow::thread::ThreadPool.
template <class Pool, class Fn>
void RunSteps(Pool* pool, int64_t threads, int64_t steps, int64_t blocks, const Fn& fn) {
  threads = std::min(threads, blocks);
  if (threads <= 1) {
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t block = 0; block < blocks; ++block) fn(step, block);
    return;
  }

  struct Team {
    explicit Team(int64_t blocks) : claimed(blocks) {}
    std::vector<std::atomic<int64_t>> claimed;  // per block: number of claimed steps
    std::atomic<int64_t> done{0};               // blocks finished, over all steps
    std::atomic<int64_t> helpers{0};            // running now; kClosed after the end of the loop
  };
  constexpr int64_t kClosed = int64_t{1} << 32;
  auto team = std::make_shared<Team>(blocks);

  const auto work = [steps, blocks, threads, &fn](Team& team, int64_t thread) {
    for (int64_t step = 0; step < steps; ++step) {
      // Own blocks first: they are the same in each step, so their weights are in the core's cache.
      // Then blocks that no other thread has started. Every other step runs backwards from the end
      // of the own blocks, so that the last weights in a cache that is too small are used again.
      const int64_t first = blocks * (thread + (step & 1)) / threads;
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t offset = step & 1 ? blocks - 1 - i : i;
        const int64_t block = (first + offset) % blocks;
        int64_t expected = step;
        if (team.claimed[block].load(std::memory_order_relaxed) == step &&
            team.claimed[block].compare_exchange_strong(expected, step + 1)) {
          fn(step, block);
          team.done.fetch_add(1);
        }
      }
      if (thread > 0 && step + 1 == steps) return;  // only the caller waits for the last step
      for (int spins = 0; team.done.load() < (step + 1) * blocks; ++spins) {
        spins < 4000 ? Pause() : (void)sched_yield();
      }
    }
  };
  for (int64_t thread = 1; thread < threads; ++thread) {
    pool->Schedule([team, &work, thread] {
      // A helper that starts after the end must not access `work`, which no longer exists.
      if (team->helpers.fetch_add(1) < kClosed) work(*team, thread);
      team->helpers.fetch_sub(1);
    });
  }
  work(*team, 0);
  team->helpers.fetch_add(kClosed);
  // Late helpers may enter during this wait. They leave immediately.
  while (team->helpers.load() != kClosed) Pause();
}

// A buffer that a step borrows and returns, so that its pages stay mapped for the next step: new
// memory costs a page fault per 4 KiB. All ops share the buffers.
class Scratch {
 public:
  explicit Scratch(int64_t floats) {
    constexpr size_t kHugePage = size_t{1} << 21;
    const size_t bytes = std::max<int64_t>(floats, 1) * sizeof(float);
    const size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    {
      std::lock_guard<std::mutex> lock(Mutex());
      auto replaced = Free().end();
      for (auto it = Free().begin(); it != Free().end(); ++it) {
        // Not a buffer that is several times too large: a different op will need that buffer.
        if (it->second >= size && it->second / 4 <= size) {
          buffer_ = *it;
          Free().erase(it);
          return;
        }
        if (it->second < size && size / 4 <= it->second) replaced = it;
      }
      // A size that depends on the words would otherwise leave a buffer for each new maximum.
      if (replaced != Free().end()) {
        free(replaced->first);
        Free().erase(replaced);
      }
    }
    buffer_ = {nullptr, size};
    if (posix_memalign(&buffer_.first, kHugePage, size) != 0) buffer_.first = nullptr;
#if defined(MADV_HUGEPAGE)
    if (buffer_.first) madvise(buffer_.first, size, MADV_HUGEPAGE);
#endif
  }
  ~Scratch() {
    if (!buffer_.first) return;
    std::lock_guard<std::mutex> lock(Mutex());
    Free().push_back(buffer_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* data() { return static_cast<float*>(buffer_.first); }  // nullptr: out of memory

 private:
  static std::mutex& Mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::vector<std::pair<void*, size_t>>& Free() {
    static auto* free = new std::vector<std::pair<void*, size_t>>;
    return *free;
  }
  std::pair<void*, size_t> buffer_;
};

}  // namespace lm

#endif  // LM_KERNELS_PARALLEL_H_
