// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#include "parallel.h"

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace jaxplugin {
namespace {

// Sets the default float mode until the end of the scope. XLA:CPU sets
// flush-to-zero and denormals-are-zero on its threads. The kernels need
// subnormals: E8M0 byte 0 is 2^-127, for example.
class ScopedFloatMode {
 public:
#if defined(__x86_64__)
  ScopedFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~ScopedFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedFloatMode() {
    uint64_t zero = 0;
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(zero));
  }
  ~ScopedFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

inline void SpinPause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The state that the caller shares with the tasks that it schedules. A task may
// start after the caller has returned. Such a task finds no iteration left and
// accesses only this state.
struct LoopState {
  int64_t count;
  LoopBody body;
  const void* context;
  std::atomic<int> next_slot{1};
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;

  void Work(int slot) {
    ScopedFloatMode mode;
    int64_t ran = 0;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;
         ++ran) {
      body(context, i, slot);
    }
    if (ran == 0) return;
    // acq_rel: a thread that reads done == count sees all writes of the bodies.
    if (done.fetch_add(ran, std::memory_order_acq_rel) + ran == count) {
      std::lock_guard<std::mutex> lock(mutex);
      finished.notify_all();
    }
  }

  bool Finished() const {
    return done.load(std::memory_order_acquire) == count;
  }

  void Wait() {
    // Spin first: an iteration takes tens of microseconds, sleeping longer.
    for (int spin = 0; spin < 4000; ++spin) {
      if (Finished()) return;
      SpinPause();
    }
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return Finished(); });
  }
};

struct ScratchHeader {
  size_t bytes;
  ScratchHeader* next;
};
constexpr size_t kAlignment = 64;
constexpr size_t kHeaderBytes = kAlignment;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kCachedBytesMax = 0;  // so that ASan sees every overrun
#else
constexpr size_t kCachedBytesMax = size_t{48} << 20;
#endif

struct ScratchCache {
  std::mutex mutex;
  ScratchHeader* head = nullptr;
  size_t bytes = 0;
};

ScratchCache& Cache() {
  // Never destroyed, because a pool thread may outlive static destructors.
  static ScratchCache* cache = new ScratchCache;
  return *cache;
}

// Returns the number of cores of the process's affinity, or 0.
int64_t AffinityCores() {
#if defined(__linux__)
  cpu_set_t set[16];  // 16384 cores
  if (sched_getaffinity(getpid(), sizeof(set), set) == 0) {
    return CPU_COUNT_S(sizeof(set), set);
  }
#endif
  return 0;
}

// Reads up to two numbers from a file; returns how many it has.
int ReadNumbers(const std::string& file, long long* first, long long* second) {
  std::FILE* stream = std::fopen(file.c_str(), "r");
  if (stream == nullptr) return 0;
  const int found = std::fscanf(stream, "%lld %lld", first, second);
  std::fclose(stream);
  return found;
}

// Returns the CPU quota of a cgroup in cores, rounded up, or 0 for no quota.
int64_t QuotaCores(const std::string& folder, bool is_v2) {
  long long quota = 0, period = 0, none = 0;  // microseconds
  if (is_v2) {  // without a quota, "max" stands for the first number
    if (ReadNumbers(folder + "/cpu.max", &quota, &period) < 2) return 0;
  } else {  // -1 if there is no quota
    ReadNumbers(folder + "/cpu.cfs_quota_us", &quota, &none);
    ReadNumbers(folder + "/cpu.cfs_period_us", &period, &none);
  }
  return quota > 0 && period > 0 ? (quota + period - 1) / period : 0;
}

}  // namespace

bool RunLoop(const Parallel& parallel, int64_t count, LoopBody body,
             const void* context) {
  if (count <= 0) return true;
  if (parallel.threads <= 1 || count == 1 || parallel.schedule == nullptr) {
    ScopedFloatMode mode;
    for (int64_t i = 0; i < count; ++i) body(context, i, 0);
    return true;
  }
  std::shared_ptr<LoopState> state;
  try {
    state = std::make_shared<LoopState>();
    state->count = count;
    state->body = body;
    state->context = context;
    int64_t helpers = parallel.threads - 1;
    if (helpers > count - 1) helpers = count - 1;
    for (int64_t h = 0; h < helpers; ++h) {
      auto* data = new (std::nothrow) std::shared_ptr<LoopState>(state);
      if (data == nullptr) break;  // the caller does the work alone
      parallel.schedule(
          parallel.pool,
          +[](void* opaque) {
            std::unique_ptr<std::shared_ptr<LoopState>> owned(
                static_cast<std::shared_ptr<LoopState>*>(opaque));
            LoopState& loop = **owned;
            loop.Work(loop.next_slot.fetch_add(1, std::memory_order_relaxed));
          },
          data);
    }
  } catch (const std::bad_alloc&) {
    if (state == nullptr) return false;
  }
  state->Work(0);
  state->Wait();
  return true;
}

Parts::Parts(int64_t parts, int64_t count)
    : parts_(static_cast<int>(parts < kMost ? parts : kMost)) {
  for (int i = 0; i < parts_; ++i) {
    part_[i].next.store(count * i / parts_, std::memory_order_relaxed);
    part_[i].end = count * (i + 1) / parts_;
  }
}

int64_t Parts::Next(int slot) {
  for (int i = 0;; ++i) {
    Part& part = part_[(slot + i) % parts_];
    const int64_t next = part.next.fetch_add(1, std::memory_order_relaxed);
    if (next < part.end) return next;
  }
}

int64_t AvailableCores(const char* proc, const char* cgroups) {
  int64_t cores = AffinityCores();
  const std::string file = std::string(proc) + "/self/cgroup";
  std::FILE* self = std::fopen(file.c_str(), "r");
  if (self == nullptr) return cores;
  // A line is "0::PATH" in version 2, and "NUMBER:CONTROLLERS:PATH" in version
  // 1, for example "4:cpu,cpuacct:/docker/1f".
  char line[4096];
  while (std::fgets(line, sizeof(line), self) != nullptr) {
    line[std::strcspn(line, "\n")] = 0;
    const char* names = std::strchr(line, ':');
    const char* end = names == nullptr ? nullptr : std::strchr(names + 1, ':');
    if (end == nullptr) continue;
    const std::string controllers = "," + std::string(names + 1, end) + ",";
    const bool is_v2 = controllers == ",,";
    if (!is_v2 && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string root = std::string(cgroups) + (is_v2 ? "" : "/cpu");
    // The parents limit a cgroup too. In a container the path may lie outside
    // of what is mounted, and the root has the container's quota.
    for (std::string path = end + 1;; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      const int64_t quota = QuotaCores(root + path, is_v2);
      if (quota > 0 && (cores == 0 || quota < cores)) cores = quota;
      if (path.find('/') == std::string::npos) break;
    }
  }
  std::fclose(self);
  return cores;
}

void* AcquireScratch(size_t bytes) {
  if (bytes > SIZE_MAX - 4096) return nullptr;
  // Multiples of 4 KiB, so that requests of similar sizes reuse a block.
  bytes = (bytes + kHeaderBytes + 4095) / 4096 * 4096;
  ScratchCache& cache = Cache();
  {
    std::lock_guard<std::mutex> lock(cache.mutex);
    ScratchHeader** best = nullptr;
    for (ScratchHeader** p = &cache.head; *p != nullptr; p = &(*p)->next) {
      if ((*p)->bytes >= bytes && (*p)->bytes / 4 <= bytes &&
          (best == nullptr || (*p)->bytes < (*best)->bytes)) {
        best = p;
      }
    }
    if (best != nullptr) {
      ScratchHeader* block = *best;
      *best = block->next;
      cache.bytes -= block->bytes;
      return reinterpret_cast<uint8_t*>(block) + kHeaderBytes;
    }
  }
  void* memory = std::aligned_alloc(kAlignment, bytes);
  if (memory == nullptr) return nullptr;
  static_cast<ScratchHeader*>(memory)->bytes = bytes;
  return static_cast<uint8_t*>(memory) + kHeaderBytes;
}

void ReleaseScratch(void* block) {
  auto* header = reinterpret_cast<ScratchHeader*>(
      static_cast<uint8_t*>(block) - kHeaderBytes);
  ScratchCache& cache = Cache();
  {
    std::lock_guard<std::mutex> lock(cache.mutex);
    if (cache.bytes + header->bytes <= kCachedBytesMax) {
      header->next = cache.head;
      cache.head = header;
      cache.bytes += header->bytes;
      return;
    }
  }
  std::free(header);
}

void AdviseHugePages(void* memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr size_t kLeastBytes = size_t{8} << 20;
  // The size of a huge page on x86-64, and on aarch64 with 4 KiB pages.
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  if (bytes < kLeastBytes) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + bytes) / kPage * kPage;
  // The result is ignored because madvise is only a hint.
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

}  // namespace jaxplugin
