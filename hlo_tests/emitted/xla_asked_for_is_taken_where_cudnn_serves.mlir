// An implementation that is asked for is the one emitted.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 --rhs 256x512xmxfp8
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} --implementation xla \
// RUN:   | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix CUDNN
// CHECK: func.func public @main
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: stablehlo.dot_general
// CUDNN: @__op$block_scaled_dot(
// CUDNN-NOT: stablehlo.dot_general
// CUDNN: return
