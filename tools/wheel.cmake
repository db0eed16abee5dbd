# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
# CMake's toolchain file of the wheel for aarch64: Zig, a Clang that links with
# the symbols of an old glibc, on any machine. tools/release.sh sets the
# variables. -s strips the library, because the machine's own `strip`
# may not support the other architecture.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR "$ENV{WHEEL_MACHINE}")
set(CMAKE_CXX_COMPILER "$ENV{ZIG}" c++)
set(CMAKE_CXX_COMPILER_TARGET
  "$ENV{WHEEL_MACHINE}-linux-gnu.$ENV{WHEEL_GLIBC}")
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(CMAKE_STRIP true)
