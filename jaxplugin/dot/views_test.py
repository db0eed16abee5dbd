# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls that a backend of another package gets, and the use of its answers."""

import warnings
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import decisions, formats
from jaxplugin.dot import backends
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import dot_variants, variants
from jaxplugin.tables import resolution
from jaxplugin.testing import (
  acme_backend,
  command_lines,
  contract,
  dot_problems,
  written_modules,
)
from jaxplugin.testing.dot_suite import dot_rows

CPU = jp.detect_target("cpu")


def by_general_dot(call):
  """Multiplies in the dimensions of the call."""
  sums = jax.lax.dot_general(
    call.lhs.dequantized().astype(jnp.float32),
    call.rhs.dequantized().astype(jnp.float32),
    call.dimension_numbers,
    precision="highest",
  )
  return call.finish(sums)


def by_rows(call):
  """Multiplies three-dimensional arrays, and computes the epilogue."""
  rows = call.as_rows()
  lhs, rhs = rows.lhs.dequantized(), rows.rhs.dequantized()
  assert lhs.shape == (*rows.shape[:2], rhs.shape[2]), (lhs.shape, rows.shape)
  result = jnp.einsum(
    "bmk,bnk->bmn",
    lhs.astype(jnp.float32),
    rhs.astype(jnp.float32),
    precision="highest",
  )
  for factor in rows.global_scales:
    result = result * factor
  if rows.bias is not None:
    result = result + rows.bias.astype(jnp.float32)
  if rows.activation is not None:
    result = getattr(jax.nn, rows.activation)(result)
  if rows.residual is not None:
    result = result + rows.residual.astype(jnp.float32)
  return result.astype(rows.dtype)


def backend(emit=by_general_dot, **changes):
  return acme_backend.create(emit, **{"summary": "made for tests", **changes})


def with_print(call):
  jax.debug.print("rows {}", call.lhs.values)
  return by_general_dot(call)


def with_callback(call):
  result = jax.ShapeDtypeStruct(call.shape, call.dtype)
  return jax.pure_callback(lambda: np.zeros(call.shape, call.dtype), result)


def with_sharding(call):
  mesh = jax.make_mesh((1,), ("x",))
  spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.lax.with_sharding_constraint(by_general_dot(call), spec)


class BackendTestCase(parameterized.TestCase):
  def register(self, emit=by_general_dot, first=False, **changes):
    result = jp.register_backend(backend(emit, **changes), first=first)
    self.addCleanup(jp.backends.unregister_backend, result.name)
    return result

  def look(self, function, *args, reads=(), **options):
    """Calls `function` with the call that a backend gets, in its emit."""
    looked = []

    def emit(call):
      looked.append(function(call))
      return jnp.zeros(call.shape, call.dtype)

    jp.register_backend(backend(emit, reads=reads))
    try:
      jp.block_scaled_dot(*args, implementation="acme", **options)
    finally:
      jp.backends.unregister_backend("acme")
    self.assertLen(looked, 1)


def operand(format, *shape, storage="scaled_array"):
  case = contract.operand_case(format, *shape, storage=storage)
  return contract.make_operand(np.random.default_rng(0), case, integers=True)


def mxfp8(*shape):
  return operand(jp.MXFP8, *shape).operand


X = mxfp8(3, 32)


def acme(*args, **options):
  return jp.block_scaled_dot(*args, implementation="acme", **options)


class ViewTest(BackendTestCase):
  @parameterized.product(
    format=(jp.MXFP8, jp.MXFP4, jp.NVFP4),
    storage=("scaled_array", "swizzled", "packed_scaled_array", "bytes"),
  )
  @pytest.mark.sample(6)
  def test_operand_is_the_same_however_it_is_stored(self, format, storage):
    if storage.startswith("packed") and not format.is_fp4:
      self.skipTest("is not packed")
    is_bytes = storage == "bytes"
    storage = "scaled_array" if is_bytes else storage
    given = operand(format, 5, 96, storage=storage).operand
    given = given.to_bytes() if is_bytes else given

    def look(call):
      rhs = call.rhs
      self.assertEqual((rhs.format, rhs.axis, rhs.shape), (format, 1, (5, 96)))
      self.assertEqual(rhs.scale_layout, "linear")
      self.assertEqual(rhs.scale.shape, (5, 96 // format.block_size))
      self.assertEqual(rhs.scale.dtype, format.scale_dtype)
      self.assertEqual(call.problem.rhs.dtype, rhs.values.dtype)
      self.assertEqual(rhs.unpacked().dtype, format.values_dtype)
      columns = 48 if format.is_fp4 else 96
      self.assertEqual(rhs.packed().shape, (5, columns))
      self.assertIsNone(call.lhs.format)
      self.assertIsNone(call.lhs.scale)
      self.assertEqual(call.lhs.contracting, (1,))
      self.assertEqual(call.lhs.free, (0,))

    self.look(look, jnp.ones((3, 96)), given)

  def test_arrays_hold_what_was_given(self):
    made = operand(jp.MXFP4, 5, 96, storage="packed_scaled_array")

    def emit(call):
      rhs = call.rhs
      arrays = rhs.dequantized(), rhs.unpacked(), jnp.repeat(rhs.scale, 32, 1)
      rows = [a.astype(jnp.float32)[0, : call.shape[1]] for a in arrays]
      return call.finish(jnp.stack(rows))

    self.register(emit)
    actual = np.asarray(acme(jnp.ones((3, 96)), made.operand))
    np.testing.assert_array_equal(actual[0], made.exact[0, :5])
    np.testing.assert_array_equal(actual[0], actual[1] * actual[2])

  def test_swizzled_scales_stay_so_for_one_that_reads_them(self):
    made = operand(jp.MXFP8, 130, 96, storage="swizzled")

    def look(call):
      self.assertEqual(call.rhs.scale_layout, "swizzled_128x4")
      self.assertEqual(call.rhs.scale.shape, made.operand.scale.shape)
      self.assertEqual(call.problem.rhs.scale_layout, "swizzled_128x4")
      self.assertEqual(call.as_rows().rhs.scale.shape, (1, 130, 3))

    reads = ("swizzled_128x4",)
    self.look(look, jnp.ones((3, 96)), made.operand, reads=reads)

  def test_padding_of_scales_is_cut_off(self):
    made = operand(jp.MXFP8, 5, 50, storage="padded")
    self.look(
      lambda call: self.assertEqual(call.rhs.scale.shape, (5, 2)),
      *(jnp.ones((3, 50)), made.operand, None, made.scale),
      block_size=32,
    )

  def test_problem_says_what_supports_needs(self):
    made = operand(jp.NVFP4, 5, 96, storage="packed_scaled_array")
    expected = jp.backends.Problem(
      batch=1,
      m=6,
      n=5,
      k=96,
      lhs=jp.backends.OperandProblem(format=jp.MXFP8, dtype=formats.E4M3),
      rhs=jp.backends.OperandProblem(format=jp.NVFP4, dtype=formats.PACKED),
      dtype=contract.BF16,
      global_scale="scalar",
      has_bias=True,
      activation="gelu",
    )

    def look(call):
      self.assertEqual(call.problem, expected)
      self.assertEqual((call.shape, call.dtype), ((2, 3, 5), contract.BF16))

    self.look(
      look,
      *(mxfp8(2, 3, 96), made.operand),
      global_scale=2.0,
      bias=jnp.ones(5),
      activation="gelu",
      preferred_element_type=jnp.bfloat16,
    )
    self.assertEqual(
      str(expected), "mxfp8 x nvfp4 -> bfloat16, batch=1 m=6 n=5 k=96"
    )

  def test_what_it_is_given_is_of_public_types(self):
    seen = set()

    def look(call):
      for view in (call, call.lhs, call.problem, call.problem.lhs):
        for name in (n for n in dir(view) if not n.startswith("_")):
          kind = type(getattr(view, name))
          is_public = (
            not kind.__module__.startswith("jaxplugin")
            or getattr(jp.backends, kind.__name__, None) is kind
            or getattr(jp, kind.__name__, None) is kind
          )
          self.assertTrue(is_public, f"{type(view).__name__}.{name}: {kind}")
          seen.add(name)

    self.look(look, X, X)
    self.assertContainsSubset({"lhs", "format", "values", "m"}, seen)


class GeneralRowsTest(dot_rows.DotRowsTestCase):
  """A backend that multiplies in the call's own dimensions."""

  implementation = "acme"
  emit = staticmethod(by_general_dot)
  in_leg = ("mixed dimensions, global scale (2, 2, 3, 4, 5)",)

  def setUp(self):
    super().setUp()
    acme_backend.register(self, self.emit)


class MatrixRowsTest(GeneralRowsTest):
  """A backend that multiplies three-dimensional arrays."""

  emit = staticmethod(by_rows)
  in_leg = (
    "mixed dimensions, global scale (2, 2, 1, 4, 1)",
    "mxfp8 blocked along k2, mxfp4 along k1",
  )


class EmitTest(BackendTestCase):
  def test_empty_calls_never_reach_it(self):
    self.register(lambda call: 1 / 0)
    x = mxfp8(3, 0)
    actual = acme(x, x, bias=jnp.arange(3.0))
    np.testing.assert_array_equal(actual, [[0, 1, 2]] * 3)

  def test_wrong_result_is_an_error_that_names_the_backend(self):
    for emit, got in (
      (lambda call: jnp.zeros((3, 4), call.dtype), r"got float32\[3, 4\]"),
      (lambda call: jnp.zeros(call.shape, "int8"), r"got int8\[3, 3\]"),
      (lambda call: np.zeros((3, 3), "f"), r"got array"),
      (lambda call: None, "got None"),
    ):
      self.register(emit)
      with self.assertRaisesRegex(
        TypeError,
        r"emit of backend 'acme' \(registered in code\) must return"
        r" float32\[3, 3\].*" + got,
      ):
        acme(X, X)
      self.doCleanups()

  def test_error_of_emit_is_its_own_and_says_for_which_call(self):
    self.register(mock.Mock(side_effect=OSError("no kernel")))
    with self.assertRaisesRegex(OSError, "no kernel") as caught:
      acme(X, X)
    self.assertIn(
      "In emit of backend 'acme' (registered in code), for mxfp8 x mxfp8 ->"
      " float32, batch=1 m=3 n=3 k=32.",
      caught.exception.__notes__,
    )

  def test_sums_of_another_shape_or_dtype_are_refused(self):
    for sums in (jnp.zeros((1, 3, 3)), jnp.zeros((3, 3), jnp.bfloat16)):
      self.register(lambda call, sums=sums: call.finish(sums))
      with self.assertRaisesRegex(TypeError, r"sums must be float32\[3, 3\]"):
        acme(X, X)
      self.doCleanups()


class KernelTest(BackendTestCase):
  """Backends that compile kernels with configs."""

  def tuning(self, **changes):
    fields = dict(
      candidates=lambda p, t: [{"rows": 4, "columns": p.n}],
      config_error=lambda c, p, t: None if c["rows"] > 1 else "needs rows > 1",
      source=lambda t: jp.backends.Source(toolchain=(("acme", "1.2"),)),
    )
    return jp.backends.Tuning(**{**fields, **changes})

  def explained(self, **changes):
    self.register(**changes)
    (found,) = jp.explain(acme, X, X)
    return found

  def test_reason_not_to_lower_is_explained_and_raised(self):
    found = self.explained(lowering_error=lambda t: "needs acmec")
    self.assertEqual(found.lowering_error, "needs acmec")
    text = "dot: implementation acme: needs acmec; or leave implementation out"
    with self.assertRaisesRegex(NotImplementedError, text):
      acme(X, X)

  def test_reason_that_emit_raises_names_the_backend(self):
    self.register(mock.Mock(side_effect=NotImplementedError("no registers")))
    text = "dot: implementation acme: no registers; or leave implementation out"
    with self.assertRaisesRegex(NotImplementedError, text):
      acme(X, X)

  def test_reason_of_a_backend_that_is_first_names_the_remedy(self):
    self.register(lowering_error=lambda t: "needs acmec", first=True)
    text = "needs acmec; or call .*unregister_backend, or pass another impl"
    with self.assertRaisesRegex(NotImplementedError, text):
      jp.block_scaled_dot(X, X)

  def test_plan_is_explained(self):
    plan = jp.backends.Plan(padding="k 32 to 64", notes=("one kernel",))
    decision = self.explained(plan=lambda p, t, c: plan).decision
    found = decision.padding, decision.notes
    self.assertEqual(found, (plan.padding, plan.notes))

  def test_plan_of_another_type_is_an_error(self):
    with self.assertRaisesRegex(
      TypeError, r"plan of backend 'acme' .* must return a jp.backends.Plan"
    ):
      self.explained(plan=lambda p, t, c: "a plan")

  def test_tuner_and_tables_use_its_configs(self):
    problem = self.explained(tuning=self.tuning()).problem
    adapted = backends.table()["acme"]
    (fields,) = adapted.tunable.candidates(problem, CPU)
    self.assertEqual(fields, (("columns", 3), ("rows", 4)))
    self.assertIsNone(adapted.config_error(fields, problem, CPU))
    self.assertEqual(
      adapted.config_error((("rows", 1),), problem, CPU), "needs rows > 1"
    )
    self.assertEqual(adapted.tunable.source(CPU).toolchain, (("acme", "1.2"),))

  def test_chosen_config_reaches_plan_and_emit(self):
    seen = []

    def emit(call):
      seen.append((call.config, call.target.platform))
      return by_general_dot(call)

    def plan(problem, target, config):
      return jp.backends.Plan(notes=(f"rows of {config.get('rows')}",))

    self.register(emit, tuning=self.tuning(), plan=plan)
    adapted = backends.table()["acme"].configured((("rows", 4),))
    table = {**backends.table(), "acme": adapted}
    self.enter_context(mock.patch.object(backends, "table", lambda: table))
    (found,) = jp.explain(acme, X, X)
    self.assertEqual(found.decision.notes, ("rows of 4",))
    acme(X, X)
    self.assertEqual(seen, [({"rows": 4}, "cpu")])

  def test_kernel_gets_no_epilogue_that_it_cannot_fuse(self):
    seen = []

    def kernel(call):
      seen.append((call.problem.has_bias, call.problem.global_scale))
      return by_general_dot(call)

    self.register(lambda call: call.fuse(kernel))
    for options, expected in (
      ({"bias": jnp.arange(3.0), "global_scale": 2.0}, (True, "scalar")),
      ({"global_scale": jnp.arange(3.0)[:, None]}, (False, "none")),
    ):
      np.testing.assert_array_equal(
        acme(X, X, **options),
        jp.block_scaled_dot(X, X, implementation="xla", **options),
      )
      self.assertEqual(seen.pop(), expected)

  @parameterized.parameters(
    (jp.NVFP4, 48, 64), (jp.MXFP8, 128, 128), (jp.MXFP8, 96, 96)
  )
  def test_rows_are_padded_and_swizzled(self, format, k, padded):
    made = operand(format, 5, k, storage="swizzled")

    def emit(call):
      rows = call.as_rows(k=padded, scale_layout="swizzled_128x4")
      self.assertEqual(rows.rhs.shape, (1, 5, padded))
      self.assertEqual(rows.rhs.scale_layout, "swizzled_128x4")
      self.assertEqual(rows.rhs.scale.shape[1], 128)
      with self.assertRaisesRegex(ValueError, f"k must be at least {k}, got 2"):
        call.as_rows(k=2)
      lhs, rhs = rows.lhs.dequantized(), rows.rhs.dequantized()
      # A kernel may multiply zeros by the scale's columns beyond k.
      scale = rows.rhs.scale[0]
      columns = jp.unswizzle_scale(scale, scale.shape)[:5]
      is_finite = jnp.isfinite(columns.astype(jnp.float32)).all()
      sums = lhs @ jnp.swapaxes(rhs, 1, 2)
      return rows.finish(jnp.where(is_finite, sums, jnp.nan))

    self.register(emit, reads=("swizzled_128x4",))
    exact, _ = contract.dot(made.exact, made.exact)
    x = made.operand
    np.testing.assert_array_equal(acme(x, x), exact)

  def test_its_custom_calls_are_exported(self):
    def emit(call):
      result = jax.ShapeDtypeStruct(call.shape, call.dtype)
      return jax.ffi.ffi_call("acme_launch", result)(call.lhs.values)

    self.register(emit, call_targets=("acme_launch",))
    self.assertIn("@acme_launch", jp.export(acme)(X, X).mlir_module())


class SupportsTest(BackendTestCase):
  def refusal(self, function, *args, target=CPU):
    """Why it is not chosen for a dot, and what was warned."""
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      (dot,) = jp.explain(function, *args, target=target)
      jp.explain(function, *args, target=target)
    reason = dot_problems.reasons(dot.decision)["acme"]
    return reason, [str(w.message) for w in caught]

  def test_its_reason_is_told_and_raised_where_it_is_asked_for(self):
    self.register(supports=lambda p, t: f"needs m of 8, got m={p.m}")
    reason, texts = self.refusal(jp.block_scaled_dot, X, X)
    self.assertEqual(reason, "needs m of 8, got m=3 [registered in code]")
    self.assertEqual(texts, [])
    with self.assertRaisesRegex(
      decisions.RefusedError, "acme: needs m of 8, got m=3"
    ):
      acme(X, X)

  @parameterized.parameters(
    (lambda p, t: 1 / 0, "its supports raised ZeroDivisionError: division"),
    (lambda p, t: True, "its supports returned True, which is neither"),
    (lambda p, t: "", "its supports returned '', which is neither"),
    (lambda p: None, "its supports raised TypeError"),
  )
  def test_wrong_answer_refuses_and_is_warned_about_once(self, supports, text):
    self.register(supports=supports, first=True)
    reason, texts = self.refusal(jp.block_scaled_dot, X, X)
    self.assertStartsWith(reason, text)
    self.assertLen(texts, 1)
    self.assertStartsWith(
      texts[0],
      "backend 'acme' (registered in code) is not used for a dot: " + text,
    )

  def test_it_is_not_asked_for_another_platform(self):
    self.register(supports=lambda p, t: 1 / 0, platforms=("cuda", "rocm"))
    reason, texts = self.refusal(jp.block_scaled_dot, X, X)
    self.assertStartsWith(
      reason, "supports cuda, rocm, the target's platform is cpu"
    )
    self.assertEqual(texts, [])

  def test_target_it_is_asked_for_is_that_of_the_call(self):
    asked = []
    self.register(
      supports=lambda p, t: asked.append(t), platforms=("cuda",), first=True
    )
    h100 = jp.named_target("h100")
    (dot,) = jp.explain(jp.block_scaled_dot, X, X, target=h100)
    self.assertEqual(dot.decision.implementation, "acme")
    self.assertEqual(set(asked), {h100})

  def test_symbolic_sizes_are_for_those_that_take_them(self):
    rows = jax.export.symbolic_shape("m, 64")
    x = jp.ScaledArray(
      jax.ShapeDtypeStruct(rows, formats.E4M3),
      jax.ShapeDtypeStruct((rows[0], 2), formats.E8M0),
      None,
      jp.MXFP8,
    )
    w = mxfp8(5, 64)
    sizes = []
    supports = lambda p, t: sizes.append(p.m)
    self.register(supports=supports)
    reason, _ = self.refusal(jp.block_scaled_dot, x, w)
    self.assertStartsWith(reason, "needs static sizes, some are symbolic")
    self.assertEqual(sizes, [])
    self.doCleanups()
    self.register(supports=supports, takes_symbolic_sizes=True)
    self.refusal(jp.block_scaled_dot, x, w)
    self.assertEqual(set(sizes), {None})

  def test_operands_of_no_block_format_are_not_its_business(self):
    self.register(supports=lambda p, t: 1 / 0)
    x = jnp.ones((3, 32), jnp.int8)
    scale = jnp.ones((3, 1), jnp.bfloat16)
    function = lambda x, s: jp.scaled_dot(x, x.T, lhs_scale=s, rhs_scale=s.T)
    (dot,) = jp.explain(function, x, scale)
    reason = dot_problems.reasons(dot.decision)["acme"]
    self.assertStartsWith(reason, "supports block formats, got")


class RecordTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(name=3), TypeError, "name must be a string"),
    (dict(name="Acme"), ValueError, "lower-case .* got 'Acme'"),
    (dict(name="off"), ValueError, "not one of .* got 'off'"),
    (dict(api_version="1"), TypeError, "api_version must be an integer"),
    (dict(api_version=True), TypeError, "api_version must be an integer"),
    (dict(platforms="cpu"), TypeError, "platforms must be a tuple of strings"),
    (dict(platforms=()), ValueError, "platforms must have at least"),
    (dict(supports=None), TypeError, "supports must be callable, got None"),
    (dict(emit="x"), TypeError, "emit must be callable, got 'x'"),
    (dict(reads=("interleaved",)), ValueError, "must contain only 'swizzled"),
    (dict(is_portable=1), TypeError, "is_portable must be True or False"),
    (dict(notes="x"), TypeError, "notes must be a tuple of strings"),
  )  # fmt: skip
  def test_wrong_field_is_an_error_that_names_it(self, changes, error, text):
    with self.assertRaisesRegex(error, text):
      backend(**changes)

  def test_api_version_has_no_default(self):
    with self.assertRaisesRegex(TypeError, "api_version"):
      jp.Backend(name="acme", platforms=("cpu",), supports=print, emit=print)


class EverywhereTest(BackendTestCase):
  """It takes part where programs are exported and rewritten.

  `dot_suite.backend_suite` has JAX's other transformations.
  """

  def test_first_one_is_left_out_of_an_export_unless_it_is_portable(self):
    for is_portable in (False, True):
      emit = mock.Mock(side_effect=by_rows)
      self.register(emit, first=True, is_portable=is_portable)
      jax.export.export(jax.jit(jp.block_scaled_dot))(X, mxfp8(5, 32))
      self.assertEqual(emit.call_count, int(is_portable))
      self.doCleanups()

  @parameterized.parameters(by_rows, with_sharding)
  def test_rewriting_a_module(self, function):
    emit = mock.Mock(side_effect=function)
    self.register(emit)
    module = written_modules.dot_module()
    target = jp.detect_target("cpu")
    text = jp.rewrite(module, target, implementation="acme")
    emit.assert_called_once()
    x, w = (operand(jp.MXFP8, m, 64, storage="raw") for m in (8, 16))
    arrays = x.operand, w.operand, x.scale, w.scale
    (actual,) = written_modules.run(text, *arrays)
    contract.assert_exact(actual, x.exact @ w.exact.T, actual.dtype)

  @parameterized.parameters(with_print, with_callback)
  def test_a_rewritten_module_cannot_call_python(self, emit):
    self.register(emit)
    module = written_modules.dot_module()
    for target in (CPU, jp.named_target("cpu")):
      with self.assertRaisesRegex(
        NotImplementedError,
        r"at <str>:3:10: .*Python function, got .*python_cpu_callback in"
        " block_scaled_dot.mxfp8_acme",
      ):
        jp.rewrite(module, target, implementation="acme", strict=True)


class MeasuredTest(BackendTestCase):
  def test_of_one_that_code_registers_nothing_can_be_kept(self):
    self.register()
    with self.assertRaisesRegex(
      ValueError, "must have known sources.*got acme"
    ):
      resolution.sources_of(backends.OPERATION, CPU, ["acme"])


ARGUMENTS = "--lhs mxfp8 --rhs mxfp4 -m 4 -n 64 -k 64"


class EntrancesTestCase(BackendTestCase):
  """A backend wherever implementations have names."""

  def setUp(self):
    super().setUp()
    self.traced = []

    def emit(call):
      self.traced.append(call.problem)
      return by_rows(call)

    refusal = "is for m below 8, got m={}"
    self.register(
      emit,
      supports=lambda p, t: refusal.format(p.m) if p.m >= 8 else None,
      notes=("it is slow",),
    )

  def operands(self):
    rng = np.random.default_rng(0)
    x = rng.integers(-6, 7, (4, 64)).astype(np.float32)
    return x, rng.integers(-4, 5, (64, 64)).astype(np.float32)


def linear(x, w, name):
  return jp.linear(x, jp.quantize(w, "mxfp8"), implementation=name)


def scaled_dot(x, w, name, function=jp.scaled_dot):
  x, w = jp.quantize(x, "mxfp8"), jp.quantize(w, "mxfp8")
  options = {} if name is None else {"implementation": name}
  return function(
    *(x.values, w.values.T),
    lhs_scale=x.scale,
    rhs_scale=w.scale.T,
    preferred_element_type=jnp.float32,
    **options,
  )


def scaled_matmul(x, w, name):
  x, w = jp.quantize(x[None], "mxfp8"), jp.quantize(w[None], "mxfp8")
  return jp.nn.scaled_matmul(
    x.values, w.values, x.scale, w.scale, implementation=name
  )[0]


def dot_general(x, w, name):
  dot = jp.dot_general("mxfp8", "mxfp8", implementation=name)
  return dot(x, w, (((1,), (1,)), ((), ())))


def accelerated(x, w, name):
  function = lambda x, w: scaled_dot(x, w, None, jax.lax.scaled_dot)
  return jp.accelerate(function, implementation=name)(x, w)


class FunctionsTest(EntrancesTestCase):
  @parameterized.parameters(
    linear, scaled_dot, scaled_matmul, dot_general, accelerated
  )
  @pytest.mark.sample(1)
  def test_it_is_what_multiplies(self, function):
    x, w = self.operands()
    actual = jax.jit(function, static_argnums=2)(x, w, "acme")
    expected = function(x, w, "xla")
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(expected, x @ w.T, rtol=0.2, atol=20)
    self.assertLen(self.traced, 1)

  def test_ragged_dots_know_only_their_own(self):
    x, w = self.operands()
    with self.assertRaisesRegex(ValueError, "implementation .* got 'acme'"):
      stack, sizes = jp.quantize(w[None], "mxfp8"), jnp.array([4])
      jp.ragged_dot(x, stack, sizes, implementation="acme")


class CommandsTest(EntrancesTestCase, command_lines.CommandLineTestCase):
  def output(self, *command):
    status, out, _ = self.run_command(*command)
    self.assertEqual(status, 0)
    return " ".join(out.split())

  def test_info_lists_it(self):
    out = self.output("info")
    self.assertIn("format cudnn triton cpu xla cutile acme mxfp8 no no", out)
    self.assertIn("mxfp8 no no yes yes no no", out)
    self.assertIn("not acme: is for m below 8, got m=128", out)
    self.assertTrue(
      out.endswith("backends of other packages: acme, registered in code")
    )

  def test_explain_names_it_and_takes_its_name(self):
    explain = ("explain", "--verbose", *ARGUMENTS.split())
    self.assertIn(
      "not acme: supported, but used only if requested [registered in code]",
      self.output(*explain),
    )
    out = self.output(*explain, "--implementation", "acme")
    self.assertIn("acme: made for tests (requested) [registered in code]", out)
    self.assertIn("it is slow", out)

  def test_unknown_name_is_told_with_all_known_ones(self):
    status, _, error = self.run_command(
      "explain", *ARGUMENTS.split(), "--implementation", "acne"
    )
    self.assertEqual(status, 2)
    self.assertIn(
      "'acne' (choose from cudnn, triton, cpu, xla, cutile, acme)", error
    )

  @pytest.mark.full
  def test_benchmark_has_it_among_ours_where_it_serves(self):
    (pair,) = workloads.parse_pairs("mxfp8")
    target = jp.detect_target("cpu")
    for rows, kind in ((5, variants.Variant), (9, variants.Unavailable)):
      (workload,) = workloads.parse_rows(f"{rows}x96x256")
      dtype = np.dtype(jnp.float32)
      every = dot_variants.DotVariants(workload, pair, dtype, target)
      (one,) = every.ours(["acme"])
      self.assertIsInstance(one, kind)
    self.assertEqual(one.reason, "is for m below 8, got m=9")
