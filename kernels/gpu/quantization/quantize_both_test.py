# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernel that quantizes both ways gives the bits of `jp.quantize`."""

import numpy as np
import pytest
from absl.testing import parameterized
from jaxplugin.kernels.gpu.quantization import quantize_config, quantize_plans

from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import quantize_cases

expected = quantize_cases.expected
setUpModule = interpret.skip_unless_supported


class BothTest(parameterized.TestCase):
  @parameterized.product(
    format_name=quantize_cases.FORMAT_NAMES,
    case=(
      # x, and the multiple that columns are padded to. In the last ones rows
      # and columns have tails, and more than a block of zeros follows the rows.
      ((1, 64, 64), np.float32),
      ((2, 96, 160), quantize_cases.BF16),
      ((1, 1, 1), np.float32),
      ((2, 33, 77), np.float32),
      ((1, 70, 128), np.float32),
    ),
    # Whether rows are the last dimension of their result, and packed values
    # too.
    transposed=((False, False), (False, True), (True, True)),
  )
  @pytest.mark.sample(3)
  def test_rows_and_columns_are_quantized_from_one_read(
    self, format_name, case, transposed
  ):
    shape, dtype = case
    batch, rows, columns = shape
    x = np.random.default_rng(11).standard_normal(shape).astype(dtype)
    if rows > 40:
      x[0, 3, 7] = np.nan
      x[0, 40, 60] = 1000
    k_t, k = rows + -rows % 32 + 32 * (rows % 32 > 0), columns + -columns % 32
    global_scale, arrays = "none", {}
    if format_name == "nvfp4":  # one for each result
      global_scale = "given"
      arrays = {
        name: np.array([number], np.float32)
        for name, number in (("global_scale", 0.4), ("global_scale_t", 0.07))
      }
    matrices = quantize_config.Matrices(
      batch=batch,
      rows=rows,
      columns=columns,
      k=k,
      k_t=k_t,
      is_transposed=transposed[0],
      format=format_name,
      global_scale=global_scale,
      packed_in_place=not transposed[1],
    )
    launches = quantize_plans.plan(matrices, quantize_cases.SM_90)
    found = quantize_cases.run(launches, x, **arrays)
    along_k = np.pad(x, ((0, 0), (0, 0), (0, k - columns)))
    wanted = expected(
      along_k, format_name, global_scale=arrays.get("global_scale")
    )
    np.testing.assert_array_equal(found["values"], wanted[0])
    np.testing.assert_array_equal(found["scale"], wanted[1])
    along_rows = np.pad(x, ((0, 0), (0, k_t - rows), (0, 0)))
    values_t, scale_t = expected(
      along_rows,
      format_name,
      axis=1,
      global_scale=arrays.get("global_scale_t"),
    )
    is_packed = values_t.shape[1] < k_t
    if transposed[0] or (is_packed and transposed[1]):
      values_t = np.swapaxes(values_t, 1, 2)
    if transposed[0]:
      scale_t = np.swapaxes(scale_t, 1, 2)
    np.testing.assert_array_equal(found["values_t"], values_t)
    np.testing.assert_array_equal(found["scale_t"], scale_t)
