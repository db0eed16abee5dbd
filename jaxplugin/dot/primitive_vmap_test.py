# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot` under `vmap`: the same as a loop of plain calls."""

from __future__ import annotations

import functools
import itertools
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing import transformations

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

array = transformations.array
dots_of = transformations.dots_of
equations = transformations.equations
operand = transformations.operand


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


class VmapTest(transformations.PrimitiveTestCase):
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
  @pytest.mark.sample(1)
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
  @pytest.mark.sample(1)
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
  @pytest.mark.sample(1)
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
  @pytest.mark.sample(1)
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
      eqn.params["call"].dimension_numbers, (((2,), (1,)), ((), ()))
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
  @pytest.mark.sample(1)
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

  @pytest.mark.full
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
        contract.dot(
          np.abs(np.asarray(jp.dequantize(jp.quantize(row, jp.NVFP4)), float)),
          np.abs(np.asarray(jp.dequantize(w), float)),
        )[0]
        for row in x
      ]
    )
    bound = 2 * contract.DOT_BOUND * magnitude
    self.assertTrue((np.abs(actual - expected) <= bound).all())

  def test_axis_size_zero_gives_an_empty_result(self):
    rng = np.random.default_rng(0)
    x = array(rng, jp.MXFP8, (4, 32))
    w = array(rng, jp.MXFP8, (5, 32))
    empty = jax.tree.map(lambda a: jnp.zeros((0, *a.shape), a.dtype), x)
    actual = jax.vmap(jp.block_scaled_dot, in_axes=(0, None))(empty, w)
    self.assertEqual(actual.shape, (0, 4, 5))


if __name__ == "__main__":
  absltest.main()
