// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#ifndef JAXPLUGIN_KERNELS_CPU_CONFIG_ERROR_H_
#define JAXPLUGIN_KERNELS_CPU_CONFIG_ERROR_H_

#include <string>

#include "dot/rule.h"
#include "kernels.h"

namespace jaxplugin {

// Why a dot does not support a config: the rule, and the value that breaks it.
// Both are empty if it does.
struct ConfigError {
  std::string rule, given;
};
// `isa` is not kAuto.
ConfigError WhyNot(Isa isa, const DotShape& shape, const DotConfig& config);

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_CONFIG_ERROR_H_
