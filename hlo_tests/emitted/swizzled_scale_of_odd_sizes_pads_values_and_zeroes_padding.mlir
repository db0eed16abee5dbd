// The kernel's own call takes rows in multiples of 128; the columns of the
// scale's padding are zeroed, because NaN * 0 would show.
//
// DEFINE: %{dot} = --lhs 5x96xmxfp8:swizzled --rhs 7x96xmxfp8:swizzled
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// CHECK-COUNT-2: {{call @_where|stablehlo.select}}
// CHECK: stablehlo.pad {{.*}} -> tensor<128x96xf8E4M3FN>
// CHECK: stablehlo.pad {{.*}} -> tensor<128x96xf8E4M3FN>
// CHECK: stablehlo.custom_call @__cudnn$blockScaledDot(
// CHECK-SAME: : (tensor<128x96xf8E4M3FN>, tensor<128x96xf8E4M3FN>,
// CHECK-SAME: tensor<128x4xf8E8M0FNU>, tensor<128x4xf8E8M0FNU>) -> (tensor<128x128xbf16>, tensor<0xui8>)
// CHECK-NEXT: stablehlo.slice {{.*}} -> tensor<5x7xbf16>
