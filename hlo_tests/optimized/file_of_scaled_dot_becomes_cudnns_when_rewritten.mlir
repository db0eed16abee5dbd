// Left to itself, XLA makes no call of cuDNN of JAX's scaled_dot; rewritten
// first, it is one.
//
// RUN: %tool optimize --target b200 --cudnn 9.13 %s | filecheck %s
// RUN: %tool optimize --target b200 --cudnn 9.13 %s --rewrite \
// RUN:   | filecheck %s --check-prefix REWRITTEN
// CHECK-NOT: __cudnn
// CHECK: ENTRY
// CHECK-NOT: __cudnn
// REWRITTEN: = (bf16[2,128,256], u8[0]) custom-call(f8e4m3fn[2,128,512] {{[^ ]*}}, f8e4m3fn[2,256,512] {{[^ ]*}},
// REWRITTEN-SAME: f8e8m0fnu[2,128,16] {{[^ ]*}}, f8e8m0fnu[2,256,16] {{[^ ]*}})
// REWRITTEN-SAME: custom_call_target="__cudnn$blockScaledDot"
// REWRITTEN-NOT: dot(

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
