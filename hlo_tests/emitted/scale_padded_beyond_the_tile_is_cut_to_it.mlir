// What XLA would not take of a padded scale is sliced off.
//
// DEFINE: %{dot} = --lhs 100x480xmxfp8:scale=200x31 --rhs 250x480xmxfp8
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// CHECK: stablehlo.slice
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: {\22block_size\22: 32}
// CHECK-SAME: (tensor<100x480xf8E4M3FN>, tensor<250x480xf8E4M3FN>,
// CHECK-SAME: tensor<128x16xf8E8M0FNU>, tensor<250x15xf8E8M0FNU>)
