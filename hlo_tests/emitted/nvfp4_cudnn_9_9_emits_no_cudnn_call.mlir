// Below cuDNN 9.10, and without it, no GPU gets a call of it, and one asked
// for is refused.
//
// DEFINE: %{dot} = --lhs 128x512xnvfp4 --rhs 256x512xnvfp4
// RUN: %tool emit --target b200 --cudnn 9.9 %{dot} | filecheck %s
// RUN: %tool refuse --target b200 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target b200 --cudnn 9.8 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target b200 --cudnn 9.9 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target b200 --cudnn 9.9.9 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target b300 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target b300 --cudnn 9.8 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target b300 --cudnn 9.9 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target b300 --cudnn 9.9.9 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target rtx5090 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target rtx5090 --cudnn 9.8 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target rtx5090 --cudnn 9.9 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target rtx5090 --cudnn 9.9.9 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target gb10 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target gb10 --cudnn 9.8 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target gb10 --cudnn 9.9 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// RUN: %tool refuse --target gb10 --cudnn 9.9.9 %{dot} --implementation cudnn \
// RUN:   | filecheck %s --check-prefix REFUSED
// CHECK: func.func public @main
// CHECK-NOT: {{@__op|@__cudnn}}
// CHECK: return
// REFUSED: cudnn: needs cuDNN 9.10.0 or newer
