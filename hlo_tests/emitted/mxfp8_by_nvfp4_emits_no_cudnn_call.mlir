// MXFP8 by NVFP4 is no pair of cuDNN's.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 --rhs 256x512xnvfp4
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// RUN: %tool refuse --target b200 --cudnn 9.28 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target b300 --cudnn 9.28 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target rtx5090 --cudnn 9.28 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target gb10 --cudnn 9.28 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// CHECK: func.func public @main
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: return
// REFUSED: cudnn: supports mxfp8 pairs and nvfp4 x nvfp4, got mxfp8 x nvfp4
