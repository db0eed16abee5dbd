// From cuDNN 9.13 on XLA's own answer and the rewritten module's are the same
// call.
//
// RUN: %tool optimize --target b200 --cudnn 9.13 %s | filecheck %s
// RUN: %tool optimize --target b200 --cudnn 9.13 %s --rewrite | filecheck %s
// RUN: %tool optimize --target b300 --cudnn 9.28 %s --rewrite | filecheck %s
// CHECK-NOT: multiply(
// CHECK: = (bf16[128,256], u8[0]) custom-call(f4e2m1fn[128,512] {{[^ ]*}}, f4e2m1fn[256,512] {{[^ ]*}},
// CHECK-SAME: f8e4m3fn[128,32] {{[^ ]*}}, f8e4m3fn[256,32] {{[^ ]*}}, bf16[] {{[^ ]*}})
// CHECK-SAME: custom_call_target="__cudnn$blockScaledDot"
// CHECK-NOT: multiply(

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
