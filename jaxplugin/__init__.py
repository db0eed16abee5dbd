# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled matrix multiplication for JAX.

Formats: MXFP8, MXFP6, MXFP4, MXINT8, NVFP4, and FP8, INT8 and INT4 in blocks.

import jaxplugin as jp

x_q = jp.quantize(x, jp.NVFP4)
w_q = jp.quantize(w, jp.NVFP4)
y = jp.block_scaled_dot(x_q, w_q, preferred_element_type=jnp.bfloat16)
"""

from jaxplugin.jaxext import jax_version as _jax_version  # noqa: F401

# isort: split
from jaxplugin import backends as backends
from jaxplugin import checkpoints as checkpoints
from jaxplugin import nn as nn
from jaxplugin import repro as repro
from jaxplugin import training as training
from jaxplugin.arrays.layouts import pack_fp4 as pack_fp4
from jaxplugin.arrays.layouts import swizzle_scale as swizzle_scale
from jaxplugin.arrays.layouts import unpack_fp4 as unpack_fp4
from jaxplugin.arrays.layouts import unswizzle_scale as unswizzle_scale
from jaxplugin.arrays.placement import shard as shard
from jaxplugin.arrays.placement import shardings as shardings
from jaxplugin.arrays.preparation import prepare_weights as prepare_weights
from jaxplugin.arrays.preparation import unprepare_weights as unprepare_weights
from jaxplugin.arrays.quantized_weight import QuantizedWeight as QuantizedWeight
from jaxplugin.arrays.scaled_array import ScaledArray as ScaledArray
from jaxplugin.arrays.stacking import concatenate as concatenate
from jaxplugin.arrays.stacking import (
  legacy_global_scales as legacy_global_scales,
)
from jaxplugin.arrays.stacking import stack as stack
from jaxplugin.arrays.validation import GlobalScaleWarning as GlobalScaleWarning
from jaxplugin.backends import Backend as Backend
from jaxplugin.backends import register_backend as register_backend
from jaxplugin.core import error_context as _error_context
from jaxplugin.core.call_options import FallbackError as FallbackError
from jaxplugin.core.call_options import FallbackWarning as FallbackWarning
from jaxplugin.core.call_options import options as options
from jaxplugin.core.decisions import RefusedError as RefusedError
from jaxplugin.core.error_context import (
  NotQuantizedWarning as NotQuantizedWarning,
)
from jaxplugin.core.formats import FP8_1X128 as FP8_1X128
from jaxplugin.core.formats import FP8_1X128_E8M0 as FP8_1X128_E8M0
from jaxplugin.core.formats import FP8_128X128 as FP8_128X128
from jaxplugin.core.formats import FP8_128X128_E8M0 as FP8_128X128_E8M0
from jaxplugin.core.formats import FP8_ROW as FP8_ROW
from jaxplugin.core.formats import INT4_32 as INT4_32
from jaxplugin.core.formats import INT4_128 as INT4_128
from jaxplugin.core.formats import INT4_128_BF16 as INT4_128_BF16
from jaxplugin.core.formats import INT8_32 as INT8_32
from jaxplugin.core.formats import INT8_ROW as INT8_ROW
from jaxplugin.core.formats import MXFP4 as MXFP4
from jaxplugin.core.formats import MXFP6_E2M3 as MXFP6_E2M3
from jaxplugin.core.formats import MXFP6_E3M2 as MXFP6_E3M2
from jaxplugin.core.formats import MXFP8 as MXFP8
from jaxplugin.core.formats import MXFP8_E5M2 as MXFP8_E5M2
from jaxplugin.core.formats import MXINT8 as MXINT8
from jaxplugin.core.formats import NF4 as NF4
from jaxplugin.core.formats import NVFP4 as NVFP4
from jaxplugin.core.formats import UINT4_32_MIN as UINT4_32_MIN
from jaxplugin.core.formats import UINT4_128 as UINT4_128
from jaxplugin.core.formats import UINT4_128_BF16 as UINT4_128_BF16
from jaxplugin.core.formats import BlockFormat as BlockFormat
from jaxplugin.core.targets import Target as Target
from jaxplugin.core.targets import detect_target as detect_target
from jaxplugin.core.targets import named_target as named_target
from jaxplugin.core.targets import use_target as use_target
from jaxplugin.dot.api import block_scaled_dot as block_scaled_dot
from jaxplugin.dot.guards import NonFiniteError as NonFiniteError
from jaxplugin.dot.guards import debug_checks as debug_checks
from jaxplugin.dropin.linear import linear as linear
from jaxplugin.explanation.diagnostics import explain as explain
from jaxplugin.explanation.information import info as info
from jaxplugin.explanation.report import Explanation as Explanation
from jaxplugin.exports.api import export as export
from jaxplugin.nn import scaled_dot as scaled_dot
from jaxplugin.params.conversion import Parameter as Parameter
from jaxplugin.params.conversion import QuantizationReport as QuantizationReport
from jaxplugin.params.conversion import quantize_params as quantize_params
from jaxplugin.params.flax_states import (
  register_flax_serialization as register_flax_serialization,
)
from jaxplugin.quantization.api import quantize as quantize
from jaxplugin.quantization.api import quantize_both as quantize_both
from jaxplugin.quantization.dequantization import dequantize as dequantize
from jaxplugin.quantization.out_format import OutFormat as OutFormat
from jaxplugin.ragged.api import ragged_dot as ragged_dot
from jaxplugin.ragged.general import align_groups as align_groups
from jaxplugin.ragged.general import ragged_dot_general as ragged_dot_general
from jaxplugin.rewriting.acceleration import accelerate as accelerate
from jaxplugin.rewriting.acceptance import accept_quantized as accept_quantized
from jaxplugin.rewriting.quantized_dots import quantize_dots as quantize_dots
from jaxplugin.rewriting.sites import Site as Site
from jaxplugin.stablehlo.modules import ModuleError as ModuleError
from jaxplugin.stablehlo.rewriter import RewriteWarning as RewriteWarning
from jaxplugin.stablehlo.rewriter import rewrite as rewrite
from jaxplugin.tables.records import TableError as TableError
from jaxplugin.tables.records import TableWarning as TableWarning
from jaxplugin.tables.resolution import TablesDifferError as TablesDifferError
from jaxplugin.tables.resolution import tuning as tuning
from jaxplugin.tables.resolution import tuning_digest as tuning_digest
from jaxplugin.training import checkpoint_policies as checkpoint_policies
from jaxplugin.training.api import dot_general as dot_general
from jaxplugin.training.quantized_operand import (
  QuantizedOperand as QuantizedOperand,
)
from jaxplugin.training.quantized_operand import (
  quantize_operand as quantize_operand,
)

__version__ = "0.1.0"

__all__ = [
  "FP8_1X128",
  "FP8_1X128_E8M0",
  "FP8_128X128",
  "FP8_128X128_E8M0",
  "FP8_ROW",
  "INT4_32",
  "INT4_128",
  "INT4_128_BF16",
  "INT8_32",
  "INT8_ROW",
  "MXFP4",
  "MXFP6_E2M3",
  "MXFP6_E3M2",
  "MXFP8",
  "MXFP8_E5M2",
  "MXINT8",
  "NF4",
  "NVFP4",
  "UINT4_32_MIN",
  "UINT4_128",
  "UINT4_128_BF16",
  "Backend",
  "BlockFormat",
  "Explanation",
  "FallbackError",
  "FallbackWarning",
  "GlobalScaleWarning",
  "ModuleError",
  "NonFiniteError",
  "NotQuantizedWarning",
  "OutFormat",
  "Parameter",
  "QuantizationReport",
  "QuantizedOperand",
  "QuantizedWeight",
  "RefusedError",
  "RewriteWarning",
  "ScaledArray",
  "Site",
  "TableError",
  "TableWarning",
  "TablesDifferError",
  "Target",
  "accelerate",
  "accept_quantized",
  "align_groups",
  "backends",
  "block_scaled_dot",
  "checkpoint_policies",
  "checkpoints",
  "concatenate",
  "debug_checks",
  "dequantize",
  "detect_target",
  "dot_general",
  "explain",
  "export",
  "info",
  "legacy_global_scales",
  "linear",
  "named_target",
  "nn",
  "options",
  "pack_fp4",
  "prepare_weights",
  "quantize",
  "quantize_both",
  "quantize_dots",
  "quantize_operand",
  "quantize_params",
  "ragged_dot",
  "ragged_dot_general",
  "register_backend",
  "register_flax_serialization",
  "repro",
  "rewrite",
  "scaled_dot",
  "shard",
  "shardings",
  "stack",
  "swizzle_scale",
  "training",
  "tuning",
  "tuning_digest",
  "unpack_fp4",
  "unprepare_weights",
  "unswizzle_scale",
  "use_target",
]

_error_context.public_module(__name__, [*__all__, "__version__"])
