// Below cuDNN 9.13 a fifth operand would be ignored: the call gets four, and
// f32 is multiplied after it.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.10 | filecheck %s
// RUN: %tool rewrite %s --target b200 --cudnn 9.12 | filecheck %s
// RUN: %tool rewrite %s --target gb10 --cudnn 9.12.9 | filecheck %s
// CHECK: call @block_scaled_dot.nvfp4_cudnn(%arg0, %arg1, %arg2, %arg3, %arg4)
// CHECK: func.func private @block_scaled_dot.nvfp4_cudnn(
// CHECK: stablehlo.convert %arg4 : (tensor<bf16>) -> tensor<f32>
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>, tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>) -> tensor<128x256xf32>
// CHECK: stablehlo.multiply {{.*}} : tensor<128x256xf32>
// CHECK-NEXT: stablehlo.convert {{.*}} -> tensor<128x256xbf16>

module @model {
  func.func public @main(
      %arg0: tensor<128x512xf4E2M1FN>,
      %arg1: tensor<256x512xf4E2M1FN>,
      %arg2: tensor<128x32xf8E4M3FN>,
      %arg3: tensor<256x32xf8E4M3FN>,
      %arg4: tensor<bf16>
  ) -> tensor<128x256xbf16> {
    %0 = stablehlo.custom_call @__op$block_scaled_dot(%arg0, %arg1, %arg2, %arg3, %arg4)
      : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>, tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>, tensor<bf16>)
      -> tensor<128x256xbf16>
    return %0 : tensor<128x256xbf16>
  }
}
