// GENERATED: CHECK lines by `python hlo_tests/tool.py regenerate`.
// The whole rewritten module of JAX's scaled_dot.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.10 | filecheck %s
// CHECK: module @model {
// CHECK-NEXT:   func.func public @main(%arg0: tensor<2x128x512xf8E4M3FN>, %arg1: tensor<2x512x256xf8E4M3FN>, %arg2: tensor<2x128x16xf8E8M0FNU>, %arg3: tensor<2x16x256xf8E8M0FNU>) -> tensor<2x128x256xbf16> {
// CHECK-NEXT:     %0 = call @scaled_dot.mxfp8_cudnn(%arg0, %arg1, %arg2, %arg3) : (tensor<2x128x512xf8E4M3FN>, tensor<2x512x256xf8E4M3FN>, tensor<2x128x16xf8E8M0FNU>, tensor<2x16x256xf8E8M0FNU>) -> tensor<2x128x256xbf16>
// CHECK-NEXT:     return %0 : tensor<2x128x256xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT:   func.func private @scaled_dot.mxfp8_cudnn(%arg0: tensor<2x128x512xf8E4M3FN>, %arg1: tensor<2x512x256xf8E4M3FN>, %arg2: tensor<2x128x16xf8E8M0FNU>, %arg3: tensor<2x16x256xf8E8M0FNU>) -> tensor<2x128x256xbf16> {
// CHECK-NEXT:     %0 = stablehlo.transpose %arg1, dims = [0, 2, 1] : (tensor<2x512x256xf8E4M3FN>) -> tensor<2x256x512xf8E4M3FN>
// CHECK-NEXT:     %1 = stablehlo.transpose %arg3, dims = [0, 2, 1] : (tensor<2x16x256xf8E8M0FNU>) -> tensor<2x256x16xf8E8M0FNU>
// CHECK-NEXT:     %2 = stablehlo.custom_call @__op$block_scaled_dot(%arg0, %0, %arg2, %1) {backend_config = "", operand_layouts = [dense<[2, 1, 0]> : tensor<3xindex>, dense<[2, 1, 0]> : tensor<3xindex>, dense<[2, 1, 0]> : tensor<3xindex>, dense<[2, 1, 0]> : tensor<3xindex>], result_layouts = [dense<[2, 1, 0]> : tensor<3xindex>]} : (tensor<2x128x512xf8E4M3FN>, tensor<2x256x512xf8E4M3FN>, tensor<2x128x16xf8E8M0FNU>, tensor<2x256x16xf8E8M0FNU>) -> tensor<2x128x256xbf16>
// CHECK-NEXT:     return %2 : tensor<2x128x256xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT: }

module @model {
  func.func public @main(
      %arg0: tensor<2x128x512xf8E4M3FN>,
      %arg1: tensor<2x512x256xf8E4M3FN>,
      %arg2: tensor<2x128x16xf8E8M0FNU>,
      %arg3: tensor<2x16x256xf8E8M0FNU>
  ) -> tensor<2x128x256xbf16> {
    %0 = stablehlo.composite "xla.scaled_dot" %arg0, %arg1, %arg2, %arg3
      {composite_attributes = {dimension_numbers = [[[2], [1]], [[0], [0]]],
      preferred_element_type = bf16}, decomposition = @xla.scaled_dot}
      : (tensor<2x128x512xf8E4M3FN>, tensor<2x512x256xf8E4M3FN>, tensor<2x128x16xf8E8M0FNU>, tensor<2x16x256xf8E8M0FNU>)
      -> tensor<2x128x256xbf16>
    return %0 : tensor<2x128x256xbf16>
  }
  func.func private @xla.scaled_dot(
      %arg0: tensor<2x128x512xf8E4M3FN>,
      %arg1: tensor<2x512x256xf8E4M3FN>,
      %arg2: tensor<2x128x16xf8E8M0FNU>,
      %arg3: tensor<2x16x256xf8E8M0FNU>
  ) -> tensor<2x128x256xbf16> {
    %0 = stablehlo.convert %arg0 : (tensor<2x128x512xf8E4M3FN>) -> tensor<2x128x512xbf16>
    %1 = stablehlo.convert %arg1 : (tensor<2x512x256xf8E4M3FN>) -> tensor<2x512x256xbf16>
    %2 = stablehlo.dot_general %0, %1, batching_dims = [0] x [0], contracting_dims = [2] x [1]
      : (tensor<2x128x512xbf16>, tensor<2x512x256xbf16>) -> tensor<2x128x256xbf16>
    return %2 : tensor<2x128x256xbf16>
  }
}
