// Dequantized values are exact in bf16, so GPUs multiply bf16 and accumulate
// f32.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp4 --rhs 256x512xmxfp4 --implementation xla
// RUN: %tool emit --target a100 %{dot} | filecheck %s
// RUN: %tool emit --target l40s %{dot} | filecheck %s
// RUN: %tool emit --target h100 %{dot} | filecheck %s
// RUN: %tool emit --target h200 %{dot} | filecheck %s
// RUN: %tool emit --target b200 %{dot} | filecheck %s
// RUN: %tool emit --target b300 %{dot} | filecheck %s
// RUN: %tool emit --target rtx5090 %{dot} | filecheck %s
// RUN: %tool emit --target gb10 %{dot} | filecheck %s
// RUN: %tool emit --target mi300x %{dot} | filecheck %s
// RUN: %tool emit --target mi355x %{dot} | filecheck %s
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: stablehlo.dot_general
// CHECK-SAME: (tensor<128x512xbf16>, tensor<256x512xbf16>) -> tensor<128x256xf32>
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: stablehlo.convert {{.*}} -> tensor<128x256xbf16>
