// Below cuDNN 9.10 a swizzled scale gets no call of it either.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8:swizzled --rhs 256x512xmxfp8:swizzled
// RUN: %tool emit --target b200 --cudnn 9.9 %{dot} | filecheck %s
// RUN: %tool refuse --target b200 --cudnn 9.9 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// CHECK: func.func public @main
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: return
// REFUSED: cudnn: needs cuDNN 9.10.0 or newer, the target has 9.9.0
