// With a bias the call gives f32 and the cast to the result's dtype is last.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 --rhs 256x512xmxfp8 --bias
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>,
// CHECK-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> tensor<128x256xf32>
// CHECK: stablehlo.add {{.*}} : tensor<128x256xf32>
// CHECK: stablehlo.convert {{.*}} : (tensor<128x256xf32>) -> tensor<128x256xbf16>
// CHECK-NEXT: return
