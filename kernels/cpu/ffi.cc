// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The XLA FFI handlers of dot, quantize and dequantize. README.md has their
// signatures.

#include <cstdint>
#include <string>

#include "arguments.h"
#include "config_error.h"
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

// The digest of the library's sources; empty if unknown (CMakeLists.txt).
#ifndef JAXPLUGIN_SOURCES_DIGEST
#define JAXPLUGIN_SOURCES_DIGEST ""
#endif

namespace jaxplugin {
namespace {

// Reads the global scale of a dot. f32[2] are two factors that are multiplied
// one after the other, because their product may overflow or underflow f32.
bool ReadGlobalScales(Checker& check, const ffi::AnyBuffer& x, DotArgs* out) {
  if (!JAXPLUGIN_REQUIRE(
          check, x.element_type() == ffi::F32 && x.element_count() <= 2,
          "global_scale must be f32[], f32[2] or f32[0]", Text(x))) {
    return false;
  }
  const float* numbers = static_cast<const float*>(x.untyped_data());
  out->global_scale = x.element_count() > 0 ? numbers : nullptr;
  out->global_power = x.element_count() > 1 ? numbers + 1 : nullptr;
  return true;
}

ffi::Error BlockScaledDot(ffi::ThreadPool pool, ffi::AnyBuffer lhs,
                          ffi::AnyBuffer lhs_scale, ffi::AnyBuffer rhs,
                          ffi::AnyBuffer rhs_scale, ffi::AnyBuffer global_scale,
                          ffi::AnyBuffer bias, ffi::AnyBuffer residual,
                          ffi::RemainingArgs more,
                          ffi::Result<ffi::AnyBuffer> out,
                          ffi::RemainingRets more_results,
                          ffi::Dictionary given) {
  constexpr const char* kWho = "jaxplugin_block_scaled_dot";
  Checker check(kWho);
  Attributes attributes(check, given);
  const int64_t activation = attributes.Required("activation");
  DotArgs args{};
  args.config = {static_cast<Engine>(attributes.Optional("engine", 0)),
                 attributes.Optional("panel_rows", 0),
                 attributes.Optional("task_rows", 0),
                 attributes.Optional("threads", 0)};
  const int64_t max_threads = ReadMaxThreads(check, attributes);
  const ResultAttributes result(attributes);
  const Kernels* kernels = nullptr;
  if (!ReadOperands(check, attributes, lhs, lhs_scale, 3, rhs, rhs_scale, more,
                    result.is_quantized(), &args, &kernels) ||
      !ReadGlobalScales(check, global_scale, &args)) {
    return check.error();
  }
  args.batch = lhs.dimensions()[0];
  args.m = lhs.dimensions()[1];
  args.n = rhs.dimensions()[1];
  args.k = args.lhs.k;
  args.rhs_batched = rhs.dimensions()[0] != 1 || args.batch == 1;
  JAXPLUGIN_REQUIRE(
      check, rhs.dimensions()[0] == args.batch || rhs.dimensions()[0] == 1,
      "rhs must have the batch of lhs, or 1", Text(lhs) + " and " + Text(rhs));
  QuantizedResult quantized{};
  ReadQuantizedResult(check, result, *kernels, more, lhs, args.batch * args.m,
                      args.n, *out, more_results, &quantized);
  JAXPLUGIN_REQUIRE(check,
                    result.is_quantized() ||
                        (PlainFormat(out->element_type(), &args.out_format) &&
                         IsDims(out->dimensions(),
                                {args.batch, args.m, args.n})),
                    "the result must be f32, bf16 or f16[batch, m, n]",
                    Text(*out) + " for " + Text(lhs) + " and " + Text(rhs));
  JAXPLUGIN_REQUIRE(check,
                    bias.element_type() == ffi::F32 &&
                        (IsAbsent(bias) || IsDims(bias.dimensions(), {args.n})),
                    "bias must be f32[n] or f32[0]", Text(bias));
  JAXPLUGIN_REQUIRE(
      check,
      PlainFormat(residual.element_type(), &args.residual_format) &&
          (IsAbsent(residual) ||
           (IsDims(residual.dimensions(), {args.batch, args.m, args.n}) &&
            (residual.element_type() == ffi::F32 ||
             residual.element_type() == out->element_type()))),
      "residual must be [batch, m, n] of f32 or the result's dtype, or f32[0]",
      Text(residual) + " for a result " + Text(*out));
  JAXPLUGIN_REQUIRE(
      check, activation >= 0 && activation <= 3,
      "activation must be 0 (none), 1 (relu), 2 (gelu) or 3 (silu)",
      std::to_string(activation));
  args.activation = static_cast<Activation>(activation);
  CheckOffsets(check, args,
               !IsAbsent(global_scale) || !IsAbsent(bias) ||
                   !IsAbsent(residual));
  JAXPLUGIN_REQUIRE(check,
                    args.rhs.offset == nullptr || rhs.dimensions()[0] == 1,
                    "rhs must have batch 1 if it has offsets", Text(rhs));
  if (!check.ok()) return check.error();
  if (out->element_count() == 0) return ffi::Error::Success();
  const int64_t rows = args.rhs_batched ? args.m : args.m * args.batch;
  DotShape shape = {ShapeOf(args.lhs), ShapeOf(args.rhs), rows, args.n, args.k};
  if (args.quantize_rows) {
    const RowsForm form =
        RowsFormOf(LevelOf(*kernels), shape, args.config.engine);
    shape = WithRows(shape, form);
  }
  const ConfigError error = WhyNot(LevelOf(*kernels), shape, args.config);
  if (!JAXPLUGIN_REQUIRE(check, error.rule.empty(), error.rule, error.given)) {
    return check.error();
  }
  if (!IsAbsent(bias)) args.bias = static_cast<float*>(bias.untyped_data());
  if (!IsAbsent(residual)) args.residual = residual.untyped_data();
  if (result.is_quantized()) {
    args.quantized = &quantized;
    args.out_format = Format::kF32;
  } else {
    args.out = out->untyped_data();
    AdviseHugePages(args.out, out->size_bytes());
  }
  if (!args.rhs_batched) {  // one rhs for all entries: fold the batch into m
    args.m *= args.batch;
    args.batch = 1;
    args.rhs_batched = true;
  }
  if (!Dot(*kernels, args, MakeParallel(pool, max_threads))) {
    return NoMemory(kWho);
  }
  return ffi::Error::Success();
}

bool IsLike(const ffi::AnyBuffer& x, const ffi::AnyBuffer& like) {
  return x.element_type() == like.element_type() &&
         x.dimensions() == like.dimensions();
}

// Reads the attributes of a prologue.
void ReadPrologue(Checker& check, Attributes& attributes, Prologue* out) {
  const int64_t function = attributes.Optional("prologue", 0);
  const int64_t halves = attributes.Optional("halves", 0);
  const int64_t gradient = attributes.Optional("gradient", 0);
  out->epsilon = attributes.OptionalFloat("epsilon");
  out->alpha = attributes.OptionalFloat("alpha");
  out->limit = attributes.OptionalFloat("limit");
  JAXPLUGIN_REQUIRE(check, function >= 0 && function <= 10,
                    "prologue must be 0 (none), 1 (rms_norm), 2 (layer_norm), 3"
                    " (silu_and_mul), 4 (gelu_and_mul), 5 (swigluoai), 6"
                    " (exact_gelu_and_mul), 7 (silu), 8 (gelu), 9 (relu) or 10"
                    " (exact_gelu)",
                    std::to_string(function));
  out->function = static_cast<PrologueFunction>(function);
  JAXPLUGIN_REQUIRE(
      check, halves == 0 || (out->IsGated() && (halves == 1 || halves == 2)),
      "halves must be 0 (none), or 1 (split) or 2 (interleaved) for a gated"
      " activation",
      std::to_string(halves));
  JAXPLUGIN_REQUIRE(
      check,
      gradient == 0 || (function >= 1 && gradient == 1) ||
          (out->IsGated() && gradient == 2 && halves == 0),
      "gradient must be 0 (none), 1 (of x) or, for a gated activation without"
      " halves, 2 (of up)",
      std::to_string(gradient));
  out->gradient = static_cast<PrologueGradient>(gradient);
  out->halves = static_cast<PrologueHalves>(halves);
}

// Returns how many further arguments a prologue has before the key.
size_t ArgumentsOf(const Prologue& prologue) {
  if (prologue.function == PrologueFunction::kNone) return 0;
  return prologue.gradient == PrologueGradient::kNone ? 4 : 5;
}

// Reads the further arguments of a prologue: up, weight, bias and residual, each
// f32[0] if absent, and the cotangent of a gradient. Reads its results, which
// begin at number `at` of the further results: the sum with a residual, or a
// norm's gradient; then optionally amax and the prologue's result.
void ReadPrologueArrays(Checker& check, const ffi::AnyBuffer& x, int64_t rows,
                        int64_t k, const ffi::RemainingArgs& arguments,
                        ffi::RemainingRets& results, size_t at,
                        Prologue* out) {
  const bool is_none = out->function == PrologueFunction::kNone;
  const bool is_norm = out->IsNorm();
  ffi::AnyBuffer arrays[5] = {x, x, x, x, x};
  bool has[5] = {};
  const size_t count = ArgumentsOf(*out);
  if (!JAXPLUGIN_REQUIRE(check,
                         arguments.size() == count ||
                             (!is_none && arguments.size() == count + 1),
                         "a prologue must have 4 more arguments, which are up,"
                         " weight, bias and residual, then the cotangent of a"
                         " gradient, and optionally the key",
                         std::to_string(arguments.size()))) {
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    const auto array = arguments.get<ffi::AnyBuffer>(i);
    if (!JAXPLUGIN_REQUIRE(check, array.has_value(),
                           "the arguments of a prologue must be arrays",
                           "another argument")) {
      return;
    }
    arrays[i] = *array;
    has[i] = !IsDims(array->dimensions(), {0});
  }
  const auto& [up, weight, bias, residual, cotangent] = arrays;
  const auto [has_up, has_weight, has_bias, has_residual, is_gradient] = has;
  const int64_t features =
      count == 5 && out->halves != PrologueHalves::kNone ? k / 2 : k;
  JAXPLUGIN_REQUIRE(
      check,
      has_up == (out->IsGated() && out->halves == PrologueHalves::kNone) &&
          (!has_up || IsLike(up, x)),
      "up must have x's dtype and shape for a gated activation without halves,"
      " else be f32[0]",
      Text(up) + " for " + Text(x));
  JAXPLUGIN_REQUIRE(
      check,
      !has_weight || (is_norm && weight.element_type() == ffi::F32 &&
                      IsDims(weight.dimensions(), {k})),
      "weight must be f32[k] for a norm, or f32[0]",
      Text(weight) + " for " + Text(x));
  JAXPLUGIN_REQUIRE(
      check,
      !has_bias || (!out->IsNormGradient() &&
                    bias.element_type() == ffi::F32 &&
                    IsDims(bias.dimensions(),
                           {out->IsGated() ? 2 * features : k})),
      "bias must be f32[2 * k] for a gated activation, else f32[k], or f32[0],"
      " as for a norm's gradient",
      Text(bias) + " for " + Text(x));
  JAXPLUGIN_REQUIRE(check, !has_residual || (is_norm && IsLike(residual, x)),
                    "residual must have x's dtype and shape for a norm, or be"
                    " f32[0]",
                    Text(residual) + " for " + Text(x));
  JAXPLUGIN_REQUIRE(check,
                    count < 5 || (cotangent.element_type() == x.element_type() &&
                                  IsDims(cotangent.dimensions(),
                                         {rows, features})),
                    "the cotangent must have x's dtype and the shape of the"
                    " activation",
                    Text(cotangent) + " for " + Text(x));
  const bool returns_sum = has_residual || out->IsNormGradient();
  const size_t sums = at + (returns_sum ? 1 : 0);
  if (!JAXPLUGIN_REQUIRE(check, results.size() >= sums,
                         "the further results must include the sum",
                         std::to_string(results.size())) ||
      !check.ok()) {
    return;
  }
  if (has_up) out->up = up.untyped_data();
  if (has_weight) out->weight = static_cast<float*>(weight.untyped_data());
  if (has_bias) out->bias = static_cast<float*>(bias.untyped_data());
  if (is_gradient) out->cotangent = cotangent.untyped_data();
  if (has_residual) out->residual = residual.untyped_data();
  if (returns_sum) {
    auto sum = results.get<ffi::AnyBuffer>(at);
    JAXPLUGIN_REQUIRE(check, sum.has_value() && IsLike(**sum, x),
                      "the sum must have x's dtype and shape",
                      sum.has_value() ? Text(**sum) : "no array");
    if (check.ok()) {
      out->sum = (*sum)->untyped_data();
      AdviseHugePages(out->sum, (*sum)->size_bytes());
    }
  }
  for (size_t i = sums; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    const bool is_f32 =
        result.has_value() && (*result)->element_type() == ffi::F32;
    if (is_f32 && out->amax == nullptr && IsDims((*result)->dimensions(), {})) {
      out->amax = static_cast<uint32_t*>((*result)->untyped_data());
      *out->amax = 0;
    } else if (is_f32 && out->y == nullptr &&
               IsDims((*result)->dimensions(), {rows, k})) {
      out->y = static_cast<float*>((*result)->untyped_data());
    } else if (is_f32 && out->column_sums == nullptr &&
               (*result)->dimensions().size() == 3 && count > 0) {
      const auto dims = (*result)->dimensions();
      JAXPLUGIN_REQUIRE(check,
                        dims[0] > 0 && rows % dims[0] == 0 && dims[1] == 1 &&
                            dims[2] == k,
                        "column sums must be f32[entries, 1, k], and entries"
                        " divide the rows",
                        Text(**result) + " for " + Text(x));
      out->column_sums = static_cast<float*>((*result)->untyped_data());
      out->entries = dims[0];
    } else {
      check.Fail("the last results must be amax, f32[], the prologue's result,"
                 " f32[rows, k], and its column sums, f32[entries, 1, k], each"
                 " at most once",
                 result.has_value() ? Text(**result) : "no array");
    }
  }
}

// The attributes of a call that quantizes along k, along runs of rows, or along
// both. Both sides of such a call use the options of training operands.
struct SideAttributes {
  explicit SideAttributes(Attributes& attributes)
      : along(attributes.Optional("along", 1)),
        run(attributes.Optional("run", 0)) {}
  bool has(int side) const { return along & (1 << side); }

  int64_t along;  // 1: along k, 2: along runs of rows, 3: along both
  int64_t run;    // rows of a run; 0: all rows
};

// Reads the sides of the result of a prologue: `first` are the values, scale and
// global scale of the first side, and `more_results` begins with those of a
// second side. The last one of `more` may be a key.
void ReadSides(Checker& check, const SideAttributes& given,
               const QuantizeArgs& args, int64_t rounding,
               int64_t compute_global, const ffi::AnyBuffer& x,
               const ffi::AnyBuffer& given_global,
               const ffi::RemainingArgs& more, const ffi::AnyBuffer* first,
               ffi::RemainingRets& more_results, OperandArgs* sides) {
  const bool is_both = given.along == 3;
  const int64_t run = given.run > 0 ? given.run : args.rows;
  if (!JAXPLUGIN_REQUIRE(check,
                         given.along >= 1 && given.along <= 3 &&
                             args.prologue.function != PrologueFunction::kNone,
                         "along must be 1 (k), or with a prologue 2 (rows) or 3"
                         " (both)",
                         std::to_string(given.along)) ||
      !JAXPLUGIN_REQUIRE(
          check, given.run >= 0 && (run == 0 || args.rows % run == 0),
          "run must be 0 or divide the rows",
          std::to_string(given.run) + " for " + Text(x)) ||
      !JAXPLUGIN_REQUIRE(
          check,
          given_global.element_type() == ffi::F32 &&
              (given_global.element_count() <= 1 ||
               (is_both && IsDims(given_global.dimensions(), {2}))),
          "global_scale must be f32[] or f32[0], or f32[2] for both sides",
          Text(given_global))) {
    return;
  }
  const Prologue& p = args.prologue;
  if (p.column_sums != nullptr &&
      !JAXPLUGIN_REQUIRE(check,
                         run == 0 || args.rows / p.entries % run == 0,
                         "run must divide the rows of an entry of column sums",
                         std::to_string(run) + " for " +
                             std::to_string(p.entries) + " entries of " +
                             Text(x))) {
    return;
  }
  const size_t key_at = ArgumentsOf(args.prologue);
  const auto key = more.get<ffi::AnyBuffer>(key_at);
  if (more.size() > key_at &&
      !JAXPLUGIN_REQUIRE(check,
                         key.has_value() && !is_both &&
                             key->element_type() == ffi::U32 &&
                             IsDims(key->dimensions(), {2}),
                         "the key of one side must be u32[2]",
                         key.has_value() ? Text(*key) : "no array")) {
    return;
  }
  const QuantizedFacts facts = FactsOf(args.format);
  const float* global = static_cast<float*>(given_global.untyped_data());
  size_t found = 0;
  for (int side = 0; side < 2; ++side) {
    OperandArgs& out = sides[side];
    out.outer = side == 0 ? args.rows : run == 0 ? 0 : args.rows / run;
    out.k = side == 0 ? args.k : run;
    out.inner = side == 0 ? 1 : args.k;
    out.padded = out.k;
    out.format = args.format;
    out.hadamard = 1;
    if (!given.has(side)) continue;
    const bool is_second = found++ > 0;
    if (!IsAbsent(given_global)) {
      const bool is_separate = given_global.element_count() > 1;
      out.given_global = global + (is_second && is_separate ? 1 : 0);
    }
    if (key.has_value()) out.key = static_cast<uint32_t*>(key->untyped_data());
    ffi::AnyBuffer arrays[3] = {first[0], first[1], first[2]};
    for (size_t i = 0; is_second && i < 3; ++i) {
      auto array = more_results.get<ffi::AnyBuffer>(i);
      if (!JAXPLUGIN_REQUIRE(check, array.has_value(),
                             "the further results must include values, scale"
                             " and global scale of the second side",
                             std::to_string(more_results.size()))) {
        return;
      }
      arrays[i] = **array;
    }
    auto& [values, scale, global_scale] = arrays;
    if (side == 1 && values.dimensions().size() == 2) {
      out.padded = ColumnsOf(facts, values);
    }
    JAXPLUGIN_REQUIRE(check,
                      out.padded >= out.k && out.padded % facts.block == 0 &&
                          out.padded - out.k <= kMostPadding,
                      "values along rows must have the run padded to whole"
                      " blocks of " +
                          std::to_string(facts.block) + ", by at most " +
                          std::to_string(kMostPadding),
                      std::to_string(out.padded) + " for a run of " +
                          std::to_string(run));
    ReadQuantized(check, rounding, compute_global, out.outer * out.inner,
                  out.padded, x, values, scale, global_scale, &out);
  }
}

ffi::Error QuantizeHandler(ffi::ThreadPool pool, ffi::AnyBuffer x,
                           ffi::AnyBuffer given_global, ffi::RemainingArgs more,
                           ffi::Result<ffi::AnyBuffer> values,
                           ffi::Result<ffi::AnyBuffer> scale,
                           ffi::Result<ffi::AnyBuffer> global_scale,
                           ffi::RemainingRets more_results,
                           ffi::Dictionary given) {
  constexpr const char* kWho = "jaxplugin_quantize";
  Checker check(kWho);
  Attributes attributes(check, given);
  const int64_t format = attributes.Required("format");
  const int64_t rounding = attributes.Required("rounding");
  const int64_t compute_global = attributes.Required("compute_global");
  const int64_t isa = attributes.Required("isa");
  const int64_t max_threads = ReadMaxThreads(check, attributes);
  QuantizeArgs args{};
  ReadPrologue(check, attributes, &args.prologue);
  const SideAttributes given_sides(attributes);
  const Kernels* kernels = nullptr;
  if (!attributes.AreAll() || !ReadKernels(check, isa, &kernels) ||
      !JAXPLUGIN_REQUIRE(check,
                         PlainFormat(x.element_type(), &args.x_format) &&
                             x.dimensions().size() == 2,
                         "x must be f32, bf16 or f16[rows, k]", Text(x)) ||
      !ReadFormat(check, format, &args.format)) {
    return check.error();
  }
  const int64_t block = FactsOf(args.format).block;
  const int64_t halves = args.prologue.halves == PrologueHalves::kNone ? 1 : 2;
  args.rows = x.dimensions()[0];
  const bool is_gradient = args.prologue.gradient != PrologueGradient::kNone;
  args.k = x.dimensions()[1] / (is_gradient ? 1 : halves);
  JAXPLUGIN_REQUIRE(
      check, args.k % block == 0 && x.dimensions()[1] % halves == 0,
      "k must be a multiple of the block size " + std::to_string(block),
      Text(x));
  ReadPrologueArrays(check, x, args.rows, args.k, more, more_results,
                     given_sides.along == 3 ? 3 : 0, &args.prologue);
  OperandArgs sides[2] = {};
  if (given_sides.along != 1 || more.size() > ArgumentsOf(args.prologue) ||
      args.prologue.column_sums != nullptr || args.prologue.IsNormGradient() ||
      (args.prologue.function != PrologueFunction::kNone &&
       compute_global != 0)) {
    ffi::AnyBuffer first[3] = {*values, *scale, *global_scale};
    ReadSides(check, given_sides, args, rounding, compute_global, x,
              given_global, more, first, more_results, sides);
    args.x = x.untyped_data();
    args.sides = sides;
  } else if (ReadGlobalScale(check, given_global, &args.given_global)) {
    ReadQuantized(check, rounding, compute_global, args.rows, args.k, x,
                  *values, *scale, *global_scale, &args);
  }
  if (!check.ok()) return check.error();
  if (!kernels->quantize(args, MakeParallel(pool, max_threads))) {
    return NoMemory(kWho);
  }
  return ffi::Error::Success();
}

ffi::Error DequantizeHandler(ffi::ThreadPool pool, ffi::AnyBuffer values,
                             ffi::AnyBuffer scale, ffi::AnyBuffer global_scale,
                             ffi::Result<ffi::AnyBuffer> out,
                             ffi::Dictionary given) {
  constexpr const char* kWho = "jaxplugin_dequantize";
  Checker check(kWho);
  Attributes attributes(check, given);
  const OperandAttributes operand{attributes.Required("block_size"),
                                  attributes.Optional("element", 0),
                                  attributes.Optional("scale_element", 0),
                                  attributes.Optional("fraction_bits", 0)};
  const int64_t isa = attributes.Required("isa");
  const int64_t max_threads = ReadMaxThreads(check, attributes);
  DequantizeArgs args{};
  const Kernels* kernels = nullptr;
  if (!attributes.AreAll() || !ReadKernels(check, isa, &kernels) ||
      !ReadOperand(check, "values", values, scale, operand, 2, &args.x) ||
      !ReadGlobalScale(check, global_scale, &args.global_scale) ||
      !JAXPLUGIN_REQUIRE(check,
                         PlainFormat(out->element_type(), &args.out_format) &&
                             IsDims(out->dimensions(), {args.x.rows, args.x.k}),
                         "the result must be f32, bf16 or f16[rows, k]",
                         Text(*out) + " for " + Text(values))) {
    return check.error();
  }
  args.out = out->untyped_data();
  AdviseHugePages(args.out, out->size_bytes());
  if (!kernels->dequantize(args, MakeParallel(pool, max_threads))) {
    return NoMemory(kWho);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxplugin

#if defined(__linux__)
// glibc has this variable since 2.32. The static C++ library reads this one
// instead, so that wheels run with an older glibc (tools/release.sh). XLA always
// starts threads.
extern "C" {
char __libc_single_threaded = 0;
}
#endif

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxplugin_block_scaled_dot,
                              jaxplugin::BlockScaledDot,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // lhs
                                  .Arg<xla::ffi::AnyBuffer>()  // lhs_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // rhs
                                  .Arg<xla::ffi::AnyBuffer>()  // rhs_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // global_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // bias
                                  .Arg<xla::ffi::AnyBuffer>()  // residual
                                  .RemainingArgs()  // rhs_offset
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .RemainingRets()  // scale, amax
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxplugin_quantize, jaxplugin::QuantizeHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // global_scale
                                  .RemainingArgs()             // of a prologue
                                  .Ret<xla::ffi::AnyBuffer>()  // values
                                  .Ret<xla::ffi::AnyBuffer>()  // scale
                                  .Ret<xla::ffi::AnyBuffer>()  // global_scale
                                  .RemainingRets()             // of a prologue
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxplugin_dequantize,
                              jaxplugin::DequantizeHandler);

extern "C" {

// Returns the FFI version of the headers that the library was built with. A
// jaxlib with an older version refuses the handlers, and its CPU backend is
// then broken. So compare the versions before you register the handlers.
int jaxplugin_cpu_ffi_api_version() {
  return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR;
}

// Returns the digest of the sources; library.py compares it with the checkout.
const char* jaxplugin_cpu_sources() { return JAXPLUGIN_SOURCES_DIGEST; }

// Returns AvailableCores(proc, cgroups).
int64_t jaxplugin_cpu_available_cores(const char* proc, const char* cgroups) {
  return jaxplugin::AvailableCores(proc, cgroups);
}

// Returns the instruction set of isa=0 on this machine, e.g. "avx512_bf16".
const char* jaxplugin_cpu_isa() {
  return jaxplugin::GetKernels(jaxplugin::Isa::kAuto)->name;
}

}  // extern "C"

#pragma GCC visibility pop
