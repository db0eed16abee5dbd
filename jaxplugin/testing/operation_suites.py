# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Suites for backends of ragged dots, quantize and dequantize.

`dot_suite.backend_suite` is the suite for backends of the dot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import ragged_suite

# f32 with every kind of number that a block may contain.
_SPECIAL: Final = (
  *(0.0, -0.0, 1.0, -6.5, 448.0, 57344.0, 3e38, 1e-38, 1e-45, -1e-40),
  *(np.inf, -np.inf, np.nan),
)


class _Suite(parameterized.TestCase):
  """A backend that is registered for each test, before jaxplugin's own.

  Attributes:
    REQUIRED: the attributes that a subclass must set besides `backend`.
  """

  REQUIRED: ClassVar[tuple[str, ...]] = ()
  backend: ClassVar[jp.Backend | None] = None
  operation = ""

  def setUp(self) -> None:
    super().setUp()
    if type(self).__module__ == __name__:
      self.skipTest("the suite itself")
    if self.backend is None or self.backend.operation != self.operation:
      self.fail(
        f"{type(self).__name__} must set backend, for {self.operation!r}"
      )
    if not all(getattr(self, name) for name in self.REQUIRED):
      self.fail(f"{type(self).__name__} must set {' and '.join(self.REQUIRED)}")

  def with_backend(
    self, function: Callable[..., Any], *args: Any
  ) -> tuple[Any, Any]:
    """Returns results with the backend and with jaxplugin's own.

    Fails unless the backend computes the operation.
    """
    expected = jax.jit(function)(*args)
    assert self.backend is not None
    jp.register_backend(self.backend, first=True)
    try:
      (found,) = jp.explain(function, *args).quantizations
      reasons = [str(r) for d in found.decisions for r in d.refusals]
      self.assertEqual(found.implementation, self.backend.name, reasons)
      return jax.jit(function)(*args), expected
    finally:
      jp.backends.unregister_backend(self.backend.name)

  def assert_same_bits(self, actual: Any, expected: Any) -> None:
    self.assertEqual(jax.tree.structure(actual), jax.tree.structure(expected))
    for x, y in zip(
      jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
      self.assertEqual((x.shape, x.dtype), (y.shape, y.dtype))
      # NaN may have any bits.
      x, y = (np.asarray(z) for z in (x, y))
      same = (x.view(f"u{x.itemsize}") == y.view(f"u{y.itemsize}")) | (
        np.isnan(x.astype(np.float32)) & np.isnan(y.astype(np.float32))
      )
      self.assertTrue(same.all(), f"{x[~same][:4]} instead of {y[~same][:4]}")


class _ArraySuite(_Suite):
  """A suite of arrays that are quantized or dequantized.

  Attributes:
    backend: the backend.
    formats: the formats that it supports.
    shapes: shapes that it supports with each format, blocked along the last
      dimension. Its size is a multiple of 32.
    axes: the blocked dimensions that it supports, as negative numbers.
  """

  REQUIRED = ("formats", "shapes")
  formats: Sequence[jp.BlockFormat] = ()
  shapes: Sequence[tuple[int, ...]] = ()
  axes: Sequence[int] = (-1,)


class QuantizeBackendSuite(_ArraySuite):
  """The contract of a backend of `quantize`: the bits of `jp.quantize`.

  A subclass sets `backend`, the `formats` and `shapes` that it supports, and
  optionally `axes`.
  """

  operation = "quantize"

  def inputs(self, dtype: Any = np.float32) -> list[np.ndarray]:
    """Returns an array of each shape, with blocks of all magnitudes."""
    rng = np.random.default_rng(0)
    found = []
    for shape in self.shapes:
      exponents = rng.integers(-20, 20, (*shape[:-1], 1)).astype(np.float32)
      x = rng.normal(size=shape).astype(np.float32) * np.exp2(exponents)
      with np.errstate(over="ignore"):
        found.append(x.astype(jnp.dtype(dtype)))
    return found

  def check(self, x: np.ndarray) -> None:
    for format in self.formats:
      for axis in self.axes:
        with self.subTest(format=format.name, shape=x.shape, axis=axis):
          widths = [(0, 0)] * x.ndim
          widths[axis] = (0, -x.shape[axis] % format.block_size)
          function = functools.partial(jp.quantize, format=format, axis=axis)
          self.assert_same_bits(*self.with_backend(function, np.pad(x, widths)))

  @parameterized.parameters("float32", "bfloat16", "float16")
  def test_values_and_scales_have_the_bits_of_quantize(self, dtype):
    for x in self.inputs(dtype):
      self.check(x)

  def test_special_numbers_have_the_bits_of_quantize(self):
    for x in self.inputs():
      flat = x.reshape(-1)
      flat[: x.size // 2] = np.resize(np.float32(_SPECIAL), x.size // 2)
      self.check(flat.reshape(x.shape))

  def test_given_global_scale_has_the_bits_of_quantize(self):
    with_scale = [f for f in self.formats if f.has_global_scale]
    if not with_scale:
      self.skipTest("no format has a global scale")
    for format in with_scale:
      function = functools.partial(jp.quantize, format=format)
      for x in self.inputs():
        with self.subTest(format=format.name, shape=x.shape):
          self.assert_same_bits(
            *self.with_backend(
              lambda x, s, f=function: f(x, global_scale=s),
              x,
              jnp.float32(0.25),
            )
          )


class DequantizeBackendSuite(_ArraySuite):
  """The contract of a backend of `dequantize`: the bits of `jp.dequantize`.

  A subclass sets `backend`, the `formats` and `shapes` that it supports, and
  optionally `axes`.
  """

  operation = "dequantize"

  @parameterized.parameters("float32", "bfloat16", "float16")
  def test_all_codes_have_the_bits_of_dequantize(self, dtype):
    rng = np.random.default_rng(0)
    for format in self.formats:
      for shape in self.shapes:
        for axis in self.axes:
          with self.subTest(format=format.name, shape=shape, axis=axis):
            sizes = list(shape)
            sizes[axis] += -sizes[axis] % format.block_size
            x, _ = ragged_suite.operand(
              rng, format, tuple(sizes), axis, integers=False
            )
            function = functools.partial(jp.dequantize, dtype=dtype)
            self.assert_same_bits(*self.with_backend(function, x))


class RaggedBackendSuite(_Suite):
  """The numerical contract of a backend of `ragged_dot`.

  Sums are exact on integers, and within 16 * 2^-24 * sum|a * b| on all codes.

  Attributes:
    backend: the backend.
    kinds: pairs (lhs, rhs) that it supports, of block formats, and of dtypes
      for lhs.
    sizes: (groups, m, n, k) that it supports for each of `kinds`. k is a
      multiple of 32.
  """

  operation = "ragged_dot"
  REQUIRED = ("kinds", "sizes")
  kinds: Sequence[tuple[Any, jp.BlockFormat]] = ()
  sizes: Sequence[tuple[int, int, int, int]] = ()

  def setUp(self) -> None:
    super().setUp()
    assert self.backend is not None
    jp.register_backend(self.backend)
    self.addCleanup(jp.backends.unregister_backend, self.backend.name)

  def dot(self, *args: Any, **options: Any) -> jax.Array:
    assert self.backend is not None
    return jp.ragged_dot(*args, implementation=self.backend.name, **options)

  def cases(self, *, integers: bool):
    """Returns (lhs, rhs, exact lhs, exact rhs, group sizes) of each claim."""
    found = []
    for seed, kind in enumerate(self.kinds):
      for groups, m, n, k in self.sizes:
        rng = np.random.default_rng(seed)
        lhs, exact_lhs = ragged_suite.operand(
          rng, kind[0], (m, k), integers=integers
        )
        rhs, exact_rhs = ragged_suite.operand(
          rng, kind[1], (groups, n, k), integers=integers
        )
        for rows in (m, m // 2):  # the other rows are in no group
          sizes = rng.multinomial(rows, rng.dirichlet(np.full(groups, 0.3)))
          sizes = sizes.astype(np.int32)
          found.append((lhs, rhs, exact_lhs, exact_rhs, sizes))
    return found

  def test_sums_of_integers_are_exact(self):
    for lhs, rhs, exact_lhs, exact_rhs, sizes in self.cases(integers=True):
      exact, _ = ragged_suite.oracle(exact_lhs, exact_rhs, sizes)
      for dtype in contract.RESULT_DTYPES:
        actual = self.dot(lhs, rhs, sizes, preferred_element_type=dtype)
        contract.assert_exact(actual, exact, dtype)

  def test_sums_of_all_codes_are_within_the_bound(self):
    for lhs, rhs, exact_lhs, exact_rhs, sizes in self.cases(integers=False):
      exact, magnitude = ragged_suite.oracle(exact_lhs, exact_rhs, sizes)
      actual = self.dot(lhs, rhs, sizes)
      bound = contract.DOT_BOUND * magnitude
      contract.assert_within(actual, exact, bound, contract.F32)

  def test_bias_and_activation_follow_the_sums(self):
    for lhs, rhs, exact_lhs, exact_rhs, sizes in self.cases(integers=True):
      exact, _ = ragged_suite.oracle(exact_lhs, exact_rhs, sizes)
      bias = np.random.default_rng(0).integers(-9, 9, rhs.shape[:2])
      group = ragged_suite.group_of_rows(sizes, len(exact))[:, None]
      exact = np.where(group < 0, 0, np.maximum(exact + bias[group[:, 0]], 0))
      actual = self.dot(
        *(lhs, rhs, sizes), bias=bias.astype(np.float32), activation="relu"
      )
      contract.assert_exact(actual, exact, contract.F32)

  def test_gradient_of_a_plain_lhs_is_the_sum_of_the_weights(self):
    _, rhs = self.kinds[0]
    groups, m, n, k = self.sizes[0]
    rng = np.random.default_rng(0)
    weights, exact = ragged_suite.operand(
      rng, rhs, (groups, n, k), integers=True
    )
    x = jnp.asarray(rng.integers(-4, 5, (m, k)), jnp.float32)
    sizes = np.full(groups, m // groups, np.int32)
    try:
      actual = jax.grad(lambda x: jnp.sum(self.dot(x, weights, sizes)))(x)
    except NotImplementedError as error:
      self.skipTest(str(error))
    group = ragged_suite.group_of_rows(sizes, m)[:, None]
    expected = np.where(group < 0, 0, exact.sum(axis=1)[group[:, 0]])
    contract.assert_exact(actual, expected, contract.F32)
