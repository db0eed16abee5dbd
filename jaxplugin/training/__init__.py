# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Recipes, which quantize the matmuls of a training step.

`jp.dot_general`, `jp.quantize_dots`, `jp.quantize_operand` and
`ragged_dot_general` take a recipe. `accumulate` sums gradients of microbatches
over devices once. `jp.checkpoint_policies` chooses which residuals
`jax.checkpoint` saves.
"""

from jaxplugin.core import error_context as _error_context
from jaxplugin.training.accumulation import accumulate as accumulate
from jaxplugin.training.quantized_operand import primals as primals
from jaxplugin.training.quantized_operand import promote_dtype as promote_dtype
from jaxplugin.training.quantized_operand import with_primals as with_primals
from jaxplugin.training.ragged import ragged_dot_general as ragged_dot_general
from jaxplugin.training.recipes import FP8_BLOCK_RECIPE as FP8_BLOCK_RECIPE
from jaxplugin.training.recipes import INT8_RECIPE as INT8_RECIPE
from jaxplugin.training.recipes import MXFP4_RECIPE as MXFP4_RECIPE
from jaxplugin.training.recipes import MXFP8_RECIPE as MXFP8_RECIPE
from jaxplugin.training.recipes import NVFP4_RECIPE as NVFP4_RECIPE
from jaxplugin.training.recipes import Recipe as Recipe

__all__ = [
  "FP8_BLOCK_RECIPE",
  "INT8_RECIPE",
  "MXFP4_RECIPE",
  "MXFP8_RECIPE",
  "NVFP4_RECIPE",
  "Recipe",
  "accumulate",
  "primals",
  "promote_dtype",
  "ragged_dot_general",
  "with_primals",
]

_error_context.public_module(__name__, __all__)
