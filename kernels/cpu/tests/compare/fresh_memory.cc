// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Measures the cost of first writes to new memory. Loops read and write as many
// bytes as a copy, quantize or dequantize of 4096 x 4096. Each thread computes
// one part. All cases are timed interleaved. The program needs Linux on x86-64.
//
//   g++ -std=c++17 -O3 -mavx2 -pthread kernels/cpu/tests/compare/fresh_memory.cc
//   ./a.out [threads]
//
// It prints the median times in ms for a result in
//   there            memory that was written before, in huge pages
//   fresh, 4 KiB     new memory in pages of 4 KiB
//   fresh, huge      new memory in huge pages
//   populated        new memory in huge pages that the system fills before the
//                    loop (MADV_POPULATE_WRITE, Linux 5.14)
//   streamed         the same as `there`, with stores that bypass the caches
//   streamed, fresh  the same as `fresh, huge`, with such stores

#if defined(__linux__) && defined(__x86_64__)
#include <emmintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kHugePage = 2 * kMiB;
constexpr size_t kInputs = 192 * kMiB;  // larger than the last-level cache
constexpr size_t kStep = 4096;          // bytes that are written at a time
constexpr int kRounds = 21;

enum Way { kThere, kSmallPages, kHugePages, kPopulated, kStreamed,
           kStreamedFresh, kWays };
const char* const kNames[kWays] = {
    "there", "fresh, 4 KiB", "fresh, huge", "populated", "streamed",
    "streamed, fresh"};

void Require(bool ok, const char* what) {
  if (ok) return;
  std::perror(what);
  std::exit(1);
}

// A mapping of `bytes` bytes, aligned to huge pages.
struct Mapping {
  explicit Mapping(size_t bytes, bool is_huge) : all_bytes(bytes + kHugePage) {
    all = mmap(nullptr, all_bytes, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    Require(all != MAP_FAILED, "mmap");
    const uintptr_t at = reinterpret_cast<uintptr_t>(all);
    data = reinterpret_cast<uint8_t*>((at + kHugePage - 1) / kHugePage *
                                      kHugePage);
    madvise(data, bytes, is_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  }
  ~Mapping() { munmap(all, all_bytes); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  size_t all_bytes;
  void* all;
  uint8_t* data;
};

// Reads `read` bytes and writes `written` bytes. Each step writes a value that
// depends on its part of the input.
void Loop(const uint8_t* in, size_t read, uint8_t* out, size_t written,
          bool is_streamed) {
  const size_t steps = written / kStep;
  for (size_t i = 0; i < steps; ++i) {
    uint64_t lanes[8] = {};
    const size_t end = read / 64 * (i + 1) / steps;
    for (size_t j = read / 64 * i / steps; j < end; ++j) {
      uint64_t line[8];
      std::memcpy(line, in + 64 * j, 64);
      for (int l = 0; l < 8; ++l) lanes[l] += line[l];
    }
    const __m128i value = _mm_set1_epi64x(static_cast<int64_t>(
        lanes[0] + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] +
        lanes[6] + lanes[7] + i));
    auto* to = reinterpret_cast<__m128i*>(out + i * kStep);
    if (is_streamed) {
      for (size_t j = 0; j < kStep / 16; ++j) _mm_stream_si128(to + j, value);
    } else {
      for (size_t j = 0; j < kStep / 16; ++j) _mm_store_si128(to + j, value);
    }
  }
  if (is_streamed) _mm_sfence();
}

// Threads that spin while they wait, as the threads of a pool do for a while.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {
    for (int i = 1; i < threads; ++i) {
      others_.emplace_back([this, i] { Run(i); });
    }
  }
  ~Team() {
    stop_ = true;
    ++round_;
    for (std::thread& other : others_) other.join();
  }
  // Returns the time in ms of one loop, cut into a part for each thread.
  double Time(const uint8_t* in, size_t read, uint8_t* out, size_t written,
              bool is_streamed) {
    task_ = [=](int i) {
      const size_t part = written / threads_, in_part = read / threads_;
      Loop(in + i * in_part, in_part, out + i * part, part, is_streamed);
    };
    done_ = 0;
    const auto start = std::chrono::steady_clock::now();
    ++round_;
    task_(0);
    while (done_ != threads_ - 1) {
    }
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    return taken.count();
  }

 private:
  void Run(int i) {
    for (int seen = 0;;) {
      while (round_ == seen) {
      }
      seen = round_;
      if (stop_) return;
      task_(i);
      ++done_;
    }
  }
  int threads_;
  std::function<void(int)> task_;
  std::atomic<int> round_{0}, done_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> others_;
};

double Once(Team& team, Way way, const uint8_t* in, size_t read, Mapping& there,
            size_t written) {
  if (way == kThere || way == kStreamed) {
    return team.Time(in, read, there.data, written, way == kStreamed);
  }
  Mapping fresh(written, way != kSmallPages);
  double milliseconds = 0;
  if (way == kPopulated) {
    const auto start = std::chrono::steady_clock::now();
    if (madvise(fresh.data, written, MADV_POPULATE_WRITE) != 0) return -1;
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    milliseconds = taken.count();
  }
  return milliseconds + team.Time(in, read, fresh.data, written,
                                  way == kStreamedFresh);
}

int Main(int threads) {
  Team team(threads);
  Mapping inputs(kInputs, true), there(64 * kMiB, true);
  std::memset(inputs.data, 1, kInputs);
  std::memset(there.data, 1, 64 * kMiB);
  std::printf("| read, written (MiB) |");
  for (const char* name : kNames) std::printf(" %s |", name);
  std::printf("\n|---|---|---|---|---|---|---|\n");
  const size_t sizes[][2] = {{0, 64}, {64, 64}, {16, 64},
                             {8, 64}, {64, 16}, {64, 8}};
  for (const auto& size : sizes) {
    const size_t read = size[0] * kMiB, written = size[1] * kMiB;
    std::vector<double> taken[kWays];
    size_t at = 0;
    for (int round = 0; round <= kRounds; ++round) {
      for (int way = 0; way < kWays; ++way) {
        if (at + read > kInputs) at = 0;
        const double ms = Once(team, static_cast<Way>(way), inputs.data + at,
                               read, there, written);
        at += read;
        if (round > 0) taken[way].push_back(ms);  // the first round warms up
      }
    }
    std::printf("| %zu, %zu |", size[0], size[1]);
    for (auto& times : taken) {
      std::sort(times.begin(), times.end());
      std::printf(" %.1f |", times[times.size() / 2]);
    }
    std::printf("\n");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int given = argc > 1 ? std::atoi(argv[1]) : 0;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return Main(given > 0 ? given : cores > 0 ? cores : 1);
}

#else
#include <cstdio>

int main() {
  std::puts("fresh_memory: for Linux on x86-64");
  return 69;
}
#endif
