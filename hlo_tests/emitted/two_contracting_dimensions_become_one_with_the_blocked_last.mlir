// Contracting dimensions are merged, the blocked one last.
//
// DEFINE: %{dot} = --lhs 128x4x128xmxfp8 --rhs 4x256x128xmxfp8 --dims mak,ank
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// CHECK-NOT: stablehlo.convert
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>,
// CHECK-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> tensor<128x256xbf16>
