// With both scales swizzled nothing is transposed.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8:swizzled --rhs 256x512xmxfp8:swizzled
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target b300 --cudnn 9.28 %{dot} | filecheck %s
// CHECK-NOT: {{@__op|transpose|swizzle_scale}}
// CHECK: stablehlo.custom_call @__cudnn$blockScaledDot(
// CHECK-SAME: : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>,
// CHECK-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> (tensor<128x256xbf16>, tensor<0xui8>)
// CHECK-NOT: {{transpose|swizzle_scale}}
