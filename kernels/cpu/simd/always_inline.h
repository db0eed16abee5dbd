// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#ifndef JAXPLUGIN_KERNELS_CPU_SIMD_ALWAYS_INLINE_H_
#define JAXPLUGIN_KERNELS_CPU_SIMD_ALWAYS_INLINE_H_

// Every inline function that a kernel file sees must really be inlined: a copy
// compiled for AVX-512 must never be the one the linker keeps (see kernels.h).
#define JAXPLUGIN_ALWAYS_INLINE inline __attribute__((always_inline))

#endif  // JAXPLUGIN_KERNELS_CPU_SIMD_ALWAYS_INLINE_H_
