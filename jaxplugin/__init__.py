# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled matrix multiplication for JAX: MXFP8, MXFP4 and NVFP4.

import jaxplugin as jp

x_q = jp.quantize(x, jp.NVFP4)
w_q = jp.quantize(w, jp.NVFP4)
y = jp.block_scaled_dot(x_q, w_q, preferred_element_type=jnp.bfloat16)
"""

from jaxplugin import jax_version as _jax_version  # noqa: F401

# isort: split
from jaxplugin import checkpoint_policies as checkpoint_policies
from jaxplugin import matmul as _matmul  # noqa: F401
from jaxplugin import nn as nn
from jaxplugin.acceleration import accelerate as accelerate
from jaxplugin.diagnostics import explain as explain
from jaxplugin.diagnostics import info as info
from jaxplugin.dot import block_scaled_dot as block_scaled_dot
from jaxplugin.explanation import Explanation as Explanation
from jaxplugin.formats import MXFP4 as MXFP4
from jaxplugin.formats import MXFP8 as MXFP8
from jaxplugin.formats import MXFP8_E5M2 as MXFP8_E5M2
from jaxplugin.formats import NVFP4 as NVFP4
from jaxplugin.formats import BlockFormat as BlockFormat
from jaxplugin.gradients import dot_general as dot_general
from jaxplugin.guards import NonFiniteError as NonFiniteError
from jaxplugin.guards import debug_checks as debug_checks
from jaxplugin.linear import linear as linear
from jaxplugin.nn import scaled_dot as scaled_dot
from jaxplugin.placement import shard as shard
from jaxplugin.placement import shardings as shardings
from jaxplugin.preparation import prepare_weights as prepare_weights
from jaxplugin.preparation import unprepare_weights as unprepare_weights
from jaxplugin.quantization import dequantize as dequantize
from jaxplugin.quantization import quantize as quantize
from jaxplugin.quantization import quantize_both as quantize_both
from jaxplugin.rewriter import rewrite as rewrite
from jaxplugin.scaled_array import GlobalScaleWarning as GlobalScaleWarning
from jaxplugin.scaled_array import ScaledArray as ScaledArray
from jaxplugin.scaled_array import pack_fp4 as pack_fp4
from jaxplugin.scaled_array import swizzle_scale as swizzle_scale
from jaxplugin.scaled_array import unpack_fp4 as unpack_fp4
from jaxplugin.scaled_array import unswizzle_scale as unswizzle_scale
from jaxplugin.stacking import concatenate as concatenate
from jaxplugin.stacking import legacy_global_scales as legacy_global_scales
from jaxplugin.stacking import stack as stack
from jaxplugin.target import Target as Target
from jaxplugin.target import detect_target as detect_target
from jaxplugin.target import named_target as named_target
from jaxplugin.target import use_target as use_target

__version__ = "0.1.0"

__all__ = [
  "MXFP4",
  "MXFP8",
  "MXFP8_E5M2",
  "NVFP4",
  "BlockFormat",
  "Explanation",
  "GlobalScaleWarning",
  "NonFiniteError",
  "ScaledArray",
  "Target",
  "accelerate",
  "block_scaled_dot",
  "checkpoint_policies",
  "concatenate",
  "debug_checks",
  "dequantize",
  "detect_target",
  "dot_general",
  "explain",
  "info",
  "legacy_global_scales",
  "linear",
  "named_target",
  "nn",
  "pack_fp4",
  "prepare_weights",
  "quantize",
  "quantize_both",
  "rewrite",
  "scaled_dot",
  "shard",
  "shardings",
  "stack",
  "swizzle_scale",
  "unpack_fp4",
  "unprepare_weights",
  "unswizzle_scale",
  "use_target",
]


def __dir__() -> list[str]:
  """The public names, without the modules that importing them leaves here."""
  return [*__all__, "__version__"]
