// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Checks whether a dot supports a config. The handler checks each call. Python
// checks at trace time, possibly for another machine's instruction set.

#include "config_error.h"

#include <cstring>

namespace jaxplugin {
namespace {

// In the order of Isa, Format and ScaleKind.
constexpr const char* kIsaNames[] = {"auto",     "baseline",     "avx2",
                                     "avx512",   "avx512_bf16",  "amx_bf16",
                                     "neon_dotprod", "neon_i8mm"};
constexpr const char* kFormatNames[] = {"e4m3", "e5m2", "e2m1", "f32",
                                        "bf16", "f16",  "e2m3", "e3m2",
                                        "int8", "int4", "codebook"};
constexpr const char* kScaleNames[] = {"none", "e8m0", "e4m3", "e5m2",
                                       "f32",  "bf16", "f16"};
static_assert(sizeof(kIsaNames) / sizeof(kIsaNames[0]) == kIsas);
static_assert(sizeof(kFormatNames) / sizeof(kFormatNames[0]) == kFormats);
static_assert(sizeof(kScaleNames) / sizeof(kScaleNames[0]) == kScaleKinds);

const char* Name(Isa isa) { return kIsaNames[static_cast<int>(isa)]; }
const char* Name(Format format) {
  return kFormatNames[static_cast<int>(format)];
}
const char* Name(ScaleKind kind) { return kScaleNames[static_cast<int>(kind)]; }

// Returns the name of the values' format, and the scales of those sides that
// only some engines support.
std::string Text(const SideShape& side) {
  const std::string values = Name(side.format);
  if (IsPlain(side.format) || IsDecodedByAvx512(side)) return values;
  return values + " with " + Name(side.scale) + " scales per " +
         (side.block == 512 ? "512 or row" : std::to_string(side.block));
}

// Returns the lowest instruction set that has the engine.
Isa IsaOf(Engine engine) {
  switch (engine) {
    case Engine::kAmx: return Isa::kAmx;
    case Engine::kBF16:
    case Engine::kBF16Rows:
    case Engine::kVnni:
    case Engine::kFewRowsVnni:
    case Engine::kFewRowsAvx512:
    case Engine::kFloatAvx512: return Isa::kAvx512Bf16;
    case Engine::kFloatAvx2:
    case Engine::kIntegerAvx2:
    case Engine::kFewRowsAvx2: return Isa::kAvx2;
    case Engine::kNeonIntegers: return Isa::kNeonDotprod;
    default: return Isa::kBaseline;
  }
}

// Instruction sets above AVX2 also have AVX2's engines, but not the engine of
// the baseline. Those of aarch64 have it.
bool Has(Isa isa, Engine engine) {
  const Isa least = IsaOf(engine);
  if (isa >= Isa::kNeonDotprod) {
    return least == Isa::kBaseline || least >= Isa::kNeonDotprod;
  }
#if !defined(__x86_64__)
  // An emulated AVX-512 has no AVX2 engines unless the machine is x86-64.
  if (least == Isa::kAvx2) return false;
#endif
  return least == Isa::kBaseline ? isa == least : isa >= least;
}

bool IsFewRows(Engine engine) {
  return engine == Engine::kFewRowsAvx2 || engine == Engine::kFewRowsAvx512 ||
         engine == Engine::kFewRowsVnni;
}

// Checks the operands' formats and sizes.
ConfigError WhyNotOperands(const DotShape& shape, Engine engine) {
  const std::string who =
      std::string("the engine ") + kEngineNames[static_cast<int>(engine)];
  const std::string pair = Text(shape.lhs) + " and " + Text(shape.rhs);
  const ShapeSides sides = SidesOf(shape);
  switch (engine) {
    case Engine::kIntegerAvx2:
    case Engine::kFewRowsVnni:
      if (!AreBytes(shape.lhs, shape.rhs)) {
        return {who + " needs sides of int8, int4 or e2m1, and no wide scales of"
                      " two sides of e2m1",
                pair};
      }
      break;
    case Engine::kNeonIntegers:
      if (!IsBytes(shape.lhs.format) || !IsBytes(shape.rhs.format)) {
        return {who + " needs sides of int8, int4 or e2m1", pair};
      }
      break;
    case Engine::kVnni:
      if (AreIntegers(sides)) break;
      if (!IsE2M1(shape.lhs) || !IsE2M1(shape.rhs)) {
        return {who + " needs sides of int8, int4 or e2m1", pair};
      }
      if (!IsBF16(shape.lhs) || !IsBF16(shape.rhs)) {
        return {who + " needs e8m0 or e4m3 scales per 16 or 32", pair};
      }
      break;
    case Engine::kBF16:
      if (IsBF16(sides.panel) && IsScaledByAvx512(sides.strip)) break;
      [[fallthrough]];
    case Engine::kBF16Rows:
    case Engine::kAmx:
      if (!IsBF16(shape.lhs) || !IsBF16(shape.rhs)) {
        return {who + " needs sides that are quantized, or bf16", pair};
      }
      break;
    case Engine::kFloatAvx512:
      if (!IsFloatAvx512(shape)) {
        return {who + " needs blocks of 16, 32, 64, 128, 256, multiples of 512"
                      " or a row, and no e5m2 scales",
                pair};
      }
      break;
    case Engine::kFewRowsAvx512:
      if (!IsPlain(sides.strip.format) && !IsStreamedByAvx512(sides.strip)) {
        return {who + " needs weights without e5m2 scales, and blocks of 16,"
                      " 32, 64, 128, 256, multiples of 512 or a row",
                pair};
      }
      [[fallthrough]];
    case Engine::kFewRowsAvx2:
      if (IsPlain(sides.strip.format)) {
        return {who + " needs a quantized side of more rows than the other one",
                pair};
      }
      break;
    default: break;
  }
  if (IsFewRows(engine) && sides.rows > kFewRowsServed) {
    return {who + " supports up to " + std::to_string(kFewRowsServed) +
                " rows of the other side",
            std::to_string(sides.rows)};
  }
  return {};
}

}  // namespace

ConfigError WhyNot(Isa isa, const DotShape& shape, const DotConfig& config) {
  const auto number = static_cast<int64_t>(config.engine);
  if (number < 0 || number >= kEngines) {
    return {"engine must be 0 (by_rule) to " + std::to_string(kEngines - 1),
            std::to_string(number)};
  }
  if (config.engine != Engine::kByRule) {
    if (!Has(isa, config.engine)) {
      return {std::string("the engine ") + kEngineNames[number] + " needs " +
                  Name(IsaOf(config.engine)) + " kernels",
              std::string(Name(isa)) + " ones"};
    }
    ConfigError error = WhyNotOperands(shape, config.engine);
    if (!error.rule.empty()) return error;
  }
  const struct {
    const char* name;
    int64_t value, most;
  } sizes[] = {
      {"panel_rows", config.panel_rows,
       IsFewRows(config.engine) ? kPassRowsMax : kPanelRowsMost},
      {"task_rows", config.task_rows, kTaskRowsMost},
      {"threads", config.threads, kThreadsMost},
  };
  for (const auto& size : sizes) {
    if (size.value >= 0 && size.value <= size.most) continue;
    return {std::string(size.name) + " must be 0 (chosen by rules) to " +
                std::to_string(size.most),
            std::to_string(size.value)};
  }
  return {};
}

namespace {

ConfigError WhyNotNumbers(const int64_t dot[10]) {
  if (dot[0] < 1 || dot[0] >= kIsas) {
    return {"isa must be 1 to " + std::to_string(kIsas - 1),
            std::to_string(dot[0])};
  }
  for (int side = 1; side <= 2; ++side) {
    if (dot[side] >= 0 && dot[side] < kFormats) continue;
    return {"formats must be 0 to " + std::to_string(kFormats - 1),
            std::to_string(dot[side])};
  }
  for (int side = 8; side <= 9; ++side) {
    if (dot[side] >= 0 && dot[side] < kScaleKinds) continue;
    return {"scales must be 0 to " + std::to_string(kScaleKinds - 1),
            std::to_string(dot[side])};
  }
  return {};
}

DotShape ShapeOf(const int64_t dot[10]) {
  const auto side = [dot](int i) {
    return ShapeOf(static_cast<Format>(dot[1 + i]),
                   static_cast<ScaleKind>(dot[8 + i]), dot[3 + i], dot[7]);
  };
  return {side(0), side(1), dot[5], dot[6], dot[7]};
}

}  // namespace
}  // namespace jaxplugin

#pragma GCC visibility push(default)

extern "C" {

// In the following functions, `dot` is: isa (from 1 on; the machine need not
// support it), the formats of lhs and rhs (simd/formats.h), their block sizes,
// m, n, k, and the kinds of their scales.

// Writes the reason why a dot does not support a config (engine, panel_rows,
// task_rows, threads) to `text`, cut off after `size` bytes. Returns the length
// of the whole reason, or 0 if the dot supports the config.
int64_t jaxplugin_cpu_dot_config_error(const int64_t dot[10],
                                       const int64_t config[4], char* text,
                                       int64_t size) {
  using namespace jaxplugin;
  ConfigError error = WhyNotNumbers(dot);
  if (error.rule.empty()) {
    error = WhyNot(static_cast<Isa>(dot[0]), ShapeOf(dot),
                   {static_cast<Engine>(config[0]), config[1], config[2],
                    config[3]});
  }
  if (error.rule.empty()) return 0;
  const std::string all = error.rule + ", got " + error.given;
  const auto length = static_cast<int64_t>(all.size());
  if (size > 0) {
    const int64_t kept = length < size ? length : size - 1;
    std::memcpy(text, all.data(), kept);
    text[kept] = 0;
  }
  return length;
}

// Returns the engine that the rule selects for a dot, or -1 if the dot's isa or
// formats are out of range.
int64_t jaxplugin_cpu_dot_engine(const int64_t dot[10]) {
  using namespace jaxplugin;
  if (!WhyNotNumbers(dot).rule.empty()) return -1;
  return static_cast<int64_t>(
      EngineByRule(static_cast<Isa>(dot[0]), ShapeOf(dot)));
}

// Returns the RowsForm of a dot with the attribute quantize_rows and without a
// config, or -1 if the dot's isa or formats are out of range.
int64_t jaxplugin_cpu_dot_rows_form(const int64_t dot[10]) {
  using namespace jaxplugin;
  if (!WhyNotNumbers(dot).rule.empty()) return -1;
  return static_cast<int64_t>(RowsFormOf(static_cast<Isa>(dot[0]),
                                         ShapeOf(dot), Engine::kByRule));
}

// Returns the name of an engine, or null if no engine has that number.
const char* jaxplugin_cpu_engine_name(int64_t engine) {
  return engine >= 0 && engine < jaxplugin::kEngines
             ? jaxplugin::kEngineNames[engine]
             : nullptr;
}

}  // extern "C"

#pragma GCC visibility pop
