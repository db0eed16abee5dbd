# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of docs/concepts/formats.md has the numbers of the formats."""

import fractions
import pathlib
import re

import jax
import numpy as np
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.core import formats

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs/concepts/formats.md"
ROW = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.M)


def measured(names):
  """Returns bits a value with its scales, and the SQNR in dB, of formats."""
  x = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)

  @jax.jit
  def quantized(x):
    found = {name: jp.quantize(x, getattr(jp, name)) for name in names}
    return found, jax.tree.map(jp.dequantize, found, is_leaf=is_array)

  is_array = lambda x: isinstance(x, jp.ScaledArray)
  arrays, values = quantized(x)
  exact = x.astype(np.float64)
  for name, x_q in arrays.items():
    error = np.asarray(values[name], np.float64) - exact
    sqnr = 10 * np.log10((exact**2).sum() / (error**2).sum())
    yield name, (f"{8 * x_q.nbytes / x.size:.2f}", f"{sqnr:.1f} dB")


class FormatsPageTest(absltest.TestCase):
  def test_table_has_each_format_and_its_numbers(self):
    rows = {
      name: row.split(" | ") for name, row in ROW.findall(PAGE.read_text())
    }
    self.assertEqual(
      sorted(rows), sorted(format.name.upper() for format in formats.NAMED)
    )
    found = dict(measured(rows))
    for name, (_, largest, _, block, bits, sqnr, _) in rows.items():
      with self.subTest(name):
        format = getattr(jp, name)
        size = str(format.block_size or "a row")
        if format.is_square:
          size = f"{size} x {size}"
        self.assertEqual(block, size)
        found_largest = format.values_encoding.max + format.code_offset
        if format.codebook is not None:
          found_largest = max(map(abs, format.codebook))
        self.assertEqual(fractions.Fraction(largest), found_largest)
        self.assertEqual((bits, sqnr), found[name])
