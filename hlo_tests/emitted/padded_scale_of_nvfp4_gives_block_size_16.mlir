// The block size in the backend config is the format's.
//
// DEFINE: %{dot} = --lhs 100x480xnvfp4:scale=128x32 \
// DEFINE:   --rhs 250x480xnvfp4:scale=256x32 --global-scale scalar
// RUN: %tool emit --target b200 --cudnn 9.12 %{dot} \
// RUN:   | filecheck %s --check-prefix OUTSIDE
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// OUTSIDE: stablehlo.custom_call @__op$block_scaled_dot(
// OUTSIDE-SAME: {\22block_size\22: 16}
// OUTSIDE-SAME: tensor<256x32xf8E4M3FN>) -> tensor<100x250xf32>
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: {\22block_size\22: 16}
// CHECK-SAME: tensor<256x32xf8E4M3FN>, tensor<bf16>) -> tensor<100x250xbf16>
