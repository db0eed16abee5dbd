// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#if defined(__x86_64__) || defined(JAXPLUGIN_EMULATE_AVX512)

#if defined(__x86_64__)
#include <immintrin.h>

#define JAXPLUGIN_AVX2_QUANTIZE  // quantize/blocks_avx2.inl
#endif

#define JAXPLUGIN_NAME(f) f##Avx512
#include "quantize/kernels.inl"

#endif
