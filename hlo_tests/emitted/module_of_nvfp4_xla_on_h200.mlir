// GENERATED: CHECK lines by `python hlo_tests/tool.py regenerate`.
// The whole module, unfused.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 --rhs 256x512xnvfp4 \
// DEFINE:   --global-scale scalar --implementation xla
// RUN: %tool emit --target h200 %{dot} | filecheck %s
// CHECK: module @jit_block_scaled_dot attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
// CHECK-NEXT:   func.func public @main(%arg0: tensor<128x512xf4E2M1FN>, %arg1: tensor<256x512xf4E2M1FN>, %arg2: tensor<128x32xf8E4M3FN>, %arg3: tensor<256x32xf8E4M3FN>, %arg4: tensor<f32>) -> (tensor<128x256xbf16> {jax.result_info = "result"}) {
// CHECK-NEXT:     %0 = stablehlo.convert %arg0 : (tensor<128x512xf4E2M1FN>) -> tensor<128x512xf32>
// CHECK-NEXT:     %1 = stablehlo.reshape %0 : (tensor<128x512xf32>) -> tensor<128x32x16xf32>
// CHECK-NEXT:     %2 = stablehlo.convert %arg2 : (tensor<128x32xf8E4M3FN>) -> tensor<128x32xf32>
// CHECK-NEXT:     %3 = stablehlo.broadcast_in_dim %2, dims = [0, 1] : (tensor<128x32xf32>) -> tensor<128x32x1xf32>
// CHECK-NEXT:     %4 = stablehlo.broadcast_in_dim %3, dims = [0, 1, 2] : (tensor<128x32x1xf32>) -> tensor<128x32x16xf32>
// CHECK-NEXT:     %5 = stablehlo.multiply %1, %4 : tensor<128x32x16xf32>
// CHECK-NEXT:     %6 = stablehlo.reshape %5 : (tensor<128x32x16xf32>) -> tensor<128x512xf32>
// CHECK-NEXT:     %7 = stablehlo.slice %6 [0:128, 0:512] : (tensor<128x512xf32>) -> tensor<128x512xf32>
// CHECK-NEXT:     %8 = stablehlo.convert %arg1 : (tensor<256x512xf4E2M1FN>) -> tensor<256x512xf32>
// CHECK-NEXT:     %9 = stablehlo.reshape %8 : (tensor<256x512xf32>) -> tensor<256x32x16xf32>
// CHECK-NEXT:     %10 = stablehlo.convert %arg3 : (tensor<256x32xf8E4M3FN>) -> tensor<256x32xf32>
// CHECK-NEXT:     %11 = stablehlo.broadcast_in_dim %10, dims = [0, 1] : (tensor<256x32xf32>) -> tensor<256x32x1xf32>
// CHECK-NEXT:     %12 = stablehlo.broadcast_in_dim %11, dims = [0, 1, 2] : (tensor<256x32x1xf32>) -> tensor<256x32x16xf32>
// CHECK-NEXT:     %13 = stablehlo.multiply %9, %12 : tensor<256x32x16xf32>
// CHECK-NEXT:     %14 = stablehlo.reshape %13 : (tensor<256x32x16xf32>) -> tensor<256x512xf32>
// CHECK-NEXT:     %15 = stablehlo.slice %14 [0:256, 0:512] : (tensor<256x512xf32>) -> tensor<256x512xf32>
// CHECK-NEXT:     %16 = stablehlo.convert %7 : (tensor<128x512xf32>) -> tensor<128x512xbf16>
// CHECK-NEXT:     %17 = stablehlo.convert %15 : (tensor<256x512xf32>) -> tensor<256x512xbf16>
// CHECK-NEXT:     %18 = stablehlo.dot_general %16, %17, contracting_dims = [1] x [1], precision = [DEFAULT, DEFAULT] : (tensor<128x512xbf16>, tensor<256x512xbf16>) -> tensor<128x256xf32>
// CHECK-NEXT:     %19 = stablehlo.broadcast_in_dim %arg4, dims = [] : (tensor<f32>) -> tensor<128x256xf32>
// CHECK-NEXT:     %20 = stablehlo.multiply %18, %19 : tensor<128x256xf32>
// CHECK-NEXT:     %21 = stablehlo.convert %20 : (tensor<128x256xf32>) -> tensor<128x256xbf16>
// CHECK-NEXT:     return %21 : tensor<128x256xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT: }
