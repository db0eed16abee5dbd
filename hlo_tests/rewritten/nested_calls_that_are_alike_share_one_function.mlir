// Calls in regions and in other functions are replaced too, and those that are
// alike call one private function.
//
// RUN: %tool rewrite %s --target h200 --implementation xla | filecheck %s
// RUN: %tool rewrite %s --target b200 --cudnn 9.9 --implementation xla \
// RUN:   | filecheck %s
// CHECK: stablehlo.if
// CHECK: call @layer(
// CHECK: call @block_scaled_dot.mxfp8_xla(
// CHECK: func.func private @layer(
// CHECK: call @block_scaled_dot.mxfp8_xla(
// CHECK: func.func private @block_scaled_dot.mxfp8_xla(
// CHECK-NOT: func.func private @block_scaled_dot
// CHECK-NOT: @__op

module @model {
  func.func public @main(%arg0: tensor<i1>, %arg1: tensor<128x512xf8E4M3FN>, %arg2: tensor<128x16xf8E8M0FNU>) -> tensor<128x128xbf16> {
    %0 = "stablehlo.if"(%arg0) ({
      %1 = func.call @layer(%arg1, %arg2) : (tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>) -> tensor<128x128xbf16>
      stablehlo.return %1 : tensor<128x128xbf16>
    }, {
      %1 = stablehlo.custom_call @__op$block_scaled_dot(%arg1, %arg1, %arg2, %arg2)
        : (tensor<128x512xf8E4M3FN>, tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>, tensor<128x16xf8E8M0FNU>)
        -> tensor<128x128xbf16>
      stablehlo.return %1 : tensor<128x128xbf16>
    }) : (tensor<i1>) -> tensor<128x128xbf16>
    return %0 : tensor<128x128xbf16>
  }
  func.func private @layer(%arg0: tensor<128x512xf8E4M3FN>, %arg1: tensor<128x16xf8E8M0FNU>) -> tensor<128x128xbf16> {
    %0 = stablehlo.custom_call @__op$block_scaled_dot(%arg0, %arg0, %arg1, %arg1)
      : (tensor<128x512xf8E4M3FN>, tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>, tensor<128x16xf8E8M0FNU>)
      -> tensor<128x128xbf16>
    return %0 : tensor<128x128xbf16>
  }
}
