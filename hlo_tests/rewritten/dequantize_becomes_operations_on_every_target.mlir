// A dequantize call is plain operations in f32 on every target.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.28 | filecheck %s
// RUN: %tool rewrite %s --target a100 | filecheck %s
// RUN: %tool rewrite %s --target h200 | filecheck %s
// RUN: %tool rewrite %s --target mi300x | filecheck %s
// RUN: %tool rewrite %s --target cpu | filecheck %s
// CHECK: call @dequantize.mxfp8(%arg0, %arg1)
// CHECK: func.func private @dequantize.mxfp8(
// CHECK: stablehlo.convert %arg0 : (tensor<128x512xf8E4M3FN>) -> tensor<128x512xf32>
// CHECK: stablehlo.multiply {{.*}} : tensor<128x16x32xf32>
// CHECK-NOT: {{@__op|bf16}}
// CHECK: return

module @model {
  func.func public @main(
      %arg0: tensor<128x512xf8E4M3FN>,
      %arg1: tensor<128x16xf8E8M0FNU>
  ) -> tensor<128x512xf32> {
    %0 = stablehlo.custom_call @__op$dequantize(%arg0, %arg1)
      : (tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>)
      -> tensor<128x512xf32>
    return %0 : tensor<128x512xf32>
  }
}
