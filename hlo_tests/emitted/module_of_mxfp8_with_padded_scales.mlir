// GENERATED: CHECK lines by `python hlo_tests/tool.py regenerate`.
// The whole module, of scales with padding.
//
// DEFINE: %{dot} = --lhs 100x96xmxfp8:scale=128x4 \
// DEFINE:   --rhs 250x96xmxfp8:scale=256x4
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// CHECK: module @jit_block_scaled_dot attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
// CHECK-NEXT:   func.func public @main(%arg0: tensor<100x96xf8E4M3FN>, %arg1: tensor<250x96xf8E4M3FN>, %arg2: tensor<128x4xf8E8M0FNU>, %arg3: tensor<256x4xf8E8M0FNU>) -> (tensor<100x250xbf16> {jax.result_info = "result"}) {
// CHECK-NEXT:     %c = stablehlo.constant dense<[true, true, true, false]> : tensor<4xi1>
// CHECK-NEXT:     %c_0 = stablehlo.constant dense<[true, true, true, false]> : tensor<4xi1>
// CHECK-NEXT:     %0 = stablehlo.reshape %arg0 : (tensor<100x96xf8E4M3FN>) -> tensor<1x100x96xf8E4M3FN>
// CHECK-NEXT:     %1 = stablehlo.reshape %arg2 : (tensor<128x4xf8E8M0FNU>) -> tensor<1x128x4xf8E8M0FNU>
// CHECK-NEXT:     %2 = stablehlo.bitcast_convert %1 : (tensor<1x128x4xf8E8M0FNU>) -> tensor<1x128x4xui8>
// CHECK-NEXT:     %c_1 = stablehlo.constant dense<0> : tensor<ui8>
// CHECK-NEXT:     %3 = call @_where(%c, %2, %c_1) : (tensor<4xi1>, tensor<1x128x4xui8>, tensor<ui8>) -> tensor<1x128x4xui8>
// CHECK-NEXT:     %4 = stablehlo.bitcast_convert %3 : (tensor<1x128x4xui8>) -> tensor<1x128x4xf8E8M0FNU>
// CHECK-NEXT:     %5 = stablehlo.reshape %0 : (tensor<1x100x96xf8E4M3FN>) -> tensor<100x96xf8E4M3FN>
// CHECK-NEXT:     %6 = stablehlo.reshape %4 : (tensor<1x128x4xf8E8M0FNU>) -> tensor<128x4xf8E8M0FNU>
// CHECK-NEXT:     %7 = stablehlo.reshape %arg1 : (tensor<250x96xf8E4M3FN>) -> tensor<1x250x96xf8E4M3FN>
// CHECK-NEXT:     %8 = stablehlo.reshape %arg3 : (tensor<256x4xf8E8M0FNU>) -> tensor<1x256x4xf8E8M0FNU>
// CHECK-NEXT:     %9 = stablehlo.bitcast_convert %8 : (tensor<1x256x4xf8E8M0FNU>) -> tensor<1x256x4xui8>
// CHECK-NEXT:     %c_2 = stablehlo.constant dense<0> : tensor<ui8>
// CHECK-NEXT:     %10 = call @_where_0(%c_0, %9, %c_2) : (tensor<4xi1>, tensor<1x256x4xui8>, tensor<ui8>) -> tensor<1x256x4xui8>
// CHECK-NEXT:     %11 = stablehlo.bitcast_convert %10 : (tensor<1x256x4xui8>) -> tensor<1x256x4xf8E8M0FNU>
// CHECK-NEXT:     %12 = stablehlo.reshape %7 : (tensor<1x250x96xf8E4M3FN>) -> tensor<250x96xf8E4M3FN>
// CHECK-NEXT:     %13 = stablehlo.reshape %11 : (tensor<1x256x4xf8E8M0FNU>) -> tensor<256x4xf8E8M0FNU>
// CHECK-NEXT:     %14 = stablehlo.custom_call @__op$block_scaled_dot(%5, %12, %6, %13) {backend_config = "{\22block_scaled_dot_backend_config\22: {\22block_size\22: 32}}", operand_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>], result_layouts = [dense<[1, 0]> : tensor<2xindex>]} : (tensor<100x96xf8E4M3FN>, tensor<250x96xf8E4M3FN>, tensor<128x4xf8E8M0FNU>, tensor<256x4xf8E8M0FNU>) -> tensor<100x250xbf16>
// CHECK-NEXT:     return %14 : tensor<100x250xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT:   func.func private @_where(%arg0: tensor<4xi1>, %arg1: tensor<1x128x4xui8>, %arg2: tensor<ui8>) -> tensor<1x128x4xui8> {
// CHECK-NEXT:     %0 = stablehlo.broadcast_in_dim %arg0, dims = [2] : (tensor<4xi1>) -> tensor<1x128x4xi1>
// CHECK-NEXT:     %1 = stablehlo.broadcast_in_dim %arg2, dims = [] : (tensor<ui8>) -> tensor<1x128x4xui8>
// CHECK-NEXT:     %2 = stablehlo.select %0, %arg1, %1 : tensor<1x128x4xi1>, tensor<1x128x4xui8>
// CHECK-NEXT:     return %2 : tensor<1x128x4xui8>
// CHECK-NEXT:   }
// CHECK-NEXT:   func.func private @_where_0(%arg0: tensor<4xi1>, %arg1: tensor<1x256x4xui8>, %arg2: tensor<ui8>) -> tensor<1x256x4xui8> {
// CHECK-NEXT:     %0 = stablehlo.broadcast_in_dim %arg0, dims = [2] : (tensor<4xi1>) -> tensor<1x256x4xi1>
// CHECK-NEXT:     %1 = stablehlo.broadcast_in_dim %arg2, dims = [] : (tensor<ui8>) -> tensor<1x256x4xui8>
// CHECK-NEXT:     %2 = stablehlo.select %0, %arg1, %1 : tensor<1x256x4xi1>, tensor<1x256x4xui8>
// CHECK-NEXT:     return %2 : tensor<1x256x4xui8>
// CHECK-NEXT:   }
// CHECK-NEXT: }
