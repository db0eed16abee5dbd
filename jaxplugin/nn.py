# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions of `jax.nn` and `jax.lax`, and norms and activations that quantize.

Names, defaults and meaning of the matmuls are JAX's. They run on every platform
and accept `implementation=`. They differ in three points: sums are in f32 with
one cast at the end, results are f32, bf16 or f16, and k = 0 gives zeros.

Norms and activations can return their result quantized (`out_format=`).
"""

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
from jaxplugin.dropin.producers import gelu as gelu
from jaxplugin.dropin.producers import gelu_and_mul as gelu_and_mul
from jaxplugin.dropin.producers import layer_norm as layer_norm
from jaxplugin.dropin.producers import relu as relu
from jaxplugin.dropin.producers import rms_norm as rms_norm
from jaxplugin.dropin.producers import silu as silu
from jaxplugin.dropin.producers import silu_and_mul as silu_and_mul
from jaxplugin.dropin.producers import swigluoai as swigluoai

__all__ = [
  "MODES",
  "BlockScaleConfig",
  "Mode",
  "gelu",
  "gelu_and_mul",
  "get_scaled_dot_general_config",
  "layer_norm",
  "relu",
  "rms_norm",
  "scaled_dot",
  "scaled_dot_general",
  "scaled_matmul",
  "silu",
  "silu_and_mul",
  "swigluoai",
]

_error_context.public_module(__name__, __all__)
