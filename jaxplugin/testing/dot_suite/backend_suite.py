# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every backend of another package must do, as one suite of tests."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import unittest
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import decisions, formats
from jaxplugin.plugins import registry
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import suite

# Gradients of the tests are sums of integers up to this.
_COTANGENTS: Final = 5
# Beside "raw"; padding is garbage, that of swizzled scales NaN.
_STORAGES: Final = (
  *("padded", "scaled_array", "swizzled"),
  *("packed_raw", "packed_padded", "packed_scaled_array", "packed_swizzled"),
)


class BackendSuite(suite.DotSuite):
  """The contract of one backend: docs/concepts/numerics.md, and its claims.

    class AcmeTest(testing.BackendSuite):
      implementation = "acme"
      kinds = ((jp.MXFP8, jp.MXFP8), (jp.MXFP8, jp.MXFP4))
      sizes = ((1, 8, 128, 256), (4, 1, 128, 96))

    if __name__ == "__main__":
      absltest.main()

  It runs on the local device, or where an overridden `dot` brings operands. A
  call that the backend refuses is a test skipped with its reason; what it must
  not refuse, `kinds` and `sizes` say. What it is compared with is NumPy in f64,
  of codes that ml_dtypes decodes: bit for bit where every sum is exact, else
  within 16 * 2^-24 * sum|a * b|. Padding of scales is poisoned.

  Attributes:
    implementation: name of the backend.
    backend: the backend to register for these tests; None if an entry point
      names it or code has registered it.
    kinds: supported pairs (lhs, rhs) of formats, such as `jp.MXFP8`, and of
      float dtypes. The fuzzed calls use them.
    sizes: (batch, m, n, k) that the backend supports for each of `kinds`, at
      least one. k is a multiple of 64, and at most 1024.
    cases_per_test: calls in each of twenty fuzzed tests.
    exact_beyond_f32, subnormal_spacing, keeps_global_scale_f32: see
      `dot_cases.DotTestCase`.
  """

  backend: ClassVar[jp.Backend | None] = None
  kinds: Sequence[tuple[Any, Any]] = ()
  sizes: Sequence[tuple[int, int, int, int]] = ()
  cases_per_test: int = 10

  @classmethod
  def setUpClass(cls) -> None:
    super().setUpClass()
    if cls.backend is not None:
      jp.register_backend(cls.backend)
      cls.addClassCleanup(jp.backends.unregister_backend, cls.backend.name)

  def setUp(self) -> None:
    super().setUp()
    if type(self) is BackendSuite:
      self.skipTest("the suite itself")
    for name in ("implementation", "kinds", "sizes"):
      if not getattr(self, name):
        self.fail(f"{type(self).__name__} must set {name}; see BackendSuite")
    # Counts and the last refusal of the fuzzed calls.
    self._num_served, self._refusal = 0, ""

  def tearDown(self) -> None:
    super().tearDown()
    if self._refusal and not self._num_served:
      self.skipTest(self._refusal)

  def dot(self, *args: Any, **kwargs: Any) -> Any:
    """The call under test; one that is refused skips the test."""
    try:
      return self.served_dot(*args, **kwargs)
    except decisions.RefusedError as error:
      raise unittest.SkipTest(
        f"{self.implementation}: {error.reason}"
      ) from error

  def served_dot(self, *args: Any, **kwargs: Any) -> Any:
    """The call under test. Override it to run elsewhere."""
    return super().dot(*args, **kwargs)

  def result_of(self, function: Callable[..., Any], *args: Any) -> Any:
    try:
      result = super().result_of(function, *args)
    except unittest.SkipTest as refusal:
      self._refusal = str(refusal)
      return None
    self._num_served += 1
    return result

  # What it claims, in its own sizes.

  def test_every_kind_is_served_in_every_size_that_is_claimed(self):
    for kind, sizes in itertools.product(self.kinds, self.sizes):
      lhs, rhs = self.operands(kind, sizes)
      # Refused ones are an error; nothing is compiled.
      jax.eval_shape(functools.partial(self.served, lhs, rhs))

  def test_claimed_sizes_are_exact_on_integers(self):
    for i, (kind, sizes) in enumerate(self.claims()):
      dtype = contract.RESULT_DTYPES[i % len(contract.RESULT_DTYPES)]
      with self.subTest(kind=kind, sizes=sizes, dtype=dtype.name):
        lhs, rhs = self.operands(kind, sizes)
        exact, _ = contract.dot(lhs.exact, rhs.exact)
        actual = self.served(lhs, rhs, preferred_element_type=dtype)
        contract.assert_exact(actual, exact, dtype)

  def test_claimed_sizes_are_within_the_bound_on_all_codes(self):
    for kind, sizes in self.claims():
      with self.subTest(kind=kind, sizes=sizes):
        lhs, rhs = self.operands(kind, sizes, integers=False)
        expected = contract.dot(lhs.exact, rhs.exact)
        contract.assert_dot(self.served(lhs, rhs), *expected)

  def test_global_scale_and_epilogue_count_in_claimed_sizes(self):
    rng = np.random.default_rng(0)
    for kind, sizes in self.claims():
      batch, m, n, _ = sizes
      lhs, rhs = self.operands(kind, sizes)
      exact, _ = contract.dot(lhs.exact, rhs.exact)
      bias = rng.integers(-9, 9, n).astype(np.float32)
      residual = rng.integers(-9, 9, (batch, m, n)).astype(np.float32)
      of_rows = np.exp2(rng.integers(-2, 3, (batch, m, 1)))
      for scale in (0.5, of_rows.astype(np.float32)):
        with self.subTest(kind=kind, sizes=sizes, scale=np.shape(scale)):
          actual = self.served(
            *(lhs, rhs, scale), bias=bias, activation="relu", residual=residual
          )
          expected = np.maximum(exact * scale + bias, 0) + residual
          contract.assert_exact(actual, expected, contract.F32)

  def test_storage_and_poison_change_nothing_in_claimed_sizes(self):
    for kind, sizes in self.claims():
      expected = self.served(*self.operands(kind, sizes))
      for storage in _STORAGES:
        with self.subTest(kind=kind, sizes=sizes, storage=storage):
          made = self.operands(kind, sizes, storage=storage)
          block_size = None
          if "padded" in storage:
            blocks = [getattr(f, "block_size", None) for f in kind]
            known = [block for block in blocks if block is not None]
            block_size = tuple(block or known[0] for block in blocks)
          actual = self.served(*made, block_size=block_size)
          self.assertTrue(suite.same_bits(expected, actual))

  def test_nan_scale_is_nan_in_its_row_alone_in_claimed_sizes(self):
    for kind, sizes in self.claims():
      lhs, rhs = self.operands(kind, sizes)
      if lhs.scale is None:
        continue
      nan = 0xFF if kind[0].scale_is_power_of_two else 0x7F
      scale = np.asarray(lhs.scale).copy()
      scale.view(np.uint8)[0, -1, -1] = nan
      scale = jax.device_put(scale)
      actual = self.served(dataclasses.replace(lhs, scale=scale), rhs)
      exact, _ = contract.dot(lhs.exact, rhs.exact)
      exact[0, -1] = np.nan
      contract.assert_exact(actual, exact, contract.F32)

  def test_supports_answers_about_anything_and_always_the_same(self):
    backend = self.record()
    for problem in _problems():
      for target in (jp.detect_target(), *_named_targets()):
        if target.platform not in backend.platforms:
          continue
        answer = backend.supports(problem, target)
        self.assertEqual(answer, backend.supports(problem, target))
        if answer is not None:
          self.assertIsInstance(answer, str, f"{problem} on {target}")
          self.assertNotEmpty(answer, f"{problem} on {target}")

  # Under JAX's transformations.

  def test_vmap_gives_what_a_loop_does(self):
    batch, m, n, k = self.sizes[0]
    kind = self.kinds[0]
    rhs = self.operands(kind, (batch, m, n, k))[1]
    made = [self.operands(kind, (batch, m, n, k), seed=i)[0] for i in range(3)]
    stack = lambda name: _stacked([getattr(x, name) for x in made])
    dot = lambda x, s: self.dot(x, rhs.operand, s, rhs.scale)
    has_scale = made[0].scale is not None
    actual = jax.vmap(dot, in_axes=(0, 0 if has_scale else None))(
      stack("operand"), stack("scale") if has_scale else None
    )
    exact = np.stack([contract.dot(x.exact, rhs.exact)[0] for x in made])
    contract.assert_exact(actual, exact, contract.F32)

  def test_gradients_of_what_follows_the_sums(self):
    batch, m, n, k = self.sizes[0]
    lhs, rhs = self.operands(self.kinds[0], (batch, m, n, k))
    rng = np.random.default_rng(0)
    shape = (batch, m, n)
    g = rng.integers(-_COTANGENTS, _COTANGENTS, shape).astype(np.float32)

    def loss(scale, bias):
      y = self.dot(
        *(lhs.operand, rhs.operand, lhs.scale, rhs.scale, scale), bias=bias
      )
      return jnp.sum(y * g)

    of_scale, of_bias = jax.jit(jax.grad(loss, (0, 1)))(
      jnp.float32(2), jnp.zeros(n)
    )
    exact, magnitude = contract.dot(lhs.exact, rhs.exact)
    bound = contract.DOT_BOUND * np.sum(magnitude * np.abs(g))
    # Beside the dot's own error that of a sum over the result.
    bound = bound + np.sum(np.abs(exact * g)) * exact.size * 2.0**-24
    contract.assert_within(of_scale, np.sum(exact * g), bound, contract.F32)
    np.testing.assert_array_equal(of_bias, g.sum((0, 1)))

  @parameterized.parameters("m", "n", "k")
  def test_a_sharded_dimension_changes_nothing(self, dimension):
    if len(jax.local_devices()) < 2:
      self.skipTest("needs two devices; on a CPU set jax_num_cpu_devices")
    kind = self.kinds[0]
    lhs, rhs = self.operands(kind, self.sizes[0])
    axes = {"m": ("a", None), "n": (None, None), "k": (None, "a")}[dimension]
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:2]), ("a",))
    own = (axes, ("a" if dimension == "n" else None, axes[1]))
    placed = []
    for x, (row, column) in zip((lhs, rhs), own, strict=True):
      spec = jax.sharding.PartitionSpec(None, row, column)
      sharding = jax.sharding.NamedSharding(mesh, spec)
      for array in (x.operand, x.scale):
        if array is not None and any(
          size % 2 for size, name in zip(array.shape, spec, strict=True) if name
        ):
          self.skipTest(f"{array.shape} does not divide over two devices")
        placed.append(
          None if array is None else jax.device_put(np.asarray(array), sharding)
        )
    x, x_scale, w, w_scale = placed
    actual = jax.jit(self.dot)(x, w, x_scale, w_scale)
    exact, _ = contract.dot(lhs.exact, rhs.exact)
    contract.assert_exact(actual, exact, contract.F32)

  def test_portable_backend_is_exported_and_loaded(self):
    if not self.record().is_portable:
      self.skipTest("does not say that it is portable")
    lhs, rhs = self.operands(self.kinds[0], self.sizes[0])
    args = [
      x
      for x in (lhs.operand, rhs.operand, lhs.scale, rhs.scale)
      if x is not None
    ]
    tree = jax.tree.structure((lhs.operand, rhs.operand, lhs.scale, rhs.scale))
    function = jax.jit(lambda *args: self.dot(*jax.tree.unflatten(tree, args)))
    exported = jax.export.export(function)(*args)
    again = jax.export.deserialize(exported.serialize())
    actual = again.call(*args)
    self.assertTrue(suite.same_bits(actual, function(*args)))

  # Helpers of the tests.

  def claims(self) -> list[tuple[tuple[Any, Any], tuple[int, int, int, int]]]:
    """Every kind, and every size, once."""
    kinds, sizes = self.kinds, self.sizes
    count = max(len(kinds), len(sizes))
    return [
      (kinds[i % len(kinds)], sizes[i % len(sizes)]) for i in range(count)
    ]

  def operands(
    self,
    kind: tuple[Any, Any],
    sizes: tuple[int, int, int, int],
    *,
    seed: int = 0,
    integers: bool = True,
    storage: str = "raw",
  ) -> tuple[contract.Operand, contract.Operand]:
    """(batch, m, k) and (batch, n, k); packed storage is for FP4 alone."""
    batch, m, n, k = sizes
    made = []
    for i, (one, rows) in enumerate(zip(kind, (m, n), strict=True)):
      own = storage
      if not getattr(one, "is_fp4", False):
        own = own.removeprefix("packed_")
      if getattr(one, "is_fp6", False) and own == "raw":
        own = "scaled_array"  # the dtype of bytes does not tell the format
      rng = np.random.default_rng([seed, i])
      made.append(
        self.operand(rng, one, (batch, rows, k), integers=integers, storage=own)
      )
    return made[0], made[1]

  def served(
    self,
    lhs: contract.Operand,
    rhs: contract.Operand,
    *args: Any,
    **kwargs: Any,
  ) -> Any:
    """A call that must not be refused."""
    return self.served_dot(
      *(lhs.operand, rhs.operand, lhs.scale, rhs.scale), *args, **kwargs
    )

  def found(self):
    """Returns the backend's entry in the registry."""
    for item in registry.usable():
      if item.backend.name == self.implementation:
        return item
    known = "".join(f"\n  {status}" for status in jp.backends.statuses())
    self.fail(f"no backend {self.implementation!r} can be used:{known}")

  def record(self) -> jp.Backend:
    return self.found().backend


def _stacked(arrays: Sequence[Any]) -> Any:
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)


def _named_targets() -> list[jp.Target]:
  names = ("cpu", "a100", "h100", "b200", "rtx5090", "mi300x")
  return [jp.named_target(name) for name in names]


def _problems() -> list[jp.backends.Problem]:
  """Problems of every format and of sizes that are odd, small and large."""
  plain = [
    jp.backends.OperandProblem(format=None, dtype=dtype)
    for dtype in contract.RESULT_DTYPES
  ]
  own = contract.block_format("own", formats.E4M3, formats.E8M0, 64)
  blocked = [
    jp.backends.OperandProblem(
      format=format, dtype=format.array_dtype, scale_layout=layout
    )
    for format in (*formats.KNOWN, own)
    for layout in ("linear", "swizzled_128x4")
  ]
  every = {"activation": "gelu", "has_bias": True, "has_residual": True}
  return [
    jp.backends.Problem(
      batch=batch, m=m, n=n, k=k, lhs=lhs, rhs=rhs, dtype=dtype, **epilogue
    )
    for rhs in blocked
    for lhs in (rhs, *plain)
    for batch, m, n, k in ((1, 1, 1, 1), (3, 7, 130, 992), (1, 4096, 1, 65536))
    for dtype in contract.RESULT_DTYPES[:2]
    for epilogue in ({}, {"global_scale": "array", **every})
  ]
