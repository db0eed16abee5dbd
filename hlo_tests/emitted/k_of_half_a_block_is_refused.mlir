// k that is no multiple of the block size is refused while tracing.
//
// DEFINE: %{dot} = --lhs 128x528xmxfp8 --rhs 256x528xmxfp8
// RUN: %tool refuse --target b200 --cudnn 9.28 %{dot} | filecheck %s
// CHECK: block_scaled_dot: lhs contracting size must be a multiple of 32
// CHECK-SAME: got k=528
