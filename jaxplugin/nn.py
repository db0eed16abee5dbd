# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for `jax.nn.scaled_*` and `jax.lax.scaled_dot`.

Names, defaults and meaning are JAX's. The functions run on every platform and
accept `implementation=`. They differ in three points: sums are in f32 with one
cast at the end, results are f32, bf16 or f16, and k = 0 gives zeros.
"""

import typing as _typing

from jaxplugin.core import error_context as _error_context
from jaxplugin.dropin.nn_general import MODES as MODES
from jaxplugin.dropin.nn_general import BlockScaleConfig as BlockScaleConfig
from jaxplugin.dropin.nn_general import Mode as Mode
from jaxplugin.dropin.nn_general import (
  get_scaled_dot_general_config as get_scaled_dot_general_config,
)
from jaxplugin.dropin.nn_general import scaled_dot_general as scaled_dot_general
from jaxplugin.dropin.nn_scaled import scaled_dot as scaled_dot
from jaxplugin.dropin.nn_scaled import scaled_matmul as scaled_matmul

__all__ = [
  "MODES",
  "BlockScaleConfig",
  "Mode",
  "get_scaled_dot_general_config",
  "scaled_dot",
  "scaled_dot_general",
  "scaled_matmul",
]

if not _typing.TYPE_CHECKING:
  __dir__, __getattr__ = _error_context.public_module(__name__, __all__)
