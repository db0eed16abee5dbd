// Other operations, other custom calls and attributes are left as they are.
//
// RUN: %tool rewrite %s --target h200 --implementation xla | filecheck %s
// CHECK: module @model attributes {{.*}}example.kept = "yes"
// CHECK: %arg0: tensor<128x512xf8E4M3FN> {example.name = "x"}
// CHECK: [[DOT:%[0-9]+]] = call @block_scaled_dot.mxfp8_xla(
// CHECK-NEXT: [[OTHER:%[0-9]+]] = stablehlo.custom_call @someone_elses([[DOT]])
// CHECK-NEXT: stablehlo.tanh [[OTHER]] {example.mark = 7 : i32}
// CHECK-NEXT: return

module @model attributes {mhlo.num_partitions = 1 : i32, example.kept = "yes"} {
  func.func public @main(
      %arg0: tensor<128x512xf8E4M3FN> {example.name = "x"},
      %arg1: tensor<128x16xf8E8M0FNU>
  ) -> tensor<128x128xf32> {
    %0 = stablehlo.custom_call @__op$block_scaled_dot(%arg0, %arg0, %arg1, %arg1)
      : (tensor<128x512xf8E4M3FN>, tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>, tensor<128x16xf8E8M0FNU>)
      -> tensor<128x128xf32>
    %1 = stablehlo.custom_call @someone_elses(%0) {api_version = 2 : i32} : (tensor<128x128xf32>) -> tensor<128x128xf32>
    %2 = stablehlo.tanh %1 {example.mark = 7 : i32} : tensor<128x128xf32>
    return %2 : tensor<128x128xf32>
  }
}
