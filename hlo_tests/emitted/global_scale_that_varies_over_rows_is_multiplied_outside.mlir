// A global scale that is an array is no operand of the call.
//
// DEFINE: %{dot} = --lhs 4x128x512xmxfp8 \
// DEFINE:   --rhs 4x256x512xmxfp8 --global-scale array
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<4x128x512xf8E4M3FN>, tensor<4x256x512xf8E4M3FN>,
// CHECK-SAME: tensor<4x128x16xf8E8M0FNU>, tensor<4x256x16xf8E8M0FNU>) -> tensor<4x128x256xf32>
// CHECK: stablehlo.multiply {{.*}} : tensor<4x128x256xf32>
