// The kernel's own call, with scales in the 128x4 layout, stays where cuDNN
// serves.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.10 | filecheck %s
// RUN: %tool rewrite %s --target b300 --cudnn 9.28 | filecheck %s
// CHECK-NOT: {{ call @}}
// CHECK: stablehlo.custom_call @__cudnn$blockScaledDot(%arg0, %arg1, %arg2, %arg3
// CHECK-NOT: func.func private
// CHECK: return

module @model {
  func.func public @main(
      %arg0: tensor<128x512xf4E2M1FN>,
      %arg1: tensor<256x512xf4E2M1FN>,
      %arg2: tensor<128x32xf8E4M3FN>,
      %arg3: tensor<256x32xf8E4M3FN>
  ) -> tensor<128x256xbf16> {
    %0:2 = stablehlo.custom_call @__cudnn$blockScaledDot(%arg0, %arg1, %arg2, %arg3)
      : (tensor<128x512xf4E2M1FN>, tensor<256x512xf4E2M1FN>, tensor<128x32xf8E4M3FN>, tensor<256x32xf8E4M3FN>)
      -> (tensor<128x256xbf16>, tensor<0xui8>)
    return %0#0 : tensor<128x256xbf16>
  }
}
