// precision="highest" keeps the global scale in f32 where the call would take
// it in bf16.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 --rhs 256x512xnvfp4 \
// DEFINE:   --global-scale scalar --precision highest
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target b300 --cudnn 9.28 %{dot} | filecheck %s
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>,
// CHECK-SAME: tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>) -> tensor<128x256xf32>
// CHECK: stablehlo.multiply {{.*}} : tensor<128x256xf32>
// CHECK-NEXT: stablehlo.convert {{.*}} -> tensor<128x256xbf16>
