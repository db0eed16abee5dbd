// Where shapes tell the block size, the backend config is empty.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 --rhs 256x512xmxfp8
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: backend_config = ""
// CHECK-NOT: block_size
// CHECK: return
