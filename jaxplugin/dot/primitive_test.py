# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot` under JAX's transformations: the same as the plain call.

Control flow, `vmap`, export, and many rows. The tests of derivatives cover
derivatives, those of sharding `shard_map`.
"""

from __future__ import annotations

import functools
import itertools
from typing import Final
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.dot import backends, calls, primitive
from jaxplugin.testing import (
  contract,
  exact_numbers,
  interpreted,
  transformations,
)
from jaxplugin.testing.oracles import quantization_oracle

PLATFORMS: Final = ("cpu", "cuda", "rocm", "tpu")
MAPPED_SIZE: Final = 3

dot = jp.block_scaled_dot
array = transformations.array
dots_of = transformations.dots_of


def arrays(*kinds_and_shapes, seed=0):
  """Arrays of integers from one generator, by (format, shape)."""
  rng = np.random.default_rng(seed)
  return [array(rng, format, shape) for format, shape in kinds_and_shapes]


def entry(tree, i):
  return jax.tree.map(lambda a: a[i], tree)


def specs(tree, leading=None):
  """Types of arrays; the first dimension may be symbolic."""
  lead = lambda shape: shape if leading is None else (leading, *shape[1:])
  return jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(lead(a.shape), a.dtype), tree
  )


class ControlFlowTest(transformations.PrimitiveTestCase):
  def setUp(self):
    super().setUp()
    self.x, self.w = arrays((jp.MXFP8, (3, 64)), (jp.NVFP4, (5, 64)))
    rng = np.random.default_rng(1)
    self.residual = jnp.asarray(rng.integers(-9, 9, (3, 5)), jnp.float32)
    self.plain = dot(self.x, self.w, residual=self.residual)

  def test_scan_over_stacked_weights_equals_a_loop(self):
    stacked = arrays((jp.MXFP4, (4, 5, 64)))[0]

    def step(carry, w):
      y = dot(self.x, w, residual=carry)
      return y, y.sum()

    @jax.jit
    def run(residual, stacked):
      expected, expected_sums = residual, []
      for i in range(4):
        expected, total = step(expected, entry(stacked, i))
        expected_sums.append(total)
      loop = expected, jnp.stack(expected_sums)
      return lax.scan(step, residual, stacked), loop

    jax.tree.map(self.assert_same, *run(self.residual, stacked))

  def test_cond_takes_the_right_branch(self):
    either = lambda x, w: dot(x, w, residual=self.residual)
    other = functools.partial(dot, activation="relu")
    function = jax.jit(lambda flag, x, w: lax.cond(flag, either, other, x, w))
    for flag, branch in ((True, either), (False, other)):
      expected = branch(self.x, self.w)
      self.assert_same(function(flag, self.x, self.w), expected)

  @parameterized.parameters(
    None, "everything_saveable", "nothing_saveable", "dots_saveable"
  )
  @pytest.mark.sample(1)
  def test_remat_gives_the_same_value_and_gradient(self, policy):
    if policy is not None:
      policy = getattr(jax.checkpoint_policies, policy)
    inner = lambda s, x, w: s * s * dot(x, w, residual=self.residual)
    rematted = jax.checkpoint(inner, policy=policy)
    loss = lambda f: lambda s: f(s, self.x, self.w).sum()
    s = jnp.float32(2)
    expected = jax.value_and_grad(loss(inner))(s)
    self.assertEqual(float(expected[1]), 4 * float(self.plain.sum()))
    function = jax.value_and_grad(loss(rematted))
    for run in (function, jax.jit(function)):
      jax.tree.map(self.assert_same, run(s), expected)

  def test_donated_residual_is_reused(self):
    function = jax.jit(
      lambda residual, x, w: dot(x, w, residual=residual), donate_argnums=0
    )
    residual = jnp.array(self.residual)
    self.assert_same(function(residual, self.x, self.w), self.plain)
    self.assertTrue(residual.is_deleted())
    lowered = function.lower(self.residual, self.x, self.w)
    self.assertIn("tf.aliasing_output = 0", lowered.as_text())

  def test_eval_shape_and_jaxpr_tell_shape_and_dtype(self):
    for dtype in ("float32", "bfloat16", "float16"):
      function = functools.partial(dot, preferred_element_type=dtype)
      spec = jax.eval_shape(function, self.x, self.w)
      self.assertEqual((spec.shape, spec.dtype), ((3, 5), jnp.dtype(dtype)))
      self.assertFalse(spec.weak_type)
      (eqn,) = dots_of(jax.make_jaxpr(function)(self.x, self.w).jaxpr)
      self.assertEqual(
        [v.aval.dtype for v in eqn.invars],
        [self.x.dtype, self.w.dtype, self.x.scale.dtype, self.w.scale.dtype],
      )
      self.assertEqual(eqn.params["call"].lhs.format, jp.MXFP8)
      self.assertIsInstance(eqn.params["call"], calls.DotCall)

  def test_stop_gradient_makes_it_a_constant(self):
    (w,) = arrays((jp.MXFP8, (5, 32)))

    def loss(x):
      y = dot(lax.stop_gradient(x), w, bias=jnp.ones(5))
      return y.sum() * x.sum()

    x = jnp.ones((3, 32))
    expected = 3 * float(np.asarray(jp.dequantize(w)).sum() + 5)
    np.testing.assert_array_equal(jax.grad(loss)(x), np.full((3, 32), expected))


class DecideTest(absltest.TestCase):
  def equation(self, **options):
    (x,) = arrays((jp.MXFP8, (4, 64)))
    function = jax.jit(functools.partial(dot, **options))
    jaxpr = jax.make_jaxpr(function)(x, x).jaxpr
    (eqn,) = primitive.equations(jaxpr)
    return eqn

  def test_decision_is_for_the_given_the_recorded_or_the_local_target(self):
    b200 = jp.named_target("b200", cudnn="9.12")
    eqn = self.equation()
    self.assertEqual(primitive.decide(eqn, None).target, jp.detect_target())
    decided = primitive.decide(eqn, b200)
    self.assertEqual(decided.target, b200)
    self.assertEqual(decided.decision.implementation, "cudnn")
    with jp.use_target(b200):
      eqn = self.equation(implementation="cudnn")
    self.assertEqual(primitive.decide(eqn, None).target, b200)
    refused = primitive.decide(eqn, jp.named_target("cpu"))
    self.assertIsNone(refused.decision)
    self.assertRegex(refused.error, r"(?s)does not support.*platform is cpu")
    self.assertEqual((refused.problem.m, refused.problem.k), (4, 64))


class ExportTest(transformations.PrimitiveTestCase):
  def assert_exported(self, function, types, *calls):
    """Exports for types; a loaded function gives the same bits."""
    exported = jax.export.export(function)(*types)
    again = jax.export.deserialize(exported.serialize())
    for args in calls:
      self.assert_same(again.call(*args), function(*args))
    return exported

  @parameterized.parameters(
    (jp.MXFP8, jp.MXFP8),
    (jp.MXFP8, jp.NVFP4),
    (jp.NVFP4, jp.NVFP4),
    (None, jp.MXFP4),
    (jp.MXFP4, None),
  )
  @pytest.mark.sample(1)
  def test_symbolic_sizes_serve_every_size(self, lhs, rhs):
    scope = jax.export.SymbolicScope()

    def spec(dtype, text):
      shape = jax.export.symbolic_shape(text, scope=scope)
      return jax.ShapeDtypeStruct(shape, dtype)

    def side(format, rows):
      values = f"b, {rows}, 32*k"
      if format is None:
        return spec(jnp.bfloat16, values)
      columns = f"b, {rows}, {32 // format.block_size}*k"
      scale = spec(format.scale_dtype, columns)
      return jp.ScaledArray(
        spec(format.values_dtype, values), scale, None, format
      )

    def make(format, shape, seed):
      rng = np.random.default_rng(seed)
      if format is None:
        return jnp.asarray(rng.integers(-8, 9, shape), jnp.bfloat16)
      return array(rng, format, shape)

    options = {"global_scale": 0.5, "activation": "relu"}
    function = lambda x, w, bias: dot(x, w, bias=bias, **options)
    types = side(lhs, "m"), side(rhs, "n"), spec(jnp.float32, "n")
    given = []
    for b, m, n, k in ((1, 1, 1, 1), (2, 3, 5, 4), (3, 1, 7, 2)):
      x, w = make(lhs, (b, m, 32 * k), b), make(rhs, (b, n, 32 * k), b + 10)
      given.append((x, w, jnp.arange(n, dtype=jnp.float32)))
    exported = self.assert_exported(jax.jit(function), types, *given)
    self.assertEqual(str(exported.out_avals[0].shape), "(b, m, n)")

  @parameterized.parameters(jp.MXFP8, jp.NVFP4)
  def test_each_exported_platform_is_decided_for_itself(self, format):
    (m,) = jax.export.symbolic_shape("m")
    x, w = arrays((format, (7, 64)), (format, (5, 64)))
    choose = mock.patch.object(backends, "choose", side_effect=backends.choose)
    function = jax.jit(lambda x, w: dot(x, w))
    with choose as choose:
      exported = jax.export.export(function, platforms=PLATFORMS)(
        specs(x, m), w
      )
    decided = [args[0][1].platform for args in choose.call_args_list]
    self.assertCountEqual(decided, PLATFORMS)
    self.assertEqual(exported.platforms, PLATFORMS)
    again = jax.export.deserialize(exported.serialize())
    self.assert_same(again.call(x, w), dot(x, w))

  def test_vmap_over_symbolic_entries_is_exported(self):
    x, w = arrays((jp.MXFP8, (2, 3, 32)), (jp.MXFP8, (5, 32)))
    (b,) = jax.export.symbolic_shape("b")
    function = jax.jit(jax.vmap(dot, in_axes=(0, None)))
    self.assert_exported(function, (specs(x, b), w), (x, w))


def flat_dot(*flat, **static):
  """The call with its arrays in one order, the epilogue's last."""
  *operands, bias, residual = flat
  return dot(*operands, bias=bias, residual=residual, **static)


def sides(rng, *kinds_shapes_axes):
  """lhs, rhs and their scales, as raw arrays."""
  made = [
    contract.operand(rng, format, shape, axis=axis, storage="raw")
    for format, shape, axis in kinds_shapes_axes
  ]
  return (*(x.operand for x in made), *(x.scale for x in made))


def patterns(count):
  return (p for p in itertools.product((False, True), repeat=count) if any(p))


class VmapTest(transformations.PrimitiveTestCase):
  def check(self, rng, mapped, make, function):
    """vmap over random axes against a loop, with a random out axis.

    Args:
      rng: chooses the axes.
      mapped: which arrays are mapped.
      make: entry -> the arrays of one entry; None for an absent one.
      function: of these arrays.
    """
    entries = [make(i) for i in range(MAPPED_SIZE)]
    args, in_axes = [], []
    for first, is_mapped, *each in zip(
      entries[0], mapped, *entries, strict=True
    ):
      if first is None or not is_mapped:
        args.append(first)
        in_axes.append(None)
        continue
      axis = int(rng.integers(first.ndim + 1))
      args.append(np.stack([np.asarray(e) for e in each], axis))
      # Negative axes name the same dimension.
      in_axes.append(axis - (first.ndim + 1) * int(rng.integers(2)))
    rows = [
      [
        own if axis is not None else first
        for own, first, axis in zip(each, entries[0], in_axes, strict=True)
      ]
      for each in entries
    ]
    out_axis = int(rng.integers(jax.eval_shape(function, *rows[0]).ndim + 1))
    batched = jax.vmap(function, in_axes=tuple(in_axes), out_axes=out_axis)

    @jax.jit
    def run(args, rows):
      return batched(*args), [function(*row) for row in rows]

    actual, expected = run(args, rows)
    self.assert_same(actual, np.stack(expected, out_axis))
    self.assertLen(dots_of(jax.make_jaxpr(batched)(*args).jaxpr), 1)

  @parameterized.parameters(*patterns(7))
  @pytest.mark.sample(1)
  def test_every_pattern_of_in_axes_equals_a_loop(self, *mapped):
    seed = sum(bit << i for i, bit in enumerate(mapped))

    def make(entry):
      rng = np.random.default_rng([seed, entry])
      lhs = (jp.MXFP8, (2, 3, 32), 2)
      return (
        *sides(rng, lhs, (jp.NVFP4, (2, 5, 32), 2)),
        np.exp2(rng.integers(-2, 3, (2, 3, 1))).astype(np.float32),
        rng.integers(-99, 99, 5).astype(np.float32),
        rng.integers(-99, 99, (2, 3, 5)).astype(np.float32),
      )

    function = functools.partial(flat_dot, activation="relu")
    self.check(np.random.default_rng(seed), mapped, make, function)

  @parameterized.product(
    mapped=tuple(patterns(4)),
    order=(
      # (lhs dimensions, rhs dimensions): b batch, m and n rows, k contracting
      ("kmb", "bkn"),
      ("mbkM", "nkbN"),
      ("bck", "kbc"),  # no rows at all
      ("k", "nk"),
    ),
  )
  @pytest.mark.sample(1)
  def test_every_dimension_order_is_mapped(self, mapped, order):
    sizes = {"b": 2, "c": 3, "m": 3, "M": 2, "n": 5, "N": 2, "k": 64}
    batch = [d for d in "bc" if d in order[0]]
    numbers = tuple(
      tuple(tuple(side.index(d) for d in dims) for side in order)
      for dims in (["k"], batch)
    )
    shapes = [tuple(sizes[d] for d in side) for side in order]
    axes = [side.index("k") for side in order]

    def make(entry):
      rng = np.random.default_rng(entry)
      operands = zip((jp.MXFP4, jp.MXFP8), shapes, axes, strict=True)
      return (*sides(rng, *operands), None, None, None)

    function = functools.partial(flat_dot, dimension_numbers=numbers)
    rng = np.random.default_rng(len(order[0]))
    self.check(rng, (*mapped, False, False, False), make, function)

  @parameterized.product(
    storage=("packed_raw", "swizzled", "padded", "plain"),
    mapped=((True, False), (False, True), (True, True)),
    rhs_storage=("raw", "swizzled"),
  )
  @pytest.mark.sample(1)
  def test_every_storage_is_mapped(self, storage, mapped, rhs_storage):
    rng = np.random.default_rng(0)

    def make(format, shape, storage):
      if storage == "plain":
        return jnp.asarray(rng.integers(-8, 9, shape), jnp.bfloat16), None
      raw = "raw" if storage == "padded" else storage
      made = contract.operand(rng, format, shape, storage=raw)
      scale = made.scale
      if storage == "padded":
        scale = np.full((8, 5), 0xFF, np.uint8).view(scale.dtype)
        scale[:3, :2] = made.scale
        scale = jnp.asarray(scale)
      return made.operand, scale

    def function(lhs, rhs):
      block_size = 32 if storage == "padded" else None
      (x, x_scale), (w, w_scale) = lhs, rhs
      return dot(x, w, x_scale, w_scale, block_size=block_size)

    stacks, args = [], []
    for side, is_mapped in zip(
      ((jp.MXFP4, (3, 64), storage), (jp.MXFP8, (130, 64), rhs_storage)),
      mapped,
      strict=True,
    ):
      entries = [make(*side) for _ in range(MAPPED_SIZE if is_mapped else 1)]
      stack = jax.tree.map(lambda *xs: jnp.stack(xs, 1), *entries)
      args.append(stack if is_mapped else entries[0])
      stacks.append(entries if is_mapped else entries * MAPPED_SIZE)
    in_axes = tuple(1 if is_mapped else None for is_mapped in mapped)

    @jax.jit
    def run(args, pairs):
      each = [function(*pair) for pair in pairs]
      return jax.vmap(function, in_axes=in_axes)(*args), jnp.stack(each)

    self.assert_same(*run(args, list(zip(*stacks, strict=True))))

  @parameterized.product(
    in_axes=((0, None), (None, 0), (1, None), (None, 2), (2, None)),
    formats=((jp.MXFP8, jp.MXFP4), (jp.NVFP4, jp.NVFP4)),
    batched=(False, True),
  )
  @pytest.mark.sample(1)
  def test_unbatched_operand_goes_untouched_into_one_dot(
    self, in_axes, formats, batched
  ):
    # Not even a reshape: the very variables of the arguments are multiplied.
    rng = np.random.default_rng(0)
    args = []
    for format, rows, axis in zip(formats, (4, 6), in_axes, strict=True):
      x = array(rng, format, (2, rows, 32) if batched else (rows, 32))
      if axis is not None:
        x = jax.tree.map(lambda a, axis=axis: jnp.stack([a] * 3, axis), x)
      args.append(x)
    jaxpr = jax.make_jaxpr(jax.vmap(dot, in_axes=in_axes))(*args).jaxpr
    (eqn,) = dots_of(jaxpr)
    fixed = 0 if in_axes[0] is None else 1
    self.assertIs(eqn.invars[fixed], jaxpr.invars[2 * fixed])
    self.assertIs(eqn.invars[2 + fixed], jaxpr.invars[2 * fixed + 1])
    names = {e.primitive.name for e in transformations.equations(jaxpr)}
    self.assertNotIn("broadcast_in_dim", names)

  def test_vector_dot_with_scalar_epilogue_is_mapped(self):
    x, w = arrays((jp.MXFP8, (4, 32)), (jp.MXFP8, (1, 32)))
    vector = jp.ScaledArray(w.values[0], w.scale[0], None, jp.MXFP8)
    residual = np.float32(7)
    function = lambda x, residual: dot(
      *(x, vector),
      dimension_numbers=(((0,), (0,)), ((), ())),
      residual=residual,
    )

    @jax.jit
    def run(x, residual, residuals):
      return (
        jnp.stack([function(entry(x, i), residual) for i in range(4)]),
        jax.vmap(function, in_axes=(0, None))(x, residual),
        jax.vmap(function)(x, residuals),
      )

    expected, *results = run(x, residual, np.full(4, residual))
    for actual in results:
      self.assert_same(actual, expected)

  def test_axis_size_zero_gives_an_empty_result(self):
    x, w = arrays((jp.MXFP8, (4, 32)), (jp.MXFP8, (5, 32)))
    empty = jax.tree.map(lambda a: jnp.zeros((0, *a.shape), a.dtype), x)
    actual = jax.vmap(dot, in_axes=(0, None))(empty, w)
    self.assertEqual(actual.shape, (0, 4, 5))


LONG_K = 1056
PAIRS = (
  (None, jp.MXFP8),
  (None, jp.NVFP4),
  (jp.MXFP8, jp.MXFP8),
  (jp.MXFP8, jp.MXFP4),
  (jp.MXFP4, jp.MXFP4),
  (jp.NVFP4, jp.NVFP4),
)
# From so many rows on one engine computes them, whatever they are
# (kernels/cpu/dot/rule.h). The others run only where a CPU has them.
SAME_FROM = {"avx2": 5, "avx512": 5, "avx512_bf16": 65, "amx_bf16": 24}


def quantized(x, format):
  if format is None:
    return jnp.asarray(x, jnp.bfloat16)
  # A computed global scale would depend on all rows.
  scale = 2.0**-8 if format == jp.NVFP4 else None
  return jp.quantize(x, format, global_scale=scale)


def assert_same_rows(dot, numbers, x):
  """Checks that rows have the same bits for each number of rows."""
  results = [np.asarray(dot(x[:m])) for m in numbers]
  for m, result in zip(numbers, results, strict=True):
    np.testing.assert_array_equal(results[-1][:m], result, f"m={m}")


def assert_same_places(dot, x):
  """Checks that a row has the same bits in each place."""
  order = np.random.default_rng(1).permutation(len(x))
  np.testing.assert_array_equal(np.asarray(dot(x))[order], dot(x[order]))


class CpuRowsTest(absltest.TestCase):
  """Numbers of rows that give the same bits: docs/how_to/decode_loop.md."""

  @pytest.mark.full
  def test_rows_have_the_same_bits_from_some_number_on(self):
    target = targets.detect_target("cpu")
    first = SAME_FROM.get(target.cpu_kernels)
    if first is None:
      self.skipTest(f"no claim about kernels {target.cpu_kernels}")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, LONG_K)).astype(np.float32)
    for lhs, rhs in PAIRS:
      # AVX2 adds up two FP4 sides in one order: sums of a block are integers.
      all_fp4 = lhs in (jp.MXFP4, jp.NVFP4) and rhs in (jp.MXFP4, jp.NVFP4)
      start = 1 if all_fp4 and target.cpu_kernels == "avx2" else first
      for n in (1, 40):
        w = quantized(rng.normal(size=(n, LONG_K)).astype(np.float32), rhs)
        dot = jax.jit(
          lambda x, w=w, lhs=lhs: jp.block_scaled_dot(
            quantized(x, lhs), w, implementation="cpu"
          )
        )
        with self.subTest(lhs=lhs, rhs=rhs, n=n):
          numbers = (start, start + 1, start + 32, 129, 300)
          assert_same_rows(dot, numbers, x)
          for m in (2, 3, 4, 300):
            assert_same_places(dot, x[:m])


@interpreted.needs_interpreter
class TritonRowsTest(interpreted.RecordedTestCase):
  """Launches of the same name add up a row's products in the same order.

  Places are not compared: the interpreter's products are NumPy's, whose order
  depends on the place (`interpreted.products_depend_on_rows`).
  """

  @pytest.mark.full
  def test_rows_of_one_kernel_have_the_same_bits(self):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 288)).astype(np.float32)
    for lhs, rhs in ((None, jp.MXFP8), (jp.MXFP8, jp.MXFP4)):
      w = quantized(rng.normal(size=(40, 288)).astype(np.float32), rhs)
      rows = quantized(x, lhs)
      for numbers in ((1, 3, 16), (65, 90)):
        with (
          self.subTest(lhs=lhs, rhs=rhs, numbers=numbers),
          jp.use_target(targets.named_target("h100")),
        ):
          self.launched.clear()

          def dot(index, rows=rows, w=w):
            lhs = jax.tree.map(lambda a: a[index], rows)
            return jp.block_scaled_dot(lhs, w, implementation="triton")

          assert_same_rows(dot, numbers, np.arange(90))
          self.assertLen({launch.name for launch in self.launched}, 1)


ROWS = 32_769
MATVEC = (((0,), (1,)), ((), ()))
RANK_7 = (2, 1, 3, 1, 2, 2, 32)
OF_3 = contract.block_format(
  "e4m3 of 3", jp.MXFP8.values_dtype, jp.MXFP8.scale_dtype, 3
)


def integers(shape, seed=0):
  return exact_numbers.integers(seed, *shape)


def exactly(x, format):
  """Integers of a magnitude of up to 4, exactly, by a scale of 1."""
  blocks = (*x.shape[:-1], x.shape[-1] // format.block_size)
  return jp.ScaledArray(
    jnp.asarray(x, format.values_dtype),
    jnp.ones(blocks, format.scale_dtype),
    None,
    format,
  )


class ManyRowsTest(absltest.TestCase):
  """Programs beyond the sizes at which XLA's CPU compiler is known to fail.

  With jaxlib 0.10.2 `vmap(lambda r: sum((m @ r) ** 2))` of more than 32,768
  rows of 3 gives wrong values (jax-ml/jax#39103), and some programs of rank 7
  crash (jax-ml/jax#40412). Ours are right there. Numbers are small integers, so
  that NumPy's products are exact.
  """

  def setUp(self):
    super().setUp()
    # XLA's operations, which kernels for CPUs would replace.
    self.enter_context(targets.use_target(targets.named_target("cpu")))

  @pytest.mark.full
  def test_quantize(self):
    for format in (jp.MXFP8, jp.NVFP4):
      size = format.block_size
      for shape in ((ROWS, size), (3, ROWS, size), RANK_7):
        x = integers(shape)
        with self.subTest(format.name, shape=shape):
          result = jax.jit(lambda x, f=format: jp.quantize(x, f))(x)
          codes, scale, *_ = quantization_oracle.reference(x, format)
          quantization_oracle.assert_codes(result, codes, scale)

  def test_dequantize(self):
    for shape in ((ROWS, 32), (2, ROWS, 32), RANK_7):
      x = integers(shape)
      with self.subTest(shape=shape):
        result = jax.jit(jp.dequantize)(exactly(x, jp.MXFP8))
        np.testing.assert_array_equal(result, x)

  @pytest.mark.full
  def test_dots(self):
    w = integers((3, 32), 1)
    x = integers((ROWS, 32))
    product = x @ w.T
    batched = integers((2, 1, 3, 1, 2, 4, 32), 1)
    rank_7 = integers(RANK_7)
    product_of_7 = rank_7 @ batched.swapaxes(-1, -2)
    few, of_3 = integers((ROWS, 3)), integers((3, 3), 1)
    squares_of_3 = ((few @ of_3.T) ** 2).sum(1)
    dot = jp.block_scaled_dot
    squares = lambda rows, w: jax.vmap(
      lambda row: jnp.sum(dot(row, w, dimension_numbers=MATVEC) ** 2)
    )(rows)
    table = {
      "rows": (dot, x, w, jp.MXFP8, product),
      "columns": (lambda x, w: dot(w, x), x, w, jp.MXFP8, product.T),
      "vmap": (squares, x, w, jp.MXFP8, (product**2).sum(1)),
      "vmap of rows of 3": (squares, few, of_3, OF_3, squares_of_3),
      "rank 7": (dot, rank_7, batched, jp.MXFP8, product_of_7),
    }
    for name, (function, x, w, format, expected) in table.items():
      for lhs in (x, exactly(x, format)):
        with self.subTest(name, lhs=type(lhs).__name__):
          result = jax.jit(function)(lhs, exactly(w, format))
          np.testing.assert_array_equal(result, expected)

  @pytest.mark.full
  def test_gradients(self):
    x, w = integers((ROWS, 32)), integers((3, 32), 1)
    signs = np.sign(integers((ROWS, 3), 2))
    dot = jp.dot_general("mxfp8", "mxfp8")

    def loss(x, w):
      return jnp.sum(dot(x, w, (((1,), (1,)), ((), ()))) * signs)

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    np.testing.assert_array_equal(found[0], signs @ w)
    np.testing.assert_array_equal(found[1], signs.T @ x)

  @pytest.mark.full
  def test_ragged_dot(self):
    x, w = integers((ROWS, 32)), integers((3, 8, 32), 1)
    sizes = np.array([ROWS - 12, 0, 12])
    expected = np.concatenate([x[:-12] @ w[0].T, x[-12:] @ w[2].T])
    result = jax.jit(jp.ragged_dot)(x, exactly(w, jp.MXFP8), sizes)
    np.testing.assert_array_equal(result, expected)
    _, pullback = jax.vjp(
      lambda x: jp.ragged_dot(x, exactly(w, jp.MXFP8), jnp.asarray(sizes)), x
    )
    cotangent = integers(expected.shape, 3)
    wanted = np.concatenate([cotangent[:-12] @ w[0], cotangent[-12:] @ w[2]])
    np.testing.assert_array_equal(pullback(cotangent)[0], wanted)
