// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The XLA FFI handler of the ragged dot (dot/ragged.cc).

#include <cstdint>
#include <string>

#include "arguments.h"
#include "dot/ragged.h"
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace jaxplugin {
namespace {

constexpr int64_t kFirstGate = 4;  // the first gated `activation`

// Reads the global scales: f32[1, groups], f32[2, groups], or empty for none.
void ReadFactors(Checker& check, const ffi::AnyBuffer& x, RaggedArgs* out) {
  const int64_t groups = out->groups;
  if (!JAXPLUGIN_REQUIRE(
          check,
          x.element_type() == ffi::F32 &&
              (IsAbsent(x) || IsDims(x.dimensions(), {1, groups}) ||
               IsDims(x.dimensions(), {2, groups})),
          "global_scale must be f32[1, groups], f32[2, groups] or"
          " f32[0]",
          Text(x)) ||
      IsAbsent(x)) {
    return;
  }
  const float* numbers = static_cast<const float*>(x.untyped_data());
  out->factors = numbers;
  if (x.dimensions()[0] == 2) out->powers = numbers + groups;
}

ffi::Error RaggedDotHandler(ffi::ThreadPool pool, ffi::AnyBuffer lhs,
                            ffi::AnyBuffer lhs_scale, ffi::AnyBuffer rhs,
                            ffi::AnyBuffer rhs_scale,
                            ffi::AnyBuffer group_sizes,
                            ffi::AnyBuffer global_scale, ffi::AnyBuffer bias,
                            ffi::RemainingArgs more,
                            ffi::Result<ffi::AnyBuffer> out,
                            ffi::RemainingRets more_results,
                            ffi::Dictionary given) {
  constexpr const char* kWho = "jaxplugin_ragged_dot";
  Checker check(kWho);
  Attributes attributes(check, given);
  const int64_t activation = attributes.Required("activation");
  const int64_t max_threads = ReadMaxThreads(check, attributes);
  const ResultAttributes result(attributes);
  RaggedArgs args{};
  DotArgs& dot = args.dot;
  const Kernels* kernels = nullptr;
  if (!ReadOperands(check, attributes, lhs, lhs_scale, 2, rhs, rhs_scale, more,
                    result.is_quantized(), &dot, &kernels)) {
    return check.error();
  }
  args.groups = rhs.dimensions()[0];
  dot.batch = 1;
  dot.rhs_batched = true;
  dot.m = lhs.dimensions()[0];
  dot.n = rhs.dimensions()[1];
  dot.k = dot.lhs.k;
  JAXPLUGIN_REQUIRE(check,
                    group_sizes.element_type() == ffi::S32 &&
                        IsDims(group_sizes.dimensions(), {args.groups}),
                    "group_sizes must be i32[groups]", Text(group_sizes));
  JAXPLUGIN_REQUIRE(
      check, activation >= 0 && activation <= kFirstGate + 1,
      "activation must be 0 (none), 1 (relu), 2 (gelu), 3 (silu), 4"
      " (swiglu) or 5 (swigluoai)",
      std::to_string(activation));
  args.is_gated = activation >= kFirstGate;
  JAXPLUGIN_REQUIRE(check, !args.is_gated || dot.n % 2 == 0,
                    "n must be even for a gated activation", Text(rhs));
  const int64_t columns = args.is_gated ? dot.n / 2 : dot.n;
  QuantizedResult quantized{};
  ReadQuantizedResult(check, result, *kernels, more, lhs, dot.m, columns, *out,
                      more_results, &quantized);
  JAXPLUGIN_REQUIRE(
      check,
      result.is_quantized() ||
          (PlainFormat(out->element_type(), &dot.out_format) &&
           IsDims(out->dimensions(), {dot.m, columns})),
      "the result must be f32, bf16 or f16[m, n], of half the columns"
      " for a gated activation",
      Text(*out) + " for " + Text(lhs) + " and " + Text(rhs));
  JAXPLUGIN_REQUIRE(
      check,
      bias.element_type() == ffi::F32 &&
          (IsAbsent(bias) || IsDims(bias.dimensions(), {args.groups, dot.n})),
      "bias must be f32[groups, n] or f32[0]", Text(bias));
  ReadFactors(check, global_scale, &args);
  CheckOffsets(check, dot,
               !IsAbsent(global_scale) || !IsAbsent(bias) || activation != 0);
  if (!check.ok()) return check.error();
  if (out->element_count() == 0) return ffi::Error::Success();
  args.sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
  if (!IsAbsent(bias)) args.bias = static_cast<float*>(bias.untyped_data());
  if (args.is_gated) {
    args.gate = static_cast<Gate>(activation - kFirstGate);
  } else {
    dot.activation = static_cast<Activation>(activation);
  }
  if (result.is_quantized()) {
    dot.quantized = &quantized;
    dot.out_format = Format::kF32;
  } else {
    dot.out = out->untyped_data();
    AdviseHugePages(dot.out, out->size_bytes());
  }
  if (!RaggedDot(*kernels, args, MakeParallel(pool, max_threads))) {
    return NoMemory(kWho);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxplugin

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxplugin_ragged_dot,
                              jaxplugin::RaggedDotHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // lhs
                                  .Arg<xla::ffi::AnyBuffer>()  // lhs_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // rhs
                                  .Arg<xla::ffi::AnyBuffer>()  // rhs_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // group_sizes
                                  .Arg<xla::ffi::AnyBuffer>()  // global_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // bias
                                  .RemainingArgs()  // rhs_offset
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .RemainingRets()  // scale, amax
                                  .Attrs());

#pragma GCC visibility pop
