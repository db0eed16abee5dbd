// A plain bf16 side is exact in bf16.
//
// DEFINE: %{dot} = --lhs 128x512xbfloat16 \
// DEFINE:   --rhs 256x512xnvfp4 --implementation xla
// RUN: %tool emit --target a100 %{dot} | filecheck %s
// RUN: %tool emit --target h200 %{dot} | filecheck %s
// RUN: %tool emit --target b200 %{dot} | filecheck %s
// RUN: %tool emit --target mi355x %{dot} | filecheck %s
// CHECK: stablehlo.dot_general
// CHECK-SAME: (tensor<128x512xbf16>, tensor<256x512xbf16>) -> tensor<128x256xf32>
