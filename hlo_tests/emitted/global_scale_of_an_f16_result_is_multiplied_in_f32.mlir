// An f16 global scale could be zero, so it is multiplied in f32 before the
// cast.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 --rhs 256x512xnvfp4 \
// DEFINE:   --global-scale scalar --out float16
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target b300 --cudnn 9.28 %{dot} | filecheck %s
// CHECK-NOT: tensor<f16>
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>,
// CHECK-SAME: tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>) -> tensor<128x256xf32>
// CHECK: stablehlo.multiply {{.*}} : tensor<128x256xf32>
// CHECK-NEXT: stablehlo.convert {{.*}} -> tensor<128x256xf16>
