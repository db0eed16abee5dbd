// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#if defined(__x86_64__)

#include <immintrin.h>

#define JAXPLUGIN_AVX2_QUANTIZE  // quantize/blocks_avx2.inl
#define JAXPLUGIN_NAME(f) f##Avx2
#include "quantize/kernels.inl"

#endif  // defined(__x86_64__)
