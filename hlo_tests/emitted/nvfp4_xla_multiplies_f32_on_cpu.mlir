// XLA:CPU's bf16 dot loses precision, so it multiplies f32.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 --rhs 256x512xnvfp4 --implementation xla
// RUN: %tool emit --target cpu %{dot} | filecheck %s
// CHECK-NOT: bf16>) -> tensor<128x256xf32>
// CHECK: stablehlo.dot_general
// CHECK-SAME: precision = [HIGHEST, HIGHEST]
// CHECK-SAME: (tensor<128x512xf32>, tensor<256x512xf32>) -> tensor<128x256xf32>
