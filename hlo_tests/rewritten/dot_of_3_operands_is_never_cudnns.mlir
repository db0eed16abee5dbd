// With three operands rhs is plain, which cuDNN does not serve.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.28 --implementation xla \
// RUN:   | filecheck %s
// RUN: %tool rewrite %s --target cpu | filecheck %s --check-prefix CPU
// RUN: %tool rewrite %s --target b200 --cudnn 9.28 --implementation cudnn --refused \
// RUN:   | filecheck %s --check-prefix REFUSED
// CHECK: call @block_scaled_dot.mxfp8_bfloat16_xla(%arg0, %arg1, %arg2)
// CHECK: func.func private
// CHECK: stablehlo.dot_general {{.*}}, %arg1,
// CHECK-SAME: (tensor<128x512xbf16>, tensor<256x512xbf16>) -> tensor<128x256xf32>
// CPU: stablehlo.dot_general
// CPU-SAME: (tensor<128x512xf32>, tensor<256x512xf32>) -> tensor<128x256xf32>
// REFUSED: cudnn: needs both operands quantized

module @model {
  func.func public @main(
      %arg0: tensor<128x512xf8E4M3FN>,
      %arg1: tensor<256x512xbf16>,
      %arg2: tensor<128x16xf8E8M0FNU>
  ) -> tensor<128x256xbf16> {
    %0 = stablehlo.custom_call @__op$block_scaled_dot(%arg0, %arg1, %arg2)
      : (tensor<128x512xf8E4M3FN>, tensor<256x512xbf16>, tensor<128x16xf8E8M0FNU>)
      -> tensor<128x256xbf16>
    return %0 : tensor<128x256xbf16>
  }
}
