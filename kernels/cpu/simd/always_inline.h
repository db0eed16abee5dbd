// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#ifndef JAXPLUGIN_KERNELS_CPU_SIMD_ALWAYS_INLINE_H_
#define JAXPLUGIN_KERNELS_CPU_SIMD_ALWAYS_INLINE_H_

// Inline functions with external linkage that a kernel file includes must be
// inlined. Otherwise the linker may keep a copy compiled for AVX-512 for the
// whole library (see kernels.h).
#define JAXPLUGIN_ALWAYS_INLINE inline __attribute__((always_inline))

#endif  // JAXPLUGIN_KERNELS_CPU_SIMD_ALWAYS_INLINE_H_
