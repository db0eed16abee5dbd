// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#define JAXPLUGIN_NAME(f) f##Baseline
#include "quantize/kernels.inl"
