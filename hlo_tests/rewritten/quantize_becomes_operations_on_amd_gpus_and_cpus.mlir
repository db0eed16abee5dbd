// A quantize call is plain operations where no kernel is called for it: codes
// are made as integers, never by a division or by a cast to f8.
//
// RUN: %tool rewrite %s --target mi355x | filecheck %s
// RUN: %tool rewrite %s --target cpu | filecheck %s
// CHECK: call @quantize.mxfp8(%arg0)
// CHECK: func.func private @quantize.mxfp8(
// CHECK: stablehlo.convert %arg0 : (tensor<128x512xbf16>) -> tensor<128x512xf32>
// CHECK-NOT: {{stablehlo.divide|convert .*xf32>\) -> tensor<.*xf8}}
// CHECK: stablehlo.bitcast_convert {{.*}}xui8>) -> tensor<128x512xf8E4M3FN>
// CHECK: stablehlo.bitcast_convert {{.*}}xui8>) -> tensor<128x16xf8E8M0FNU>
// CHECK-NEXT: return

module @model {
  func.func public @main(%arg0: tensor<128x512xbf16>)
      -> (tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>) {
    %0:2 = stablehlo.custom_call @__op$quantize(%arg0)
      : (tensor<128x512xbf16>)
      -> (tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>)
    return %0#0, %0#1 : tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>
  }
}
