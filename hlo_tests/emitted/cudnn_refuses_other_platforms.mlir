// Asked for on another platform, it is refused with the platform.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 \
// DEFINE:   --rhs 256x512xnvfp4 --implementation cudnn
// RUN: %tool refuse --target mi300x %{dot} | filecheck %s --check-prefix AMD
// RUN: %tool refuse --target mi355x %{dot} | filecheck %s --check-prefix AMD
// RUN: %tool refuse --target cpu %{dot} | filecheck %s --check-prefix CPU
// AMD: cudnn: needs an NVIDIA GPU, the target's platform is rocm
// CPU: cudnn: needs an NVIDIA GPU, the target's platform is cpu
