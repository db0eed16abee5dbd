# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Launches of the quantize kernels, and expected results, for their tests.

`jp.quantize` itself is tested against NumPy. An access outside the arrays is an
error (`interpret`).
"""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.kernels import architectures
from jaxplugin.kernels.gpu.quantization import (
  quantize,
  quantize_config,
  quantize_plans,
)
from jaxplugin.testing.kernels import gpu_operands

BF16 = np.dtype(ml_dtypes.bfloat16)
SM_90 = architectures.by_name("sm_90")
FORMAT_NAMES = tuple(format.name for format in formats.FORMATS)


def rows_of(rows, k, format="nvfp4", **options):
  """Returns the description of one dense matrix, quantized along its rows."""
  fields = {"batch": 1, "k_is_minor": True} | options
  return quantize_config.Rows(rows=rows, k=k, format=format, **fields)


def with_given_scale(rows, k, format, **options):
  """Returns `rows_of`, with a given global scale if the format has one."""
  kind = "given" if format == "nvfp4" else "none"
  return rows_of(rows, k, format, global_scale=kind, **options)


def run(launches, x, **arrays):
  """Returns the arrays of launches of the quantize kernels, by name."""
  arrays = {"x": x, **arrays}
  return gpu_operands.run_launches(quantize.KERNELS, launches, arrays)


def run_quantize(
  x,
  format_name,
  *,
  global_scale=None,
  config=None,
  k_axis=2,
  check_races=True,
  **fields,
):
  """Returns values and scale, uint8, with the axes of x.

  Args:
    x: array [batch, rows, k], or [batch, k, rows] if `k_axis` is 1.
    format_name: name of the format.
    global_scale: array of one number, or None.
    config: tiles; None for the default.
    k_axis: 2 or 1.
    check_races: see `interpret.launch`.
    **fields: other fields of `quantize_config.Rows`.
  """
  order = {2: (0, 1, 2), 1: (0, 2, 1)}[k_axis]
  batch, rows, k = (x.shape[axis] for axis in order)
  described = rows_of(
    rows,
    k,
    format_name,
    batch=batch,
    k_is_minor=k_axis == 2,
    packed_in_place=True,
    global_scale="none" if global_scale is None else "given",
    **fields,
  )
  if config is None:
    config = quantize_config.default_config(described, SM_90)
  launch = quantize_plans.quantize_launch(described, config, 0)
  strides = tuple(x.strides[axis] // x.itemsize for axis in order)
  constants = dict(launch.constexprs)
  constants["TILE"] = dataclasses.replace(constants["TILE"], strides=strides)
  launch = dataclasses.replace(launch, constexprs=tuple(constants.items()))
  arrays = gpu_operands.run_launches(
    quantize.KERNELS,
    [launch],
    {"x": x, "global_scale": global_scale},
    check_races=check_races,
  )
  return arrays["values"], arrays["scale"]


def expected(x, format_name, *, axis=-1, global_scale=None, **kwargs):
  """(values, scale) of `jp.quantize`, as bytes, FP4 packed along `axis`."""
  if global_scale is not None:
    kwargs["global_scale"] = np.asarray(global_scale).reshape(())
  quantized = jp.quantize(
    jnp.asarray(x), formats.by_name(format_name), axis=axis, **kwargs
  )
  leaves = quantized.values, quantized.scale
  return tuple(np.asarray(leaf).view(np.uint8) for leaf in leaves)
