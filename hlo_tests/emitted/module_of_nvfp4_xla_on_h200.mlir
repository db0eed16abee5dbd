// GENERATED: CHECK lines by `python hlo_tests/tool.py regenerate`.
// The whole module, unfused.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 --rhs 256x512xnvfp4 \
// DEFINE:   --global-scale scalar --implementation xla
// RUN: %tool emit --target h200 %{dot} | filecheck %s
// CHECK: module @jit_block_scaled_dot attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
// CHECK-NEXT:   func.func public @main(%arg0: tensor<128x512xf4E2M1FN>, %arg1: tensor<256x512xf4E2M1FN>, %arg2: tensor<128x32xf8E4M3FN>, %arg3: tensor<256x32xf8E4M3FN>, %arg4: tensor<f32>) -> (tensor<128x256xbf16> {jax.result_info = "result"}) {
// CHECK-NEXT:     %0 = stablehlo.convert %arg0 : (tensor<128x512xf4E2M1FN>) -> tensor<128x512xf32>
// CHECK-NEXT:     %c = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT:     %1 = call @_pad(%0, %c) : (tensor<128x512xf32>, tensor<i32>) -> tensor<128x512xf32>
// CHECK-NEXT:     %2 = stablehlo.reshape %1 : (tensor<128x512xf32>) -> tensor<128x32x16xf32>
// CHECK-NEXT:     %3 = stablehlo.convert %arg2 : (tensor<128x32xf8E4M3FN>) -> tensor<128x32xf32>
// CHECK-NEXT:     %4 = stablehlo.broadcast_in_dim %3, dims = [0, 1] : (tensor<128x32xf32>) -> tensor<128x32x1xf32>
// CHECK-NEXT:     %5 = stablehlo.broadcast_in_dim %4, dims = [0, 1, 2] : (tensor<128x32x1xf32>) -> tensor<128x32x16xf32>
// CHECK-NEXT:     %6 = stablehlo.multiply %2, %5 : tensor<128x32x16xf32>
// CHECK-NEXT:     %7 = stablehlo.reshape %6 : (tensor<128x32x16xf32>) -> tensor<128x512xf32>
// CHECK-NEXT:     %8 = stablehlo.slice %7 [0:128, 0:512] : (tensor<128x512xf32>) -> tensor<128x512xf32>
// CHECK-NEXT:     %9 = stablehlo.convert %arg1 : (tensor<256x512xf4E2M1FN>) -> tensor<256x512xf32>
// CHECK-NEXT:     %c_0 = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT:     %10 = call @_pad_0(%9, %c_0) : (tensor<256x512xf32>, tensor<i32>) -> tensor<256x512xf32>
// CHECK-NEXT:     %11 = stablehlo.reshape %10 : (tensor<256x512xf32>) -> tensor<256x32x16xf32>
// CHECK-NEXT:     %12 = stablehlo.convert %arg3 : (tensor<256x32xf8E4M3FN>) -> tensor<256x32xf32>
// CHECK-NEXT:     %13 = stablehlo.broadcast_in_dim %12, dims = [0, 1] : (tensor<256x32xf32>) -> tensor<256x32x1xf32>
// CHECK-NEXT:     %14 = stablehlo.broadcast_in_dim %13, dims = [0, 1, 2] : (tensor<256x32x1xf32>) -> tensor<256x32x16xf32>
// CHECK-NEXT:     %15 = stablehlo.multiply %11, %14 : tensor<256x32x16xf32>
// CHECK-NEXT:     %16 = stablehlo.reshape %15 : (tensor<256x32x16xf32>) -> tensor<256x512xf32>
// CHECK-NEXT:     %17 = stablehlo.slice %16 [0:256, 0:512] : (tensor<256x512xf32>) -> tensor<256x512xf32>
// CHECK-NEXT:     %18 = stablehlo.convert %8 : (tensor<128x512xf32>) -> tensor<128x512xbf16>
// CHECK-NEXT:     %19 = stablehlo.convert %17 : (tensor<256x512xf32>) -> tensor<256x512xbf16>
// CHECK-NEXT:     %20 = stablehlo.dot_general %18, %19, contracting_dims = [1] x [1], precision = [DEFAULT, DEFAULT] : (tensor<128x512xbf16>, tensor<256x512xbf16>) -> tensor<128x256xf32>
// CHECK-NEXT:     %21 = stablehlo.broadcast_in_dim %arg4, dims = [] : (tensor<f32>) -> tensor<128x256xf32>
// CHECK-NEXT:     %22 = stablehlo.multiply %20, %21 : tensor<128x256xf32>
// CHECK-NEXT:     %23 = stablehlo.convert %22 : (tensor<128x256xf32>) -> tensor<128x256xbf16>
// CHECK-NEXT:     return %23 : tensor<128x256xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT:   func.func private @_pad(%arg0: tensor<128x512xf32>, %arg1: tensor<i32>) -> tensor<128x512xf32> {
// CHECK-NEXT:     %0 = stablehlo.convert %arg1 : (tensor<i32>) -> tensor<f32>
// CHECK-NEXT:     %1 = stablehlo.pad %arg0, %0, low = [0, 0], high = [0, 0], interior = [0, 0] : (tensor<128x512xf32>, tensor<f32>) -> tensor<128x512xf32>
// CHECK-NEXT:     return %1 : tensor<128x512xf32>
// CHECK-NEXT:   }
// CHECK-NEXT:   func.func private @_pad_0(%arg0: tensor<256x512xf32>, %arg1: tensor<i32>) -> tensor<256x512xf32> {
// CHECK-NEXT:     %0 = stablehlo.convert %arg1 : (tensor<i32>) -> tensor<f32>
// CHECK-NEXT:     %1 = stablehlo.pad %arg0, %0, low = [0, 0], high = [0, 0], interior = [0, 0] : (tensor<256x512xf32>, tensor<f32>) -> tensor<256x512xf32>
// CHECK-NEXT:     return %1 : tensor<256x512xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }
