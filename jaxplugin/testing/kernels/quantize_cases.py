# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Launches of the quantize kernels, and expected results, for their tests.

`jp.quantize` itself is tested against NumPy. An access outside the arrays is an
error (`interpret`). Outputs are filled with a value that no test expects
everywhere, so that a test finds bytes that the kernel does not write.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxplugin as jp
import jaxplugin.kernels.formats
from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.kernels import architectures
from jaxplugin.kernels.gpu.quantization import quantize
from jaxplugin.kernels.gpu.quantization import quantize_config
from jaxplugin.testing.interpreter import interpret

BF16 = np.dtype(ml_dtypes.bfloat16)
UNWRITTEN = 0xA5
SM_90 = architectures.by_name("sm_90")
FORMAT_NAMES = tuple(format.name for format in formats.FORMATS)


def rows_of(rows, k, format="nvfp4", **options):
  """Returns the description of one dense matrix, quantized along its rows."""
  fields = {"batch": 1, "k_is_minor": True} | options
  return quantize_config.Rows(rows=rows, k=k, format=format, **fields)


def element_strides(x):
  return tuple(stride // x.itemsize for stride in x.strides)


def run_quantize(
  x,
  format_name,
  *,
  global_scale=None,
  scale_rounding="up",
  swizzled=False,
  pads_values=False,
  config=None,
  k_axis=2,
  check_races=True,
  options=quantize_config.NO_OPTIONS,
  key=None,
  maxima=None,
  computed_scale=None,
):
  """Values and scale, uint8, of x[batch, rows, k], the axis of k given.

  Both have the axes of `x`; a swizzled scale is [batch, rows, k]. With maxima
  the kernel writes the global scale of what is given as one.
  """
  order = {2: (0, 1, 2), 1: (0, 2, 1)}[k_axis]
  batch, rows, k = (x.shape[axis] for axis in order)

  def strides_of(array):
    return tuple(element_strides(array)[axis] for axis in order)

  facts = jp.kernels.formats.by_name(format_name)
  grid_rows, grid_k = quantize_config.covered(
    rows, k, format_name, swizzled=swizzled
  )
  if config is None:
    config = quantize_config.default_config(
      format_name,
      SM_90,
      grid_rows,
      grid_k,
      k_is_contiguous=k_axis == 2,
      options=options,
    )
  stored_rows = grid_rows if pads_values else rows
  shape = (batch, stored_rows, -(-k // facts.values_per_byte))
  values = np.full([shape[i] for i in order], UNWRITTEN, np.uint8)
  shape = (batch, rows, -(-k // facts.block_size))
  if swizzled:
    shape = (batch, *layouts.swizzled_shape(shape[1:]))
    scale = np.full(shape, UNWRITTEN, np.uint8)
    scale_strides = (shape[1] * shape[2], 0, 0)
  else:
    scale = np.full([shape[i] for i in order], UNWRITTEN, np.uint8)
    scale_strides = strides_of(scale)
  interpret.launch(
    quantize.quantize,
    quantize_config.launch_grid(config, batch, grid_rows, grid_k),
    x,
    global_scale,
    key,
    computed_scale,
    values,
    scale,
    rows,
    k,
    grid_rows,
    grid_k,
    strides_of(x),
    tuple(((0, s),) for s in strides_of(np.empty(x.shape, np.uint8))),
    strides_of(values),
    scale_strides,
    check_races=check_races,
    **quantize_config.constexprs(
      config,
      format_name,
      scale_rounding=scale_rounding,
      swizzled=swizzled,
      pads_values=pads_values,
      options=options,
      maxima=maxima,
    ),
  )
  return values, scale


def expected(x, format_name, *, axis=-1, global_scale=None, **kwargs):
  """(values, scale) of `jp.quantize`, as bytes, FP4 packed along `axis`."""
  if global_scale is not None:
    kwargs["global_scale"] = jnp.asarray(global_scale).reshape(())
  quantized = jp.quantize(
    jnp.asarray(x), formats.by_name(format_name), axis=axis, **kwargs
  )
  values = jax.lax.bitcast_convert_type(quantized.values, jnp.uint8)
  return np.asarray(values), np.asarray(quantized.scale).view(np.uint8)
