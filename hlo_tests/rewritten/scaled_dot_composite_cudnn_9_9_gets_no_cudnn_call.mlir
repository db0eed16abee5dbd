// Below the gates JAX's scaled_dot gets no call of cuDNN.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.9 | filecheck %s
// RUN: %tool rewrite %s --target h200 --implementation xla \
// RUN:   | filecheck %s --check-prefix XLA
// RUN: %tool rewrite %s --target cpu | filecheck %s --check-prefix XLA
// CHECK-NOT: {{stablehlo.composite|@__op|@__cudnn}}
// CHECK: call @scaled_dot
// CHECK-NOT: {{stablehlo.composite|@__op|@__cudnn}}
// CHECK: return
// XLA-NOT: stablehlo.composite
// XLA: func.func private @scaled_dot
// XLA: stablehlo.dot_general

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
