// Batch dimensions come first in the call, wherever they were.
//
// DEFINE: %{dot} = --lhs 128x4x512xmxfp8 --rhs 256x4x512xmxfp8 --dims mbk,nbk
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<4x128x512xf8E4M3FN>, tensor<4x256x512xf8E4M3FN>,
// CHECK-SAME: tensor<4x128x16xf8E8M0FNU>, tensor<4x256x16xf8E8M0FNU>) -> tensor<4x128x256xbf16>
