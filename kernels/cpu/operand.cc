// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The XLA FFI handler that quantizes the operands of training matmuls.
// README.md has its signature.

#include <cstdint>
#include <string>

#include "arguments.h"
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxplugin {
namespace {

constexpr int64_t kMostTransformed = 256;  // largest Hadamard group

// Reads the key and the attributes that jaxplugin_quantize does not have.
void ReadExtras(Checker& check, const QuantizedFacts& facts, int64_t hadamard,
                int64_t square, int64_t four_over_six, int64_t scale_up,
                const ffi::AnyBuffer& key, OperandArgs* args) {
  JAXPLUGIN_REQUIRE(check,
                    hadamard >= 1 && hadamard <= kMostTransformed &&
                        (hadamard & (hadamard - 1)) == 0,
                    "hadamard must be a power of two up to 256, or 1",
                    std::to_string(hadamard));
  JAXPLUGIN_REQUIRE(
      check,
      args->padded >= args->k && args->padded % facts.block == 0 &&
          (hadamard < 1 || args->padded % hadamard == 0),
      "values must have k padded to whole blocks of " +
          std::to_string(facts.block) + " and groups of hadamard",
      std::to_string(args->padded) + " for k=" + std::to_string(args->k) +
          " and hadamard=" + std::to_string(hadamard));
  const int64_t rows = args->outer * args->inner;
  JAXPLUGIN_REQUIRE(check, square == 0 || (square > 0 && rows % square == 0),
                    "square must be 0 or divide the rows",
                    std::to_string(square) + " for " + std::to_string(rows));
  JAXPLUGIN_REQUIRE(
      check,
      four_over_six == 0 || (four_over_six == 1 && facts.has_global_scale),
      "four_over_six must be 0, or 1 for nvfp4", std::to_string(four_over_six));
  JAXPLUGIN_REQUIRE(
      check, scale_up == 0 || (scale_up == 1 && facts.has_global_scale),
      "scale_up must be 0, or 1 for nvfp4", std::to_string(scale_up));
  JAXPLUGIN_REQUIRE(check,
                    IsAbsent(key) || (key.element_type() == ffi::U32 &&
                                      IsDims(key.dimensions(), {2})),
                    "key must be u32[2] or u32[0]", Text(key));
  args->hadamard = hadamard;
  args->square = square;
  args->four_over_six = four_over_six == 1;
  args->scale_up = scale_up == 1;
  if (!IsAbsent(key)) args->key = static_cast<uint32_t*>(key.untyped_data());
}

ffi::Error QuantizeOperandHandler(ffi::ThreadPool pool, ffi::AnyBuffer x,
                                  ffi::AnyBuffer given_global,
                                  ffi::AnyBuffer key,
                                  ffi::Result<ffi::AnyBuffer> values,
                                  ffi::Result<ffi::AnyBuffer> scale,
                                  ffi::Result<ffi::AnyBuffer> global_scale,
                                  ffi::Dictionary given) {
  constexpr const char* kWho = "jaxplugin_quantize_operand";
  Checker check(kWho);
  Attributes attributes(check, given);
  const int64_t format = attributes.Required("format");
  const int64_t rounding = attributes.Required("rounding");
  const int64_t compute_global = attributes.Required("compute_global");
  const int64_t hadamard = attributes.Required("hadamard");
  const int64_t square = attributes.Required("square");
  const int64_t four_over_six = attributes.Required("four_over_six");
  const int64_t scale_up = attributes.Required("scale_up");
  const int64_t isa = attributes.Required("isa");
  const int64_t max_threads = ReadMaxThreads(check, attributes);
  OperandArgs args{};
  const Kernels* kernels = nullptr;
  if (!attributes.AreAll() || !ReadKernels(check, isa, &kernels) ||
      !ReadGlobalScale(check, given_global, &args.given_global) ||
      !JAXPLUGIN_REQUIRE(check,
                         PlainFormat(x.element_type(), &args.x_format) &&
                             x.dimensions().size() == 3,
                         "x must be f32, bf16 or f16[outer, k, inner]",
                         Text(x)) ||
      !ReadFormat(check, format, &args.format) ||
      !JAXPLUGIN_REQUIRE(check, values->dimensions().size() == 2,
                         "values must be [outer * inner, k]", Text(*values))) {
    return check.error();
  }
  const QuantizedFacts facts = FactsOf(args.format);
  args.outer = x.dimensions()[0];
  args.k = x.dimensions()[1];
  args.inner = x.dimensions()[2];
  args.padded = ColumnsOf(facts, *values);
  const int64_t rows = args.outer * args.inner;
  ReadExtras(check, facts, hadamard, square, four_over_six, scale_up, key,
             &args);
  if (!ReadQuantized(check, rounding, compute_global, rows, args.padded, x,
                     *values, *scale, *global_scale, &args)) {
    return check.error();
  }
  if (!kernels->quantize_operand(args, MakeParallel(pool, max_threads))) {
    return NoMemory(kWho);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxplugin

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxplugin_quantize_operand,
                              jaxplugin::QuantizeOperandHandler);

#pragma GCC visibility pop
