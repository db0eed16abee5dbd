# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` and `dequantize`: floats to block-scaled arrays, and back.

`api` checks arguments and binds a primitive. `backends` chooses between XLA
ops, C++ kernels and Triton kernels, both for lowerings and for `explain`. All
of them compute the same bits. `integers` quantizes to formats with zero points
or minima, and by the rules of other packages.
"""

from jaxplugin.quantization.api import quantize as quantize
from jaxplugin.quantization.api import quantize_both as quantize_both
from jaxplugin.quantization.arguments import SCALE_ROUNDINGS as SCALE_ROUNDINGS
from jaxplugin.quantization.arguments import ScaleRounding as ScaleRounding
from jaxplugin.quantization.dequantization import dequantize as dequantize
from jaxplugin.quantization.operations import (
  has_four_over_six as has_four_over_six,
)
