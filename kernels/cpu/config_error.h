// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#ifndef JAXPLUGIN_KERNELS_CPU_CONFIG_ERROR_H_
#define JAXPLUGIN_KERNELS_CPU_CONFIG_ERROR_H_

#include <string>

#include "dot/rule.h"
#include "kernels.h"

namespace jaxplugin {

// The rule that a config breaks, and the value that breaks it. Both are empty
// if the dot supports the config.
struct ConfigError {
  std::string rule, given;
};
// `isa` must not be kAuto.
ConfigError WhyNot(Isa isa, const DotShape& shape, const DotConfig& config);

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_CONFIG_ERROR_H_
