// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#include "arguments.h"

#include "dot/rule.h"

namespace jaxplugin {
namespace {

const char* Name(ffi::DataType type) {
  switch (type) {
    case ffi::F32: return "f32";
    case ffi::BF16: return "bf16";
    case ffi::F16: return "f16";
    case ffi::S4: return "s4";
    case ffi::S8: return "s8";
    case ffi::U8: return "u8";
    case ffi::U32: return "u32";
    case ffi::F8E4M3FN: return "f8e4m3fn";
    case ffi::F8E5M2: return "f8e5m2";
    case ffi::F4E2M1FN: return "f4e2m1fn";
    case ffi::F8E8M0FNU: return "f8e8m0fnu";
    default: return "another type";
  }
}

// The formats of u8 values, indexed by the `element` attribute.
constexpr Format kElements[] = {Format::kE2M1, Format::kE2M3, Format::kE3M2,
                                Format::kE4M3, Format::kE5M2, Format::kInt8,
                                Format::kInt4};
constexpr int64_t kElementCount = sizeof(kElements) / sizeof(kElements[0]);

bool ValuesFormat(ffi::DataType type, int64_t element, Format* format) {
  switch (type) {
    case ffi::F8E4M3FN: *format = Format::kE4M3; return true;
    case ffi::F8E5M2: *format = Format::kE5M2; return true;
    case ffi::F4E2M1FN: *format = Format::kE2M1; return true;
    case ffi::S8: *format = Format::kInt8; return true;
    case ffi::S4: *format = Format::kInt4; return true;
    case ffi::U8: *format = kElements[element]; return true;
    default: return PlainFormat(type, format);
  }
}

// The kinds of u8 scales, indexed by the `scale_element` attribute.
constexpr ScaleKind kByteScales[] = {ScaleKind::kNone, ScaleKind::kE8M0,
                                     ScaleKind::kE4M3, ScaleKind::kE5M2};
constexpr int64_t kByteScaleCount = sizeof(kByteScales) / sizeof(ScaleKind);

// Returns the kind of scales, or kNone if no kernel reads them.
ScaleKind KindOf(ffi::DataType type, int64_t scale_element) {
  switch (type) {
    case ffi::F8E8M0FNU: return ScaleKind::kE8M0;
    case ffi::F8E4M3FN: return ScaleKind::kE4M3;
    case ffi::F8E5M2: return ScaleKind::kE5M2;
    case ffi::F32: return ScaleKind::kF32;
    case ffi::BF16: return ScaleKind::kBF16;
    case ffi::F16: return ScaleKind::kF16;
    case ffi::U8: return kByteScales[scale_element];
    default: return ScaleKind::kNone;
  }
}

// The largest `fraction_bits`. With it the values of safe rows are still normal
// numbers.
constexpr int64_t kFractionBitsMax = 8;

bool ReadOffsetKind(ffi::DataType type, OffsetKind* out) {
  switch (type) {
    case ffi::F32: *out = OffsetKind::kF32; return true;
    case ffi::BF16: *out = OffsetKind::kBF16; return true;
    case ffi::F16: *out = OffsetKind::kF16; return true;
    case ffi::U8: *out = OffsetKind::kUint8; return true;
    case ffi::S8: *out = OffsetKind::kInt8; return true;
    default: return false;
  }
}

// Reads the offsets of rhs, if `more` has them.
bool ReadOffset(Checker& check, const ffi::RemainingArgs& more,
                const ffi::AnyBuffer& scale, int64_t code_offset,
                Operand* out) {
  if (!JAXPLUGIN_REQUIRE(check, more.size() <= 1,
                         "rhs_offset must be the last argument",
                         std::to_string(more.size()) + " more arguments") ||
      more.size() == 0) {
    return check.ok();
  }
  const auto offset = more.get<ffi::AnyBuffer>(0);
  if (!JAXPLUGIN_REQUIRE(check, offset.has_value(),
                         "rhs_offset must be an array", "another argument")) {
    return false;
  }
  const bool is_scaled_by_floats = out->scale_kind == ScaleKind::kF32 ||
                                   out->scale_kind == ScaleKind::kBF16 ||
                                   out->scale_kind == ScaleKind::kF16;
  out->offset = static_cast<const uint8_t*>(offset->untyped_data());
  out->code_offset = static_cast<float>(code_offset);
  return JAXPLUGIN_REQUIRE(
             check, is_scaled_by_floats && out->scale_shift == 0,
             "rhs_scale must be f32, bf16 or f16 with a row for each row of"
             " rhs, if rhs has offsets",
             Text(scale)) &&
         JAXPLUGIN_REQUIRE(check, out->format != Format::kCodebook,
                           "rhs must have no codebook if it has offsets",
                           "rhs_codebook and rhs_offset") &&
         JAXPLUGIN_REQUIRE(
             check,
             ReadOffsetKind(offset->element_type(), &out->offset_kind) &&
                 offset->dimensions() == scale.dimensions(),
             "rhs_offset must be u8, s8, f32, bf16 or f16, with the shape of"
             " rhs_scale",
             Text(*offset) + " for " + Text(scale));
}

// Reads the values of 4-bit codes, if the call has them.
bool ReadCodebook(Checker& check, const std::string& who,
                  ffi::Span<const float> values, Operand* out) {
  if (values.size() == 0) return true;
  if (!JAXPLUGIN_REQUIRE(check,
                         values.size() == 16 && out->format == Format::kInt4,
                         who + "_codebook must have 16 values, for int4",
                         std::to_string(values.size()))) {
    return false;
  }
  out->format = Format::kCodebook;
  for (int code = 0; code < 16; ++code) {
    const float value = values[code ^ 8];
    const float size = value < 0 ? -value : value;
    out->codebook[code] = value;
    if (!JAXPLUGIN_REQUIRE(
            check, size == 0 || (size >= 0x1p-16f && size <= 0x1p16f),
            who + "_codebook must have magnitudes of 0, or 2^-16 to 2^16",
            std::to_string(value))) {
      return false;
    }
  }
  return true;
}

std::string Text(ffi::DataType type, Dims dims) {
  std::string text = std::string(Name(type)) + "[";
  const char* comma = "";
  for (int64_t dim : dims) {
    text += comma + std::to_string(dim);
    comma = ",";
  }
  return text + "]";
}

// Returns the type of a matrix that may also be passed as bytes.
std::string TypeOrBytes(ffi::DataType type, int64_t rows, int64_t columns,
                        int64_t bytes) {
  const int64_t dims[2] = {rows, columns}, dims_of_bytes[2] = {rows, bytes};
  const std::string text = Text(ffi::U8, Dims(dims_of_bytes, 2));
  return type == ffi::U8 ? text : Text(type, Dims(dims, 2)) + " or " + text;
}

}  // namespace

std::string Text(const ffi::AnyBuffer& x) {
  return Text(x.element_type(), x.dimensions());
}

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

ffi::DataType TypeOf(Format format) {
  switch (format) {
    case Format::kE4M3: return ffi::F8E4M3FN;
    case Format::kE5M2: return ffi::F8E5M2;
    case Format::kE2M1: return ffi::F4E2M1FN;
    default: return ffi::U8;
  }
}

bool ReadOperand(Checker& check, const char* name, const ffi::AnyBuffer& values,
                 const ffi::AnyBuffer& scale, const OperandAttributes& given,
                 size_t rank, Operand* out) {
  const std::string who = name;
  const Dims dims = values.dimensions();
  const ffi::DataType type = values.element_type();
  const int64_t element = given.element;
  if (!JAXPLUGIN_REQUIRE(check, dims.size() == rank,
                         who + " must have rank " + std::to_string(rank),
                         Text(values)) ||
      !JAXPLUGIN_REQUIRE(
          check,
          element >= 0 && element < kElementCount &&
              (element == 0 || type == ffi::U8),
          who + "'s element must be 0, or for u8 1 (e2m3), 2 (e3m2),"
                " 3 (e4m3), 4 (e5m2), 5 (int8) or 6 (int4)",
          std::to_string(element) + " for " + Text(values))) {
    return false;
  }
  *out = Operand{};
  if (!JAXPLUGIN_REQUIRE(
          check, ValuesFormat(type, element, &out->format),
          who + " must be f8e4m3fn, f8e5m2, f4e2m1fn, s8, s4, u8"
                " (packed e2m1 or int4, or a code a byte), f32, bf16"
                " or f16",
          Text(values))) {
    return false;
  }
  if (!ReadCodebook(check, who, given.codebook, out)) return false;
  const int64_t last = dims[rank - 1];
  const bool is_packed_here = IsPacked(out->format) && type == ffi::U8;
  if (!JAXPLUGIN_REQUIRE(
          check, !IsPacked(out->format) || is_packed_here || last % 2 == 0,
          who + " of f4e2m1fn or s4 must have an even k", Text(values)) ||
      !JAXPLUGIN_REQUIRE(
          check,
          given.fraction_bits == 0 ||
              (IsInteger(out->format) && given.fraction_bits > 0 &&
               given.fraction_bits <= kFractionBitsMax),
          who + "'s fraction_bits must be 0, or for integers at most " +
              std::to_string(kFractionBitsMax),
          std::to_string(given.fraction_bits) + " for " + Text(values))) {
    return false;
  }
  out->values = static_cast<const uint8_t*>(values.untyped_data());
  out->rows = 1;
  for (size_t i = 0; i + 1 < rank; ++i) out->rows *= dims[i];
  out->k = is_packed_here ? 2 * last : last;
  out->row_bytes = BytesOf(out->format, out->k);
  out->fraction_bits = static_cast<int>(given.fraction_bits);
  out->block = 32;
  const bool is_power_of_two =
      given.scale_rows > 0 && (given.scale_rows & (given.scale_rows - 1)) == 0;
  if (!JAXPLUGIN_REQUIRE(
          check, is_power_of_two,
          who + "_scale_rows must be a power of two",
          std::to_string(given.scale_rows))) {
    return false;
  }
  out->scale_shift = __builtin_ctzll(given.scale_rows);
  if (IsPlain(out->format)) {
    out->scale_kind = ScaleKind::kNone;
    return JAXPLUGIN_REQUIRE(check, IsAbsent(scale),
                             who + " without a format takes an empty scale",
                             Text(scale));
  }
  const bool is_bytes = scale.element_type() == ffi::U8;
  if (!JAXPLUGIN_REQUIRE(
          check,
          given.scale_element == 0 || (is_bytes && given.scale_element > 0 &&
                                       given.scale_element < kByteScaleCount),
          who + "_scale_element must be 0, or for u8 1 (e8m0), 2"
                " (e4m3) or 3 (e5m2)",
          std::to_string(given.scale_element) + " for " + Text(scale))) {
    return false;
  }
  out->scale_kind = KindOf(scale.element_type(), given.scale_element);
  if (!JAXPLUGIN_REQUIRE(check, out->scale_kind != ScaleKind::kNone,
                         who +
                             "_scale must be f8e8m0fnu, f8e4m3fn, f8e5m2, f32,"
                             " bf16 or f16, or u8 with " +
                             who +
                             "_scale_element 1 (e8m0), 2 (e4m3) or 3 (e5m2)",
                         Text(scale))) {
    return false;
  }
  const int64_t block = given.block_size;
  if (!JAXPLUGIN_REQUIRE(
          check, block > 0 && (block % 16 == 0 || block >= out->k),
          who + "_block_size must be a multiple of 16, or at least"
                " k for one scale a row",
          std::to_string(block))) {
    return false;
  }
  // A block that has the whole row may have any size of at least k.
  const int64_t row_block = (out->k + 31) / 32 * 32 + (out->k == 0 ? 32 : 0);
  const bool is_row = block % 16 != 0 || block > row_block;
  out->block = is_row ? row_block : block;
  out->scale_cols = (out->k + out->block - 1) / out->block;
  out->scale = static_cast<const uint8_t*>(scale.untyped_data());
  const Dims scale_dims = scale.dimensions();
  bool same = scale_dims.size() == rank;
  for (size_t i = 0; same && i + 2 < rank; ++i) same = scale_dims[i] == dims[i];
  const int64_t rows = dims[rank - 2];
  const int64_t scale_rows = (rows + given.scale_rows - 1) / given.scale_rows;
  same = same && scale_dims[rank - 2] == scale_rows &&
         scale_dims[rank - 1] == out->scale_cols;
  return JAXPLUGIN_REQUIRE(check, same,
                           who + "_scale must have " + who + "'s shape with " +
                               std::to_string(scale_rows) + " rows and " +
                               std::to_string(out->scale_cols) +
                               " columns for block size " +
                               std::to_string(block),
                           Text(scale) + " for " + Text(values)) &&
         JAXPLUGIN_REQUIRE(
             check, rows % given.scale_rows == 0 || out->rows == rows,
             who + "'s rows must be a multiple of scale_rows if there are"
                   " several matrices",
             std::to_string(given.scale_rows) + " for " + Text(values));
}

bool ReadOperands(Checker& check, Attributes& attributes,
                  const ffi::AnyBuffer& lhs, const ffi::AnyBuffer& lhs_scale,
                  size_t lhs_rank, const ffi::AnyBuffer& rhs,
                  const ffi::AnyBuffer& rhs_scale,
                  const ffi::RemainingArgs& more, bool is_quantized,
                  DotArgs* out, const Kernels** kernels) {
  const int64_t isa = attributes.Required("isa");
  const int64_t quantize_rows = attributes.Optional("quantize_rows", 0);
  out->quantize_rows = quantize_rows == 1;
  const OperandAttributes l{attributes.Required("lhs_block_size"),
                            attributes.Optional("lhs_element", 0),
                            attributes.Optional("lhs_scale_element", 0),
                            attributes.Optional("lhs_fraction_bits", 0),
                            attributes.Optional("lhs_scale_rows", 1),
                            attributes.OptionalFloats("lhs_codebook")};
  const OperandAttributes r{attributes.Required("rhs_block_size"),
                            attributes.Optional("rhs_element", 0),
                            attributes.Optional("rhs_scale_element", 0),
                            attributes.Optional("rhs_fraction_bits", 0),
                            attributes.Optional("rhs_scale_rows", 1),
                            attributes.OptionalFloats("rhs_codebook")};
  const int64_t code_offset = attributes.Optional("rhs_code_offset", 0);
  return attributes.AreAll() && ReadKernels(check, isa, kernels) &&
         ReadOperand(check, "lhs", lhs, lhs_scale, l, lhs_rank, &out->lhs) &&
         ReadOperand(check, "rhs", rhs, rhs_scale, r, 3, &out->rhs) &&
         JAXPLUGIN_REQUIRE(
             check, code_offset == 0 || (more.size() == 1 && !is_quantized),
             "rhs_code_offset must be 0 if rhs has no offsets",
             std::to_string(code_offset)) &&
         (is_quantized ||
          ReadOffset(check, more, rhs_scale, code_offset, &out->rhs)) &&
         // Behind the end of a row, codes of 0 have values other than 0.
         JAXPLUGIN_REQUIRE(check,
                           out->lhs.format != Format::kCodebook ||
                               out->rhs.format != Format::kCodebook,
                           "one operand at most must have a codebook", "two") &&
         JAXPLUGIN_REQUIRE(check, out->lhs.k == out->rhs.k,
                           "lhs and rhs must have the same k",
                           Text(lhs) + " and " + Text(rhs)) &&
         JAXPLUGIN_REQUIRE(check, quantize_rows == 0 || quantize_rows == 1,
                           "quantize_rows must be 0 or 1",
                           std::to_string(quantize_rows));
}

bool CheckOffsets(Checker& check, const DotArgs& args, bool has_epilogue) {
  return args.rhs.offset == nullptr ||
         JAXPLUGIN_REQUIRE(
             check,
             !has_epilogue && args.out_format == Format::kF32 &&
                 args.activation == Activation::kNone,
             "the result must be f32 without an epilogue if rhs has offsets",
             has_epilogue ? "an epilogue" : "an activation or another dtype");
}

bool ReadGlobalScale(Checker& check, const ffi::AnyBuffer& x,
                     const float** out) {
  *out = nullptr;
  if (!JAXPLUGIN_REQUIRE(check,
                         x.element_type() == ffi::F32 && x.element_count() <= 1,
                         "global_scale must be f32[] or f32[0]", Text(x))) {
    return false;
  }
  if (!IsAbsent(x)) *out = static_cast<const float*>(x.untyped_data());
  return true;
}

bool ReadFormat(Checker& check, int64_t format, QuantizedFormat* out) {
  *out = static_cast<QuantizedFormat>(format);
  return JAXPLUGIN_REQUIRE(
      check, format >= 0 && format < kQuantizedFormats,
      "format must be 0 (mxfp8), 1 (mxfp8_e5m2), 2 (mxfp4), 3"
      " (nvfp4), 4 (mxfp6_e2m3) or 5 (mxfp6_e3m2)",
      std::to_string(format));
}

bool CheckGlobalScale(Checker& check, const QuantizedFacts& facts,
                      int64_t compute_global, bool is_given,
                      const ffi::AnyBuffer& result) {
  return JAXPLUGIN_REQUIRE(
             check,
             compute_global == 0 ||
                 (compute_global == 1 && facts.has_global_scale && !is_given),
             "compute_global must be 0, or 1 for nvfp4 with global_scale"
             " f32[0]",
             std::to_string(compute_global)) &&
         JAXPLUGIN_REQUIRE(
             check,
             result.element_type() == ffi::F32 && result.element_count() == 1,
             "the global scale result must be f32[]", Text(result));
}

int64_t ColumnsOf(const QuantizedFacts& facts, const ffi::AnyBuffer& values) {
  const int64_t stored = values.dimensions()[1];
  const bool is_bytes = values.element_type() == ffi::U8;
  return is_bytes ? stored * 8 / FactsOf(facts.values).stored_bits : stored;
}

bool CheckQuantized(Checker& check, const QuantizedFacts& facts,
                    int64_t rounding, int64_t rows, int64_t k,
                    const ffi::AnyBuffer& x, const ffi::AnyBuffer& values,
                    const ffi::AnyBuffer& scale) {
  JAXPLUGIN_REQUIRE(check, rounding == 0 || rounding == 1,
                    "rounding must be 0 (up) or 1 (floor)",
                    std::to_string(rounding));
  const bool is_bytes = values.element_type() == ffi::U8;
  const int64_t stored = is_bytes ? BytesOf(facts.values, k) : k;
  JAXPLUGIN_REQUIRE(
      check,
      IsDims(values.dimensions(), {rows, stored}) &&
          (is_bytes || values.element_type() == TypeOf(facts.values)),
      "values must be " + TypeOrBytes(TypeOf(facts.values), rows, k,
                                      BytesOf(facts.values, k)),
      Text(values) + " for " + Text(x));
  const ffi::DataType scale_type = facts.scale == ScaleKind::kE4M3
                                       ? ffi::F8E4M3FN
                                       : ffi::F8E8M0FNU;
  return JAXPLUGIN_REQUIRE(
      check,
      (scale.element_type() == ffi::U8 || scale.element_type() == scale_type) &&
          IsDims(scale.dimensions(), {rows, k / facts.block}),
      "scale must be " + TypeOrBytes(scale_type, rows, k / facts.block,
                                     k / facts.block),
      Text(scale) + " for " + Text(x));
}

bool ReadQuantizedResult(Checker& check, const ResultAttributes& given,
                         const Kernels& kernels, const ffi::RemainingArgs& more,
                         const ffi::AnyBuffer& lhs, int64_t rows,
                         int64_t columns, ffi::AnyBuffer& values,
                         const ffi::RemainingRets& more_results,
                         QuantizedResult* out) {
  const size_t found = more_results.size();
  if (!JAXPLUGIN_REQUIRE(
          check,
          given.is_quantized() ? found == 1 || found == 2 : found == 0,
          "the results must be one array; if result_format is given, values and"
          " scale, or values, scale and amax",
          std::to_string(found + 1)) ||
      !given.is_quantized()) {
    return check.ok();
  }
  auto scale = more_results.get<ffi::AnyBuffer>(0);
  auto amax = more_results.get<ffi::AnyBuffer>(1);
  const auto global_scale = more.get<ffi::AnyBuffer>(0);
  const float* global = nullptr;
  if (!JAXPLUGIN_REQUIRE(
          check,
          more.size() == 1 && global_scale.has_value() && scale.has_value(),
          "the last argument of a dot with a quantized result must be its"
          " global scale",
          std::to_string(more.size()) + " more arguments") ||
      !ReadFormat(check, given.format, &out->codec.format) ||
      !ReadGlobalScale(check, *global_scale, &global)) {
    return false;
  }
  const QuantizedFacts facts = FactsOf(out->codec.format);
  if (!JAXPLUGIN_REQUIRE(check, columns % facts.block == 0,
                         "the columns of a quantized result must be a multiple"
                         " of its block size",
                         std::to_string(columns)) ||
      !CheckQuantized(check, facts, given.rounding, rows, columns, lhs, values,
                      **scale) ||
      (amax.has_value() &&
       !JAXPLUGIN_REQUIRE(check,
                          (*amax)->element_type() == ffi::F32 &&
                              (*amax)->element_count() == 1,
                          "amax must be f32[]", Text(**amax)))) {
    return false;
  }
  out->codec.round_up = given.rounding == 0;
  out->codec.global_scale = global != nullptr ? *global : 1;
  out->quantize_run = kernels.quantize_run;
  out->values = static_cast<uint8_t*>(values.untyped_data());
  out->scale = static_cast<uint8_t*>((*scale)->untyped_data());
  out->columns = columns;
  if (amax.has_value()) {
    out->amax = static_cast<uint32_t*>((*amax)->untyped_data());
    *out->amax = 0;
  }
  AdviseHugePages(out->values, rows * BytesOf(facts.values, columns));
  return true;
}

bool ReadKernels(Checker& check, int64_t isa, const Kernels** kernels) {
  *kernels = isa >= 0 && isa < kIsas
                 ? GetKernels(static_cast<Isa>(isa)) : nullptr;
  return JAXPLUGIN_REQUIRE(
      check, *kernels != nullptr,
      "isa must be 0 (auto), 1 (baseline), 2 (avx2), 3 (avx512), 4"
      " (avx512_bf16), 5 (amx_bf16), 6 (neon_dotprod) or 7 (neon_i8mm), and one"
      " that this machine has",
      std::to_string(isa));
}

int64_t ReadMaxThreads(Checker& check, Attributes& attributes) {
  const int64_t given = attributes.Optional("max_threads", 0);
  JAXPLUGIN_REQUIRE(check, given >= 0,
                    "max_threads must be 0 (all threads) or positive",
                    std::to_string(given));
  return given;
}

Parallel MakeParallel(ffi::ThreadPool& pool, int64_t max_threads) {
  constexpr int64_t kThreadsMax = 256;
  // XLA sizes its pool by the affinity of the process, but not by its cgroups.
  static const int64_t cores = AvailableCores("/proc", "/sys/fs/cgroup");
  int64_t threads = pool.num_threads();
  for (const int64_t most : {kThreadsMax, cores, max_threads}) {
    if (most > 0 && threads > most) threads = most;
  }
  if (threads < 1) threads = 1;
  return Parallel{static_cast<int>(threads),
                  [](void* opaque, void (*task)(void*), void* data) {
                    static_cast<ffi::ThreadPool*>(opaque)->Schedule(
                        [task, data] { task(data); });
                  },
                  &pool};
}

}  // namespace jaxplugin
