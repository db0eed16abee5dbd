// GENERATED: CHECK lines by `python hlo_tests/tool.py regenerate`.
// The whole rewritten module, with the global scale outside the call.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.12 | filecheck %s
// CHECK: module @model {
// CHECK-NEXT:   func.func public @main(%arg0: tensor<128x512xf4E2M1FN>, %arg1: tensor<256x512xf4E2M1FN>, %arg2: tensor<128x32xf8E4M3FN>, %arg3: tensor<256x32xf8E4M3FN>, %arg4: tensor<bf16>) -> tensor<128x256xbf16> {
// CHECK-NEXT:     %0 = call @block_scaled_dot.nvfp4_cudnn(%arg0, %arg1, %arg2, %arg3, %arg4) : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>, tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>, tensor<bf16>) -> tensor<128x256xbf16>
// CHECK-NEXT:     return %0 : tensor<128x256xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT:   func.func private @block_scaled_dot.nvfp4_cudnn(%arg0: tensor<128x512xf4E2M1FN>, %arg1: tensor<256x512xf4E2M1FN>, %arg2: tensor<128x32xf8E4M3FN>, %arg3: tensor<256x32xf8E4M3FN>, %arg4: tensor<bf16>) -> tensor<128x256xbf16> {
// CHECK-NEXT:     %0 = stablehlo.convert %arg4 : (tensor<bf16>) -> tensor<f32>
// CHECK-NEXT:     %1 = stablehlo.reshape %arg0 : (tensor<128x512xf4E2M1FN>) -> tensor<1x128x512xf4E2M1FN>
// CHECK-NEXT:     %2 = stablehlo.reshape %arg2 : (tensor<128x32xf8E4M3FN>) -> tensor<1x128x32xf8E4M3FN>
// CHECK-NEXT:     %3 = stablehlo.reshape %1 : (tensor<1x128x512xf4E2M1FN>) -> tensor<128x512xf4E2M1FN>
// CHECK-NEXT:     %4 = stablehlo.reshape %2 : (tensor<1x128x32xf8E4M3FN>) -> tensor<128x32xf8E4M3FN>
// CHECK-NEXT:     %5 = stablehlo.reshape %arg1 : (tensor<256x512xf4E2M1FN>) -> tensor<1x256x512xf4E2M1FN>
// CHECK-NEXT:     %6 = stablehlo.reshape %arg3 : (tensor<256x32xf8E4M3FN>) -> tensor<1x256x32xf8E4M3FN>
// CHECK-NEXT:     %7 = stablehlo.reshape %5 : (tensor<1x256x512xf4E2M1FN>) -> tensor<256x512xf4E2M1FN>
// CHECK-NEXT:     %8 = stablehlo.reshape %6 : (tensor<1x256x32xf8E4M3FN>) -> tensor<256x32xf8E4M3FN>
// CHECK-NEXT:     %9 = stablehlo.custom_call @__op$block_scaled_dot(%3, %7, %4, %8) {backend_config = "", operand_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>], result_layouts = [dense<[1, 0]> : tensor<2xindex>]} : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>, tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>) -> tensor<128x256xf32>
// CHECK-NEXT:     %10 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<128x256xf32>
// CHECK-NEXT:     %11 = stablehlo.multiply %9, %10 : tensor<128x256xf32>
// CHECK-NEXT:     %12 = stablehlo.convert %11 : (tensor<128x256xf32>) -> tensor<128x256xbf16>
// CHECK-NEXT:     return %12 : tensor<128x256xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT: }

module @model {
  func.func public @main(
      %arg0: tensor<128x512xf4E2M1FN>,
      %arg1: tensor<256x512xf4E2M1FN>,
      %arg2: tensor<128x32xf8E4M3FN>,
      %arg3: tensor<256x32xf8E4M3FN>,
      %arg4: tensor<bf16>
  ) -> tensor<128x256xbf16> {
    %0 = stablehlo.custom_call @__op$block_scaled_dot(%arg0, %arg1, %arg2, %arg3, %arg4)
      : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>, tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>, tensor<bf16>)
      -> tensor<128x256xbf16>
    return %0 : tensor<128x256xbf16>
  }
}
