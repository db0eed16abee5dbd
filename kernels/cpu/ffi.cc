// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The XLA FFI handlers: every shape, dtype and attribute is checked here, so
// that a bad call is an error and never an access out of bounds. README.md has
// the signatures.

#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

// Of the files that the library is made of; empty: not known (CMakeLists.txt).
#ifndef JAXPLUGIN_SOURCES_DIGEST
#define JAXPLUGIN_SOURCES_DIGEST ""
#endif

namespace ffi = xla::ffi;

namespace jaxplugin {
namespace {

using Dims = ffi::Span<const int64_t>;

const char* Name(ffi::DataType type) {
  switch (type) {
    case ffi::F32: return "f32";
    case ffi::BF16: return "bf16";
    case ffi::F16: return "f16";
    case ffi::U8: return "u8";
    case ffi::F8E4M3FN: return "f8e4m3fn";
    case ffi::F8E5M2: return "f8e5m2";
    case ffi::F4E2M1FN: return "f4e2m1fn";
    case ffi::F8E8M0FNU: return "f8e8m0fnu";
    default: return "another type";
  }
}

std::string Text(const ffi::AnyBuffer& x) {
  std::string text = std::string(Name(x.element_type())) + "[";
  const char* comma = "";
  for (int64_t dim : x.dimensions()) {
    text += comma + std::to_string(dim);
    comma = ",";
  }
  return text + "]";
}

// Collects the first broken rule; later ones are not looked at.
class Checker {
 public:
  explicit Checker(const char* who) : who_(who) {}

  bool Require(bool ok, const std::string& rule, const std::string& given) {
    if (ok || !rule_broken_.empty()) return ok && rule_broken_.empty();
    rule_broken_ = std::string(who_) + ": " + rule + ", got " + given;
    return false;
  }
  bool ok() const { return rule_broken_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(rule_broken_); }

 private:
  const char* who_;
  std::string rule_broken_;
};

// The int64 attributes of a call, by name.
class Attributes {
 public:
  Attributes(Checker& check, const ffi::Dictionary& given)
      : check_(check), given_(given) {}

  int64_t Required(const std::string& name) {
    const auto value = given_.get<int64_t>(name);
    check_.Require(value.has_value(), "the attribute " + name + " must be i64",
                   given_.contains(name) ? "another type" : "none");
    ++read_;
    return value.has_value() ? *value : 0;
  }
  int64_t Optional(const std::string& name, int64_t otherwise) {
    return given_.contains(name) ? Required(name) : otherwise;
  }
  // To be called after those that there may be.
  bool AreAll() {
    return check_.Require(read_ == given_.size(),
                          "no other attributes are known",
                          std::to_string(given_.size()) + " attributes");
  }

 private:
  Checker& check_;
  const ffi::Dictionary& given_;
  size_t read_ = 0;
};

ffi::Error NoMemory(const char* who) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    std::string(who) + ": scratch memory could not be had");
}

bool IsDims(Dims dims, std::initializer_list<int64_t> expected) {
  return Dims(expected.begin(), expected.size()) == dims;
}

bool IsAbsent(const ffi::AnyBuffer& x) { return x.element_count() == 0; }

bool PlainFormat(ffi::DataType type, Format* format) {
  switch (type) {
    case ffi::F32: *format = Format::kF32; return true;
    case ffi::BF16: *format = Format::kBF16; return true;
    case ffi::F16: *format = Format::kF16; return true;
    default: return false;
  }
}

// What u8 values may be: the `element` attributes.
constexpr Format kElements[] = {Format::kE2M1, Format::kE2M3, Format::kE3M2};
constexpr int64_t kElementCount = sizeof(kElements) / sizeof(kElements[0]);

// XLA's type of arrays of a format; u8 where it has none.
ffi::DataType TypeOf(Format format) {
  switch (format) {
    case Format::kE4M3: return ffi::F8E4M3FN;
    case Format::kE5M2: return ffi::F8E5M2;
    case Format::kE2M1: return ffi::F4E2M1FN;
    default: return ffi::U8;
  }
}

bool ValuesFormat(ffi::DataType type, int64_t element, Format* format) {
  switch (type) {
    case ffi::F8E4M3FN: *format = Format::kE4M3; return true;
    case ffi::F8E5M2: *format = Format::kE5M2; return true;
    case ffi::F4E2M1FN: *format = Format::kE2M1; return true;
    case ffi::U8: *format = kElements[element]; return true;
    default: return PlainFormat(type, format);
  }
}

// Fills `out` from values [..., k] and scale [..., ceil(k / block)] of the
// same rank. Packed E2M1 comes as u8[..., k / 2] or as f4e2m1fn[..., k], which
// XLA:CPU stores packed as well (though size_bytes() counts a byte a value).
bool ReadOperand(Checker& check, const char* name, const ffi::AnyBuffer& values,
                 const ffi::AnyBuffer& scale, int64_t block, int64_t element,
                 size_t rank, Operand* out) {
  const std::string who = name;
  const Dims dims = values.dimensions();
  const ffi::DataType type = values.element_type();
  if (!check.Require(dims.size() == rank,
                     who + " must have rank " + std::to_string(rank),
                     Text(values)) ||
      !check.Require(element >= 0 && element < kElementCount &&
                         (element == 0 || type == ffi::U8),
                     who + "'s element must be 0, or for u8 1 (e2m3) or 2"
                           " (e3m2)",
                     std::to_string(element) + " for " + Text(values))) {
    return false;
  }
  *out = Operand{};
  if (!check.Require(ValuesFormat(type, element, &out->format),
                     who + " must be f8e4m3fn, f8e5m2, f4e2m1fn, u8 (packed"
                           " e2m1, or codes of 6 bits), f32, bf16 or f16",
                     Text(values))) {
    return false;
  }
  const int64_t last = dims[rank - 1];
  if (!check.Require(type != ffi::F4E2M1FN || last % 2 == 0,
                     who + " of f4e2m1fn must have an even k", Text(values))) {
    return false;
  }
  out->values = static_cast<const uint8_t*>(values.untyped_data());
  out->rows = 1;
  for (size_t i = 0; i + 1 < rank; ++i) out->rows *= dims[i];
  out->k = type == ffi::U8 && IsPacked(out->format) ? 2 * last : last;
  out->row_bytes = BytesOf(out->format, out->k);
  out->block = 32;
  if (IsPlain(out->format)) {
    out->scale_kind = ScaleKind::kNone;
    return check.Require(IsAbsent(scale),
                         who + " without a format takes an empty scale",
                         Text(scale));
  }
  switch (scale.element_type()) {
    case ffi::F8E8M0FNU: out->scale_kind = ScaleKind::kE8M0; break;
    case ffi::F8E4M3FN: out->scale_kind = ScaleKind::kE4M3; break;
    default:
      return check.Require(
          false, who + "_scale must be f8e8m0fnu or f8e4m3fn", Text(scale));
  }
  if (!check.Require(block == 16 || block == 32,
                     who + "_block_size must be 16 or 32",
                     std::to_string(block))) {
    return false;
  }
  out->block = block;
  out->scale_cols = (out->k + block - 1) / block;
  out->scale = static_cast<const uint8_t*>(scale.untyped_data());
  const Dims scale_dims = scale.dimensions();
  bool same = scale_dims.size() == rank;
  for (size_t i = 0; same && i + 1 < rank; ++i) same = scale_dims[i] == dims[i];
  same = same && scale_dims[rank - 1] == out->scale_cols;
  return check.Require(same,
                       who + "_scale must have " + who + "'s shape with " +
                           std::to_string(out->scale_cols) +
                           " columns for block size " + std::to_string(block),
                       Text(scale) + " for " + Text(values));
}

// An optional f32 scalar: f32[], f32[1], or empty for none.
bool ReadGlobalScale(Checker& check, const ffi::AnyBuffer& x,
                     const float** out) {
  *out = nullptr;
  if (!check.Require(x.element_type() == ffi::F32 && x.element_count() <= 1,
                     "global_scale must be f32[] or f32[0]", Text(x))) {
    return false;
  }
  if (!IsAbsent(x)) *out = static_cast<const float*>(x.untyped_data());
  return true;
}

// The same of a dot, which also takes a product that f32 may not hold, as
// f32[2]: two factors that multiply one after the other.
bool ReadGlobalScales(Checker& check, const ffi::AnyBuffer& x, DotArgs* out) {
  if (!check.Require(x.element_type() == ffi::F32 && x.element_count() <= 2,
                     "global_scale must be f32[], f32[2] or f32[0]", Text(x))) {
    return false;
  }
  const float* numbers = static_cast<const float*>(x.untyped_data());
  out->global_scale = x.element_count() > 0 ? numbers : nullptr;
  out->global_power = x.element_count() > 1 ? numbers + 1 : nullptr;
  return true;
}

bool ReadKernels(Checker& check, int64_t isa, const Kernels** kernels) {
  *kernels = isa >= 0 && isa <= 4 ? GetKernels(static_cast<Isa>(isa)) : nullptr;
  return check.Require(
      *kernels != nullptr,
      "isa must be 0 (auto), 1 (baseline), 2 (avx2), 3 (avx512) or 4"
      " (avx512_bf16), and one that this machine has",
      std::to_string(isa));
}

Parallel MakeParallel(ffi::ThreadPool& pool) {
  constexpr int64_t kThreadsMax = 256;
  int64_t threads = pool.num_threads();
  threads = threads < 1 ? 1 : threads > kThreadsMax ? kThreadsMax : threads;
  return Parallel{static_cast<int>(threads),
                  [](void* opaque, void (*task)(void*), void* data) {
                    static_cast<ffi::ThreadPool*>(opaque)->Schedule(
                        [task, data] { task(data); });
                  },
                  &pool};
}

ffi::Error BlockScaledDot(ffi::ThreadPool pool, ffi::AnyBuffer lhs,
                          ffi::AnyBuffer lhs_scale, ffi::AnyBuffer rhs,
                          ffi::AnyBuffer rhs_scale, ffi::AnyBuffer global_scale,
                          ffi::AnyBuffer bias, ffi::AnyBuffer residual,
                          ffi::Result<ffi::AnyBuffer> out,
                          ffi::Dictionary given) {
  constexpr const char* kWho = "jaxplugin_block_scaled_dot";
  Checker check(kWho);
  Attributes attributes(check, given);
  const int64_t lhs_block_size = attributes.Required("lhs_block_size");
  const int64_t rhs_block_size = attributes.Required("rhs_block_size");
  const int64_t lhs_element = attributes.Optional("lhs_element", 0);
  const int64_t rhs_element = attributes.Optional("rhs_element", 0);
  const int64_t activation = attributes.Required("activation");
  const int64_t isa = attributes.Required("isa");
  DotArgs args{};
  const Kernels* kernels = nullptr;
  if (!attributes.AreAll() || !ReadKernels(check, isa, &kernels) ||
      !ReadOperand(check, "lhs", lhs, lhs_scale, lhs_block_size, lhs_element, 3,
                   &args.lhs) ||
      !ReadOperand(check, "rhs", rhs, rhs_scale, rhs_block_size, rhs_element, 3,
                   &args.rhs) ||
      !ReadGlobalScales(check, global_scale, &args)) {
    return check.error();
  }
  args.batch = lhs.dimensions()[0];
  args.m = lhs.dimensions()[1];
  args.n = rhs.dimensions()[1];
  args.k = args.lhs.k;
  args.rhs_batched = rhs.dimensions()[0] != 1 || args.batch == 1;
  check.Require(args.rhs.k == args.k, "lhs and rhs must have the same k",
                Text(lhs) + " and " + Text(rhs));
  check.Require(rhs.dimensions()[0] == args.batch || rhs.dimensions()[0] == 1,
                "rhs must have the batch of lhs, or 1",
                Text(lhs) + " and " + Text(rhs));
  check.Require(PlainFormat(out->element_type(), &args.out_format) &&
                    IsDims(out->dimensions(), {args.batch, args.m, args.n}),
                "the result must be f32, bf16 or f16[batch, m, n]",
                Text(*out) + " for " + Text(lhs) + " and " + Text(rhs));
  check.Require(bias.element_type() == ffi::F32 &&
                    (IsAbsent(bias) || IsDims(bias.dimensions(), {args.n})),
                "bias must be f32[n] or f32[0]", Text(bias));
  check.Require(
      PlainFormat(residual.element_type(), &args.residual_format) &&
          (IsAbsent(residual) ||
           (IsDims(residual.dimensions(), {args.batch, args.m, args.n}) &&
            (residual.element_type() == ffi::F32 ||
             residual.element_type() == out->element_type()))),
      "residual must be [batch, m, n] of f32 or the result's dtype, or f32[0]",
      Text(residual) + " for a result " + Text(*out));
  check.Require(activation >= 0 && activation <= 3,
                "activation must be 0 (none), 1 (relu), 2 (gelu) or 3 (silu)",
                std::to_string(activation));
  if (!check.ok()) return check.error();
  if (out->element_count() == 0) return ffi::Error::Success();
  if (!IsAbsent(bias)) args.bias = static_cast<float*>(bias.untyped_data());
  if (!IsAbsent(residual)) args.residual = residual.untyped_data();
  args.activation = static_cast<Activation>(activation);
  args.out = out->untyped_data();
  if (!args.rhs_batched) {  // one rhs for all: the batch is more rows of lhs
    args.m *= args.batch;
    args.batch = 1;
    args.rhs_batched = true;
  }
  AdviseHugePages(args.out, out->size_bytes());
  if (!Dot(*kernels, args, MakeParallel(pool))) return NoMemory(kWho);
  return ffi::Error::Success();
}

ffi::Error QuantizeHandler(ffi::ThreadPool pool, ffi::AnyBuffer x,
                           ffi::AnyBuffer given_global,
                           ffi::Result<ffi::AnyBuffer> values,
                           ffi::Result<ffi::AnyBuffer> scale,
                           ffi::Result<ffi::AnyBuffer> global_scale,
                           int64_t format, int64_t rounding,
                           int64_t compute_global, int64_t isa) {
  constexpr const char* kWho = "jaxplugin_quantize";
  Checker check(kWho);
  QuantizeArgs args{};
  const Kernels* kernels = nullptr;
  if (!ReadKernels(check, isa, &kernels) ||
      !ReadGlobalScale(check, given_global, &args.given_global) ||
      !check.Require(PlainFormat(x.element_type(), &args.x_format) &&
                         x.dimensions().size() == 2,
                     "x must be f32, bf16 or f16[rows, k]", Text(x)) ||
      !check.Require(format >= 0 && format < kQuantizedFormats,
                     "format must be 0 (mxfp8), 1 (mxfp8_e5m2), 2 (mxfp4), 3"
                     " (nvfp4), 4 (mxfp6_e2m3) or 5 (mxfp6_e3m2)",
                     std::to_string(format))) {
    return check.error();
  }
  args.format = static_cast<QuantizedFormat>(format);
  const QuantizedFacts facts = FactsOf(args.format);
  const int64_t block = facts.block;
  args.rows = x.dimensions()[0];
  args.k = x.dimensions()[1];
  check.Require(args.k % block == 0,
                "k must be a multiple of the block size " +
                    std::to_string(block),
                Text(x));
  check.Require(rounding == 0 || rounding == 1,
                "rounding must be 0 (up) or 1 (floor)",
                std::to_string(rounding));
  check.Require(compute_global == 0 ||
                    (compute_global == 1 && facts.has_global_scale &&
                     args.given_global == nullptr),
                "compute_global must be 0, or 1 for nvfp4 with global_scale"
                " f32[0]",
                std::to_string(compute_global));
  const int64_t row_bytes = BytesOf(facts.values, args.k);
  const bool values_ok =
      IsDims(values->dimensions(),
             {args.rows,
              values->element_type() == ffi::U8 ? row_bytes : args.k}) &&
      (values->element_type() == ffi::U8 ||
       values->element_type() == TypeOf(facts.values));
  check.Require(values_ok,
                "values must be the format's dtype [rows, k], or u8[rows, k]"
                " (u8[rows, k / 2] for fp4)",
                Text(*values) + " for " + Text(x));
  const ffi::DataType scale_type = facts.scale == ScaleKind::kE4M3
                                       ? ffi::F8E4M3FN
                                       : ffi::F8E8M0FNU;
  check.Require(
      (scale->element_type() == ffi::U8 ||
       scale->element_type() == scale_type) &&
          IsDims(scale->dimensions(), {args.rows, args.k / block}),
      "scale must be the format's scale dtype or u8 [rows, k / block]",
      Text(*scale) + " for " + Text(x));
  check.Require(global_scale->element_type() == ffi::F32 &&
                    global_scale->element_count() == 1,
                "the global scale result must be f32[]", Text(*global_scale));
  if (!check.ok()) return check.error();
  args.x = x.untyped_data();
  args.round_up = rounding == 0;
  args.compute_global = compute_global == 1;
  args.values = static_cast<uint8_t*>(values->untyped_data());
  // size_bytes() counts a byte for each FP4 value.
  AdviseHugePages(args.values, args.rows * row_bytes);
  args.scale = static_cast<uint8_t*>(scale->untyped_data());
  args.global_scale = static_cast<float*>(global_scale->untyped_data());
  if (!kernels->quantize(args, MakeParallel(pool))) return NoMemory(kWho);
  return ffi::Error::Success();
}

ffi::Error DequantizeHandler(ffi::ThreadPool pool, ffi::AnyBuffer values,
                             ffi::AnyBuffer scale, ffi::AnyBuffer global_scale,
                             ffi::Result<ffi::AnyBuffer> out,
                             ffi::Dictionary given) {
  constexpr const char* kWho = "jaxplugin_dequantize";
  Checker check(kWho);
  Attributes attributes(check, given);
  const int64_t block_size = attributes.Required("block_size");
  const int64_t element = attributes.Optional("element", 0);
  const int64_t isa = attributes.Required("isa");
  DequantizeArgs args{};
  const Kernels* kernels = nullptr;
  if (!attributes.AreAll() || !ReadKernels(check, isa, &kernels) ||
      !ReadOperand(check, "values", values, scale, block_size, element, 2,
                   &args.x) ||
      !ReadGlobalScale(check, global_scale, &args.global_scale) ||
      !check.Require(
          PlainFormat(out->element_type(), &args.out_format) &&
              IsDims(out->dimensions(), {args.x.rows, args.x.k}),
          "the result must be f32, bf16 or f16[rows, k]",
          Text(*out) + " for " + Text(values))) {
    return check.error();
  }
  args.out = out->untyped_data();
  AdviseHugePages(args.out, out->size_bytes());
  if (!kernels->dequantize(args, MakeParallel(pool))) return NoMemory(kWho);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxplugin

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxplugin_block_scaled_dot,
                              jaxplugin::BlockScaledDot,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // lhs
                                  .Arg<ffi::AnyBuffer>()  // lhs_scale
                                  .Arg<ffi::AnyBuffer>()  // rhs
                                  .Arg<ffi::AnyBuffer>()  // rhs_scale
                                  .Arg<ffi::AnyBuffer>()  // global_scale
                                  .Arg<ffi::AnyBuffer>()  // bias
                                  .Arg<ffi::AnyBuffer>()  // residual
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxplugin_quantize, jaxplugin::QuantizeHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // global_scale
                                  .Ret<ffi::AnyBuffer>()  // values
                                  .Ret<ffi::AnyBuffer>()  // scale
                                  .Ret<ffi::AnyBuffer>()  // global_scale
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("rounding")
                                  .Attr<int64_t>("compute_global")
                                  .Attr<int64_t>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxplugin_dequantize,
                              jaxplugin::DequantizeHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values
                                  .Arg<ffi::AnyBuffer>()  // scale
                                  .Arg<ffi::AnyBuffer>()  // global_scale
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Attrs());

extern "C" {

// The FFI version of the headers this was built with. A jaxlib with an older
// one refuses the library, and breaks its CPU backend in doing so: compare
// before registering.
int jaxplugin_cpu_ffi_api_version() {
  return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR;
}

// The digest of the sources, to compare with those of a checkout.
const char* jaxplugin_cpu_sources() { return JAXPLUGIN_SOURCES_DIGEST; }

// The instruction set that isa=0 uses here, e.g. "avx512_bf16".
const char* jaxplugin_cpu_isa() {
  return jaxplugin::GetKernels(jaxplugin::Isa::kAuto)->name;
}

}  // extern "C"

#pragma GCC visibility pop
