// Packed FP4 values, two a byte, are bitcast to f4E2M1FN.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4:packed --rhs 256x512xnvfp4:packed
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// CHECK-NOT: stablehlo.convert
// CHECK-COUNT-2: stablehlo.bitcast_convert {{.*}}xui8>) -> {{.*}}xf4E2M1FN>
// CHECK-NOT: stablehlo.convert
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>,
// CHECK-SAME: tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>) -> tensor<128x256xbf16>
