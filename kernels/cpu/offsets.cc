// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The XLA FFI handler that adds zero points or minima to a dot
// (dot/offsets.inl).

#include <cstdint>
#include <string>

#include "arguments.h"
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace jaxplugin {
namespace {

bool ReadKind(ffi::DataType type, OffsetKind* out) {
  switch (type) {
    case ffi::F32: *out = OffsetKind::kF32; return true;
    case ffi::BF16: *out = OffsetKind::kBF16; return true;
    case ffi::F16: *out = OffsetKind::kF16; return true;
    case ffi::U8: *out = OffsetKind::kUint8; return true;
    case ffi::S8: *out = OffsetKind::kInt8; return true;
    default: return false;
  }
}

ffi::Error AddOffsetsHandler(ffi::ThreadPool pool, ffi::AnyBuffer result,
                             ffi::AnyBuffer x, ffi::AnyBuffer scale,
                             ffi::AnyBuffer offset,
                             ffi::Result<ffi::AnyBuffer> out,
                             ffi::Dictionary given) {
  constexpr const char* kWho = "jaxplugin_add_offsets";
  Checker check(kWho);
  Attributes attributes(check, given);
  OffsetArgs args{};
  args.block = attributes.Required("block_size");
  args.code_offset = static_cast<float>(attributes.Required("code_offset"));
  const int64_t isa = attributes.Required("isa");
  attributes.AreAll();
  const Kernels* kernels = nullptr;
  ReadKernels(check, isa, &kernels);
  const auto is_matrix_of_floats = [](const ffi::AnyBuffer& x,
                                      OffsetKind* kind) {
    return ReadKind(x.element_type(), kind) && *kind <= OffsetKind::kF16 &&
           x.dimensions().size() == 2;
  };
  JAXPLUGIN_REQUIRE(check, args.block >= 1, "block_size must be positive",
                    std::to_string(args.block));
  JAXPLUGIN_REQUIRE(check, is_matrix_of_floats(x, &args.x_kind),
                    "x must be f32, bf16 or f16[m, k]", Text(x));
  JAXPLUGIN_REQUIRE(check, is_matrix_of_floats(scale, &args.scale_kind),
                    "scale must be f32, bf16 or f16[n, blocks]", Text(scale));
  if (!check.ok()) return check.error();
  args.m = x.dimensions()[0];
  args.k = x.dimensions()[1];
  args.n = scale.dimensions()[0];
  args.blocks = scale.dimensions()[1];
  JAXPLUGIN_REQUIRE(
      check, args.blocks == args.k / args.block + (args.k % args.block != 0),
      "scale must have ceil(k / block_size) columns",
      Text(scale) + " for " + Text(x));
  JAXPLUGIN_REQUIRE(
      check,
      ReadKind(offset.element_type(), &args.offset_kind) &&
          IsDims(offset.dimensions(), {args.n, args.blocks}),
      "offset must be u8, s8, f32, bf16 or f16, with the shape of scale",
      Text(offset) + " for " + Text(scale));
  for (const ffi::AnyBuffer* f32 : {&result, &*out}) {
    JAXPLUGIN_REQUIRE(check,
                      f32->element_type() == ffi::F32 &&
                          IsDims(f32->dimensions(), {args.m, args.n}),
                      "result and out must be f32[m, n]", Text(*f32));
  }
  if (!check.ok()) return check.error();
  if (out->element_count() == 0) return ffi::Error::Success();
  args.result = static_cast<const float*>(result.untyped_data());
  args.x = static_cast<const uint8_t*>(x.untyped_data());
  args.scale = static_cast<const uint8_t*>(scale.untyped_data());
  args.offset = static_cast<const uint8_t*>(offset.untyped_data());
  args.out = static_cast<float*>(out->untyped_data());
  return kernels->add_offsets(args, MakeParallel(pool))
             ? ffi::Error::Success()
             : NoMemory(kWho);
}

}  // namespace
}  // namespace jaxplugin

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxplugin_add_offsets,
                              jaxplugin::AddOffsetsHandler);

#pragma GCC visibility pop
