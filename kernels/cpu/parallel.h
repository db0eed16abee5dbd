// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Parallel loops over XLA's thread pool, and scratch memory.
//
// A loop's iterations write disjoint outputs and its result never depends on
// which thread runs which iteration, so results are the same bits for any
// number of threads.

#ifndef JAXPLUGIN_KERNELS_CPU_PARALLEL_H_
#define JAXPLUGIN_KERNELS_CPU_PARALLEL_H_

#include <stddef.h>
#include <stdint.h>

#include <atomic>

#include "simd/always_inline.h"

namespace jaxplugin {

// How to run a loop: on `threads` threads, the caller among them.
struct Parallel {
  int threads;  // 1: serial
  // Asks another thread to run task(data) some time, or never when there is
  // no pool; `task` is called at most once. Null when threads == 1.
  void (*schedule)(void* pool, void (*task)(void*), void* data);
  void* pool;
};

// An iteration: `index` in [0, count), `slot` in [0, parallel.threads), two
// iterations that run at the same time having different slots.
using LoopBody = void (*)(const void* context, int64_t index, int slot);

// Runs body for every index, and returns when all of them have returned. The
// caller takes part and waits only for iterations already begun by others, so
// it cannot deadlock, even when it is itself a thread of a busy pool. Bodies
// run with round-to-nearest and subnormals honoured (XLA's threads flush).
// Returns false, having run nothing, when memory for its state ran out.
bool RunLoop(const Parallel& parallel, int64_t count, LoopBody body,
             const void* context);

// The iterations of a loop, cut into parts of consecutive ones. Next is called
// once an iteration, and so always finds one.
class Parts {
 public:
  Parts(int64_t parts, int64_t count);
  // Returns an iteration of the slot's own part, or of the next part with some
  // left.
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

// ParallelFor for iterations that write fresh memory one after the other: each
// thread has a part of them to itself, in order, and helps in others' when it is
// through. Threads that are next to each other touch the same huge page at the
// same time: each of them fills it with zeros then, and one was for nothing.
template <typename F>
JAXPLUGIN_ALWAYS_INLINE bool ParallelForInParts(const Parallel& parallel,
                                                int64_t count, const F& f) {
  Parts parts(parallel.threads, count);
  return ParallelFor(parallel, count, [&](int64_t, int slot) {
    f(parts.Next(slot), slot);
  });
}

// Uninitialized memory aligned to 64 bytes, null when there is none. Freed
// blocks are kept (up to a cap) and reused: fresh pages would cost more in page
// faults than a small dot takes.
void* AcquireScratch(size_t bytes);
void ReleaseScratch(void* block);

// Asks the system for huge pages under `bytes` that are about to be written for
// the first time, when they are many; nothing else changes, and a system that
// has none ignores it. Where memory is fresh, most of the time goes into page
// faults: 64 MiB of dequantized values took 30 ms and take 10 to 18.
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
