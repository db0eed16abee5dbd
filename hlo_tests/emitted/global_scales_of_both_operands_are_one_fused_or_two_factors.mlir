// Global scales of both operands reach the call as one number, their product;
// outside of it they are two factors that multiply one after the other, in f32.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4:global --rhs 256x512xnvfp4:global
// RUN: %tool emit --target b200 --cudnn 9.12 %{dot} \
// RUN:   | filecheck %s --check-prefix OUTSIDE
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} --precision highest \
// RUN:   | filecheck %s --check-prefix OUTSIDE
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// OUTSIDE: stablehlo.custom_call @__op$block_scaled_dot(
// OUTSIDE-SAME: : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>,
// OUTSIDE-SAME: tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>) -> tensor<128x256xf32>
// OUTSIDE: stablehlo.multiply {{.*}} : tensor<128x256xf32>
// OUTSIDE: stablehlo.multiply {{.*}} : tensor<128x256xf32>
// OUTSIDE: stablehlo.convert {{.*}} : (tensor<128x256xf32>) -> tensor<128x256xbf16>
// CHECK: [[FACTORS:%[0-9]+]]:2 = call @_factors(
// CHECK: [[PRODUCT:%[0-9]+]] = stablehlo.multiply [[FACTORS]]#0, [[FACTORS]]#1 : tensor<f32>
// CHECK: [[ROUNDED:%[0-9]+]] = stablehlo.convert [[PRODUCT]] : (tensor<f32>) -> tensor<bf16>
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: [[ROUNDED]])
// CHECK-NOT: stablehlo.multiply
// CHECK: return
