// From cuDNN 9.13 on the global scale is the call's fifth operand, a scalar of
// the result's dtype, and nothing is multiplied.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 \
// DEFINE:   --rhs 256x512xnvfp4 --global-scale scalar
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// RUN: %tool emit --target b300 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target b300 --cudnn 9.28 %{dot} | filecheck %s
// RUN: %tool emit --target rtx5090 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target rtx5090 --cudnn 9.28 %{dot} | filecheck %s
// RUN: %tool emit --target gb10 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target gb10 --cudnn 9.28 %{dot} | filecheck %s
// CHECK: stablehlo.convert {{.*}} : (tensor<f32>) -> tensor<bf16>
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>,
// CHECK-SAME: tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>, tensor<bf16>) -> tensor<128x256xbf16>
// CHECK-NOT: stablehlo.multiply
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: return
