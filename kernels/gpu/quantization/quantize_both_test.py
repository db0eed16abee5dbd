# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernel that quantizes both ways gives the bits of `jp.quantize`."""

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jaxplugin.kernels.gpu.quantization import quantize
from jaxplugin.kernels.gpu.quantization import quantize_config

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.kernels import architectures
from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import quantize_cases

BF16 = quantize_cases.BF16
FORMAT_NAMES = quantize_cases.FORMAT_NAMES
UNWRITTEN = quantize_cases.UNWRITTEN
element_strides = quantize_cases.element_strides
expected = quantize_cases.expected
setUpModule = interpret.skip_unless_supported

SM_80 = architectures.by_name("sm_80")


def run_both(
  x,
  format_name,
  *,
  global_scales=(None, None),
  padded=(None, None),
  transposed=True,
  values_transposed=True,
  swizzled=False,
  config=None,
  computed_scales=(None, None),
  maxima=(None, None),
):
  """(values, scale, values_t, scale_t), uint8, of x[batch, rows, columns].

  `padded` are rows and columns with the zeros that are quantized after them.
  """
  batch, rows, columns = x.shape
  k_t, k = (p or size for p, size in zip(padded, (rows, columns), strict=True))
  facts = formats.by_name(format_name).facts
  outputs = []
  for n, size, is_last, has_values_last in (
    (rows, k, True, True),
    (columns, k_t, transposed, values_transposed),
  ):
    stored, blocks = size // facts.values_per_byte, size // facts.block_size
    shape = (batch, n, stored) if has_values_last else (batch, stored, n)
    scale_shape = (batch, n, blocks) if is_last else (batch, blocks, n)
    if swizzled:
      scale_shape = (batch, *layouts.swizzled_shape(scale_shape[1:]))
    outputs += [np.full(s, UNWRITTEN, np.uint8) for s in (shape, scale_shape)]
  grid_sizes = quantize_config.covered_by_both(
    k_t, k, format_name, swizzled=swizzled
  )
  if config is None:
    config = quantize_config.default_config(
      format_name, SM_80, *grid_sizes, both=True
    )
  made, made_t = (
    quantize_config.constexprs(
      config, format_name, swizzled=swizzled, maxima=each
    )
    for each in maxima
  )
  interpret.launch(
    quantize.quantize_both,
    quantize_config.launch_grid(config, batch, *grid_sizes),
    x,
    *global_scales,
    None,
    None,
    *computed_scales,
    *outputs,
    rows,
    columns,
    k,
    k_t,
    *grid_sizes,
    element_strides(x),
    (),
    (),
    **made,
    QUANTIZED_T=made_t["QUANTIZED"],
    TRANSPOSED=transposed,
    VALUES_TRANSPOSED=values_transposed,
  )
  return outputs


class BothTest(parameterized.TestCase):
  @parameterized.product(
    format_name=FORMAT_NAMES,
    case=(
      ((1, 64, 64), False, np.float32),
      ((2, 96, 160), False, BF16),
      ((2, 96, 160), True, np.float32),
    ),
  )
  @pytest.mark.sample(1)
  def test_rows_and_columns_are_quantized_from_one_read(
    self, format_name, case
  ):
    shape, swizzled, dtype = case
    rng = np.random.default_rng(11)
    base = rng.standard_normal((shape[0], shape[1], shape[2] + 5)).astype(dtype)
    x = base[:, :, : shape[2]]
    x[0, 3, 7] = np.nan
    x[0, 40, 60] = 1000
    ones = [None, None]
    if format_name == "nvfp4":  # one for each result
      ones = [np.array([g], np.float32) for g in (0.4, 0.07)]
    wanted = expected(x, format_name, global_scale=ones[0])
    x_t = np.swapaxes(x, 1, 2)
    wanted += expected(x_t, format_name, global_scale=ones[1])
    if swizzled:
      wanted = tuple(
        np.asarray(layouts.swizzle_scale(jnp.asarray(part))) if i % 2
        else part
        for i, part in enumerate(wanted)
      )  # fmt: skip
    actual = run_both(x, format_name, global_scales=ones, swizzled=swizzled)
    for got, part in zip(actual, wanted, strict=True):
      np.testing.assert_array_equal(got, part)

  @parameterized.product(
    format_name=FORMAT_NAMES, shape=((1, 1, 1), (2, 33, 77), (1, 70, 128)),
    transposed=((False, False), (False, True), (True, True)),
  )  # fmt: skip
  @pytest.mark.sample(1)
  def test_tails_are_padded_with_zeros_that_no_other_axis_sees(
    self, format_name, shape, transposed
  ):
    x = np.random.default_rng(13).standard_normal(shape).astype(np.float32)
    one = np.array([0.3], np.float32) if format_name == "nvfp4" else None
    _, rows, columns = shape
    # Also more than a block of zeros.
    k_t, k = rows + -rows % 32 + 32, columns + -columns % 32
    along_k = np.pad(x, ((0, 0), (0, 0), (0, k - columns)))
    along_rows = np.pad(x, ((0, 0), (0, k_t - rows), (0, 0)))
    wanted = expected(along_k, format_name, global_scale=one)
    values_t, scale_t = expected(
      along_rows, format_name, axis=1, global_scale=one
    )
    transposed, values_transposed = transposed
    if values_transposed:
      values_t = np.swapaxes(values_t, 1, 2)
    if transposed:
      scale_t = np.swapaxes(scale_t, 1, 2)
    actual = run_both(
      x,
      format_name,
      global_scales=(one, one),
      padded=(k_t, k),
      transposed=transposed,
      values_transposed=values_transposed,
    )
    for got, part in zip(actual, (*wanted, values_t, scale_t), strict=True):
      np.testing.assert_array_equal(got, part)


if __name__ == "__main__":
  absltest.main()
