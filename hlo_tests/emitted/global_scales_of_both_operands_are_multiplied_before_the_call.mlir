// Global scales of the operands are one f32 product, rounded once, of scalars.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4:global --rhs 256x512xnvfp4:global
// RUN: %tool emit --target b200 --cudnn 9.12 %{dot} \
// RUN:   | filecheck %s --check-prefix OUTSIDE
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// OUTSIDE: stablehlo.multiply {{.*}} : tensor<f32>
// OUTSIDE: stablehlo.custom_call @__op$block_scaled_dot(
// OUTSIDE-SAME: : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>,
// OUTSIDE-SAME: tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>) -> tensor<128x256xf32>
// OUTSIDE: stablehlo.multiply {{.*}} : tensor<128x256xf32>
// CHECK: [[PRODUCT:%[0-9]+]] = stablehlo.multiply {{.*}} : tensor<f32>
// CHECK: [[ROUNDED:%[0-9]+]] = stablehlo.convert [[PRODUCT]] : (tensor<f32>) -> tensor<bf16>
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: [[ROUNDED]])
// CHECK-NOT: stablehlo.multiply
// CHECK: return
