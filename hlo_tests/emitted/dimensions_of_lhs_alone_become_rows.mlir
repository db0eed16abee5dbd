// Several dimensions that only lhs has are rows of one call without batch: the
// rhs is not broadcast.
//
// DEFINE: %{dot} = --lhs 4x32x512xmxfp8 --rhs 256x512xmxfp8 --dims amk,nk
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// CHECK-NOT: stablehlo.{{transpose|broadcast}}
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>,
// CHECK-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> tensor<128x256xbf16>
// CHECK: stablehlo.reshape {{.*}} -> tensor<4x32x256xbf16>
