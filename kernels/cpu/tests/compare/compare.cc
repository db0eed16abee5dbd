// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Times several builds of the kernels on two threads. One process runs the
// builds interleaved, because the times of separate processes differ by more
// than most changes of a kernel. The inputs rotate and are larger than the
// last-level cache. See compare.sh.
//
//   compare FORMAT M N K LIBRARY...        a dot of two operands in FORMAT
//   compare PLAIN*FORMAT M N K LIBRARY...  a dot with an lhs of floats
//   compare FORMAT M 0 K LIBRARY...        quantize f32[M, K]
//
// LIBRARY@ENGINE[:PANEL_ROWS[:TASK_ROWS[:THREADS]]] is a dot with a config
// (dot/config.h), such as new.so@few_rows_avx512:2. The rules choose every
// number that is 0.
//
// The LIBRARY `read` only reads the weights of a dot.
//
// FORMAT is mxfp8, mxfp8_e5m2, mxfp4, nvfp4, mxfp6_e2m3 or mxfp6_e3m2, or for a
// dot one of kCheckpoints. PLAIN is f32, bf16 or f16. Operands of a dot and quantized results are in huge pages
// unless the environment variable SMALL_PAGES is set. If ONE_THREAD is set, the
// program uses one thread and measures its CPU time.

#include <dlfcn.h>
#include <time.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels.h"

namespace jaxplugin {
namespace {

constexpr size_t kRotatedBytes = size_t{128} << 20;
constexpr double kSeconds = 6;
constexpr int kRoundsMin = 10;

// A second thread, which spins while it waits, as the threads of a pool do for
// a while.
class Helper {
 public:
  Helper() : thread_([this] { Run(); }) {}
  ~Helper() {
    stop_ = true;
    thread_.join();
  }
  void Schedule(void (*task)(void*), void* data) {
    while (task_.load() != nullptr) std::this_thread::yield();
    data_ = data;
    task_ = task;
  }

 private:
  void Run() {
    while (!stop_) {
      if (auto task = task_.load()) {
        void* data = data_;
        task_ = nullptr;
        task(data);
      }
    }
  }
  std::atomic<bool> stop_{false};
  std::atomic<void (*)(void*)> task_{nullptr};
  void* data_ = nullptr;
  std::thread thread_;
};

// Allocates memory in huge pages, like the results of quantize.
template <typename T>
struct Aligned {
  using value_type = T;
  T* allocate(size_t count) {
    constexpr size_t kPage = size_t{2} << 20;
    const size_t bytes = (count * sizeof(T) + kPage) / kPage * kPage;
    void* memory = std::aligned_alloc(kPage, bytes);
    if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (std::getenv("SMALL_PAGES") == nullptr) {
      (void)madvise(memory, bytes, MADV_HUGEPAGE);
    }
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) { std::free(memory); }
  friend bool operator==(const Aligned&, const Aligned&) { return true; }
  friend bool operator!=(const Aligned&, const Aligned&) { return false; }
};

struct Matrix {
  std::vector<uint8_t, Aligned<uint8_t>> values, scale;
};

// A format with its facts.
struct Kind : QuantizedFacts {
  QuantizedFormat format;
};

int64_t RowBytes(const Kind& kind, int64_t k) {
  return BytesOf(kind.values, k);
}

// A block of 0 is a whole row.
int64_t ScaleColumns(const Kind& kind, int64_t k) {
  if (IsPlain(kind.values)) return 0;
  return kind.block == 0 ? 1 : k / kind.block;
}

// Returns a matrix of normal numbers with scales near 1.
Matrix Random(const Kind& kind, int64_t rows, int64_t k, uint32_t seed) {
  Matrix x;
  x.values.resize(rows * RowBytes(kind, k));
  x.scale.resize(rows * ScaleColumns(kind, k) * ScaleSize(kind.scale));
  auto next = [&seed] {
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8;
  };
  if (IsPlain(kind.values)) {  // magnitudes from 1/2 to 2, both signs
    const size_t bytes = FactsOf(kind.values).bits / 8;
    const uint8_t high = kind.values == Format::kF16 ? 0x38 : 0x3f;
    for (size_t i = 0; i < x.values.size(); ++i) {
      const uint32_t bits = next();
      x.values[i] = (i + 1) % bytes != 0 ? bits : high | (bits & 0x80);
    }
    return x;
  }
  for (uint8_t& byte : x.values) {
    const uint32_t bits = next();
    byte = kind.values == Format::kE4M3 || kind.values == Format::kE5M2
               ? (bits & 0x80) | (8 + (bits >> 8) % 100)
           : IsPacked(kind.values) || IsInteger(kind.values) ? bits
                                                             : bits & 63;
  }
  const int64_t size = ScaleSize(kind.scale);
  for (size_t i = 0; i < x.scale.size(); ++i) {
    uint8_t& byte = x.scale[i];
    byte = kind.scale == ScaleKind::kE8M0   ? 123 + next() % 8
           : kind.scale == ScaleKind::kE4M3 ? 0x38 + next() % 8
           : (i + 1) % size == 0            ? 0x3c
                                            : next() & 0x7f;
  }
  return x;
}

Operand Describe(const Kind& kind, const Matrix& x, int64_t rows, int64_t k) {
  Operand out = {kind.values,
                 kind.scale,
                 x.values.data(),
                 x.scale.data(),
                 rows,
                 k,
                 RowBytes(kind, k),
                 kind.block == 0 ? k : kind.block,
                 ScaleColumns(kind, k),
                 0};
  for (int i = 0; i < 16; ++i) {
    out.codebook[i] = static_cast<float>(2 * i - 15) / 15;
  }
  return out;
}

// Formats that the dot reads and quantize does not write.
constexpr QuantizedFacts kCheckpoints[] = {
    {"fp8_1x128", Format::kE4M3, ScaleKind::kF32, 128, false},
    {"fp8_1x128_e8m0", Format::kE4M3, ScaleKind::kE8M0, 128, false},
    {"fp8_row", Format::kE4M3, ScaleKind::kF32, 0, false},
    {"int8_row", Format::kInt8, ScaleKind::kF32, 0, false},
    {"int8_32", Format::kInt8, ScaleKind::kF16, 32, false},
    {"int4_32", Format::kInt4, ScaleKind::kF16, 32, false},
    {"int4_128", Format::kInt4, ScaleKind::kF16, 128, false},
    {"mxint8", Format::kInt8, ScaleKind::kE8M0, 32, false},
    {"nf4", Format::kCodebook, ScaleKind::kF32, 64, false},
};

// Returns the kind of a name. If there is none, the result's name is null.
Kind KindOf(const std::string& name) {
  for (int i = 0; i < kQuantizedFormats; ++i) {
    const auto format = static_cast<QuantizedFormat>(i);
    const QuantizedFacts facts = FactsOf(format);
    if (name == facts.name) return {facts, format};
  }
  for (const QuantizedFacts& facts : kCheckpoints) {
    if (name == facts.name) return {facts, {}};
  }
  for (const auto& [plain, format] : {std::pair{"f32", Format::kF32},
                                      std::pair{"bf16", Format::kBF16},
                                      std::pair{"f16", Format::kF16}}) {
    if (name == plain) {
      return {{plain, format, ScaleKind::kNone, 32, false}, {}};
    }
  }
  return {};
}

// Parses ENGINE[:PANEL_ROWS[:TASK_ROWS[:THREADS]]].
bool ReadConfig(const std::string& text, DotConfig* out) {
  char engine[32];
  int64_t numbers[3] = {};
  if (std::sscanf(text.c_str(), "%31[^:]:%" SCNd64 ":%" SCNd64 ":%" SCNd64,
                  engine, numbers, numbers + 1, numbers + 2) < 1) {
    return false;
  }
  for (int i = 0; i < kEngines; ++i) {
    if (std::strcmp(engine, kEngineNames[i]) != 0) continue;
    *out = {static_cast<Engine>(i), numbers[0], numbers[1], numbers[2]};
    return true;
  }
  return false;
}

double Quantile(std::vector<double> x, double part) {
  std::sort(x.begin(), x.end());
  return x[static_cast<size_t>(part * (x.size() - 1))];
}

// Whether two results of a dot agree. Each errs by at most 16 * 2^-24 of
// sum|a*b|, which is about 20 times the largest element of such a dot.
bool IsNear(const std::vector<float>& x, const std::vector<float>& y) {
  float largest = 0, error = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    largest = std::max(largest, std::fabs(y[i]));
    // Not std::max, which would ignore NaN.
    if (!(std::fabs(x[i] - y[i]) <= error)) error = std::fabs(x[i] - y[i]);
  }
  return error <= 0x1p-14f * largest;
}

// A build of the kernels, and the config of its dots.
struct Build {
  const Kernels* kernels;  // null to only read the weights
  DotConfig config;
};

// Reads the bytes of x on all threads.
bool Read(const std::vector<uint8_t, Aligned<uint8_t>>& x,
          const Parallel& parallel) {
  constexpr int64_t kTaskBytes = int64_t{256} << 10;
  const int64_t bytes = static_cast<int64_t>(x.size()) / 64 * 64;
  return ParallelFor(
      parallel, (bytes + kTaskBytes - 1) / kTaskBytes, [&](int64_t i, int) {
        const int64_t end = std::min(bytes, (i + 1) * kTaskBytes);
        typedef uint64_t Words __attribute__((vector_size(16)));
        Words a{}, b{}, c{}, d{};
        for (int64_t at = i * kTaskBytes; at < end; at += 64) {
          const Words* words = reinterpret_cast<const Words*>(x.data() + at);
          __builtin_prefetch(x.data() + at + 4096);
          a += words[0];
          b += words[1];
          c += words[2];
          d += words[3];
        }
        a += b + c + d;
        asm volatile("" : : "m"(a));
      });
}

// The timed operation. Each run uses one of several inputs.
class Work {
 public:
  virtual ~Work() = default;
  virtual size_t inputs() const = 0;
  virtual bool Run(const Build& build, size_t input,
                   const Parallel& parallel) = 0;
  // Keep saves the result of the last run. IsAsKept compares a later result
  // with it.
  virtual void Keep() = 0;
  virtual bool IsAsKept() const = 0;
};

class Dot : public Work {
 public:
  Dot(const Kind& lhs, const Kind& kind, int64_t m, int64_t n, int64_t k)
      : lhs_(lhs), kind_(kind), m_(m), n_(n), k_(k), x_(Random(lhs, m, k, 1)),
        out_(m * n) {
    size_t bytes = 0;
    while (weights_.size() < 2 || bytes < kRotatedBytes) {
      weights_.push_back(Random(kind, n, k, 2 + weights_.size()));
      bytes += weights_.back().values.size();
    }
  }
  size_t inputs() const override { return weights_.size(); }
  bool Run(const Build& build, size_t input,
           const Parallel& all) override {
    const Matrix& weights = weights_[input];
    if (build.kernels == nullptr) {
      return Read(weights.values, all) && Read(weights.scale, all);
    }
    Parallel parallel = all;
    if (build.config.threads == 1) parallel.threads = 1;
    DotArgs args{};
    args.config = build.config;
    args.lhs = Describe(lhs_, x_, m_, k_);
    args.rhs = Describe(kind_, weights, n_, k_);
    args.batch = 1;
    args.m = m_;
    args.n = n_;
    args.k = k_;
    args.rhs_batched = true;
    args.out = out_.data();
    args.out_format = Format::kF32;
    return build.kernels->dot(args, parallel);
  }
  void Keep() override { kept_ = out_; }
  bool IsAsKept() const override { return IsNear(out_, kept_); }

 private:
  const Kind& lhs_;
  const Kind& kind_;
  int64_t m_, n_, k_;
  Matrix x_;
  std::vector<Matrix> weights_;
  std::vector<float> out_, kept_;
};

// Quantizes sums of four uniform numbers. For NVFP4 it also computes the global
// scale.
class Quantize : public Work {
 public:
  Quantize(const Kind& kind, int64_t m, int64_t k) : kind_(kind), m_(m), k_(k) {
    uint32_t seed = 1;
    while (x_.size() < 2 || x_.size() * m * k * 4 < kRotatedBytes) {
      x_.emplace_back(m * k);
      for (float& value : x_.back()) {
        for (int i = 0; i < 4; ++i) {
          seed = seed * 1664525u + 1013904223u;
          value += static_cast<float>(seed >> 8) * 0x1p-24f - 0.5f;
        }
      }
    }
    out_.values.resize(m * RowBytes(kind, k));
    out_.scale.resize(m * (k / kind.block));
  }
  size_t inputs() const override { return x_.size(); }
  bool Run(const Build& build, size_t input,
           const Parallel& parallel) override {
    QuantizeArgs args{};
    args.x = x_[input].data();
    args.x_format = Format::kF32;
    args.rows = m_;
    args.k = k_;
    args.format = kind_.format;
    args.round_up = true;
    args.compute_global = kind_.has_global_scale;
    args.values = out_.values.data();
    args.scale = out_.scale.data();
    args.global_scale = &global_scale_;
    return build.kernels->quantize(args, parallel);
  }
  void Keep() override {
    kept_ = out_;
    kept_global_scale_ = global_scale_;
  }
  bool IsAsKept() const override {
    return out_.values == kept_.values && out_.scale == kept_.scale &&
           global_scale_ == kept_global_scale_;
  }

 private:
  const Kind& kind_;
  int64_t m_, k_;
  std::vector<std::vector<float>> x_;
  Matrix out_, kept_;
  float global_scale_ = 0, kept_global_scale_ = 0;
};

double NowMs(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) * 1e3 +
         static_cast<double>(now.tv_nsec) * 1e-6;
}

// Returns the times of each build in ms, or nothing if a build fails or gives
// another result than the first.
std::vector<std::vector<double>> TimeInTurns(
    Work& work, const std::vector<Build>& builds, char** names) {
  const bool is_one = std::getenv("ONE_THREAD") != nullptr;
  const clockid_t clock = is_one ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  Helper helper;
  const Parallel parallel{
      is_one ? 1 : 2,
      [](void* pool, void (*task)(void*), void* data) {
        static_cast<Helper*>(pool)->Schedule(task, data);
      },
      &helper};
  std::vector<std::vector<double>> ms(builds.size());
  double spent = 0;
  size_t turn = 0;
  for (int round = 0; round < kRoundsMin || spent < kSeconds; ++round) {
    for (size_t i = 0; i < builds.size(); ++i, ++turn) {
      const size_t which = (i + round) % builds.size();
      // In the first round all builds have the same input, so that their
      // results can be compared.
      const size_t input = round == 0 ? 0 : turn % work.inputs();
      const double start = NowMs(clock);
      const bool ok = work.Run(builds[which], input, parallel);
      const double taken = NowMs(clock) - start;
      if (round == 0 && i == 0) work.Keep();
      const bool has_result = builds[which].kernels != nullptr;
      if (!ok || (round == 0 && has_result && !work.IsAsKept())) {
        std::fprintf(stderr, "compare: %s fails or differs\n", names[which]);
        return {};
      }
      if (round > 0) ms[which].push_back(taken);
      spent += taken / 1e3;
    }
  }
  return ms;
}

int Main(int argc, char** argv) {
  const std::string formats = argc > 5 ? argv[1] : "";
  const size_t star = formats.find('*');
  const Kind lhs = KindOf(formats.substr(0, star));
  const Kind kind =
      star == std::string::npos ? lhs : KindOf(formats.substr(star + 1));
  if (lhs.name == nullptr || kind.name == nullptr) {
    std::fprintf(stderr, "usage: compare FORMAT M N K LIBRARY...; FORMAT may be"
                         " PLAIN*FORMAT\n");
    return 2;
  }
  const int64_t m = std::atoll(argv[2]), n = std::atoll(argv[3]);
  const int64_t k = std::atoll(argv[4]);
  const int64_t block = kind.block == 0 ? 16 : kind.block;
  if (m < 1 || n < 0 || k < block || k % block) {
    std::fprintf(stderr, "compare: m must be positive, n positive or 0, k a"
                         " multiple of the block size\n");
    return 2;
  }
  char** names = argv + 5;
  std::vector<Build> builds;
  for (int i = 0; i < argc - 5; ++i) {
    const std::string name = names[i];
    const size_t at = name.find('@');
    DotConfig config{};
    if (at != std::string::npos && !ReadConfig(name.substr(at + 1), &config)) {
      std::fprintf(stderr, "compare: no config: %s\n", names[i]);
      return 2;
    }
    if (name == "read") {
      builds.push_back({});
      continue;
    }
    void* library = dlopen(name.substr(0, at).c_str(), RTLD_NOW | RTLD_LOCAL);
    void* get =
        library ? dlsym(library, "jaxplugin_compared_kernels") : nullptr;
    if (get == nullptr) {
      std::fprintf(stderr, "compare: %s\n", dlerror());
      return 2;
    }
    builds.push_back(
        {reinterpret_cast<const Kernels* (*)()>(get)(), config});
  }
  std::unique_ptr<Work> work;
  if (n == 0) {
    work = std::make_unique<Quantize>(kind, m, k);
  } else {
    work = std::make_unique<Dot>(lhs, kind, m, n, k);
  }
  const std::vector<std::vector<double>> ms = TimeInTurns(*work, builds, names);
  if (ms.empty()) return 1;
  for (size_t i = 0; i < builds.size(); ++i) {
    std::vector<double> ratio;
    for (size_t j = 0; j < ms[i].size(); ++j) {
      ratio.push_back(ms[i][j] / ms[0][j]);
    }
    std::printf("%s %ldx%ldx%ld %s: median %.3f ms (%.3f to %.3f), %.3f (%.3f"
                " to %.3f) times as long as the first\n",
                argv[1], static_cast<long>(m), static_cast<long>(n),
                static_cast<long>(k), names[i], Quantile(ms[i], 0.5),
                Quantile(ms[i], 0.25), Quantile(ms[i], 0.75),
                Quantile(ratio, 0.5), Quantile(ratio, 0.25),
                Quantile(ratio, 0.75));
  }
  return 0;
}

}  // namespace
}  // namespace jaxplugin

int main(int argc, char** argv) { return jaxplugin::Main(argc, argv); }
