// Below compute capability 10.0 no cuDNN version gets a call.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 --rhs 256x512xmxfp8
// RUN: %tool emit --target h200 --cudnn 9.28 %{dot} | filecheck %s
// RUN: %tool refuse --target a100 --cudnn 9.28 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target l40s --cudnn 9.28 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target h100 --cudnn 9.28 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target h200 --cudnn 9.28 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// CHECK: func.func public @main
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: return
// REFUSED: cudnn: needs compute capability 10.0 or higher
