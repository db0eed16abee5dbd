// Layouts that a call names say nothing about values: the new call names row-
// major ones.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.10 | filecheck %s
// CHECK: call @block_scaled_dot.mxfp8_cudnn(%arg0, %arg1, %arg2, %arg3)
// CHECK: func.func private
// CHECK-NOT: dense<[0, 1]>
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: operand_layouts = [dense<[1, 0]>
// CHECK-NOT: dense<[0, 1]>
// CHECK: return

module @model {
  func.func public @main(
      %arg0: tensor<128x512xf8E4M3FN>,
      %arg1: tensor<256x512xf8E4M3FN>,
      %arg2: tensor<128x16xf8E8M0FNU>,
      %arg3: tensor<256x16xf8E8M0FNU>
  ) -> tensor<128x256xbf16> {
    %0 = stablehlo.custom_call @__op$block_scaled_dot(%arg0, %arg1, %arg2, %arg3) {operand_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<[0, 1]> : tensor<2xindex>,
      dense<[1, 0]> : tensor<2xindex>, dense<[0, 1]> : tensor<2xindex>], result_layouts = [dense<[1, 0]> : tensor<2xindex>]}
      : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>)
      -> tensor<128x256xbf16>
    return %0 : tensor<128x256xbf16>
  }
}
