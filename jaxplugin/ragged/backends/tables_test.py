# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of measured choices decide about ragged dots and contractions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.core import formats, targets
from jaxplugin.dot import problems as dot_problems
from jaxplugin.ragged import api, backends, calls, primitive
from jaxplugin.tables import records, resolution
from jaxplugin.testing.measured import operation_tables

F32 = np.dtype(np.float32)
RAGGED = backends.OPERATION
CONTRACTION = backends.CONTRACTION
GROUPS, M, N, K = 3, 10, 24, 64
SIZES = np.array([4, 0, 6], np.int32)


def side(format=None, dtype=F32):
  if format is not None:
    dtype = format.array_dtype
  return dot_problems.SideProblem(format=format, dtype=dtype)


BASE = dict(
  groups=GROUPS, m=M, n=N, k=K, lhs=side(), rhs=side(jp.MXFP8), out_dtype=F32
)
CHANGES = {
  "groups": 4, "m": 11, "n": 8, "k": 32, "lhs": side(dtype=formats.BF16),
  "rhs": side(jp.MXFP4), "out_dtype": formats.BF16,
}  # fmt: skip
OF_DOTS = {
  "is_along_blocks": False, "global_scale": "group", "has_global_power": True,
  "has_bias": True, "activation": "swiglu", "fastest_precision": True,
  "reads_m": True,
}  # fmt: skip
OF_CONTRACTIONS = {"global_scale": "array"}


class FieldsTest(parameterized.TestCase):
  @parameterized.parameters(
    (RAGGED, calls.RaggedDotProblem, OF_DOTS),
    (CONTRACTION, calls.ContractionProblem, OF_CONTRACTIONS),
  )
  def test_problems_come_back_and_each_part_counts(self, operation, kind, more):
    changes = CHANGES | more
    names = {field.name for field in dataclasses.fields(kind)}
    self.assertEqual({*changes}, names)
    base = kind(**BASE)
    found = [base]
    found += [dataclasses.replace(base, **{n: v}) for n, v in changes.items()]
    fields = [operation.fields_of(problem) for problem in found]
    for problem, each in zip(found, fields, strict=True):
      self.assertEqual(operation.problem_of(each), problem)
    self.assertLen({*fields}, len(found))

  @parameterized.parameters(
    ({"groups": 0}, "groups must be a positive number, got 0"),
    ({"activation": "tanh"}, "activation must be one of .*swiglu"),
    ({"batch": 2}, "a problem of the ragged dot has no batch"),
  )
  def test_fields_of_no_problem_say_what_is_wrong(self, changes, message):
    fields = dict(RAGGED.fields_of(calls.RaggedDotProblem(**BASE))) | changes
    with self.assertRaisesRegex(ValueError, message):
      RAGGED.problem_of(records.fields_of("problem", fields))


class DecidedTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.target = targets.detect_target("cpu")
    if self.target.cpu_kernels is None:
      self.skipTest(self.target.missing(targets.CPU_KERNELS))
    rng = np.random.default_rng(0)
    self.x = jax.device_put(np.asarray(rng.integers(-3, 4, (M, K)), np.float32))
    w = rng.integers(-3, 4, (GROUPS, N, K)).astype(np.float32)
    self.w = jp.quantize(w, jp.MXFP8)
    # Exact, as sums of small integers are in any order.
    self.expected = np.concatenate([
      np.asarray(self.x[:4]) @ w[0].T, np.asarray(self.x[4:]) @ w[2].T
    ])  # fmt: skip
    self.table = operation_tables.with_xla_first(
      RAGGED, self.target, calls.RaggedDotProblem(**BASE)
    )

  def test_a_row_decides_what_is_lowered(self):
    f = jax.jit(jp.ragged_dot)
    args = (self.x, self.w, SIZES)
    self.assertIn("jaxplugin_ragged_dot", f.lower(*args).as_text())
    np.testing.assert_array_equal(f(*args), self.expected)
    with jp.tuning(self.table):
      self.assertNotIn("jaxplugin_ragged_dot", f.lower(*args).as_text())
      np.testing.assert_array_equal(f(*args), self.expected)
      (told,) = jp.explain(f, *args)
    self.assertEqual(told.decision.implementation_from, "overlay")
    self.assertIn("overlay: 10 us, the rule's cpu 20 us", told.decision.reason)

  def test_derivatives_are_decided_by_the_tables_of_the_call(self):
    """Also where they are transposed outside of the context."""

    def f(x):
      return jp.ragged_dot(x, self.w, SIZES)

    with jp.tuning(self.table) as tables:
      _, back = jax.vjp(f, self.x)

    # What computes the gradient of x and, with plain weights, of these.
    jaxpr = jax.make_jaxpr(back)(jnp.ones((M, N)))
    self.assert_under(jaxpr, tables)
    plain = jp.dequantize(self.w)
    with jp.tuning(self.table) as tables:
      _, back = jax.vjp(lambda w: api.product(self.x, w, SIZES), plain)
    jaxpr = jax.make_jaxpr(back)(jnp.ones((M, N)))
    self.assert_under(jaxpr, tables)

  def assert_under(self, jaxpr, tables):
    eqns = [e for e in jaxpr.eqns if e.primitive in primitive.PRIMITIVES]
    self.assertNotEmpty(eqns)
    for eqn in eqns:
      self.assertEqual(eqn.params["call"].overlay.tables, tables)

  def test_a_contraction_s_table_fits_and_tells_its_row(self):
    lhs, rhs = np.ones((M, N), np.float32), np.ones((M, K), np.float32)
    numbers = jax.lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((0,), (0,)), ((), ())),
      lhs_ragged_dimensions=(0,),
      rhs_group_dimensions=(),
    )

    def f(lhs, rhs):
      return jp.ragged_dot_general(lhs, rhs, SIZES, numbers)

    (told,) = jp.explain(f, lhs, rhs)
    made = operation_tables.with_xla_first(
      CONTRACTION, self.target, told.problem
    )
    self.assertEqual(resolution.misfit(made, CONTRACTION, self.target), "")
    with jp.tuning(made):
      (told,) = jp.explain(f, lhs, rhs)
    self.assertEqual(told.decision.implementation_from, "overlay")
    self.assertIn("20 us, the rule's own choice", told.decision.reason)
