// Below cuDNN 9.13 the global scale is no operand (older versions ignore a
// fifth): the call gives f32, which is multiplied and then rounded once.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 \
// DEFINE:   --rhs 256x512xmxfp8 --global-scale scalar
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.12 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.12.9 %{dot} | filecheck %s
// RUN: %tool emit --target b300 --cudnn 9.12 %{dot} | filecheck %s
// RUN: %tool emit --target rtx5090 --cudnn 9.12 %{dot} | filecheck %s
// RUN: %tool emit --target gb10 --cudnn 9.12 %{dot} | filecheck %s
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>,
// CHECK-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> tensor<128x256xf32>
// CHECK: stablehlo.multiply {{.*}} : tensor<128x256xf32>
// CHECK-NEXT: stablehlo.convert {{.*}} -> tensor<128x256xbf16>
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: return
