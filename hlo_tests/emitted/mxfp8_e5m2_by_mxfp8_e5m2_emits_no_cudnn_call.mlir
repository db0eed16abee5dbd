// E5M2 by E5M2 is not served by any version.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8_e5m2 --rhs 256x512xmxfp8_e5m2
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// RUN: %tool refuse --target b200 --cudnn 9.10 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target b200 --cudnn 9.13 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target b200 --cudnn 9.28 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// CHECK: func.func public @main
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: return
// REFUSED: cudnn: does not multiply E5M2 by E5M2
