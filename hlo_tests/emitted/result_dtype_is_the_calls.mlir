// Without a global scale the call gives the result's own dtype.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 --rhs 256x512xmxfp8
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} --out float32 \
// RUN:   | filecheck %s --check-prefix F32
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} --out bfloat16 \
// RUN:   | filecheck %s --check-prefix BF16
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} --out float16 \
// RUN:   | filecheck %s --check-prefix F16
// F32: stablehlo.custom_call @__op$block_scaled_dot(
// F32-SAME: : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>,
// F32-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> tensor<128x256xf32>
// F32-NEXT: return
// BF16: stablehlo.custom_call @__op$block_scaled_dot(
// BF16-SAME: : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>,
// BF16-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> tensor<128x256xbf16>
// BF16-NEXT: return
// F16: stablehlo.custom_call @__op$block_scaled_dot(
// F16-SAME: : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>,
// F16-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> tensor<128x256xf16>
// F16-NEXT: return
