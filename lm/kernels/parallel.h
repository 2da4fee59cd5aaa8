// Parallel loops on TensorFlow's intra-op threads, and memory that outlives a step.
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

// Runs fn(step, block) for all steps in order and, within a step, for all blocks in any order on
// up to `threads` threads; a step starts when the step before has ended on all of them.
//
// Threads meet in a spin-wait, because a step may be 10 us of work, too short to put a thread to
// sleep and wake it. That cannot deadlock: a block belongs to whoever claims it first, so the
// calling thread waits for running threads alone, never for one that the pool has yet to start.
//
// `pool` has Schedule(std::function<void()>), as tensorflow::thread::ThreadPool.
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
    std::vector<std::atomic<int64_t>> claimed;  // per block: how many of its steps are taken
    std::atomic<int64_t> done{0};               // blocks finished, over all steps
    std::atomic<int64_t> helpers{0};            // at work now; kClosed once the loop has ended
  };
  constexpr int64_t kClosed = int64_t{1} << 32;
  auto team = std::make_shared<Team>(blocks);

  const auto work = [steps, blocks, threads, &fn](Team& team, int64_t thread) {
    const int64_t first = blocks * thread / threads;
    for (int64_t step = 0; step < steps; ++step) {
      // Own blocks first, the same ones each step, because their weights are in this core's cache;
      // then those that others have not begun. Every other step runs backwards, so that what the
      // last one left in a shared cache too small for all the weights is met again.
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
      for (int spins = 0; team.done.load() < (step + 1) * blocks; ++spins) {
        spins < 4000 ? Pause() : (void)sched_yield();
      }
    }
  };
  for (int64_t thread = 1; thread < threads; ++thread) {
    pool->Schedule([team, &work, thread] {
      // A helper that starts after the end must not touch `work`, which is gone by then.
      if (team->helpers.fetch_add(1) < kClosed) work(*team, thread);
      team->helpers.fetch_sub(1);
    });
  }
  work(*team, 0);
  team->helpers.fetch_add(kClosed);
  // Late helpers may come and go while this waits: they leave at once.
  while (team->helpers.load() != kClosed) Pause();
}

// A buffer that a step borrows and hands back, so that the next step finds its pages mapped:
// fresh memory costs a page fault per 4 KiB. Shared by all ops, which run one after another.
class Scratch {
 public:
  explicit Scratch(int64_t floats) {
    constexpr size_t kHugePage = size_t{1} << 21;
    const size_t bytes = std::max<int64_t>(floats, 1) * sizeof(float);
    const size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    {
      std::lock_guard<std::mutex> lock(Mutex());
      for (auto it = Free().begin(); it != Free().end(); ++it) {
        // Not one several times too large: another op will need it.
        if (it->second >= size && it->second / 4 <= size) {
          buffer_ = *it;
          Free().erase(it);
          return;
        }
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
