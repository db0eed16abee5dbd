# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""On every named target `supports`, `explain` and lowering say the same."""

from __future__ import annotations

import functools
import itertools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import cutile
from jaxplugin.core import formats, targets
from jaxplugin.dot import backends
from jaxplugin.dot.backends import cpu, cudnn
from jaxplugin.kernels.gpu.cutile import assembler
from jaxplugin.runtime import triton_library
from jaxplugin.testing import installed

# Beside each device by its name, each gate of cuDNN from both sides.
TARGETS = tuple(
  dict(testcase_name=f"{name}_{cudnn}", name=name, cudnn=cudnn)
  for name, cudnn in (
    *((name, None) for name in targets.TARGET_NAMES),
    ("b200", "9.9"),
    ("b200", "9.12"),
    ("b200", "9.13"),
    ("h200", "9.13"),
    ("rtx5090", "9.13"),
  )
)
PAIRS = tuple(itertools.product((*formats.FORMATS, None), repeat=2))[:-1]
# Shape of lhs, rows of rhs; an odd size, tails, one row, two batch dimensions.
SHAPES = (((16, 64), 32), ((3, 96), 5), ((1, 512), 256), ((2, 3, 17, 160), 35))
OUT_DTYPES = (jnp.bfloat16, jnp.float32, jnp.float16)
OPTIONS = ({}, {"activation": "gelu"}, {"precision": "highest"})
KERNEL = "some_triton_kernel"


def kernel_call(kernels, launch, inputs, target):
  """`triton_library.call` without the seconds that a compilation takes."""
  del kernels, target
  outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in launch.outputs]
  return list(jax.ffi.ffi_call(KERNEL, tuple(outputs))(*inputs))


def cutile_call(launch, inputs):
  """`cutile._call` without a compilation."""
  output = jax.ShapeDtypeStruct(launch.output.shape, launch.output.dtype)
  return jax.ffi.ffi_call(cutile.CALL_TARGET, output)(*inputs)


def operand(format, shape):
  if format is None:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  return jax.eval_shape(
    lambda: jp.quantize(jnp.zeros(shape, jnp.float32), format)
  )


def problems():
  """Every pair of formats; shapes, dtypes and options come in turn."""
  for i, (lhs, rhs) in enumerate(PAIRS):
    shape, n = SHAPES[i % len(SHAPES)]
    options = OPTIONS[i // 2 % len(OPTIONS)]
    arguments = operand(lhs, shape), operand(rhs, (*shape[:-2], n, shape[-1]))
    dtype = OUT_DTYPES[i % len(OUT_DTYPES)]
    yield arguments, {"preferred_element_type": dtype, **options}


def lowered_as(text):
  """Which implementation a module's text shows."""
  calls = {
    KERNEL: "triton",
    cudnn.DOT_TARGET: "cudnn",
    cudnn.SWIZZLED_DOT_TARGET: "cudnn",
    cpu._DOT: "cpu",
    cutile.CALL_TARGET: "cutile",
  }
  found = {calls[name] for name in re.findall(r"custom_call @(\S+?)\(", text)}
  return ", ".join(found) or "xla"


@installed.needs("jax_triton")
class NamedTargetsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    for module, name, replacement in (
      (triton_library, "call", kernel_call),
      (cutile, "_call", cutile_call),
      (assembler, "missing", lambda: ""),
    ):
      self.enter_context(mock.patch.object(module, name, replacement))

  @parameterized.named_parameters(*TARGETS)
  @pytest.mark.full
  def test_what_is_decided_is_what_is_lowered(self, name, cudnn):
    target = targets.named_target(name, cudnn=cudnn)
    names = backends.NAMES
    for i, (arguments, options) in enumerate(problems()):
      # And one that is asked for, another one each time.
      for requested in (None, names[i % len(names)]):
        options |= {"implementation": requested}
        f = functools.partial(jp.block_scaled_dot, **options)
        with self.subTest(f"{arguments} {options}", requested=requested):
          self.check(f, arguments, requested, target)

  def check(self, f, arguments, requested, target):
    chosen = functools.partial(f, implementation=None)
    (dot,) = jp.explain(chosen, *arguments, target=target)
    implementation = requested or dot.decision.implementation
    refusal = backends.table()[implementation].supports(dot.problem, target)
    with jp.use_target(target):
      if refusal is not None:
        self.assertIsNotNone(requested)
        with self.assertRaises(NotImplementedError) as caught:
          jax.jit(f).trace(*arguments)
        self.assertIn(refusal.reason, str(caught.exception))
        return
      traced = jax.jit(f).trace(*arguments)
      lowered = traced.lower(lowering_platforms=(target.platform,))
    self.assertEqual(lowered_as(lowered.as_text()), implementation)
