// E5M2 by E5M2 is not cuDNN's.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.28 | filecheck %s
// RUN: %tool rewrite %s --target b200 --cudnn 9.28 --implementation cudnn --refused \
// RUN:   | filecheck %s --check-prefix REFUSED
// CHECK: call @block_scaled_dot.mxfp8_e5m2_
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: func.func private
// REFUSED: cudnn: does not multiply E5M2 by E5M2

module @model {
  func.func public @main(
      %arg0: tensor<128x512xf8E5M2>,
      %arg1: tensor<256x512xf8E5M2>,
      %arg2: tensor<128x16xf8E8M0FNU>,
      %arg3: tensor<256x16xf8E8M0FNU>
  ) -> tensor<128x256xbf16> {
    %0 = stablehlo.custom_call @__op$block_scaled_dot(%arg0, %arg1, %arg2, %arg3)
      : (tensor<128x512xf8E5M2>, tensor<256x512xf8E5M2>, tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>)
      -> tensor<128x256xbf16>
    return %0 : tensor<128x256xbf16>
  }
}
