// Asked for where cuDNN is too old or absent, it is refused with the version.
//
// DEFINE: %{dot} = --lhs 128x512xmxfp8 \
// DEFINE:   --rhs 256x512xmxfp8 --implementation cudnn
// RUN: %tool refuse --target b200 --cudnn 9.9 %{dot} \
// RUN:   | filecheck %s --check-prefix OLD
// RUN: %tool refuse --target b300 --cudnn 9.8 %{dot} \
// RUN:   | filecheck %s --check-prefix OLDER
// RUN: %tool refuse --target b200 %{dot} | filecheck %s --check-prefix NONE
// OLD: cudnn: needs cuDNN 9.10.0 or newer, the target has 9.9.0
// OLDER: cudnn: needs cuDNN 9.10.0 or newer, the target has 9.8.0
// NONE: cudnn: needs cuDNN 9.10.0 or newer, the target has none
