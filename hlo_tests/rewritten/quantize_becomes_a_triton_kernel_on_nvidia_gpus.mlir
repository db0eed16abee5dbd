// A quantize call is one Triton kernel on NVIDIA GPUs, whatever their cuDNN.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.28 | filecheck %s
// RUN: %tool rewrite %s --target b200 | filecheck %s
// RUN: %tool rewrite %s --target a100 | filecheck %s
// RUN: %tool rewrite %s --target h200 | filecheck %s
// CHECK: call @quantize.mxfp8(%arg0)
// CHECK: func.func private @quantize.mxfp8(
// CHECK-NOT: stablehlo.convert
// CHECK: %[[CALL:.*]]:2 = stablehlo.custom_call @triton_kernel_call_ffi(%arg0, %arg0, %arg0, %arg0, %arg0, %arg0, %arg0, %arg0)
// CHECK-SAME: -> (tensor<1x128x512xui8>, tensor<1x128x16xui8>)
// CHECK-NOT: stablehlo.custom_call

module @model {
  func.func public @main(%arg0: tensor<128x512xbf16>)
      -> (tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>) {
    %0:2 = stablehlo.custom_call @__op$quantize(%arg0)
      : (tensor<128x512xbf16>)
      -> (tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>)
    return %0#0, %0#1 : tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>
  }
}
