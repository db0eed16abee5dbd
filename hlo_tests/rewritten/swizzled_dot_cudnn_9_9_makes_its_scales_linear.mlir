// Where cuDNN does not serve, the scales of the kernel's own call are brought
// back to linear.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.9 --implementation xla \
// RUN:   | filecheck %s
// RUN: %tool rewrite %s --target h200 --implementation xla | filecheck %s
// RUN: %tool rewrite %s --target mi300x --implementation xla | filecheck %s
// CHECK: call @block_scaled_dot.nvfp4_xla(%arg0, %arg1, %arg2, %arg3)
// CHECK-NOT: @__cudnn
// CHECK: func.func private
// CHECK-COUNT-2: stablehlo.transpose {{.*}}, dims = [0, 3, 2, 1, 4]
// CHECK-NOT: stablehlo.transpose
// CHECK: stablehlo.dot_general
// CHECK-SAME: (tensor<128x512xbf16>, tensor<256x512xbf16>) -> tensor<128x256xf32>

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
