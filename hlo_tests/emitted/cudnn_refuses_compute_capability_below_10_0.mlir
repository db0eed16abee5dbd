// Asked for on an older GPU, it is refused with the compute capability.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 \
// DEFINE:   --rhs 256x512xmxfp8 --implementation cudnn
// RUN: %tool refuse --target a100 --cudnn 9.28 %{dot} \
// RUN:   | filecheck %s --check-prefix A100
// RUN: %tool refuse --target l40s --cudnn 9.28 %{dot} \
// RUN:   | filecheck %s --check-prefix L40S
// RUN: %tool refuse --target h100 --cudnn 9.28 %{dot} \
// RUN:   | filecheck %s --check-prefix HOPPER
// RUN: %tool refuse --target h200 --cudnn 9.28 %{dot} \
// RUN:   | filecheck %s --check-prefix HOPPER
// A100: cudnn: needs compute capability 10.0 or higher, the target has 8.0
// L40S: cudnn: needs compute capability 10.0 or higher, the target has 8.9
// HOPPER: cudnn: needs compute capability 10.0 or higher, the target has 9.0
