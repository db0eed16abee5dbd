// An rhs (k, n) is brought to (n, k) with its scale, quantized as it is.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 --rhs 512x256xmxfp8 --dims mk,kn
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// CHECK-NOT: stablehlo.convert
// CHECK: stablehlo.transpose %arg1, dims = [1, 0] : (tensor<512x256xf8E4M3FN>)
// CHECK: stablehlo.transpose %arg3, dims = [1, 0] : (tensor<16x256xf8E8M0FNU>)
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>,
// CHECK-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> tensor<128x256xbf16>
