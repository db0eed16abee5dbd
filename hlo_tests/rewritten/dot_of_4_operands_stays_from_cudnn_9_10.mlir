// A call of four operands is already what cuDNN 9.10 and newer get, and stays.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.10 | filecheck %s
// RUN: %tool rewrite %s --target b200 --cudnn 9.28 | filecheck %s
// RUN: %tool rewrite %s --target gb10 --cudnn 9.10 | filecheck %s
// RUN: %tool rewrite %s --target gb10 --cudnn 9.28 | filecheck %s
// CHECK-NOT: {{ call @}}
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(%arg0, %arg1, %arg2, %arg3
// CHECK-NOT: func.func private
// CHECK: return

module @model {
  func.func public @main(
      %arg0: tensor<128x512xf8E4M3FN>,
      %arg1: tensor<256x512xf8E4M3FN>,
      %arg2: tensor<128x16xf8E8M0FNU>,
      %arg3: tensor<256x16xf8E8M0FNU>
  ) -> tensor<128x256xbf16> {
    %0 = stablehlo.custom_call @__op$block_scaled_dot(%arg0, %arg1, %arg2, %arg3)
      : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>)
      -> tensor<128x256xbf16>
    return %0 : tensor<128x256xbf16>
  }
}
