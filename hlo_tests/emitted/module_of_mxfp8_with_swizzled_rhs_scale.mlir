// GENERATED: CHECK lines by `python hlo_tests/tool.py regenerate`.
// The whole module, of an activation by a weight that was swizzled at load
// time.
//
// DEFINE: %{dot} = --lhs 5x512xmxfp8 --rhs 256x512xmxfp8:swizzled
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// CHECK: module @jit_block_scaled_dot attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
// CHECK-NEXT:   func.func public @main(%arg0: tensor<5x512xf8E4M3FN>, %arg1: tensor<256x512xf8E4M3FN>, %arg2: tensor<5x16xf8E8M0FNU>, %arg3: tensor<256x16xf8E8M0FNU>) -> (tensor<5x256xbf16> {jax.result_info = "result"}) {
// CHECK-NEXT:     %0 = stablehlo.reshape %arg0 : (tensor<5x512xf8E4M3FN>) -> tensor<1x5x512xf8E4M3FN>
// CHECK-NEXT:     %1 = stablehlo.reshape %arg2 : (tensor<5x16xf8E8M0FNU>) -> tensor<1x5x16xf8E8M0FNU>
// CHECK-NEXT:     %2 = stablehlo.reshape %0 : (tensor<1x5x512xf8E4M3FN>) -> tensor<5x512xf8E4M3FN>
// CHECK-NEXT:     %3 = stablehlo.reshape %1 : (tensor<1x5x16xf8E8M0FNU>) -> tensor<5x16xf8E8M0FNU>
// CHECK-NEXT:     %4 = stablehlo.reshape %arg1 : (tensor<256x512xf8E4M3FN>) -> tensor<1x256x512xf8E4M3FN>
// CHECK-NEXT:     %5 = stablehlo.reshape %arg3 : (tensor<256x16xf8E8M0FNU>) -> tensor<1x256x16xf8E8M0FNU>
// CHECK-NEXT:     %6 = stablehlo.reshape %4 : (tensor<1x256x512xf8E4M3FN>) -> tensor<256x512xf8E4M3FN>
// CHECK-NEXT:     %7 = stablehlo.reshape %5 : (tensor<1x256x16xf8E8M0FNU>) -> tensor<256x16xf8E8M0FNU>
// CHECK-NEXT:     %cst = stablehlo.constant dense<0.000000e+00> : tensor<f8E4M3FN>
// CHECK-NEXT:     %8 = stablehlo.pad %2, %cst, low = [0, 0], high = [123, 0], interior = [0, 0] : (tensor<5x512xf8E4M3FN>, tensor<f8E4M3FN>) -> tensor<128x512xf8E4M3FN>
// CHECK-NEXT:     %9 = call @swizzle_scale(%3) : (tensor<5x16xf8E8M0FNU>) -> tensor<128x16xf8E8M0FNU>
// CHECK-NEXT:     %10:2 = stablehlo.custom_call @__cudnn$blockScaledDot(%8, %6, %9, %7) {backend_config = "", operand_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>], result_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<0> : tensor<1xindex>]} : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> (tensor<128x256xbf16>, tensor<0xui8>)
// CHECK-NEXT:     %11 = stablehlo.slice %10#0 [0:5, 0:256] : (tensor<128x256xbf16>) -> tensor<5x256xbf16>
// CHECK-NEXT:     return %11 : tensor<5x256xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT:   func.func private @swizzle_scale(%arg0: tensor<5x16xf8E8M0FNU>) -> tensor<128x16xf8E8M0FNU> {
// CHECK-NEXT:     %0 = stablehlo.bitcast_convert %arg0 : (tensor<5x16xf8E8M0FNU>) -> tensor<5x16xui8>
// CHECK-NEXT:     %c = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT:     %1 = call @_pad(%0, %c) : (tensor<5x16xui8>, tensor<i32>) -> tensor<128x16xui8>
// CHECK-NEXT:     %2 = stablehlo.reshape %1 : (tensor<128x16xui8>) -> tensor<1x4x32x4x4xui8>
// CHECK-NEXT:     %3 = stablehlo.transpose %2, dims = [0, 3, 2, 1, 4] : (tensor<1x4x32x4x4xui8>) -> tensor<1x4x32x4x4xui8>
// CHECK-NEXT:     %4 = stablehlo.reshape %3 : (tensor<1x4x32x4x4xui8>) -> tensor<128x16xui8>
// CHECK-NEXT:     %5 = stablehlo.bitcast_convert %4 : (tensor<128x16xui8>) -> tensor<128x16xf8E8M0FNU>
// CHECK-NEXT:     return %5 : tensor<128x16xf8E8M0FNU>
// CHECK-NEXT:   }
// CHECK-NEXT:   func.func private @_pad(%arg0: tensor<5x16xui8>, %arg1: tensor<i32>) -> tensor<128x16xui8> {
// CHECK-NEXT:     %0 = stablehlo.convert %arg1 : (tensor<i32>) -> tensor<ui8>
// CHECK-NEXT:     %1 = stablehlo.pad %arg0, %0, low = [0, 0], high = [123, 0], interior = [0, 0] : (tensor<5x16xui8>, tensor<ui8>) -> tensor<128x16xui8>
// CHECK-NEXT:     return %1 : tensor<128x16xui8>
// CHECK-NEXT:   }
// CHECK-NEXT: }
