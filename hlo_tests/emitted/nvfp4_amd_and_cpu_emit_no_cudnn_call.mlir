// cuDNN is called on NVIDIA's GPUs only.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 --rhs 256x512xnvfp4
// RUN: %tool emit --target mi300x %{dot} --implementation xla | filecheck %s
// RUN: %tool emit --target mi355x %{dot} --implementation xla | filecheck %s
// RUN: %tool emit --target cpu %{dot} | filecheck %s
// CHECK: func.func public @main
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: return
