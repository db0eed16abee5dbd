// A module with nothing to rewrite comes out as it went in.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.28 | filecheck %s
// RUN: %tool rewrite %s --target cpu | filecheck %s
// CHECK: module @model
// CHECK-NEXT: func.func public @main(%arg0: tensor<8xf32>) -> tensor<8xf32>
// CHECK-NEXT: %0 = stablehlo.tanh %arg0
// CHECK-NEXT: return
// CHECK-NEXT: }
// CHECK-NEXT: }

module @model {
  func.func public @main(%arg0: tensor<8xf32>) -> tensor<8xf32> {
    %0 = stablehlo.tanh %arg0 : tensor<8xf32>
    return %0 : tensor<8xf32>
  }
}
