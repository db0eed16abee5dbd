# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of kernels that are compiled without a GPU."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats, targets
from jaxplugin.dot.backends import triton
from jaxplugin.lab.compilation import triton_dots
from jaxplugin.operation import triton_launches
from jaxplugin.testing import contract, dot_problems, installed
from jaxplugin.testing.dot_suite import dot_cases

needs_triton = installed.needs_triton


def make_problem(lhs, rhs, **changes):
  fields = dict(m=256, n=512, k=4096, out_dtype=formats.BF16) | changes
  return dot_problems.problem(lhs, rhs, **fields)


@needs_triton
class CompileDotTest(parameterized.TestCase):
  @parameterized.parameters(
    # PTX ISA, "tcgen05.mma"; CDNA 3 ISA.
    ("b200", jp.NVFP4, jp.NVFP4, "kind::mxf4nvf4.block_scale.block16"),
    ("h200", jp.MXFP8, jp.MXFP8, "wgmma.mma_async"),
    ("mi300x", jp.MXFP8, jp.MXFP4, "v_mfma_f32"),
  )
  @pytest.mark.sample(1)
  def test_report_names_the_matrix_instruction(self, name, lhs, rhs, expected):
    target = jp.named_target(name)
    compiled = triton_dots.compile_dot(make_problem(lhs, rhs), target)
    text = str(compiled)
    self.assertIn(f"{lhs} x {rhs} -> bfloat16, batch=1 m=256", text)
    self.assertRegex(text, rf"matrix instructions: \d+ of \S*{expected}")
    self.assertIn(", 0 B spilled", text)
    self.assertRegex(text, r"main loop: \d+ instructions")

  def test_figures_of_json_and_files_are_those_of_the_report(self):
    problem = make_problem(None, jp.NVFP4, m=1, has_bias=True)
    compiled = triton_dots.compile_dot(problem, jp.named_target("h200"))
    text, figures = str(compiled), json.loads(compiled.to_json())
    with tempfile.TemporaryDirectory() as directory:
      paths = compiled.write(directory)
      contents = {path.name: path.read_bytes() for path in paths}
    for kernel in figures["kernels"]:
      name = kernel["name"]
      report = text.split(f"\n{name}\n")[1]
      self.assertIn(f"registers: {kernel['registers']} a thread", report)
      self.assertIn(f"grid: {kernel['grid']} blocks", report)
      self.assertEqual(kernel["tensor_copies"], 0)
      self.assertNotIn("TMA", report)
      self.assertIn(name.encode(), contents[f"{name}.sm_90.ptx"])
      self.assertEqual(contents[f"{name}.sm_90.cubin"][:4], b"\x7fELF")
      self.assertIn(b"EXIT", contents[f"{name}.sm_90.sass"])


class NamesTest(parameterized.TestCase):
  """`explain` and `compile_dot` describe the kernels that are launched."""

  def setUp(self):
    super().setUp()
    self.launched = []

    def recorded(module, launch, inputs, target, who):
      del module, inputs, target, who
      self.launched.append(launch.name)
      return [jnp.zeros(shape, dtype) for _, shape, dtype in launch.outputs]

    self.enter_context(mock.patch.object(triton_launches, "_call", recorded))

  def check(self, name, *operands, **options):
    target = jp.named_target(name).with_library(targets.JAX_TRITON)
    arguments = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands
    )

    def f(*operands):
      return jp.block_scaled_dot(*operands, implementation="triton", **options)

    (dot,) = jp.explain(f, *arguments, target=target)
    told = re.findall(r"block_scaled_\w+", " ".join(dot.decision.notes))
    _, launches = triton.launches(dot.problem, target)
    self.assertEqual([launch.name for launch in launches], told)
    self.launched.clear()
    with jp.use_target(target):
      traced = jax.jit(f).trace(*arguments)
      platform = "cuda" if target.platform == "cuda" else "rocm"
      traced.lower(lowering_platforms=(platform,))
    self.assertNotEmpty(told)
    self.assertEqual(self.launched, told)

  def check_pair(self, name, lhs, rhs, **options):
    arrays = lhs.operand, rhs.operand, lhs.scale, rhs.scale
    self.check(name, *arrays, **options)

  @parameterized.parameters("a100", "l40s", "h100", "b200", "rtx5090", "mi355x")
  @pytest.mark.sample(1)
  def test_of_fuzzed_products(self, name):
    # Others for each GPU; all pairs of formats come in turn.
    first = zlib.crc32(name.encode()) % 1000
    for index in range(first, first + 24):
      case = dot_cases.random_case(index)
      rng = np.random.default_rng(index)
      lhs = contract.make_operand(rng, case.lhs, integers=True)
      rhs = contract.make_operand(rng, case.rhs, integers=True)
      with self.subTest(f"random_case({index})", case=case):
        self.check_pair(
          *(name, lhs, rhs),
          dimension_numbers=case.dimension_numbers,
          block_size=case.block_size,
          preferred_element_type=case.dtype,
        )

  def quantized(self, format, shape, axis=-1):
    return jp.quantize(np.ones(shape, np.float32), format, axis=axis)

  @parameterized.product(
    name=("h100", "b200"), lhs=(jp.MXFP8, jp.MXFP4), rhs=(jp.MXFP8, jp.NVFP4)
  )
  @pytest.mark.sample(2)
  def test_of_sides_that_are_blocked_along_different_dimensions(
    self, name, lhs, rhs
  ):
    x = self.quantized(lhs, (5, 32, 96), axis=1)
    w = self.quantized(rhs, (7, 32, 96), axis=2)
    self.check(name, x, w, dimension_numbers=(((1, 2), (1, 2)), ((), ())))

  @parameterized.product(
    name=("h100", "b200"), shape=((64, 3, 1), (64, 1, 1), (3, 64, 2), (64, 7))
  )
  @pytest.mark.sample(1)
  def test_of_weights_whose_k_is_not_last(self, name, shape):
    for format in (jp.MXFP8, jp.MXFP4):
      axis = shape.index(64)
      x = self.quantized(format, (5, 64))
      w = self.quantized(format, shape, axis=axis)
      numbers = (((1,), (axis,)), ((), ()))
      self.check(name, x, w, dimension_numbers=numbers)
      if format.is_fp4:
        self.check(name, x, w.unpack(), dimension_numbers=numbers)

  @parameterized.parameters("h100", "b200")
  def test_of_k_that_is_padded(self, name):
    rng = np.random.default_rng(0)
    # k of several dimensions is padded to whole blocks: 3 * 32, not 3 * 17.
    for sizes, axis in (((17, 3), 1), ((47,), 1)):
      lhs, rhs = (
        contract.operand(rng, jp.MXFP4, (5, *sizes), axis, storage="raw")
        for _ in range(2)
      )
      dims = tuple(range(1, 1 + len(sizes)))
      self.check_pair(
        *(name, lhs, rhs),
        dimension_numbers=((dims, dims), ((), ())),
        block_size=32,
      )


class ErrorTest(parameterized.TestCase):
  @parameterized.parameters(
    ("cpu", {}, "needs an NVIDIA or AMD GPU"),
    ("h200", {"m": None}, "static sizes"),
  )
  def test_refusal_is_told(self, name, changes, reason):
    problem = make_problem(jp.MXFP8, jp.MXFP8, **changes)
    with self.assertRaisesRegex(NotImplementedError, reason):
      triton_dots.compile_dot(problem, jp.named_target(name))

  def test_missing_triton_is_told(self):
    missing = {"triton": None, "jaxplugin.lab.inspection.compile": None}
    with (
      mock.patch.dict(sys.modules, missing),
      self.assertRaisesRegex(NotImplementedError, "pip install triton"),
    ):
      triton_dots.compile_dot(
        make_problem(jp.MXFP8, jp.MXFP8), jp.named_target("h200")
      )

  @needs_triton
  def test_kernel_beyond_a_limit_is_an_error(self):
    from jaxplugin.lab.inspection import compile

    message = mock.PropertyMock(return_value="needs more than there is")
    with (
      mock.patch.object(compile.CompiledKernel, "limit_error", message),
      self.assertRaisesRegex(RuntimeError, "needs more than there is"),
    ):
      triton_dots.compile_dot(
        make_problem(jp.MXFP8, jp.MXFP8), jp.named_target("h200")
      )
