// Scales with padding keep the block size in the backend config, and their
// padding's columns are zeroed.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.10 | filecheck %s
// RUN: %tool rewrite %s --target b200 --cudnn 9.9 --implementation xla \
// RUN:   | filecheck %s --check-prefix XLA
// CHECK: func.func private @block_scaled_dot.mxfp8_cudnn(
// CHECK: stablehlo.select
// CHECK: stablehlo.select
// CHECK: stablehlo.custom_call @__op$block_scaled_dot(
// CHECK-SAME: {\22block_size\22: 32}
// XLA: func.func private @block_scaled_dot.mxfp8_xla(
// XLA: stablehlo.slice %arg2 [0:100, 0:15]
// XLA: stablehlo.slice %arg3 [0:250, 0:15]
// XLA: stablehlo.dot_general

module @model {
  func.func public @main(
      %arg0: tensor<100x480xf8E4M3FN>,
      %arg1: tensor<250x480xf8E4M3FN>,
      %arg2: tensor<128x16xf8E8M0FNU>,
      %arg3: tensor<256x16xf8E8M0FNU>
  ) -> tensor<100x250xbf16> {
    %0 = stablehlo.custom_call @__op$block_scaled_dot(%arg0, %arg1, %arg2, %arg3)
      {backend_config = "{\22block_scaled_dot_backend_config\22: {\22block_size\22: 32}}"}
      : (tensor<100x480xf8E4M3FN>, tensor<250x480xf8E4M3FN>, tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>)
      -> tensor<100x250xbf16>
    return %0 : tensor<100x250xbf16>
  }
}
