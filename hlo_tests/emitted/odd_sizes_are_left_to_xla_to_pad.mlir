// Rows and scale columns are passed as they are: XLA pads them to 128 and 4.
//
// DEFINE: %{dot} = --lhs 5x96xmxfp8 --rhs 7x96xmxfp8
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// CHECK-NOT: stablehlo.pad
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<5x96xf8E4M3FN>, tensor<7x96xf8E4M3FN>,
// CHECK-SAME: tensor<5x3xf8E8M0FNU>, tensor<7x3xf8E8M0FNU>) -> tensor<5x7xbf16>
// CHECK-NEXT: return
