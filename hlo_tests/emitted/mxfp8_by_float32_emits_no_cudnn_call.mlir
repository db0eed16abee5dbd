// With one side plain there is no call of cuDNN.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 --rhs 256x512xfloat32
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// RUN: %tool refuse --target b200 --cudnn 9.28 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// CHECK: func.func public @main
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: return
// REFUSED: cudnn: needs both operands quantized
