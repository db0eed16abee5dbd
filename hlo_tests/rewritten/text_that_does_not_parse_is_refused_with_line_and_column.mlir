// What is no module is an error with line and column.
//
// RUN: %tool rewrite %s --target b200 --cudnn 9.28 --refused | filecheck %s
// CHECK: {{[0-9]+:[0-9]+}}

module @model {
  func.func public @main(%arg0: tensor<8xf32>) -> tensor<8xf32> {
    %0 = stablehlo.tanh %nothing : tensor<8xf32>
    return %0 : tensor<8xf32>
  }
}
