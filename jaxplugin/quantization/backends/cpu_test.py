# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""C++ kernels that quantize: which problems get them, and their bits."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import blocking
from jaxplugin.quantization import (
  backends,
  operands,
  problems,
  quantize_primitive,
)
from jaxplugin.runtime import lowering
from jaxplugin.testing import contract, prologue_cases
from jaxplugin.testing import quantization_lowerings as lowerings
from jaxplugin.testing.oracles import quantization_cases

MODULE = lowering.Module(platforms=("cpu",))
DRAWN = problems.RecipeOptions(is_stochastic=True, key_impl="threefry2x32")


UP = problems.RecipeOptions(scale_up=True)
FIRST, ROWS, LAST = (blocking.Blocking.along(axis, 3, 32) for axis in range(3))
MERGED = blocking.Blocking(dims=(0, 1), lead=(2,), multiple=32)

# Roundings of the largest result.
AMAX_ERROR = 16 * 2.0**-24

spec_of = quantization_cases.manner


def problem(options, axis=1, **fields):
  return dataclasses.replace(
    problems.QuantizationProblem.along(
      axis, shape=(48, 64, 80), dtype=np.dtype(np.float32), format=jp.NVFP4
    ),
    options=(options,),
    **fields,
  )


def unsigned_zeros(values, format):
  """Returns scales or numbers, FP4 as codes. -0 becomes 0."""
  values = np.asarray(values)
  if values.dtype == np.uint8 and format.is_fp6:
    values = values.view(format.values_dtype)
  if values.dtype != np.uint8:
    return values.astype(np.float32)
  codes = np.stack([values & 15, values >> 4])
  return np.where(codes == 8, 0, codes)


@lowerings.needs_library
class ChoiceTest(parameterized.TestCase):
  @parameterized.parameters(
    *(
      (options, "cpu", "^$")
      for options in (
        problems.RecipeOptions(hadamard=16),
        *(problems.RecipeOptions(square=s) for s in ((0, 2), (2, 0), ())),
        problems.RecipeOptions(four_over_six=True),
        problems.RecipeOptions(scale_up=True),
        DRAWN,
        dataclasses.replace(
          DRAWN, hadamard=64, square=(2,), four_over_six=True
        ),
      )
    ),
    (dataclasses.replace(DRAWN, key_impl="rbg"), "xla",
      "^cpu: .*threefry2x32 key, got rbg"),
    (dataclasses.replace(DRAWN, is_partitionable=False), "xla",
      "^cpu: .*jax_threefry_partitionable .*it is off"),
    (problems.RecipeOptions(hadamard=128), "xla",
      "^cpu: .*whole groups of 128, got 64 values"),
    (dataclasses.replace(DRAWN, square=(2, 0)), "xla",
      r"^cpu: .*in the order of the array.*merge dimensions \[2, 0\]"),
  )  # fmt: skip
  def test_kernels_are_chosen_or_the_reason_names_the_argument(
    self, options, implementation, reason
  ):
    told = backends.explained(problem(options), MODULE, lowerings.TARGET)
    self.assertEqual(told.implementation, implementation)
    self.assertRegex(told.reason, reason)

  def test_choice_does_not_depend_on_settings_of_jax(self):
    with jax.threefry_partitionable(False):
      told = backends.explained(problem(DRAWN), MODULE, lowerings.TARGET)
    self.assertEqual(told.implementation, "cpu")


@lowerings.needs_library
class BitsTest(parameterized.TestCase):
  """Bits of kernels and operations are equal."""

  def assert_same(self, function, *args, kernels=1):
    wrapped = jax.jit(lambda *args: function(*args))
    text = wrapped.trace(*args).lower().as_text()
    calls, _ = lowerings.kernel_calls(text)
    self.assertEqual(calls, kernels)
    actual = wrapped(*args)
    expected = jax.jit(lowerings.by_operations(function))(*args)
    contract.assert_same_bits(actual, expected)

  def test_modules_call_the_kernels(self):
    for name, case in quantization_cases.rows(is_full=False):
      with self.subTest(name):
        text = lowerings.lowered_text(case.call, case.array())
        calls, _ = lowerings.kernel_calls(text)
        self.assertEqual(calls, case.cpu)

  # In the other rows, triton_test.py compares C++ kernels with Triton's.
  @parameterized.named_parameters(*quantization_cases.rows(is_full=False))
  @pytest.mark.sample(16)
  def test_kernels_have_the_bits_of_operations(self, case):
    self.assert_same(case.call, case.array(), kernels=case.cpu)

  @parameterized.named_parameters(*quantization_cases.rows(is_full=True))
  @pytest.mark.sample(1)
  def test_more_kernels_have_the_bits_of_operations(self, case):
    self.assert_same(case.call, case.array(), kernels=case.cpu)

  def test_raw_key_is_the_typed_one(self):
    x = lowerings.numbers((40, 64), np.float32)
    found = spec_of(jp.NVFP4, (1,), 2)
    quantize = lambda x, key: operands.quantize(x, found, key)
    self.assert_same(quantize, x, jax.random.PRNGKey(7))
    contract.assert_same_bits(
      quantize(x, jax.random.PRNGKey(7)), quantize(x, jax.random.key(7))
    )

  def test_other_keys_are_operations(self):
    x = lowerings.numbers((40, 64), np.float32)
    found = spec_of(jp.NVFP4, (1,), 2)
    quantize = lambda x, key: operands.quantize(x, found, key)

    def assert_operations(key):
      text = lowerings.lowered_text(quantize, x, key)
      self.assertEqual(lowerings.kernel_calls(text), (0, 0))
      operations = lowerings.by_operations(quantize)
      self.assertEqual(text, lowerings.lowered_text(operations, x, key))

    assert_operations(jax.random.key(7, impl="rbg"))
    with jax.threefry_partitionable(False):
      assert_operations(jax.random.key(7))
      expected = jax.jit(quantize)(x, jax.random.key(7))

    def under_setting(x, key):
      with jax.threefry_partitionable(False):
        return quantize(x, key)

    # Lowered under another setting than traced.
    contract.assert_same_bits(
      jax.jit(under_setting)(x, jax.random.key(7)), expected
    )

  def test_vmap_of_keys_draws_for_each(self):
    x = np.stack([lowerings.numbers((40, 64), np.float32, i) for i in range(3)])
    keys = jax.random.split(jax.random.key(0), 3)
    found = spec_of(jp.MXFP4, (0,), 2, hadamard=32)
    quantize = lambda x, key: operands.quantize(x, found, key)

    @jax.jit
    def run(x, keys):
      mapped = jax.vmap(quantize)(x, keys)
      each = [quantize(x[i], keys[i]) for i in range(3)]
      return [jax.tree.map(lambda a, i=i: a[i], mapped) for i in range(3)], each

    contract.assert_same_bits(*run(x, keys))

  @parameterized.parameters(jp.MXFP8, jp.NVFP4)
  @pytest.mark.sample(1)
  def test_vmap_of_squares_is_one_kernel(self, format):
    x = lowerings.numbers((3, 40, 64), np.float32)
    found = spec_of(format, (0,), 2, square=(1,))
    quantize = lambda x: jp.dequantize(operands.quantize(x, found))
    # NVFP4 has a global scale for each: more than a kernel takes.
    kernels = int(format == jp.MXFP8)
    self.assert_same(jax.vmap(quantize), x, kernels=kernels)


@lowerings.needs_library
class PrologueTest(parameterized.TestCase):
  """kernels/cpu/tests/prologue_handler_test.py has the numerical tests."""

  def problem(self, format=jp.MXFP8, shape=(2, 32, 64), **fields):
    return problems.QuantizationProblem(
      shape=shape,
      dtype=np.dtype(np.float32),
      format=format,
      prologue=prologue_cases.CASES[0],
      **{"blockings": (LAST,)} | fields,
    )

  @parameterized.parameters(
    (
      {"shape": (2, 32, 40), "format": jp.MXFP4, "blockings": (ROWS,)},
      "only for whole blocks of 32 features, got 40",
    ),
    (
      {"shape": (32, 4, 64), "format": jp.MXFP4, "blockings": (FIRST,)},
      r"directly before it, .* got \[\[0\]\]",
    ),
    ({"options": (UP,)}, "a prologue of values scales rounded up"),
    (
      {"blockings": (LAST, ROWS), "options": (DRAWN, DRAWN)},
      "random bits of a prologue's result for one axis",
    ),
    (
      {"blockings": (MERGED,), "options": (DRAWN,)},
      "random bits of a prologue's result for one axis",
    ),
    (
      {"blockings": (MERGED,), "column_sums": 1},
      "sum columns of whole runs of .* rows under vmap",
    ),
  )
  def test_note_says_why_the_prologue_is_separate(self, fields, reason):
    problem = self.problem(**fields)
    parts = backends.decide(problem, MODULE, lowerings.TARGET)
    for part in parts:
      self.assertIsNone(part.problem.prologue)
    self.assertRegex(
      str(parts[0].decision), f"(?s)separate XLA operation, .*cpu: .*{reason}"
    )

  @parameterized.parameters(
    (0, jp.MXFP8, (LAST,), None),
    (1, jp.NVFP4, (LAST,), 0.01),
    (2, jp.NVFP4, (LAST,), None),
    (1, jp.MXFP6_E2M3, (ROWS, LAST), None),
    (0, jp.MXFP8, (LAST, MERGED), None),
    (2, jp.NVFP4, (MERGED, LAST), (0.01, 0.02)),
    (3, jp.MXFP4, (LAST,), None),
    (0, jp.MXFP4, (MERGED,), None),
    (3, jp.NVFP4, (ROWS, LAST), None),
  )
  @pytest.mark.sample(4)  # each quarter of the prologues once
  def test_one_kernel_computes_and_quantizes(self, first, format, along, scale):
    """Codes differ from those of f64 results if roundings of f32 do."""
    # A quarter has norms, activations and gradients, gated and not.
    cases = prologue_cases.ALL[first::4]
    quantize = functools.partial(
      quantize_primitive.produce,
      global_scale=None if scale is None else np.float32(scale),
      blockings=along,
      format=format,
      packed=format.is_fp4,
    )
    given = [
      prologue_cases.operands(prologue, (2, 64, 192), jax.numpy.bfloat16)
      for prologue in cases
    ]

    def produce(given):
      return [
        quantize(
          x,
          returns_amax=True,
          column_sums=first % 2 if prologue.gradient else None,
          prologue=prologue,
          more=more,
        )
        for prologue, (x, more) in zip(cases, given, strict=True)
      ]

    text = lowerings.lowered_text(produce, given)
    self.assertEqual(lowerings.kernel_calls(text), (len(cases), 0))
    self.assertNotRegex(text, "rsqrt|logistic|reduce")
    by_operations = jax.jit(lowerings.by_operations(lambda x: quantize(x)[0]))
    for (one, amax, sums, total), prologue, (x, more) in zip(
      jax.jit(produce)(given), cases, given, strict=True
    ):
      exact, exact_total = prologue_cases.exact(prologue, x, more)
      np.testing.assert_allclose(amax, np.abs(exact).max(), rtol=AMAX_ERROR)
      if prologue.gradient:
        prologue_cases.assert_sums(sums, prologue, x, more, first % 2)
      if prologue.is_norm_gradient:
        prologue_cases.assert_gradient(total, prologue, x, more)
      else:
        contract.assert_same_bits(total, exact_total)
      expected = by_operations(exact.astype(np.float32))
      for got, want in zip(
        jax.tree.leaves(one), jax.tree.leaves(expected), strict=True
      ):
        if got.ndim == 0:  # a global scale
          np.testing.assert_allclose(got, want, rtol=AMAX_ERROR)
          continue
        same = unsigned_zeros(got, format) == unsigned_zeros(want, format)
        self.assertGreater(same.mean(), 0.998)
