// GENERATED: CHECK lines by `python hlo_tests/tool.py regenerate`.
// The whole module, with the global scale fused.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 \
// DEFINE:   --rhs 256x512xnvfp4 --global-scale scalar
// RUN: %tool emit --target b200 --cudnn 9.13 %{dot} | filecheck %s
// CHECK: module @jit_block_scaled_dot attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
// CHECK-NEXT:   func.func public @main(%arg0: tensor<128x512xf4E2M1FN>, %arg1: tensor<256x512xf4E2M1FN>, %arg2: tensor<128x32xf8E4M3FN>, %arg3: tensor<256x32xf8E4M3FN>, %arg4: tensor<f32>) -> (tensor<128x256xbf16> {jax.result_info = "result"}) {
// CHECK-NEXT:     %0 = stablehlo.reshape %arg0 : (tensor<128x512xf4E2M1FN>) -> tensor<1x128x512xf4E2M1FN>
// CHECK-NEXT:     %1 = stablehlo.reshape %arg2 : (tensor<128x32xf8E4M3FN>) -> tensor<1x128x32xf8E4M3FN>
// CHECK-NEXT:     %2 = stablehlo.reshape %0 : (tensor<1x128x512xf4E2M1FN>) -> tensor<128x512xf4E2M1FN>
// CHECK-NEXT:     %3 = stablehlo.reshape %1 : (tensor<1x128x32xf8E4M3FN>) -> tensor<128x32xf8E4M3FN>
// CHECK-NEXT:     %4 = stablehlo.reshape %arg1 : (tensor<256x512xf4E2M1FN>) -> tensor<1x256x512xf4E2M1FN>
// CHECK-NEXT:     %5 = stablehlo.reshape %arg3 : (tensor<256x32xf8E4M3FN>) -> tensor<1x256x32xf8E4M3FN>
// CHECK-NEXT:     %6 = stablehlo.reshape %4 : (tensor<1x256x512xf4E2M1FN>) -> tensor<256x512xf4E2M1FN>
// CHECK-NEXT:     %7 = stablehlo.reshape %5 : (tensor<1x256x32xf8E4M3FN>) -> tensor<256x32xf8E4M3FN>
// CHECK-NEXT:     %8 = stablehlo.convert %arg4 : (tensor<f32>) -> tensor<bf16>
// CHECK-NEXT:     %9 = stablehlo.custom_call @__op$block_scaled_dot(%2, %6, %3, %7, %8) {backend_config = "", operand_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>, dense<> : tensor<0xindex>], result_layouts = [dense<[1, 0]> : tensor<2xindex>]} : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>, tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>, tensor<bf16>) -> tensor<128x256xbf16>
// CHECK-NEXT:     return %9 : tensor<128x256xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT: }
