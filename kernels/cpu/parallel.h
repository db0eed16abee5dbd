// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Parallel loops over XLA's thread pool, and scratch memory.
//
// The iterations of a loop write disjoint outputs, and no result depends on the
// thread that runs an iteration. So results have the same bits for any number
// of threads.

#ifndef JAXPLUGIN_KERNELS_CPU_PARALLEL_H_
#define JAXPLUGIN_KERNELS_CPU_PARALLEL_H_

#include <stddef.h>
#include <stdint.h>

#include <atomic>

#include "simd/always_inline.h"

namespace jaxplugin {

// The threads that run a loop.
struct Parallel {
  int threads;  // includes the caller; 1: serial
  // Schedules task(data) on another thread. The pool calls `task` at most once,
  // at any later time. Null if threads == 1.
  void (*schedule)(void* pool, void (*task)(void*), void* data);
  void* pool;
};

// Runs one iteration. `index` is in [0, count) and `slot` in
// [0, parallel.threads). Iterations that run at the same time have different
// slots.
using LoopBody = void (*)(const void* context, int64_t index, int slot);

// Runs body for every index, and returns after all calls have returned. The
// caller runs iterations too, and waits only for iterations that other threads
// have begun. So it cannot deadlock, even if the caller is a thread of a busy
// pool. Bodies run with round-to-nearest and without flushing subnormals (XLA's
// threads flush them). Returns false, without running anything, if it cannot
// allocate its state.
bool RunLoop(const Parallel& parallel, int64_t count, LoopBody body,
             const void* context);

// Cuts the iterations of a loop into parts of consecutive iterations.
class Parts {
 public:
  Parts(int64_t parts, int64_t count);
  // Returns an iteration of the slot's part, or of the next part that has some
  // left. Call it at most `count` times, so that one is always left.
  int64_t Next(int slot);

 private:
  static constexpr int kMost = 64;
  struct alignas(64) Part {
    std::atomic<int64_t> next;
    int64_t end;
  };
  int parts_;
  Part part_[kMost];
};

// RunLoop with a lambda `void(int64_t index, int slot)`.
template <typename F>
JAXPLUGIN_ALWAYS_INLINE bool ParallelFor(const Parallel& parallel,
                                         int64_t count, const F& f) {
  return RunLoop(
      parallel, count,
      [](const void* context, int64_t index, int slot) {
        (*static_cast<const F*>(context))(index, slot);
      },
      &f);
}

// ParallelFor for iterations that read or write consecutive memory. Each thread
// runs a separate part of the iterations in order, then helps with other parts.
// So it can prefetch the operands of its next iteration. And if two threads
// first write one huge page at the same time, both fill it with zeros, once in
// vain.
template <typename F>
JAXPLUGIN_ALWAYS_INLINE bool ParallelForInParts(const Parallel& parallel,
                                                int64_t count, const F& f) {
  Parts parts(parallel.threads, count);
  return ParallelFor(parallel, count, [&](int64_t, int slot) {
    f(parts.Next(slot), slot);
  });
}

// Returns the number of cores that the process may use: those of its affinity,
// or fewer if the CPU quota of a cgroup is smaller. A quota of 1.5 cores counts
// as 2. Returns 0 if the number is unknown.
//   proc     folder of the system's processes, "/proc"
//   cgroups  folder where cgroups are mounted, "/sys/fs/cgroup"
int64_t AvailableCores(const char* proc, const char* cgroups);

// Returns uninitialized memory aligned to 64 bytes, or null if allocation
// fails. A cache keeps released blocks, up to a limit, and reuses them, because
// page faults of new memory take longer than a small dot.
void* AcquireScratch(size_t bytes);
void ReleaseScratch(void* block);

// Asks the system to use huge pages for memory of at least 8 MiB. Call it
// before the memory is first written. A system without huge pages ignores the
// request. Page faults take most of the time of a first write: dequantizing 64
// MiB takes 10 to 18 ms with huge pages and 30 ms without.
void AdviseHugePages(void* memory, size_t bytes);

class Scratch {
 public:
  JAXPLUGIN_ALWAYS_INLINE explicit Scratch(size_t bytes)
      : block_(AcquireScratch(bytes)) {}
  JAXPLUGIN_ALWAYS_INLINE ~Scratch() {
    if (block_ != nullptr) ReleaseScratch(block_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  JAXPLUGIN_ALWAYS_INLINE uint8_t* get() const {
    return static_cast<uint8_t*>(block_);
  }

 private:
  void* block_;
};

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_PARALLEL_H_
