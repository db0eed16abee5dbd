// A call that cannot be lowered is an error that names it, its place and its
// operands.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.28 --refused | filecheck %s
// CHECK: __op$block_scaled_dot(tensor<128x528xf8E4M3FN>, tensor<256x528xf8E4M3FN>

module @model {
  func.func public @main(
      %arg0: tensor<128x528xf8E4M3FN>,
      %arg1: tensor<256x528xf8E4M3FN>,
      %arg2: tensor<128x17xf8E8M0FNU>,
      %arg3: tensor<256x17xf8E8M0FNU>
  ) -> tensor<128x256xbf16> {
    %0 = stablehlo.custom_call @__op$block_scaled_dot(%arg0, %arg1, %arg2, %arg3)
      : (tensor<128x528xf8E4M3FN>, tensor<256x528xf8E4M3FN>, tensor<128x17xf8E8M0FNU>, tensor<256x17xf8E8M0FNU>)
      -> tensor<128x256xbf16>
    return %0 : tensor<128x256xbf16>
  }
}
