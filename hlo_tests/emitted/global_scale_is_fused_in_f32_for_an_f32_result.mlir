// An f32 result takes the global scale without any rounding.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 --rhs 256x512xnvfp4 \
// DEFINE:   --global-scale scalar --out float32
// RUN: %tool emit --target b200 --cudnn 9.12 %{dot} \
// RUN:   | filecheck %s --check-prefix OUTSIDE
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} --precision highest \
// RUN:   | filecheck %s
// OUTSIDE: stablehlo.custom_call @__op$block_scaled_dot(
// OUTSIDE-SAME: : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>,
// OUTSIDE-SAME: tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>) -> tensor<128x256xf32>
// OUTSIDE: stablehlo.multiply {{.*}} : tensor<128x256xf32>
// CHECK-NOT: stablehlo.convert
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>,
// CHECK-SAME: tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>, tensor<f32>) -> tensor<128x256xf32>
// CHECK-NEXT: return
