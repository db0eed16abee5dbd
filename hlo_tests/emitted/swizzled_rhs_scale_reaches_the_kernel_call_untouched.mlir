// With a swizzled weight scale the kernel's own call is emitted; only the
// scale of lhs is brought to the 128x4 layout.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 --rhs 256x512xnvfp4:swizzled
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// CHECK-NOT: @__op$block_scaled_dot
// CHECK: call @swizzle_scale({{.*}} : (tensor<128x32xf8E4M3FN>)
// CHECK-NOT: swizzle_scale
// CHECK: stablehlo.custom_call @__cudnn$blockScaledDot(
// CHECK-SAME: (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>, tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>) -> (tensor<128x256xbf16>, tensor<0xui8>)
// CHECK-NEXT: return
