// Below cuDNN 9.10, and below compute capability 10.0, the call is replaced;
// asked to stay with cuDNN it is refused.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.9 | filecheck %s
// RUN: %tool rewrite %s --target h200 --implementation xla \
// RUN:   | filecheck %s --check-prefix XLA
// RUN: %tool rewrite %s --target a100 --implementation xla \
// RUN:   | filecheck %s --check-prefix XLA
// RUN: %tool rewrite %s --target mi355x --implementation xla \
// RUN:   | filecheck %s --check-prefix XLA
// RUN: %tool rewrite %s --target b200 --cudnn 9.9 --implementation cudnn --refused \
// RUN:   | filecheck %s --check-prefix REFUSED
// CHECK: call @block_scaled_dot.mxfp8_{{[a-z]+}}(%arg0, %arg1, %arg2, %arg3)
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: func.func private @block_scaled_dot.mxfp8_
// XLA: call @block_scaled_dot.mxfp8_xla(%arg0, %arg1, %arg2, %arg3
// XLA: func.func private @block_scaled_dot.mxfp8_xla(
// XLA-NOT: {{@__op|@__cudnn}}
// XLA: stablehlo.dot_general
// XLA-SAME: (tensor<128x512xbf16>, tensor<256x512xbf16>) -> tensor<128x256xf32>
// REFUSED: __op$block_scaled_dot(tensor<128x512xf8E4M3FN>
// REFUSED: cudnn: needs cuDNN 9.10.0 or newer, the target has 9.9.0

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
