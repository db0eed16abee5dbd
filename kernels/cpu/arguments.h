// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The FFI handlers check and read their arguments with these functions. They
// check every shape, dtype and attribute, so a bad call is an error and never
// an access out of bounds.

#ifndef JAXPLUGIN_KERNELS_CPU_ARGUMENTS_H_
#define JAXPLUGIN_KERNELS_CPU_ARGUMENTS_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

// Lets XLA find the bindings of a handler that takes a thread pool.
template <>
struct xla::ffi::CtxBinding<xla::ffi::ThreadPool> {
  using Ctx = ThreadPool;
};

namespace jaxplugin {

namespace ffi = xla::ffi;

using Dims = ffi::Span<const int64_t>;

std::string Text(const ffi::AnyBuffer& x);

// Records the first broken rule and ignores later ones.
class Checker {
 public:
  explicit Checker(const char* who) : who_(who) {}

  // Returns false.
  bool Fail(const std::string& rule, const std::string& given) {
    if (ok()) rule_broken_ = std::string(who_) + ": " + rule + ", got " + given;
    return false;
  }
  bool ok() const { return rule_broken_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(rule_broken_); }

 private:
  const char* who_;
  std::string rule_broken_;
};

// Checks a rule, and returns whether no rule is broken so far. A macro builds
// the texts only if the rule is broken. As arguments of a function they took
// 2.5 of the 4.8 us of a call of 1 x 4 x 32 (Zen 5, 2026-11).
#define JAXPLUGIN_REQUIRE(check, holds, rule, given) \
  ((holds) ? (check).ok() : (check).Fail(rule, given))

// The attributes of a call, by name.
class Attributes {
 public:
  Attributes(Checker& check, const ffi::Dictionary& given)
      : check_(check), given_(given) {}

  int64_t Required(std::string_view name) {
    return Read<int64_t>(name, "i64");
  }
  int64_t Optional(std::string_view name, int64_t otherwise) {
    return given_.contains(name) ? Required(name) : otherwise;
  }
  // Returns an f32 attribute, 0 if it is left out.
  float OptionalFloat(std::string_view name) {
    return given_.contains(name) ? Read<float>(name, "f32") : 0;
  }
  // Returns an array of f32, empty if it is left out.
  ffi::Span<const float> OptionalFloats(std::string_view name) {
    using Floats = ffi::Span<const float>;
    return given_.contains(name) ? Read<Floats>(name, "f32[]") : Floats{};
  }
  // Checks that the call has no attributes besides those read so far. Call it
  // after the last Required or Optional.
  bool AreAll() {
    return JAXPLUGIN_REQUIRE(check_, read_ == given_.size(),
                             "no other attributes are known",
                             std::to_string(given_.size()) + " attributes");
  }

 private:
  template <typename T>
  T Read(std::string_view name, const char* type) {
    const auto value = given_.get<T>(name);
    JAXPLUGIN_REQUIRE(
        check_, value.has_value(),
        "the attribute " + std::string(name) + " must be " + type,
        given_.contains(name) ? "another type" : "none");
    ++read_;
    return value.has_value() ? *value : T{};
  }

  Checker& check_;
  const ffi::Dictionary& given_;
  size_t read_ = 0;
};

ffi::Error NoMemory(const char* who);

bool IsDims(Dims dims, std::initializer_list<int64_t> expected);
bool IsAbsent(const ffi::AnyBuffer& x);
bool PlainFormat(ffi::DataType type, Format* format);

// Returns XLA's dtype of a small float format, or u8 if XLA has none.
ffi::DataType TypeOf(Format format);

// The attributes of an operand. `element` and `scale_element` give the formats
// of u8 values and u8 scales.
struct OperandAttributes {
  int64_t block_size, element, scale_element, fraction_bits, scale_rows = 1;
  ffi::Span<const float> codebook = {};  // 16 values by code, or none
};

// Fills `out` from values [..., rows, k] and scale [..., ceil(rows /
// scale_rows), ceil(k / block_size)] of the same rank. E2M1 is u8[..., k / 2] or f4e2m1fn[..., k], and int4 is u8[..., k /
// 2] or s4[..., k]. XLA:CPU stores all of them packed, although size_bytes() of
// f4e2m1fn counts a byte per value.
bool ReadOperand(Checker& check, const char* name, const ffi::AnyBuffer& values,
                 const ffi::AnyBuffer& scale, const OperandAttributes& given,
                 size_t rank, Operand* out);

// Fills the operands of a dot from the arrays of lhs (of rank `lhs_rank`) and
// rhs (of rank 3), and from their attributes. `more` may have the offsets of
// rhs. Reads quantize_rows too, and calls attributes.AreAll(), so a handler
// reads its other attributes first. If the result is quantized, `more` has
// other arguments (ReadQuantizedResult).
bool ReadOperands(Checker& check, Attributes& attributes,
                  const ffi::AnyBuffer& lhs, const ffi::AnyBuffer& lhs_scale,
                  size_t lhs_rank, const ffi::AnyBuffer& rhs,
                  const ffi::AnyBuffer& rhs_scale,
                  const ffi::RemainingArgs& more, bool is_quantized,
                  DotArgs* out, const Kernels** kernels);

// The attributes of a result that may be quantized.
struct ResultAttributes {
  ResultAttributes(Attributes& attributes)
      : format(attributes.Optional("result_format", -1)),
        rounding(is_quantized() ? attributes.Optional("result_rounding", 0)
                                : 0) {}
  bool is_quantized() const { return format != -1; }

  int64_t format, rounding;
};

// Reads the quantized result of a dot [rows, columns] and its global scale, the
// only one of `more`. `more_results` has the scale, and perhaps amax, which
// becomes 0.
// If the result is not quantized, checks only that there are no such results.
bool ReadQuantizedResult(Checker& check, const ResultAttributes& given,
                         const Kernels& kernels, const ffi::RemainingArgs& more,
                         const ffi::AnyBuffer& lhs, int64_t rows,
                         int64_t columns, ffi::AnyBuffer& values,
                         const ffi::RemainingRets& more_results,
                         QuantizedResult* out);

// Checks that a dot whose rhs has offsets has an f32 result, and no epilogue.
bool CheckOffsets(Checker& check, const DotArgs& args, bool has_epilogue);

// Reads an optional f32 scalar: f32[], f32[1], or an empty array for none.
bool ReadGlobalScale(Checker& check, const ffi::AnyBuffer& x,
                     const float** out);

// Reads the `format` attribute.
bool ReadFormat(Checker& check, int64_t format, QuantizedFormat* out);

// Checks the attribute `compute_global`, and the result f32[].
bool CheckGlobalScale(Checker& check, const QuantizedFacts& facts,
                      int64_t compute_global, bool is_given,
                      const ffi::AnyBuffer& result);

// Returns the columns of a quantized result, which may be bytes.
int64_t ColumnsOf(const QuantizedFacts& facts, const ffi::AnyBuffer& values);

// Checks the attribute `rounding`, and values [rows, k] and scale [rows, k /
// block] of the quantized x.
bool CheckQuantized(Checker& check, const QuantizedFacts& facts,
                    int64_t rounding, int64_t rows, int64_t k,
                    const ffi::AnyBuffer& x, const ffi::AnyBuffer& values,
                    const ffi::AnyBuffer& scale);

// Checks the results and fills the fields that QuantizeArgs and OperandArgs
// share.
template <typename Args>
bool ReadQuantized(Checker& check, int64_t rounding, int64_t compute_global,
                   int64_t rows, int64_t k, const ffi::AnyBuffer& x,
                   ffi::AnyBuffer& values, ffi::AnyBuffer& scale,
                   ffi::AnyBuffer& global_scale, Args* out) {
  const QuantizedFacts facts = FactsOf(out->format);
  if (!CheckQuantized(check, facts, rounding, rows, k, x, values, scale) ||
      !CheckGlobalScale(check, facts, compute_global,
                        out->given_global != nullptr, global_scale)) {
    return false;
  }
  out->x = x.untyped_data();
  out->round_up = rounding == 0;
  out->compute_global = compute_global == 1;
  out->values = static_cast<uint8_t*>(values.untyped_data());
  out->scale = static_cast<uint8_t*>(scale.untyped_data());
  out->global_scale = static_cast<float*>(global_scale.untyped_data());
  // size_bytes() would count a byte per FP4 value.
  AdviseHugePages(out->values, rows * BytesOf(facts.values, k));
  return true;
}

bool ReadKernels(Checker& check, int64_t isa, const Kernels** kernels);

// Returns the threads of a call: those of the pool, at most as many as cores are
// available (AvailableCores), and at most the attribute `max_threads` if it is
// not 0.
Parallel MakeParallel(ffi::ThreadPool& pool, int64_t max_threads);

// Reads the attribute `max_threads`.
int64_t ReadMaxThreads(Checker& check, Attributes& attributes);

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_ARGUMENTS_H_
