// The xla implementation multiplies the f32 result by the global scale.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 --rhs 256x512xnvfp4 \
// DEFINE:   --global-scale scalar --implementation xla
// RUN: %tool emit --target h200 %{dot} | filecheck %s
// RUN: %tool emit --target mi355x %{dot} | filecheck %s
// RUN: %tool emit --target cpu %{dot} | filecheck %s
// RUN: %tool emit --target b200 --cudnn 9.28 %{dot} | filecheck %s
// CHECK: stablehlo.dot_general
// CHECK: stablehlo.multiply {{.*}} : tensor<128x256xf32>
// CHECK-NEXT: stablehlo.convert {{.*}} -> tensor<128x256xbf16>
