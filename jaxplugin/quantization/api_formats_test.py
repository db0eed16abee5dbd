# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes to the formats of checkpoints and compares with NumPy."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats

NEW = formats.NAMED[len(formats.KNOWN) :]
INTEGERS = tuple(f for f in NEW if f.is_integer)
SHAPES = ((130, 576), (2, 7, 200), (1, 2), (256, 128), (5, 1))


def oracle(x, format):
  """Returns codes as f64, f64 scales, and their product, by NumPy.

  x is in blocks along the last axis. All divisions are in f32, like
  `jp.quantize`.
  """
  x = np.asarray(x, np.float32)
  *lead, n, k = x.shape
  size, rows = format.along(k).block_size, format.block_rows
  largest = np.float32(format.values_encoding.max)
  padded = np.pad(x, [(0, 0)] * len(lead) + [(0, -n % rows), (0, -k % size)])
  blocks = padded.reshape(*lead, -1, rows, padded.shape[-1] // size, size)
  amax = np.abs(blocks).max((-1, -3), keepdims=True)
  if format.scale_is_power_of_two:
    exponent = np.ceil(
      np.log2(
        np.float64(amax) / largest,
        where=amax > 0,
        out=np.full(amax.shape, -127.0),
      )
    )
    scale = 2.0 ** np.maximum(exponent, -127)
  else:
    ideal = np.maximum(
      amax / largest,
      np.finfo(format.scale_dtype).tiny
      if format.scale_dtype == np.float32
      else 2.0**-24,
    )
    scale = ideal.astype(np.float32).astype(format.scale_dtype)
    scale = np.where(amax > 0, scale.astype(np.float32), 0)
  unit = 2.0**-format.fraction_bits
  with np.errstate(divide="ignore", invalid="ignore"):
    quotient = (blocks / scale.astype(np.float32)).astype(np.float32)
  quotient = np.nan_to_num(quotient) / unit
  quotient = np.clip(quotient, -largest / unit, largest / unit)
  if format.is_integer:
    codes = np.rint(quotient).astype(np.float64)
  else:
    codes = quotient.astype(np.float32).astype(format.values_dtype)
    codes = codes.astype(np.float64)
  values = (codes * unit * scale.astype(np.float64)).reshape(padded.shape)
  codes = codes.reshape(padded.shape)[..., :n, :k]
  return codes, scale[..., 0, :, 0], values[..., :n, :k]


class FormatsOfCheckpointsTest(parameterized.TestCase):
  @parameterized.product(format=NEW, shape=SHAPES)
  def test_bits_are_those_of_numpy(self, format, shape):
    if not format.may_be_short and shape[-1] % format.block_size:
      shape = (*shape[:-1], 2 * format.block_size)
    rng = np.random.default_rng(len(shape) + shape[-1])
    x = rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))
    x = x.astype(np.float32)
    x[..., :1, :] = 0
    codes, scale, values = oracle(x, format)
    found = jp.quantize(x, format)
    self.assertEqual(found.shape, shape)
    np.testing.assert_array_equal(
      np.asarray(found.unpack().values).astype(np.float64), codes
    )
    np.testing.assert_array_equal(
      np.asarray(found.scale).astype(np.float64), scale.astype(np.float64)
    )
    np.testing.assert_array_equal(found.dequantize(), values.astype(np.float32))


if __name__ == "__main__":
  absltest.main()
