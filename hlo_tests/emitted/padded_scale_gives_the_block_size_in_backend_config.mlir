// A padded scale does not tell the block size, so the call says it; the
// padding's columns are zeroed, because NaN * 0 would show.
//
// DEFINE: %{dot} = --lhs 100x480xmxfp8:scale=128x16 \
// DEFINE:   --rhs 250x480xmxfp8:scale=256x16
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// CHECK: dense<[true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, false]>
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: backend_config = "{\22block_scaled_dot_backend_config\22: {\22block_size\22: 32}}"
// CHECK-SAME: (tensor<100x480xf8E4M3FN>, tensor<250x480xf8E4M3FN>,
// CHECK-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>)
