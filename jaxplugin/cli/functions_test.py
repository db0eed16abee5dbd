# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays as the command line names them; `compile_test` has functions."""

import argparse
import importlib
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.cli import functions
from jaxplugin.core import formats
from jaxplugin.testing import folders

# JAX lacks these dtypes, or has other names for them.
NUMPY_NAMES = ("f4", "i4", "float", "int", "half", "object", "longdouble")


class ArgumentTest(parameterized.TestCase):
  @parameterized.parameters(
    ("bfloat16[16,4096]", (16, 4096), jnp.bfloat16),
    ("f32[]", (), jnp.float32),
    ("s32[7]", (7,), jnp.int32),
    ("f8e4m3fn[2,3]", (2, 3), jnp.float8_e4m3fn),
    ("u4[2]", (2,), jnp.uint4),
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
    *((f"{name}[2]", "write it as") for name in NUMPY_NAMES),
    ("float64[2]", "got float64 without JAX_ENABLE_X64. .* or pass float32"),
    ("s64[2]", "got int64 without JAX_ENABLE_X64. .* or pass int32"),
    ("complex128[2]", "got complex128 without .* or pass complex64"),
    ("nvfp4[8,60]", "multiple of 16.*60"),
  )
  def test_what_is_none_is_refused(self, text, pattern):
    with self.assertRaisesRegex(argparse.ArgumentTypeError, pattern):
      functions.argument(text)


class FunctionTest(parameterized.TestCase):
  @parameterized.parameters(
    ("json:lods", "^json:lods: json has no lods; it has loads"),
    ("json.decoder:JSONDecoder.qq", "^.*: json.decoder.JSONDecoder has no qq$"),
    ("no_module:f", "^no_module:f: no module named no_module; run in the fol"),
    ("json:__name__", "^json:__name__ must be a function, got str; define a"),
  )
  def test_wrong_name_is_refused(self, text, pattern):
    with self.assertRaisesRegex(ValueError, pattern):
      functions.function(text)

  def test_error_of_the_module_or_function_names_its_line(self):
    directory = folders.new(self)
    self.enter_context(
      mock.patch.object(sys, "path", [str(directory), *sys.path])
    )
    self.addCleanup(importlib.invalidate_caches)
    for i, (content, args, error) in enumerate(
      (
        ("f(", (), "SyntaxError: '\\(' was never closed \\(.*.py:1\\)$"),
        ("import no_module", (), "ModuleNotFoundError: .*.py:1\\)$"),
        ("raise KeyError('x')", (), "KeyError: 'x' \\(.*.py:1\\)$"),
        ("\nexit(3)", (), "SystemExit: 3 \\(.*.py:2\\)$"),
        ("def f(x): pass", (), "f has the arguments \\(x\\), got 0; pass one"),
        ("def f(): pass", (1, 2), "has the arguments \\(\\), got 2; pass one"),
        (
          "def f(x: int) -> int: pass",
          (),
          "arguments \\(x\\), got 0; pass one",
        ),
        ("f = max", (), "TypeError: max expected at least 1 argument"),
        ("def f(x):\n  return x.y", (1,), "AttributeError: .*.py:2\\)$"),
        (
          "import jax.numpy as jnp\ndef f(x):\n  return jnp.dot(x, 'x')",
          (1,),
          "TypeError: .*.py:3\\)$",
        ),
      )
    ):
      (directory / f"written_{i}.py").write_text(content)
      importlib.invalidate_caches()
      with self.subTest(content), self.assertRaisesRegex(ValueError, error):
        functions.function(f"written_{i}:f")(*args)
