// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Compares the kernels of every instruction set that GetKernels supports with
// simple loops in float64. The test is for machines and emulators without
// Python and JAX; dot_handler_test.py tests more. A page that must not be
// accessed follows each operand, so that a load past its end crashes.
//
//   kernels_test [number of random dots, 400 by default]

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"

namespace jaxplugin {
namespace {

// The contract's bound on the error of a dot, relative to sum|a*b|.
constexpr double kDotError = 16 * 0x1p-24;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
const Parallel kSerial{1, nullptr, nullptr};

class Random {
 public:
  int Below(int count) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int>((state_ >> 33) % static_cast<uint64_t>(count));
  }
  template <size_t kCount>
  int Of(const int (&choices)[kCount]) {
    return choices[Below(kCount)];
  }

 private:
  uint64_t state_ = 1;
};

// Memory of `bytes` bytes that ends at a page that faults.
class Guarded {
 public:
  explicit Guarded(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (bytes + page - 1) / page * page + page;
    void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    start_ = static_cast<uint8_t*>(memory);
    if (mprotect(start_ + size_ - page, page, PROT_NONE) != 0) std::abort();
    data_ = start_ + size_ - page - bytes;
  }
  ~Guarded() { munmap(start_, size_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  uint8_t* data() { return data_; }

 private:
  uint8_t* start_;
  uint8_t* data_;
  size_t size_;
};

// The quantized formats, computed from their definitions.

struct Bits {
  int exponent, mantissa, bias;
};
Bits BitsOf(Format format) {
  switch (format) {
    case Format::kE4M3: return {4, 3, 7};
    case Format::kE5M2: return {5, 2, 15};
    case Format::kE2M3: return {2, 3, 1};
    case Format::kE3M2: return {3, 2, 3};
    case Format::kE2M1: return {2, 1, 1};
    case Format::kF16: return {5, 10, 15};
    default: break;
  }
  std::abort();
}

double Value(Format format, uint32_t code) {
  if (IsInteger(format)) {
    const int sign = 1 << (FactsOf(format).bits - 1);
    return ((static_cast<int>(code) & (2 * sign - 1)) ^ sign) - sign;
  }
  const Bits bits = BitsOf(format);
  const int top = (1 << bits.exponent) - 1;
  const int exponent = static_cast<int>(code >> bits.mantissa) & top;
  const int ones = (1 << bits.mantissa) - 1;
  const int mantissa = static_cast<int>(code) & ones;
  const bool negative = (code >> (bits.exponent + bits.mantissa) & 1) != 0;
  double value =
      exponent == 0
          ? std::ldexp(mantissa, 1 - bits.bias - bits.mantissa)
          : std::ldexp(ones + 1 + mantissa,
                       exponent - bits.bias - bits.mantissa);
  if (format == Format::kE4M3) {
    if (exponent == top && mantissa == ones) value = kNan;
  } else if ((format == Format::kE5M2 || format == Format::kF16) &&
             exponent == top) {
    value = mantissa == 0 ? HUGE_VAL : kNan;
  }
  return negative ? -value : value;
}

double ScaleValue(ScaleKind kind, int code) {
  if (kind == ScaleKind::kE4M3) return Value(Format::kE4M3, code);
  if (kind == ScaleKind::kF16) return Value(Format::kF16, code);
  return code == 255 ? kNan : std::ldexp(1.0, code - 127);
}

int BitCount(Format format) {
  if (IsInteger(format) || IsPacked(format)) return FactsOf(format).bits;
  const Bits bits = BitsOf(format);
  return 1 + bits.exponent + bits.mantissa;
}

// Returns the code of the nearest finite magnitude. A tie goes to the even
// code.
uint32_t Nearest(Format format, double magnitude) {
  uint32_t best = 0;
  const uint32_t count = 1u << (BitCount(format) - 1);
  for (uint32_t code = 0; code < count; ++code) {
    const double value = Value(format, code);
    if (!std::isfinite(value)) continue;
    const double gain = std::fabs(Value(format, best) - magnitude) -
                        std::fabs(value - magnitude);
    if (gain > 0 || (gain == 0 && code % 2 == 0)) best = code;
  }
  return best;
}

// An operand, and its exact values.
struct Side {
  Guarded values, scale;
  Operand operand;
  std::vector<double> exact;

  // Fills the operand with small integers and scales of 1/2, 1 and 2, or, if
  // `any`, with all codes and scales.
  Side(Format format, ScaleKind kind, int64_t rows, int64_t k, bool any,
       Random* random)
      : values(static_cast<size_t>(rows * RowBytes(format, k))),
        scale(static_cast<size_t>(rows * Columns(kind, k)) * ScaleSize(kind)),
        exact(static_cast<size_t>(rows * k)) {
    const int64_t block = Block(kind);
    operand = {format,  kind, values.data(), scale.data(),       rows, k,
               RowBytes(format, k), block,   Columns(kind, k),     0, {}, 0,
               0,       nullptr, OffsetKind::kF32, 0};
    for (int64_t i = 0; i < rows * Columns(kind, k); ++i) {
      static constexpr int kE4M3Codes[] = {0x30, 0x38, 0x40};
      static constexpr int kF16Codes[] = {0x3800, 0x3c00, 0xc000};
      const int small = kind == ScaleKind::kE8M0 ? 126 + random->Below(3)
                        : kind == ScaleKind::kF16 ? random->Of(kF16Codes)
                                                  : random->Of(kE4M3Codes);
      // Every second row has no extreme scales, but may have NaN scales.
      const bool wild = any && i / Columns(kind, k) % 2 == 0;
      const int nan = kind == ScaleKind::kE8M0  ? 255
                      : kind == ScaleKind::kF16 ? 0x7e00
                                                : 0x7f;
      const int tame = any && random->Below(50) == 0 ? nan : small;
      const int codes = 1 << 8 * ScaleSize(kind);
      const int code = wild ? random->Below(codes) : tame;
      std::memcpy(scale.data() + i * ScaleSize(kind), &code, ScaleSize(kind));
    }
    // The values of a codebook: -8 to 7 in another order, or any.
    for (int code = 0; code < 16; ++code) {
      operand.codebook[code] =
          any ? static_cast<float>(random->Below(2001) - 1000) / 1001
              : static_cast<float>(5 * code % 16 - 8);
    }
    uint32_t integers[2][5];  // codes of 0..4 and of 0..-4
    const uint32_t sign = 1u << (BitCount(format) - 1);
    for (uint32_t i = 0; i < 5; ++i) {
      if (format == Format::kCodebook) {  // 13 is the inverse of 5
        integers[0][i] = 13 * (8 + i) % 16;
        integers[1][i] = 13 * (8 - i) % 16;
        continue;
      }
      integers[0][i] = IsInteger(format) ? i : Nearest(format, i);
      integers[1][i] =
          IsInteger(format) ? (2 * sign - i) % (2 * sign) : integers[0][i] | sign;
    }
    double decoded[256];
    for (uint32_t code = 0; code < 256; ++code) {
      decoded[code] = format == Format::kCodebook ? operand.codebook[code % 16]
                                                  : Value(format, code);
    }
    for (int64_t i = 0; i < rows * k; ++i) {
      const int magnitude = random->Below(5);
      uint32_t code = integers[random->Below(2)][magnitude];
      if (any) {
        code = static_cast<uint32_t>(random->Below(1 << BitCount(format)));
      }
      Store(i, code);
      double factor = 1;
      if (kind != ScaleKind::kNone) {
        const int64_t at = i / k * Columns(kind, k) + i % k / block;
        int scale_code = 0;
        std::memcpy(&scale_code, scale.data() + at * ScaleSize(kind),
                    ScaleSize(kind));
        factor = ScaleValue(kind, scale_code);
      }
      exact[static_cast<size_t>(i)] = decoded[code] * factor;
    }
  }

  static int64_t Block(ScaleKind kind) {
    return kind == ScaleKind::kE4M3 ? 16 : 32;
  }
  static int64_t Columns(ScaleKind kind, int64_t k) {
    return kind == ScaleKind::kNone ? 0 : (k + Block(kind) - 1) / Block(kind);
  }
  static int64_t RowBytes(Format format, int64_t k) {
    return BitCount(format) == 4 ? k / 2 : k;
  }

 private:
  void Store(int64_t i, uint32_t code) {
    const bool packed = BitCount(operand.format) == 4;
    uint8_t* byte = values.data() + (packed ? i / 2 : i);
    *byte = static_cast<uint8_t>(packed && i % 2 == 1 ? *byte | code << 4
                                                      : code);
  }
};

Format RandomFormat(ScaleKind* kind, Random* random) {
  static constexpr Format kFormats[] = {
      Format::kE4M3, Format::kE5M2, Format::kE2M1, Format::kE2M1,
      Format::kE2M3, Format::kE3M2, Format::kInt8, Format::kInt4};
  const int i = random->Below(8);
  // Integers often have scales of wider floats.
  *kind = i == 3                              ? ScaleKind::kE4M3
          : i >= 6 && random->Below(2) == 1 ? ScaleKind::kF16
                                              : ScaleKind::kE8M0;
  return kFormats[i];
}

bool Matches(float got, double expected, double magnitude) {
  if (std::isnan(expected)) return std::isnan(got);
  const float rounded = static_cast<float>(expected);
  if (got == rounded) return true;
  const double bound = kDotError * magnitude + 0x1p-149;
  // Inf is right if the bound allows a value from 2^128 on, as it does if large
  // products cancel.
  const double nearest = std::isinf(got) ? std::copysign(0x1p128, got) : got;
  return std::fabs(nearest - expected) <= bound;
}

// Returns the number of wrong elements of one random dot.
int DotFailures(const Kernels& kernels, bool any, Random* random) {
  static constexpr int kRows[] = {1, 2, 3, 4, 5, 8, 12, 13, 31, 64};
  static constexpr int kColumns[] = {1, 2, 7, 8, 9, 31, 33, 64, 70};
  static constexpr int kSizes[] = {2,   16,  30,  32,  48,  64,   96,
                                   126, 130, 512, 514, 544, 1024, 1058};
  ScaleKind lhs_kind, rhs_kind;
  Format lhs_format = RandomFormat(&lhs_kind, random);
  Format rhs_format = RandomFormat(&rhs_kind, random);
  // At most one operand has a codebook.
  const int codebook = random->Below(10);
  if (codebook == 0) lhs_format = Format::kCodebook;
  if (codebook == 1) rhs_format = Format::kCodebook;
  const int64_t batch = 1 + random->Below(2);
  const int64_t m = random->Of(kRows), n = random->Of(kColumns);
  const int64_t k = random->Of(kSizes);
  const bool rhs_batched = batch == 1 || random->Below(2) == 0;
  Side lhs(lhs_format, lhs_kind, batch * m, k, any, random);
  Side rhs(rhs_format, rhs_kind, (rhs_batched ? batch : 1) * n, k, any, random);
  // If the batch shares the weights, the caller folds the batch into m.
  const int64_t entries = rhs_batched ? batch : 1;
  const int64_t rows = rhs_batched ? m : batch * m;
  Guarded out(static_cast<size_t>(batch * m * n) * 4);
  DotArgs args{};
  args.lhs = lhs.operand;
  args.rhs = rhs.operand;
  args.batch = entries;
  args.m = rows;
  args.n = n;
  args.k = k;
  args.rhs_batched = true;
  args.out = out.data();
  args.out_format = Format::kF32;
  if (!Dot(kernels, args, kSerial)) std::abort();
  int failures = 0;
  for (int64_t i = 0; i < entries * rows; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0, magnitude = 0;
      for (int64_t v = 0; v < k; ++v) {
        const double product = lhs.exact[i * k + v] *
                               rhs.exact[(i / rows * n + j) * k + v];
        sum += product;
        magnitude += std::fabs(product);
      }
      float got;
      std::memcpy(&got, out.data() + (i * n + j) * 4, 4);
      // Sums of integers are exact.
      failures += !Matches(got, sum, any ? magnitude : 0);
    }
  }
  if (failures != 0) {
    std::printf("%s: %d wrong in formats %d x %d, %d x (%d, %d, %d)%s\n",
                kernels.name, failures, static_cast<int>(lhs_format),
                static_cast<int>(rhs_format), static_cast<int>(entries),
                static_cast<int>(rows), static_cast<int>(n),
                static_cast<int>(k), any ? ", any codes" : "");
  }
  return failures;
}

// Returns the number of blocks whose codes or scale differ from the contract,
// for MX formats and for NVFP4 with a global scale of 1.
int QuantizeFailures(const Kernels& kernels, QuantizedFormat quantized,
                     bool round_up, Random* random) {
  constexpr Format kFormats[] = {Format::kE4M3, Format::kE5M2, Format::kE2M1,
                                 Format::kE2M1, Format::kE2M3, Format::kE3M2};
  constexpr double kLimits[] = {448, 57344, 6, 6, 7.5, 28};
  const Format format = kFormats[static_cast<int>(quantized)];
  const double limit = kLimits[static_cast<int>(quantized)];
  const bool nvfp4 = quantized == QuantizedFormat::kNvfp4;
  const int64_t rows = 9, k = 96, block = nvfp4 ? 16 : 32;
  Guarded x(rows * k * 4), scale(rows * k / block);
  Guarded values(static_cast<size_t>(rows * Side::RowBytes(format, k)));
  std::vector<float> inputs(rows * k);
  for (float& input : inputs) {
    input = std::ldexp(static_cast<float>(random->Below(2001) - 1000) / 64,
                       random->Below(8) - 4);
  }
  inputs[40] = std::numeric_limits<float>::infinity();
  for (int i = 0; i < 32; ++i) inputs[96 + i] = -0.0f;
  std::memcpy(x.data(), inputs.data(), inputs.size() * 4);
  float global = 0;
  QuantizeArgs args{};
  args.x = x.data();
  args.x_format = Format::kF32;
  args.rows = rows;
  args.k = k;
  args.format = quantized;
  args.round_up = round_up;
  args.values = values.data();
  args.scale = scale.data();
  args.global_scale = &global;
  if (!kernels.quantize(args, kSerial)) std::abort();
  int failures = 0;
  for (int64_t b = 0; b < rows * k / block; ++b) {
    const float* from = inputs.data() + b * block;
    float amax = 0;
    for (int i = 0; i < block; ++i) amax = std::fmax(amax, std::fabs(from[i]));
    const bool bad = !std::isfinite(amax);
    uint32_t code = nvfp4 ? 0x7f : 255;
    if (!bad && nvfp4) {
      // At least E4M3's smallest positive number, except for a block of zeros.
      const float ideal =
          std::fmax(0x1p-9f, std::fmin(amax / 6.0f, 448.0f));
      code = amax == 0 ? 0 : Nearest(Format::kE4M3, ideal);
    } else if (!bad) {
      int exponent = amax == 0 ? -127 : std::ilogb(amax) - std::ilogb(limit);
      exponent += round_up && amax > std::ldexp(limit, exponent);
      code = static_cast<uint32_t>(exponent < -127 ? 0 : exponent + 127);
    }
    bool same = scale.data()[b] == code;
    const double step =
        ScaleValue(nvfp4 ? ScaleKind::kE4M3 : ScaleKind::kE8M0, code);
    for (int64_t i = 0; i < block && !bad; ++i) {
      const float quotient =
          code == 0 ? 0 : std::fabs(from[i]) / static_cast<float>(step);
      const uint32_t sign = std::signbit(from[i]);
      const uint32_t expected =
          Nearest(format, std::fmin(quotient, limit)) |
          sign << (BitCount(format) - 1);
      const int64_t at = b * block + i;
      const uint32_t got = BitCount(format) == 4
                               ? values.data()[at / 2] >> at % 2 * 4 & 15
                               : values.data()[at];
      same = same && got == expected;
    }
    failures += !same;
  }
  if (failures != 0) {
    std::printf("%s: %d blocks wrong in quantized format %d\n", kernels.name,
                failures, static_cast<int>(quantized));
  }
  return failures;
}

// Returns the number of dequantized values that are wrong.
int DequantizeFailures(const Kernels& kernels, Random* random) {
  int failures = 0;
  for (int i = 0; i < 20; ++i) {
    ScaleKind kind;
    const Format format = RandomFormat(&kind, random);
    const int64_t rows = 7, k = 270;
    Side side(format, kind, rows, k, true, random);
    Guarded out(rows * k * 4);
    const DequantizeArgs args{side.operand, nullptr, out.data(), Format::kF32};
    if (!kernels.dequantize(args, kSerial)) std::abort();
    for (int64_t j = 0; j < rows * k; ++j) {
      float got;
      std::memcpy(&got, out.data() + 4 * j, 4);
      failures += !Matches(got, side.exact[static_cast<size_t>(j)], 0);
    }
  }
  if (failures != 0) {
    std::printf("%s: %d dequantized values wrong\n", kernels.name, failures);
  }
  return failures;
}

// Returns the number of operands for which the kernels write other bytes than
// the baseline. (operand_handler_test.py compares the baseline with JAX.)
int OperandFailures(const Kernels& kernels, Random* random) {
  constexpr uint32_t kKey[2] = {0x12345678, 0x9abcdef0};
  int failures = 0;
  for (int i = 0; i < 60; ++i) {
    OperandArgs args{};
    args.format = static_cast<QuantizedFormat>(i % kQuantizedFormats);
    const QuantizedFacts facts = FactsOf(args.format);
    args.x_format = random->Below(2) == 0 ? Format::kF32 : Format::kBF16;
    args.outer = random->Of({1, 2, 17, 33});
    args.inner = random->Of({1, 1, 5, 16, 33});
    args.k = random->Of({31, 64, 290});
    args.hadamard = random->Of({1, 16, 32});
    args.padded = (args.k + 31) / 32 * 32;
    args.round_up = true;
    args.square = random->Below(2) == 0 ? 0 : args.outer * args.inner;
    args.compute_global = facts.has_global_scale;
    args.four_over_six = facts.has_global_scale && random->Below(2) == 0;
    args.scale_up = facts.has_global_scale && random->Below(2) == 0;
    args.key = random->Below(2) == 0 ? nullptr : kKey;
    const int64_t rows = args.outer * args.inner;
    const size_t bytes = args.x_format == Format::kF32 ? 4 : 2;
    const size_t values = rows * BytesOf(facts.values, args.padded);
    const size_t scales = rows * args.padded / facts.block;
    Guarded x(rows * args.k * bytes);
    for (int64_t j = 0; j < rows * args.k; ++j) {
      const float number = std::ldexp(
          static_cast<float>(random->Below(2001) - 1000), random->Below(8));
      std::memcpy(x.data() + j * bytes,
                  reinterpret_cast<const char*>(&number) + 4 - bytes, bytes);
    }
    args.x = x.data();
    Guarded got(values), got_scale(scales), wanted(values), want_scale(scales);
    float global = 0, want_global = 0;
    OperandArgs expected = args;
    args.values = got.data();
    args.scale = got_scale.data();
    args.global_scale = &global;
    expected.values = wanted.data();
    expected.scale = want_scale.data();
    expected.global_scale = &want_global;
    const Kernels* baseline = GetKernels(Isa::kBaseline);
    if (!kernels.quantize_operand(args, kSerial) ||
        !baseline->quantize_operand(expected, kSerial)) {
      std::abort();
    }
    failures += global != want_global ||
                std::memcmp(got.data(), wanted.data(), values) != 0 ||
                std::memcmp(got_scale.data(), want_scale.data(), scales) != 0;
  }
  if (failures != 0) {
    std::printf("%s: %d operands differ\n", kernels.name, failures);
  }
  return failures;
}

int Main(int dots) {
  int failures = 0;
  for (int isa = 1; isa < kIsas; ++isa) {
    const Kernels* kernels = GetKernels(static_cast<Isa>(isa));
    if (kernels == nullptr) continue;
    Random random;
    int found = 0;
    for (int i = 0; i < dots; ++i) {
      found += DotFailures(*kernels, i % 2 == 1, &random) != 0;
    }
    for (int i = 0; i < 12; ++i) {
      found += QuantizeFailures(*kernels, static_cast<QuantizedFormat>(i % 6),
                                i < 6, &random) != 0;
    }
    found += DequantizeFailures(*kernels, &random) != 0;
    found += OperandFailures(*kernels, &random) != 0;
    std::printf("%s: %d failures\n", kernels->name, found);
    failures += found;
  }
  return failures != 0;
}

}  // namespace
}  // namespace jaxplugin

int main(int argc, char** argv) {
  return jaxplugin::Main(argc > 1 ? std::atoi(argv[1]) : 400);
}
