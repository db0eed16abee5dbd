// One batch dimension is the call's own.
//
// DEFINE: %{dot} = --lhs 4x128x512xnvfp4 --rhs 4x256x512xnvfp4
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// CHECK-NOT: stablehlo.{{transpose|reshape}}
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<4x128x512xf4E2M1FN>, tensor<4x256x512xf4E2M1FN>,
// CHECK-SAME: tensor<4x128x32xf8E4M3FN>, tensor<4x256x32xf8E4M3FN>) -> tensor<4x128x256xbf16>
