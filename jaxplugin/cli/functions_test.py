# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays as the command line names them; `compile_test` has functions."""

import argparse

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.cli import functions
from jaxplugin.core import formats


class ArgumentTest(parameterized.TestCase):
  @parameterized.parameters(
    ("bfloat16[16,4096]", (16, 4096), jnp.bfloat16),
    ("f32[]", (), jnp.float32),
    ("s32[7]", (7,), jnp.int32),
    ("f8e4m3fn[2,3]", (2, 3), jnp.float8_e4m3fn),
  )
  def test_arrays(self, text, shape, dtype):
    spec = functions.argument(text)
    self.assertEqual((spec.shape, spec.dtype), (shape, dtype))

  @parameterized.parameters(*formats.KNOWN)
  @pytest.mark.sample(1)
  def test_format_is_what_quantize_makes(self, format):
    made = functions.argument(f"{format}[8,64]")
    self.assertIsInstance(made, jp.ScaledArray)
    x_q = jp.quantize(jnp.ones((8, 64)), format)
    expected = [(x.shape, x.dtype) for x in jax.tree.leaves(x_q)]
    found = [(x.shape, x.dtype) for x in jax.tree.leaves(made)]
    self.assertEqual(found, expected)

  @parameterized.parameters(
    ("bfloat17[3]", "'bfloat17.3.' must be an array; write it as"),
    ("float32", "write it as bfloat16.16,4096., or with a format"),
    ("float32[3,]", "write it as"),
    ("float32[-3]", "write it as"),
    ("nvfp4[8,60]", "multiple of 16.*60"),
  )
  def test_what_is_none_is_refused(self, text, pattern):
    with self.assertRaisesRegex(argparse.ArgumentTypeError, pattern):
      functions.argument(text)


class FunctionTest(parameterized.TestCase):
  @parameterized.parameters(
    ("json:lods", "^json:lods: json has no lods; it has loads"),
    ("json.decoder:JSONDecoder.qq", "^.*: json.decoder.JSONDecoder has no qq$"),
    ("no_module:f", "^no_module:f: no module named no_module$"),
    ("json:__name__", "^json:__name__ must be a function, got str$"),
  )
  def test_wrong_name_is_refused(self, text, pattern):
    with self.assertRaisesRegex(ValueError, pattern):
      functions.function(text)
