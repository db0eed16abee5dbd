// E5M2 on one side, either one, is served.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8_e5m2 --rhs 256x512xmxfp8
// RUN: %tool emit --target b200 --cudnn 9.10 %{dot} \
// RUN:   | filecheck %s --check-prefix LHS
// RUN: %tool emit --target gb10 --cudnn 9.28 %{dot} \
// RUN:   | filecheck %s --check-prefix LHS
// RUN: %tool emit --target b200 --cudnn 9.10 --lhs 128x512xmxfp8 \
// RUN:   --rhs 256x512xmxfp8_e5m2 | filecheck %s --check-prefix RHS
// LHS: stablehlo.custom_call @__op$block_scaled_dot(
// LHS-SAME: : (tensor<128x512xf8E5M2>, tensor<256x512xf8E4M3FN>,
// LHS-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> tensor<128x256xbf16>
// RHS: stablehlo.custom_call @__op$block_scaled_dot(
// RHS-SAME: : (tensor<128x512xf8E4M3FN>, tensor<256x512xf8E5M2>,
// RHS-SAME: tensor<128x16xf8E8M0FNU>, tensor<256x16xf8E8M0FNU>) -> tensor<128x256xbf16>
