// The gate of the global scale is the same for the kernel's own call.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4:swizzled \
// DEFINE:   --rhs 256x512xnvfp4:swizzled --global-scale scalar
// RUN: %tool emit --target b200 --cudnn 9.12 %{dot} | filecheck %s
// CHECK: stablehlo.custom_call @__cudnn$blockScaledDot(
// CHECK-SAME: : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>,
// CHECK-SAME: tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>) -> (tensor<128x256xf32>, tensor<0xui8>)
// CHECK: stablehlo.multiply {{.*}} : tensor<128x256xf32>
