// A plain f16 side is not exact in bf16, so f32 is multiplied, without TF32.
//
// DEFINE: %{dot} = --lhs 128x512xfloat16 \
// DEFINE:   --rhs 256x512xmxfp4 --implementation xla
// RUN: %tool emit --target a100 %{dot} | filecheck %s
// RUN: %tool emit --target h200 %{dot} | filecheck %s
// RUN: %tool emit --target b200 %{dot} | filecheck %s
// RUN: %tool emit --target mi355x %{dot} | filecheck %s
// CHECK: stablehlo.dot_general
// CHECK-SAME: precision = [HIGHEST, HIGHEST]
// CHECK-SAME: (tensor<128x512xf32>, tensor<256x512xf32>) -> tensor<128x256xf32>
