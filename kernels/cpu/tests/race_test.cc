// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// A test for ThreadSanitizer. Three threads at once call the kernels of every
// instruction set over one thread pool. The results must have the bits of a
// serial run. The test has its own pool, because ThreadSanitizer does not see
// the locks of XLA's pool, which is not instrumented.

#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "dot/ragged.h"
#include "kernels.h"

namespace jaxplugin {
namespace {

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~Pool() {
    for (size_t i = 0; i < threads_.size(); ++i) Push(nullptr, nullptr);
    for (std::thread& thread : threads_) thread.join();
  }
  void Push(void (*task)(void*), void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.emplace_back(task, data);
    ready_.notify_one();
  }

 private:
  void Run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      ready_.wait(lock, [this] { return !tasks_.empty(); });
      auto [task, data] = tasks_.front();
      tasks_.pop_front();
      lock.unlock();
      if (task == nullptr) return;
      task(data);
    }
  }
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::pair<void (*)(void*), void*>> tasks_;
  std::vector<std::thread> threads_;
};

std::vector<uint8_t> Bytes(size_t count, uint32_t seed, int low, int high) {
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) {
    seed = seed * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(low + (seed >> 16) % (high - low));
  }
  return bytes;
}

std::vector<float> Dot(const Kernels& kernels, Format format, ScaleKind kind,
                       int64_t batch, int64_t m, int64_t n, int64_t k,
                       const DotConfig& config, const Parallel& parallel) {
  const int64_t block = kind == ScaleKind::kE4M3 ? 16 : 32;
  const int64_t row = BytesOf(format, k);
  const int most = FactsOf(format).bits == 6 ? 63 : 120;
  const auto x = Bytes(batch * m * row, 1, 0, most);
  const auto w = Bytes(batch * n * row, 2, 0, most);
  // Some scales are extreme, so that ExactDot runs too.
  const int high = kind == ScaleKind::kE4M3 ? 100 : 180;
  const auto xs = Bytes(batch * m * (k / block), 3, 90, high);
  const auto ws = Bytes(batch * n * (k / block), 4, 100, 140);
  std::vector<float> out(batch * m * n);
  DotArgs args{};
  args.lhs = {format, kind, x.data(), xs.data(), batch * m,
              k,      row,  block,    k / block, 0};
  args.rhs = {format, kind, w.data(), ws.data(), batch * n,
              k,      row,  block,    k / block, 0};
  args.batch = batch;
  args.m = m;
  args.n = n;
  args.k = k;
  args.rhs_batched = true;
  args.out = out.data();
  args.out_format = Format::kF32;
  args.config = config;
  Dot(kernels, args, parallel);
  return out;
}

// A ragged dot with empty, small and larger groups, which are cut into parts.
std::vector<float> Ragged(const Kernels& kernels, bool is_gated, Gate gate,
                          const Parallel& parallel) {
  const int64_t groups = 9, m = 45, n = 1700, k = 256, block = 32;
  const int32_t sizes[groups] = {1, 0, 3, 1, 2, 29, 1, 0, 5};
  const Format format = Format::kE2M1;
  const int64_t row = BytesOf(format, k);
  const auto x = Bytes(m * row, 1, 0, 256);
  const auto w = Bytes(groups * n * row, 2, 0, 256);
  const auto xs = Bytes(m * (k / block), 3, 90, 180);
  const auto ws = Bytes(groups * n * (k / block), 4, 124, 128);
  std::vector<float> out(m * n);
  RaggedArgs args{};
  args.dot.lhs = {format, ScaleKind::kE8M0, x.data(), xs.data(), m,
                  k,      row,              block,    k / block, 0};
  args.dot.rhs = {format, ScaleKind::kE8M0, w.data(), ws.data(), groups * n,
                  k,      row,              block,    k / block, 0};
  args.dot.batch = 1;
  args.dot.m = m;
  args.dot.n = n;
  args.dot.k = k;
  args.dot.rhs_batched = true;
  args.dot.out = out.data();
  args.dot.out_format = Format::kF32;
  args.groups = groups;
  args.sizes = sizes;
  args.is_gated = is_gated;
  args.gate = gate;
  RaggedDot(kernels, args, parallel);
  return out;
}

std::vector<uint8_t> Quantize(const Kernels& kernels, QuantizedFormat format,
                              PrologueFunction function,
                              const Parallel& parallel) {
  const int64_t rows = 300, k = 512;
  std::vector<float> x(rows * k), sum(rows * k);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i * 7919 % 1000) - 500;
  std::vector<uint8_t> out(rows * k + rows * k / 16 + 8);
  QuantizeArgs args{};
  args.x = x.data();
  args.x_format = Format::kF32;
  args.rows = rows;
  args.k = k;
  args.format = format;
  args.round_up = true;
  args.prologue.function = function;
  args.prologue.alpha = args.prologue.limit = 3;
  args.prologue.up = x.data();
  args.prologue.residual = args.prologue.IsNorm() ? x.data() : nullptr;
  args.prologue.sum = sum.data();
  uint32_t amax = 0;
  args.prologue.amax = &amax;
  args.compute_global = FactsOf(format).has_global_scale &&
                        function == PrologueFunction::kNone;
  args.values = out.data();
  args.scale = out.data() + rows * k;
  float global = 0;
  args.global_scale = &global;
  kernels.quantize(args, parallel);
  std::memcpy(out.data() + out.size() - 8, &global, 4);
  std::memcpy(out.data() + out.size() - 4, &amax, 4);
  const auto* bytes = reinterpret_cast<const uint8_t*>(sum.data());
  out.insert(out.end(), bytes, bytes + 4 * sum.size());
  return out;
}

// Quantizes with all options of training recipes.
std::vector<uint8_t> QuantizeOperand(const Kernels& kernels,
                                     QuantizedFormat format, int64_t inner,
                                     const Parallel& parallel) {
  constexpr uint32_t kKey[2] = {1, 2};
  const int64_t rows = 320, k = 600, padded = 608;
  std::vector<float> x(rows * k);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i * 7919 % 1000) - 500;
  std::vector<uint8_t> out(rows * padded + rows * padded / 16 + 4);
  OperandArgs args{};
  args.x = x.data();
  args.x_format = Format::kF32;
  args.outer = rows / inner;
  args.inner = inner;
  args.k = k;
  args.padded = padded;
  args.format = format;
  args.hadamard = 16;
  args.square = rows;
  args.four_over_six = FactsOf(format).has_global_scale;
  args.compute_global = FactsOf(format).has_global_scale;
  args.key = kKey;
  args.values = out.data();
  args.scale = out.data() + rows * padded;
  float global = 0;
  args.global_scale = &global;
  kernels.quantize_operand(args, parallel);
  std::memcpy(out.data() + out.size() - 4, &global, 4);
  return out;
}

std::vector<float> Dequantize(const Kernels& kernels, QuantizedFormat format,
                              const Parallel& parallel) {
  const QuantizedFacts facts = FactsOf(format);
  const int64_t rows = 300, k = 512;
  const int most = FactsOf(facts.values).bits == 6 ? 63 : 120;
  const auto values = Bytes(BytesOf(facts.values, rows * k), 5, 0, most);
  const auto scale = Bytes(rows * (k / facts.block), 6, 0, 256);
  std::vector<float> out(rows * k);
  DequantizeArgs args{};
  args.x = {facts.values, facts.scale, values.data(),
            scale.data(), rows,        k,
            BytesOf(facts.values, k),  facts.block, k / facts.block,
            0};
  args.out = out.data();
  args.out_format = Format::kF32;
  kernels.dequantize(args, parallel);
  return out;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Calls f(parallel) in three threads at once. Returns how many results differ
// from f(serial).
template <typename F>
int Differences(const Parallel& serial, const Parallel& parallel, const F& f) {
  const auto expected = f(serial);
  bool same[3];
  std::vector<std::thread> callers;
  for (bool& ok : same) {
    callers.emplace_back([&] { ok = SameBits(expected, f(parallel)); });
  }
  for (std::thread& caller : callers) caller.join();
  return !same[0] + !same[1] + !same[2];
}

int Main() {
  Pool pool(3);
  const Parallel serial{1, nullptr, nullptr};
  const Parallel parallel{
      4,
      [](void* p, void (*task)(void*), void* data) {
        static_cast<Pool*>(p)->Push(task, data);
      },
      &pool};
  struct Case {
    Format format;
    ScaleKind kind;
    int64_t batch, m, n, k;
  };
  const Case cases[] = {
      {Format::kE4M3, ScaleKind::kE8M0, 1, 1, 400, 512},
      {Format::kE4M3, ScaleKind::kE8M0, 1, 10, 300, 2112},
      {Format::kE2M1, ScaleKind::kE4M3, 1, 3, 300, 256},
      {Format::kE2M1, ScaleKind::kE8M0, 1, 40, 200, 320},
      {Format::kE2M1, ScaleKind::kE4M3, 1, 65, 200, 320},
      {Format::kE5M2, ScaleKind::kE8M0, 12, 9, 70, 96},
      {Format::kE2M3, ScaleKind::kE8M0, 1, 3, 300, 256},
  };
  int failures = 0;
  for (int isa = 1; isa < kIsas; ++isa) {
    const Kernels* kernels = GetKernels(static_cast<Isa>(isa));
    if (kernels == nullptr) continue;
    // `threads` overrides the rule that small dots use one thread. The second
    // config has small panels and tasks.
    for (const DotConfig& config : {DotConfig{Engine::kByRule, 0, 0, 4},
                                    {Engine::kByRule, 3, 5, 3}}) {
      for (const Case& c : cases) {
        failures += Differences(serial, parallel, [&](const Parallel& how) {
          return Dot(*kernels, c.format, c.kind, c.batch, c.m, c.n, c.k,
                     config, how);
        });
      }
    }
    for (int gate = -1; gate < 2; ++gate) {
      failures += Differences(serial, parallel, [&](const Parallel& how) {
        return Ragged(*kernels, gate >= 0, static_cast<Gate>(gate > 0), how);
      });
    }
    for (int f = 0; f < kQuantizedFormats; ++f) {
      const auto format = static_cast<QuantizedFormat>(f);
      // No function with each format, and each function with one format, except
      // the activations after swigluoai, which have the threads of the others.
      for (int function : {0, f}) {
        const auto prologue = static_cast<PrologueFunction>(function);
        failures += !SameBits(Quantize(*kernels, format, prologue, serial),
                              Quantize(*kernels, format, prologue, parallel));
      }
      for (int64_t inner : {1, 64}) {
        failures += !SameBits(
            QuantizeOperand(*kernels, format, inner, serial),
            QuantizeOperand(*kernels, format, inner, parallel));
      }
      failures += !SameBits(Dequantize(*kernels, format, serial),
                            Dequantize(*kernels, format, parallel));
    }
    std::printf("%s: %d failures\n", kernels->name, failures);
  }
  return failures != 0;
}

}  // namespace
}  // namespace jaxplugin

int main() { return jaxplugin::Main(); }
