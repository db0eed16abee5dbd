# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot` under JAX's transformations: the same as the plain call.

Data are integers under scales that are powers of two, so that every result is
exact and equality is equality of bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any
from typing import Final
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin import backends
from jaxplugin import call
from jaxplugin import testing

FORMATS: Final = (jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP4, jp.NVFP4)
MAPPED_SIZE: Final = 3
NAMES: Final = (
  "lhs",
  "rhs",
  "lhs_scale",
  "rhs_scale",
  "global_scale",
  "bias",
  "residual",
)
PRIMITIVE: Final = "block_scaled_dot"


def operand(
  rng: np.random.Generator,
  format: jp.BlockFormat,
  shape: tuple[int, ...],
  *,
  axis: int | None = None,
  storage: str = "scaled_array",
) -> testing.Operand:
  """An integer operand, blocked along its last dimension by default."""
  case = testing.OperandCase(
    format=format,
    dtype=format.values_dtype,
    shape=shape,
    axis=len(shape) - 1 if axis is None else axis,
    storage=storage,
  )
  return testing.make_operand(rng, case, integers=True)


def array(rng, format, shape, **kwargs) -> jp.ScaledArray:
  return operand(rng, format, shape, **kwargs).operand


def dot(*flat: Any, **static: Any) -> jax.Array:
  """The call with its arrays in the order of `NAMES`."""
  lhs, rhs, lhs_scale, rhs_scale, global_scale, bias, residual = flat
  return jp.block_scaled_dot(
    lhs,
    rhs,
    lhs_scale,
    rhs_scale,
    global_scale,
    bias=bias,
    residual=residual,
    **static,
  )


def equations(jaxpr: Any) -> Iterator[Any]:
  """All equations of a jaxpr and of those inside it."""
  for eqn in jaxpr.eqns:
    yield eqn
    for value in jax.tree.leaves(
      list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from equations(inner)


def varying_axes(x: jax.Array) -> set[str]:
  """The mesh axes over which `x` differs, by its type, inside `shard_map`."""
  return set(jax.typeof(x).manual_axis_type.varying)


def dots_of(jaxpr: Any) -> list[Any]:
  return [e for e in equations(jaxpr) if e.primitive.name == PRIMITIVE]


class PrimitiveTest(parameterized.TestCase):
  def assert_same(self, actual: Any, expected: Any) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    self.assertEqual(actual.dtype, expected.dtype)
    np.testing.assert_array_equal(
      actual.astype(np.float64), expected.astype(np.float64), strict=True
    )


class VmapTest(PrimitiveTest):
  def check(
    self,
    rng: np.random.Generator,
    shapes: list[Any],
    mapped: tuple[bool, ...],
    make: Any,
    function: Any,
  ) -> None:
    """vmap over random axes against a loop, with a random out axis.

    Args:
      rng: chooses the axes.
      shapes: of the arrays of one entry; None where there is none.
      mapped: which arrays are mapped.
      make: entry -> the arrays of one entry.
      function: of these arrays.
    """
    entries = [make(i) for i in range(MAPPED_SIZE)]
    args, in_axes = [], []
    for i, shape in enumerate(shapes):
      if shape is None or not mapped[i]:
        args.append(entries[0][i])
        in_axes.append(None)
        continue
      axis = int(rng.integers(len(shape) + 1))
      stacked = np.stack([np.asarray(e[i]) for e in entries], axis)
      args.append(jnp.asarray(stacked))
      # Negative axes name the same dimension.
      in_axes.append(axis - (len(shape) + 1) * int(rng.integers(2)))
    rows = []
    for entry in entries:
      row = [
        entry[i] if axis is not None else entries[0][i]
        for i, axis in enumerate(in_axes)
      ]
      rows.append(np.asarray(function(*row)))
    out_axis = int(rng.integers(rows[0].ndim + 1))
    expected = np.stack(rows, out_axis)
    batched = jax.vmap(function, in_axes=tuple(in_axes), out_axes=out_axis)
    self.assert_same(batched(*args), expected)
    jaxpr = jax.make_jaxpr(batched)(*args).jaxpr
    self.assertLen(dots_of(jaxpr), 1)

  @parameterized.parameters(
    p for p in itertools.product((False, True), repeat=7) if any(p)
  )
  def test_every_pattern_of_in_axes_equals_a_loop(self, *mapped):
    seed = sum(bit << i for i, bit in enumerate(mapped))

    def make(entry):
      rng = np.random.default_rng([seed, entry])
      lhs = operand(rng, jp.MXFP8, (2, 3, 32), storage="raw")
      rhs = operand(rng, jp.NVFP4, (2, 5, 32), storage="raw")
      return (
        lhs.operand,
        rhs.operand,
        lhs.scale,
        rhs.scale,
        jnp.float32(2.0 ** rng.integers(-2, 3)),
        jnp.asarray(rng.integers(-99, 99, 5), jnp.float32),
        jnp.asarray(rng.integers(-99, 99, (2, 3, 5)), jnp.float32),
      )

    shapes = [(2, 3, 32), (2, 5, 32), (2, 3, 1), (2, 5, 2), (), (5,), (2, 3, 5)]
    function = functools.partial(dot, activation="relu")
    rng = np.random.default_rng(seed)
    self.check(rng, shapes, mapped, make, function)

  @parameterized.product(
    mapped=tuple(
      p for p in itertools.product((False, True), repeat=4) if any(p)
    ),
    order=(
      # (lhs dimensions, rhs dimensions): b batch, m and n rows, k contracting
      ("kmb", "bkn"),
      ("mbkM", "nkbN"),
      ("bck", "kbc"),  # no rows at all
      ("k", "nk"),
    ),
  )
  def test_every_dimension_order_is_mapped(self, mapped, order):
    sizes = {"b": 2, "c": 3, "m": 3, "M": 2, "n": 5, "N": 2, "k": 64}
    lhs_order, rhs_order = order
    batch = [d for d in "bc" if d in lhs_order]
    numbers = tuple(
      tuple(tuple(side.index(d) for d in dims) for side in order)
      for dims in (["k"], batch)
    )
    lhs_shape = tuple(sizes[d] for d in lhs_order)
    rhs_shape = tuple(sizes[d] for d in rhs_order)
    axes = (lhs_order.index("k"), rhs_order.index("k"))

    def make(entry):
      rng = np.random.default_rng(entry)
      lhs = operand(rng, jp.MXFP4, lhs_shape, axis=axes[0], storage="raw")
      rhs = operand(rng, jp.MXFP8, rhs_shape, axis=axes[1], storage="raw")
      return (
        lhs.operand,
        rhs.operand,
        lhs.scale,
        rhs.scale,
        *([None] * 3),
      )

    example = make(0)
    shapes = [None if x is None else x.shape for x in example]
    rng = np.random.default_rng(len(order[0]))
    function = functools.partial(dot, dimension_numbers=numbers)
    self.check(rng, shapes, (*mapped, False, False, False), make, function)

  @parameterized.product(
    storage=("packed_raw", "swizzled", "padded", "plain"),
    mapped=((True, False), (False, True), (True, True)),
    rhs_storage=("raw", "swizzled"),
  )
  def test_every_storage_is_mapped(self, storage, mapped, rhs_storage):
    rng = np.random.default_rng(0)

    def make_lhs():
      if storage == "plain":
        return jnp.asarray(rng.integers(-8, 9, (3, 64)), jnp.bfloat16), None
      raw = "raw" if storage == "padded" else storage
      made = operand(rng, jp.MXFP4, (3, 64), storage=raw)
      scale = made.scale
      if storage == "padded":
        scale = np.full((8, 5), 0xFF, np.uint8).view(made.scale.dtype)
        scale[:3, :2] = made.scale
        scale = jnp.asarray(scale)
      return made.operand, scale

    def make_rhs():
      made = operand(rng, jp.MXFP8, (130, 64), storage=rhs_storage)
      return made.operand, made.scale

    def function(lhs, rhs):
      return jp.block_scaled_dot(
        lhs[0],
        rhs[0],
        lhs[1],
        rhs[1],
        block_size=32 if storage == "padded" else None,
      )

    sides, args = [], []
    for make, is_mapped in zip((make_lhs, make_rhs), mapped, strict=True):
      if is_mapped:
        entries = [make() for _ in range(MAPPED_SIZE)]
        args.append(jax.tree.map(lambda *xs: jnp.stack(xs, 1), *entries))
      else:
        entries = [make()] * MAPPED_SIZE
        args.append(entries[0])
      sides.append(entries)
    expected = np.stack([function(*pair) for pair in zip(*sides, strict=True)])
    in_axes = tuple(1 if is_mapped else None for is_mapped in mapped)
    batched = jax.vmap(function, in_axes=in_axes)
    self.assert_same(batched(*args), expected)
    self.assert_same(jax.jit(batched)(*args), expected)

  @parameterized.product(
    in_axes=((0, None), (None, 0), (1, None), (None, 2), (2, None)),
    formats=((jp.MXFP8, jp.MXFP4), (jp.NVFP4, jp.NVFP4)),
    batched=(False, True),
  )
  def test_unbatched_operand_goes_untouched_into_one_dot(
    self, in_axes, formats, batched
  ):
    # Not even a reshape: the very variables of the arguments are multiplied.
    rng = np.random.default_rng(0)
    lead = (2,) if batched else ()
    args = []
    for format, rows, axis in zip(formats, (4, 6), in_axes, strict=True):
      x = array(rng, format, (*lead, rows, 32))
      if axis is not None:
        x = jax.tree.map(lambda a, axis=axis: jnp.stack([a] * 3, axis), x)
      args.append(x)
    function = jax.vmap(jp.block_scaled_dot, in_axes=in_axes)
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    (eqn,) = dots_of(jaxpr)
    fixed = 0 if in_axes[0] is None else 1
    lhs, rhs, lhs_scale, rhs_scale = eqn.invars
    values, scale = ((lhs, lhs_scale), (rhs, rhs_scale))[fixed]
    self.assertIs(values, jaxpr.invars[2 * fixed])
    self.assertIs(scale, jaxpr.invars[2 * fixed + 1])
    names = {e.primitive.name for e in equations(jaxpr)}
    self.assertNotIn("broadcast_in_dim", names)

  def test_batch_of_activations_folds_into_rows(self):
    rng = np.random.default_rng(0)
    x = array(rng, jp.MXFP8, (7, 4, 32))
    w = array(rng, jp.MXFP8, (6, 32))
    function = jax.vmap(jp.block_scaled_dot, in_axes=(0, None))
    (eqn,) = dots_of(jax.make_jaxpr(function)(x, w).jaxpr)
    self.assertEqual(
      eqn.params["config"].dimension_numbers, (((2,), (1,)), ((), ()))
    )
    self.assertEqual(eqn.outvars[0].aval.shape, (7, 4, 6))

  def test_nested_vmap_equals_loops(self):
    rng = np.random.default_rng(0)
    x = array(rng, jp.MXFP8, (4, 3, 32))
    w = array(rng, jp.MXFP4, (2, 5, 32))
    bias = jnp.asarray(rng.integers(-9, 9, (2, 5)), jnp.float32)
    function = lambda x, w, b: jp.block_scaled_dot(x, w, bias=b)
    outer_w = jax.vmap(
      jax.vmap(function, in_axes=(0, None, None)), in_axes=(None, 0, 0)
    )
    outer_x = jax.vmap(
      jax.vmap(function, in_axes=(None, 0, 0), out_axes=1),
      in_axes=(0, None, None),
    )
    pick = lambda tree, i: jax.tree.map(lambda a: a[i], tree)
    expected = np.stack(
      [
        np.stack([function(pick(x, j), pick(w, i), bias[i]) for j in range(4)])
        for i in range(2)
      ]
    )
    self.assert_same(outer_w(x, w, bias), expected)
    self.assert_same(outer_x(x, w, bias), expected.transpose(1, 2, 0, 3))
    jaxpr = jax.make_jaxpr(outer_w)(x, w, bias).jaxpr
    self.assertLen(dots_of(jaxpr), 1)

  def test_vector_dot_with_scalar_epilogue_is_mapped(self):
    rng = np.random.default_rng(0)
    numbers = (((0,), (0,)), ((), ()))
    x = array(rng, jp.MXFP8, (4, 32), axis=1)
    w = array(rng, jp.MXFP8, (1, 32), axis=1)
    vector = jp.ScaledArray(w.values[0], w.scale[0], None, jp.MXFP8)
    residual = jnp.float32(7)

    def function(x, residual):
      return jp.block_scaled_dot(
        x, vector, dimension_numbers=numbers, residual=residual
      )

    rows = [jax.tree.map(lambda a, i=i: a[i], x) for i in range(4)]
    expected = np.stack([function(row, residual) for row in rows])
    self.assert_same(
      jax.vmap(function, in_axes=(0, None))(x, residual), expected
    )
    self.assert_same(
      jax.vmap(function, in_axes=(0, 0))(x, jnp.full(4, residual)), expected
    )

  @parameterized.parameters((0,), (1,), (3,))
  def test_mapped_global_scale_array_equals_a_loop(self, axis):
    rng = np.random.default_rng(0)
    x = array(rng, jp.MXFP8, (2, 3, 32))
    w = array(rng, jp.MXFP8, (2, 5, 32))
    scales = 2.0 ** rng.integers(-2, 3, (4, 2, 3, 1))
    scales = jnp.asarray(scales, jnp.float32)
    expected = np.stack(
      [jp.block_scaled_dot(x, w, global_scale=s) for s in scales]
    )
    function = lambda s: jp.block_scaled_dot(x, w, global_scale=s)
    moved = jnp.moveaxis(scales, 0, axis)
    self.assert_same(jax.vmap(function, in_axes=axis)(moved), expected)

  def test_vmap_of_quantize_inside_keeps_one_global_scale_an_entry(self):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 3, 32)), jnp.float32)
    w = jp.quantize(
      jnp.asarray(rng.normal(size=(5, 32)), jnp.float32), jp.NVFP4
    )
    function = lambda row: jp.block_scaled_dot(jp.quantize(row, jp.NVFP4), w)
    expected = np.stack([function(row) for row in x])
    actual = np.asarray(jax.vmap(function)(x))
    # Equal up to the order of adding: the rows are multiplied in one dot.
    magnitude = np.stack(
      [
        testing.dot(
          np.abs(np.asarray(jp.dequantize(jp.quantize(row, jp.NVFP4)), float)),
          np.abs(np.asarray(jp.dequantize(w), float)),
        )[0]
        for row in x
      ]
    )
    bound = 2 * testing.DOT_BOUND * magnitude
    self.assertTrue((np.abs(actual - expected) <= bound).all())

  def test_axis_size_zero_gives_an_empty_result(self):
    rng = np.random.default_rng(0)
    x = array(rng, jp.MXFP8, (4, 32))
    w = array(rng, jp.MXFP8, (5, 32))
    empty = jax.tree.map(lambda a: jnp.zeros((0, *a.shape), a.dtype), x)
    actual = jax.vmap(jp.block_scaled_dot, in_axes=(0, None))(empty, w)
    self.assertEqual(actual.shape, (0, 4, 5))


class ControlFlowTest(PrimitiveTest):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x = array(rng, jp.MXFP8, (3, 64))
    self.w = array(rng, jp.NVFP4, (5, 64))
    self.residual = jnp.asarray(rng.integers(-9, 9, (3, 5)), jnp.float32)
    self.plain = jp.block_scaled_dot(self.x, self.w, residual=self.residual)

  def test_scan_over_stacked_weights_equals_a_loop(self):
    rng = np.random.default_rng(1)
    layers = [array(rng, jp.MXFP4, (5, 64)) for _ in range(4)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)

    def step(carry, w):
      y = jp.block_scaled_dot(self.x, w, residual=carry)
      return y, y.sum()

    carry, sums = lax.scan(step, self.residual, stacked)
    expected, expected_sums = self.residual, []
    for w in layers:
      expected = jp.block_scaled_dot(self.x, w, residual=expected)
      expected_sums.append(expected.sum())
    self.assert_same(carry, expected)
    self.assert_same(sums, np.stack(expected_sums))

  @parameterized.parameters(True, False)
  def test_cond_takes_the_right_branch(self, flag):
    function = jax.jit(
      lambda flag, x, w: lax.cond(
        flag,
        lambda: jp.block_scaled_dot(x, w, residual=self.residual),
        lambda: jp.block_scaled_dot(x, w, activation="relu"),
      )
    )
    expected = self.plain
    if not flag:
      expected = jp.block_scaled_dot(self.x, self.w, activation="relu")
    self.assert_same(function(flag, self.x, self.w), expected)

  def test_mapped_cond_selects_by_entry(self):
    def function(flag):
      return lax.cond(
        flag,
        lambda: jp.block_scaled_dot(self.x, self.w, residual=self.residual),
        lambda: self.residual,
      )

    actual = jax.vmap(function)(jnp.array([True, False]))
    self.assert_same(actual, np.stack([self.plain, self.residual]))

  def test_while_loop_accumulates(self):
    def body(state):
      i, y = state
      return i + 1, jp.block_scaled_dot(self.x, self.w, residual=y)

    _, actual = jax.jit(
      lambda y: lax.while_loop(lambda s: s[0] < 3, body, (0, y))
    )(self.residual)
    expected = self.residual
    for _ in range(3):
      expected = jp.block_scaled_dot(self.x, self.w, residual=expected)
    self.assert_same(actual, expected)

  @parameterized.parameters(
    None, "everything_saveable", "nothing_saveable", "dots_saveable"
  )
  def test_remat_gives_the_same_value_and_gradient(self, policy):
    if policy is not None:
      policy = getattr(jax.checkpoint_policies, policy)

    def loss(s, remat):
      def inner(s, x, w):
        y = jp.block_scaled_dot(x, w, residual=self.residual)
        return s * s * y

      if remat:
        inner = jax.checkpoint(inner, policy=policy)
      return inner(s, self.x, self.w).sum()

    s = jnp.float32(2)
    expected = jax.value_and_grad(loss)(s, False)
    self.assertEqual(float(expected[1]), 4 * float(self.plain.sum()))
    for function in (
      jax.value_and_grad(loss),
      jax.jit(jax.value_and_grad(loss), static_argnums=1),
    ):
      actual = function(s, True)
      self.assert_same(actual[0], expected[0])
      self.assert_same(actual[1], expected[1])

  def test_rematted_dot_is_computed_again_in_the_backward_pass(self):
    def loss(s):
      inner = jax.checkpoint(
        lambda s, x: jnp.sin(s * jp.block_scaled_dot(x, self.w)).sum(),
        policy=jax.checkpoint_policies.nothing_saveable,
      )
      return inner(s, self.x)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.float32(1)).jaxpr
    self.assertGreaterEqual(len(dots_of(jaxpr)), 1)

  def test_donated_residual_is_reused(self):
    def function(residual, x, w):
      return jp.block_scaled_dot(x, w, residual=residual)

    residual = jnp.array(self.residual)
    actual = jax.jit(function, donate_argnums=0)(residual, self.x, self.w)
    self.assert_same(actual, self.plain)
    self.assertTrue(residual.is_deleted())
    lowered = jax.jit(function, donate_argnums=0).lower(
      self.residual, self.x, self.w
    )
    self.assertIn("tf.aliasing_output = 0", lowered.as_text())

  def test_compiling_ahead_of_time_gives_the_same_bits(self):
    function = jax.jit(lambda x, w, r: jp.block_scaled_dot(x, w, residual=r))
    specs = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
      (self.x, self.w, self.residual),
    )
    compiled = function.lower(*specs).compile()
    self.assert_same(compiled(self.x, self.w, self.residual), self.plain)

  @parameterized.parameters("float32", "bfloat16", "float16")
  def test_eval_shape_and_jaxpr_tell_shape_and_dtype(self, dtype):
    function = functools.partial(
      jp.block_scaled_dot, preferred_element_type=dtype
    )
    spec = jax.eval_shape(function, self.x, self.w)
    self.assertEqual((spec.shape, spec.dtype), ((3, 5), jnp.dtype(dtype)))
    self.assertFalse(spec.weak_type)
    jaxpr = jax.make_jaxpr(function)(self.x, self.w)
    (eqn,) = dots_of(jaxpr.jaxpr)
    self.assertEqual(
      [v.aval.dtype for v in eqn.invars],
      [self.x.dtype, self.w.dtype, self.x.scale.dtype, self.w.scale.dtype],
    )
    self.assertEqual(eqn.params["config"].lhs.format, jp.MXFP8)
    self.assertIsInstance(eqn.params["config"], call.DotConfig)


class DerivativeTest(PrimitiveTest):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.w = array(rng, jp.MXFP8, (5, 32))
    self.args = {
      "lhs": jnp.ones((3, 32)),
      "global_scale": jnp.float32(2),
      "bias": jnp.ones(5),
      "residual": jnp.ones((3, 5)),
    }

  def run_with(self, **changes):
    args = {**self.args, **changes}
    return jp.block_scaled_dot(args.pop("lhs"), self.w, **args).sum()

  @parameterized.product(
    name=("lhs", "global_scale", "bias", "residual"),
    transform=("grad", "jvp", "linearize", "jacfwd", "jit_grad", "vmap_grad"),
  )
  def test_direct_differentiation_is_refused_and_names_dot_general(
    self, name, transform
  ):
    function = lambda x: self.run_with(**{name: x})
    x = self.args[name]
    runs = {
      "grad": lambda: jax.grad(function)(x),
      "jvp": lambda: jax.jvp(function, (x,), (x,)),
      "linearize": lambda: jax.linearize(function, x),
      "jacfwd": lambda: jax.jacfwd(function)(x),
      "jit_grad": lambda: jax.jit(jax.grad(function))(x),
      "vmap_grad": lambda: jax.vmap(jax.grad(function))(jnp.stack([x, x])),
    }
    with self.assertRaisesRegex(
      NotImplementedError,
      r"block_scaled_dot: .*no derivative.*jaxplugin\.dot_general",
    ):
      runs[transform]()

  def test_stop_gradient_makes_it_a_constant(self):
    def loss(x):
      y = self.run_with(lhs=lax.stop_gradient(x))
      return y * x.sum()

    x = self.args["lhs"]
    expected = float(self.run_with())
    np.testing.assert_array_equal(jax.grad(loss)(x), np.full((3, 32), expected))


class ExportTest(PrimitiveTest):
  @parameterized.product(lhs=FORMATS, rhs=FORMATS)
  def test_export_round_trip_gives_the_same_bits(self, lhs, rhs):
    rng = np.random.default_rng(0)
    x, w = array(rng, lhs, (3, 64)), array(rng, rhs, (5, 64))
    function = jax.jit(
      lambda x, w: jp.block_scaled_dot(
        x, w, global_scale=0.5, bias=jnp.arange(5.0)
      )
    )
    exported = jax.export.export(function)(x, w)
    again = jax.export.deserialize(exported.serialize())
    self.assert_same(again.call(x, w), function(x, w))

  @parameterized.parameters(
    (jp.MXFP8, jp.MXFP8),
    (jp.MXFP8, jp.NVFP4),
    (jp.NVFP4, jp.NVFP4),
    (None, jp.MXFP4),
    (jp.MXFP4, None),
  )
  def test_symbolic_sizes_serve_every_size(self, lhs, rhs):
    scope = jax.export.SymbolicScope()

    def spec(format, rows):
      shape = lambda text: jax.export.symbolic_shape(text, scope=scope)
      if format is None:
        return jax.ShapeDtypeStruct(shape(f"b, {rows}, 32*k"), jnp.bfloat16)
      columns = f"{32 // format.block_size}*k"
      return jp.ScaledArray(
        jax.ShapeDtypeStruct(shape(f"b, {rows}, 32*k"), format.values_dtype),
        jax.ShapeDtypeStruct(
          shape(f"b, {rows}, {columns}"), format.scale_dtype
        ),
        None,
        format,
      )

    bias = jax.ShapeDtypeStruct(
      jax.export.symbolic_shape("n", scope=scope), jnp.float32
    )
    function = jax.jit(
      lambda x, w, bias: jp.block_scaled_dot(
        x, w, global_scale=0.5, bias=bias, activation="relu"
      )
    )
    exported = jax.export.export(function)(spec(lhs, "m"), spec(rhs, "n"), bias)
    self.assertEqual(str(exported.out_avals[0].shape), "(b, m, n)")
    again = jax.export.deserialize(exported.serialize())
    for b, m, n, k in ((1, 1, 1, 1), (2, 3, 5, 4), (3, 1, 7, 2)):
      rng = np.random.default_rng(b)

      def make(format, rows, b=b, k=k, rng=rng):
        if format is None:
          values = rng.integers(-8, 9, (b, rows, 32 * k))
          return jnp.asarray(values, jnp.bfloat16)
        return array(rng, format, (b, rows, 32 * k))

      args = (make(lhs, m), make(rhs, n), jnp.arange(n, dtype=jnp.float32))
      self.assert_same(again.call(*args), function(*args))

  def test_export_for_several_platforms_runs_here(self):
    rng = np.random.default_rng(0)
    x, w = array(rng, jp.NVFP4, (3, 64)), array(rng, jp.NVFP4, (5, 64))
    function = jax.jit(jp.block_scaled_dot)
    exported = jax.export.export(
      function, platforms=["cpu", "cuda", "rocm", "tpu"]
    )(x, w)
    self.assertEqual(exported.platforms, ("cpu", "cuda", "rocm", "tpu"))
    again = jax.export.deserialize(exported.serialize())
    self.assert_same(again.call(x, w), function(x, w))

  def test_each_exported_platform_is_decided_for_itself(self):
    rng = np.random.default_rng(0)
    x, w = array(rng, jp.MXFP8, (3, 64)), array(rng, jp.MXFP8, (5, 64))
    platforms = ("cpu", "cuda", "rocm", "tpu")
    with mock.patch.object(
      backends, "choose", side_effect=backends.choose
    ) as choose:
      jax.export.export(jax.jit(jp.block_scaled_dot), platforms=platforms)(x, w)
    decided = [args[0][1].platform for args in choose.call_args_list]
    self.assertCountEqual(decided, platforms)

  def test_export_for_several_platforms_takes_symbolic_sizes(self):
    (m,) = jax.export.symbolic_shape("m")
    rng = np.random.default_rng(0)
    w = array(rng, jp.MXFP8, (5, 64))
    x = array(rng, jp.MXFP8, (7, 64))
    spec = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct((m, *a.shape[1:]), a.dtype), x
    )
    function = jax.jit(jp.block_scaled_dot)
    exported = jax.export.export(function, platforms=["cpu", "cuda"])(spec, w)
    again = jax.export.deserialize(exported.serialize())
    self.assert_same(again.call(x, w), function(x, w))

  def test_vmap_of_an_exported_call_equals_a_loop(self):
    rng = np.random.default_rng(0)
    x = array(rng, jp.MXFP8, (2, 3, 32))
    w = array(rng, jp.MXFP8, (5, 32))
    (b,) = jax.export.symbolic_shape("b")
    spec = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype), x
    )
    function = jax.jit(jax.vmap(jp.block_scaled_dot, in_axes=(0, None)))
    exported = jax.export.export(function)(spec, w)
    rows = [jax.tree.map(lambda a, i=i: a[i], x) for i in range(2)]
    expected = np.stack([jp.block_scaled_dot(row, w) for row in rows])
    self.assert_same(exported.call(x, w), expected)


class OneDeviceMeshTest(PrimitiveTest):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x = array(rng, jp.MXFP8, (2, 3, 64))
    self.w = array(rng, jp.MXFP4, (2, 5, 64))
    self.bias = jnp.arange(5, dtype=jnp.float32)
    self.plain = jp.block_scaled_dot(self.x, self.w, bias=self.bias)

  @parameterized.product(
    check_vma=(True, False),
    specs=(("x", None), (None, "x"), ("x", "x"), (None, None)),
  )
  def test_shard_map_equals_the_plain_call(self, check_vma, specs):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = lambda s: jax.sharding.PartitionSpec(s)
    varying = {"x"} if check_vma and "x" in specs else set()

    def local(x, w, b):
      y = jp.block_scaled_dot(x, w, bias=b)
      self.assertEqual(varying_axes(y), varying)
      return y

    function = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(*map(spec, specs), spec(None)),
      out_specs=spec("x" if "x" in specs else None),
      check_vma=check_vma,
    )
    for run in (function, jax.jit(function)):
      self.assert_same(run(self.x, self.w, self.bias), self.plain)

  @parameterized.parameters(True, False)
  def test_contraction_over_shards_is_a_psum_in_shard_map(self, check_vma):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, None, "x")
    function = jax.shard_map(
      lambda x, w: lax.psum(jp.block_scaled_dot(x, w), "x"),
      mesh=mesh,
      in_specs=(spec, spec),
      out_specs=jax.sharding.PartitionSpec(),
      check_vma=check_vma,
    )
    expected = jp.block_scaled_dot(self.x, self.w)
    self.assert_same(jax.jit(function)(self.x, self.w), expected)

  def test_vmap_in_shard_map_equals_the_plain_call(self):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.shard_map(
      jax.vmap(jp.block_scaled_dot, in_axes=(0, None)),
      mesh=mesh,
      in_specs=(
        jax.sharding.PartitionSpec("x"),
        jax.sharding.PartitionSpec(),
      ),
      out_specs=jax.sharding.PartitionSpec("x"),
    )
    w = jax.tree.map(lambda a: a[0], self.w)
    expected = jax.vmap(jp.block_scaled_dot, in_axes=(0, None))(self.x, w)
    self.assert_same(jax.jit(function)(self.x, w), expected)

  @parameterized.parameters("b", "m", "n")
  def test_explicit_sharding_is_in_the_results_type(self, where):
    mesh = jax.make_mesh(
      (1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    P = jax.sharding.PartitionSpec
    lhs_spec = {"b": P("x", None, None), "m": P(None, "x", None)}
    rhs_spec = {"b": P("x", None, None), "n": P(None, "x", None)}
    with jax.set_mesh(mesh):
      put = lambda a, spec: jax.device_put(
        a, jax.sharding.NamedSharding(mesh, spec)
      )
      x = put(self.x, lhs_spec.get(where, P(None, None, None)))
      w = put(self.w, rhs_spec.get(where, P(None, None, None)))
      bias = put(self.bias, P(None))
      function = lambda x, w, b: jp.block_scaled_dot(x, w, bias=b)
      expected = P(*("x" if where == d else None for d in "bmn"))
      for run in (function, jax.jit(function)):
        actual = run(x, w, bias)
        self.assertEqual(jax.typeof(actual).sharding.spec, expected)
        self.assert_same(actual, self.plain)


if __name__ == "__main__":
  absltest.main()
