// From cuDNN 9.10 on, a GPU of compute capability 10.0 or more gets one call
// of it, with four operands as they are.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 --rhs 256x512xmxfp8
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.12 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// RUN: %tool emit --target b300 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target b300 --cudnn 9.12 %{dot} | filecheck %s
// RUN: %tool emit --target b300 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target b300 --cudnn 9.28 %{dot} | filecheck %s
// RUN: %tool emit --target rtx5090 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target rtx5090 --cudnn 9.12 %{dot} | filecheck %s
// RUN: %tool emit --target rtx5090 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target rtx5090 --cudnn 9.28 %{dot} | filecheck %s
// RUN: %tool emit --target gb10 --cudnn 9.10 %{dot} | filecheck %s
// RUN: %tool emit --target gb10 --cudnn 9.12 %{dot} | filecheck %s
// RUN: %tool emit --target gb10 --cudnn 9.13 %{dot} | filecheck %s
// RUN: %tool emit --target gb10 --cudnn 9.28 %{dot} | filecheck %s
// CHECK-NOT: stablehlo.convert
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>,
// CHECK-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> tensor<128x256xbf16>
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK-NEXT: return
