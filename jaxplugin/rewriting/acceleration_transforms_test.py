# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accelerate`: composition, derivatives, and what it must leave as it is."""

import functools
import inspect
import pathlib
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxplugin as jp
from jaxplugin.rewriting import acceleration_test as constructs
from jaxplugin.testing import contract, nn_cases

NT_3D = nn_cases.NT_3D
OURS = constructs.OURS
count, dot, matmul = constructs.count, constructs.dot, constructs.matmul


class CompositionTest(parameterized.TestCase):
  def test_exported_function_gives_the_result_where_it_is_loaded(self):
    args, *expected = constructs.operands(8)
    function = jax.jit(jp.accelerate(jax.jit(matmul)))
    exported = jax.export.export(function, platforms=("cpu", "cuda", "tpu"))
    data = exported(*args).serialize()
    result = jax.export.deserialize(data).call(*args)
    constructs.assert_dot(result, *expected)

  @parameterized.parameters(matmul, dot)
  @pytest.mark.sample(1)
  def test_lowers_for_every_platform(self, f):
    args, _, _ = constructs.operands(9)
    traced = jax.jit(jp.accelerate(jax.jit(f))).trace(*args)
    for platform in ("cpu", "cuda", "rocm", "tpu"):
      text = traced.lower(lowering_platforms=(platform,)).as_text()
      self.assertIn("func.func public @main", text)
      self.assertNotIn("xla.scaled_dot", text)

  def test_symbolic_sizes_of_known_formats_are_replaced(self):
    args, *expected = constructs.operands(10)
    b, k = jax.export.symbolic_shape("b, k")
    shapes = [(b, 5, 32 * k), (b, 5, k), (b, 3, 32 * k), (b, 3, k)]
    specs = [
      jax.ShapeDtypeStruct(shape, a.dtype)
      for shape, a in zip(shapes, args, strict=True)
    ]
    exported = jax.export.export(jax.jit(jp.accelerate(matmul)))(*specs)
    constructs.assert_dot(exported.call(*args), *expected)

  def test_inner_accelerate_decides(self):
    args, _, _ = constructs.operands(11)
    inner = jp.accelerate(jax.jit(dot), implementation="xla")
    function = jp.accelerate(
      lambda *args: (inner(*args), jax.jit(matmul)(*args)),
      implementation="cpu",
    )
    configs = nn_cases.bound_configs(function, *args)
    self.assertEqual([c.implementation for c in configs], ["xla", "cpu"])

  def test_explain_lists_the_dots_with_the_users_lines(self):
    args, _, _ = constructs.operands(12)

    @jax.jit
    def model(*args):
      first = jax.nn.scaled_matmul(args[0], args[2], args[1], args[3])
      second = jax.nn.scaled_matmul(args[0], args[2], args[1], args[3])
      return first + second

    line = inspect.getsourcelines(model)[1]
    explanation = jp.explain(jp.accelerate(model), *args)
    self.assertLen(explanation, 2)
    for offset, explained in zip((2, 3), explanation, strict=True):
      self.assertIn(
        f"{pathlib.Path(__file__).name}:{line + offset} ", explained.source
      )
      self.assertIn("model", explained.source)
      self.assertEqual(
        str(explained.problem), "mxfp8 x mxfp8 -> float32, batch=2 m=5 n=3 k=64"
      )
    self.assertEmpty(jp.explain(model, *args))

  @parameterized.product(
    f=(matmul, dot), wrap=(constructs.in_scan, constructs.in_cond)
  )
  @pytest.mark.sample(2)
  def test_types_on_an_explicit_mesh_are_jaxs(self, f, wrap):
    args, *expected = constructs.operands(14, batch=4)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    factor = 3 if wrap is constructs.in_scan else 1
    with jax.set_mesh(mesh):
      args = jax.device_put(jax.tree.map(np.asarray, args), sharding)
      function = jax.jit(jp.accelerate(wrap(f)))
      self.assertEqual(
        jax.make_jaxpr(function)(*args).out_avals,
        jax.make_jaxpr(wrap(f))(*args).out_avals,
      )
      constructs.assert_dot(function(*args), *expected, factor)


MODES = ("mxfp8", "nvfp4")  # what JAX 0.10 has


def configs_of(mode):
  """For lhs, rhs and the gradient."""
  return [jax.nn.get_scaled_dot_general_config(mode) for _ in range(3)]


def general(mode):
  return functools.partial(
    jax.nn.scaled_dot_general, dimension_numbers=NT_3D, configs=configs_of(mode)
  )


def integers(*seed, shape):
  """Small integers, which quantize exactly (E4M3 holds all up to 16)."""
  x = nn_cases.rng_of(*seed).integers(-8, 9, shape)
  x[..., ::32] = 8  # so that the scale of every block of E4M3 is 2^-5
  return x.astype(np.float32)


def value_and_gradients(f, weights):
  """The result of f(lhs, rhs), and the gradients of its weighted sum."""

  def loss(lhs, rhs):
    y = f(lhs, rhs)
    return (y * weights).sum(), y

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


# Where `accelerate` and jit go about a gradient.
PLACES = (
  ("inside", lambda f, grad: grad(jp.accelerate(f))),
  ("inside_of_jit", lambda f, grad: jax.jit(grad(jp.accelerate(f)))),
  ("around_jit", lambda f, grad: grad(jp.accelerate(jax.jit(f)))),
  ("outside", lambda f, grad: jp.accelerate(grad(f))),
  ("outside_of_jit", lambda f, grad: jp.accelerate(jax.jit(grad(f)))),
  ("around_all", lambda f, grad: jax.jit(jp.accelerate(grad(jax.jit(f))))),
  ("checkpointed", lambda f, grad: grad(jax.checkpoint(jp.accelerate(f)))),
  ("around_checkpoint", lambda f, grad: grad(jp.accelerate(jax.checkpoint(f)))),
)


def around(derivative, f, outside):
  """Accelerates a derivative, or takes that of an accelerated function."""
  if outside:
    return jp.accelerate(derivative(f))
  return derivative(jp.accelerate(f))


class GradientsTest(parameterized.TestCase):
  def test_all_three_dots_are_replaced_and_exact(self):
    # Quantizing these operands changes nothing, so the gradients of a plain
    # product are right.
    lhs, rhs = integers(1, shape=(2, 64, 32)), integers(2, shape=(2, 32, 32))
    weights = integers(3, shape=(2, 64, 32))
    grad = functools.partial(value_and_gradients, weights=weights)
    rows = {
      (name, wrap): place(wrap(general("mxfp8")), grad)
      for name, place in PLACES
      for wrap in (lambda f: f, constructs.in_scanned_operands)
    }
    program, counts = constructs.traced(rows.values(), lhs, rhs)
    for name, found in zip(rows, counts, strict=True):
      with self.subTest(name):
        self.assertGreaterEqual(constructs.assert_none_left(found), 3)
    exact = lambda equation, a, b: np.einsum(
      equation, a.astype(np.float64), b.astype(np.float64)
    )
    expected = (
      exact("bmk,bnk->bmn", lhs, rhs),
      exact("bmn,bnk->bmk", weights, rhs),
      exact("bmn,bmk->bnk", weights, lhs),
    )
    results = program.lower().compile()(lhs, rhs)
    for name, ((_, y), gradients) in zip(rows, results, strict=True):
      with self.subTest(name):
        for actual, e in zip((y, *gradients), expected, strict=True):
          contract.assert_exact(actual, e, contract.F32)

  @parameterized.named_parameters(
    (f"{name}_{mode}", place, mode) for name, place in PLACES for mode in MODES
  )
  @pytest.mark.full
  def test_gradients_are_jaxs(self, place, mode):
    if not nn_cases.JAX_NN_RUNS_ON_CPU:
      self.skipTest("jax.nn.scaled_matmul runs on CPUs since jax 0.12")
    rng = nn_cases.rng_of(4)
    lhs = rng.normal(size=(2, 64, 96)).astype(np.float32)
    rhs = rng.normal(size=(2, 32, 96)).astype(np.float32)
    weights = rng.normal(size=(2, 64, 32)).astype(np.float32)
    grad = functools.partial(value_and_gradients, weights=weights)
    expected = jax.jit(grad(general(mode)))(lhs, rhs)
    actual = place(general(mode), grad)(lhs, rhs)
    # Both sum the same quantized numbers; 96 terms of size about 1.
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
      np.testing.assert_allclose(a, e, rtol=1e-5, atol=96 * 2**-20)

  @parameterized.parameters(False, True)
  @pytest.mark.sample(1)
  def test_custom_vjp_keeps_its_rule_with_replaced_dots(self, outside):
    args, exact = constructs.exact_operands(5)

    @jax.custom_vjp
    def f(x):
      return x * matmul(*args)

    # The rule differs from the derivative: factors 2 forward, 3 backward.
    f.defvjp(
      lambda x: (2 * x * matmul(*args), x),
      lambda x, g: (3 * g * jax.jit(dot)(*args),),
    )
    x = jnp.full(exact.shape, 2, jnp.float32)
    value_and_grad = lambda f: lambda x: jax.vjp(f, x)[0:1] + jax.vjp(f, x)[1](
      jnp.ones_like(x)
    )
    function = around(value_and_grad, f, outside)
    for run in (function, jax.jit(function)):
      y, gradient = run(x)
      contract.assert_exact(y, 4 * exact, contract.F32)
      contract.assert_exact(gradient, 3 * exact, contract.F32)
    self.assertEqual(constructs.assert_replaced(function, x), 3)
    contract.assert_exact(jp.accelerate(f)(x), 2 * exact, contract.F32)

  @parameterized.parameters(False, True)
  @pytest.mark.full
  def test_custom_jvp_keeps_its_rule_with_replaced_dots(self, outside):
    args, exact = constructs.exact_operands(6)

    @jax.custom_jvp
    def f(x):
      return x * matmul(*args)

    @f.defjvp
    def _(primals, tangents):
      (x,), (t,) = primals, tangents
      return 2 * x * dot(*args), 3 * t * lax.map(
        lambda x: matmul(*(a[None] for a in x))[0], args
      )

    x = jnp.full(exact.shape, 2, jnp.float32)
    jvp = lambda f: lambda x: jax.jvp(f, (x,), (x,))
    grad = lambda f: lambda x: jax.vjp(f, x)[1](x)
    for derivative in (jvp, grad):
      function = around(derivative, f, outside)
      constructs.assert_replaced(function, x)
      for run in (function, jax.jit(function)):
        results = run(x)
        contract.assert_exact(results[-1], 6 * exact, contract.F32)
        if len(results) == 2:
          contract.assert_exact(results[0], 4 * exact, contract.F32)


class UntouchedTest(parameterized.TestCase):
  def test_arguments_and_results_pass_as_they_are(self):
    args, exact = constructs.exact_operands(15)
    seen = []

    def f(tree, mode, *, count=1, flag=None):
      """The docstring."""
      seen.append((type(tree["x"]), mode, count, flag))
      if float(tree["x"].sum()) > 0 and mode == "dot":  # needs the number
        return {"y": [dot(*args)] * count}, None, "text"
      return None

    function = jp.accelerate(f)
    self.assertEqual(function.__name__, "f")
    self.assertEqual(function.__doc__, "The docstring.")
    self.assertEqual(inspect.signature(function), inspect.signature(f))
    x = np.ones(3)
    results, none, text = function({"x": x}, "dot", count=2, flag=seen)
    self.assertEqual(seen, [(np.ndarray, "dot", 2, seen)])
    self.assertEqual((none, text), (None, "text"))
    for y in results["y"]:
      contract.assert_exact(y, exact, contract.F32)
    self.assertIsNone(function({"x": x}, "other"))

  def test_static_arguments_and_donation_of_inner_jits_are_kept(self):
    args, exact = constructs.exact_operands(16)

    @functools.partial(
      jax.jit, static_argnames="times", static_argnums=2, donate_argnums=0
    )
    def step(state, args, which, times=1):
      return state + times * (dot if which == "dot" else matmul)(*args)

    for which in ("dot", "matmul"):
      state = jnp.zeros(exact.shape)
      result = jp.accelerate(step)(state, args, which, times=2)
      contract.assert_exact(result, 2 * exact, contract.F32)
      self.assertTrue(state.is_deleted())
    outer = jax.jit(
      jp.accelerate(step), static_argnums=2, static_argnames="times"
    )
    state = jnp.zeros(exact.shape)
    contract.assert_exact(
      outer(state, args, "dot", times=3), 3 * exact, contract.F32
    )
    traced = jax.jit(jp.accelerate(lambda s, a: step(s, a, "dot"))).trace(
      state, args
    )
    (eqn,) = traced.jaxpr.eqns
    self.assertEqual(eqn.params["name"], "step")
    self.assertEqual(eqn.params["donated_invars"][0], True)

  def test_effects_happen_in_order_and_once(self):
    args, exact = constructs.exact_operands(17)
    seen = []

    @jax.jit
    def f(*args):
      jax.debug.callback(lambda: seen.append("before"), ordered=True)
      y = constructs.in_scan(matmul)(*args)
      jax.debug.callback(
        lambda y: seen.append(float(y)), y[0, 0, 0], ordered=True
      )
      return y

    for function in (jp.accelerate(f), jax.jit(jp.accelerate(f))):
      seen.clear()
      jax.block_until_ready(function(*args))
      jax.effects_barrier()
      self.assertEqual(seen, ["before", 3 * exact[0, 0, 0]])

  def test_state_of_references_is_kept(self):
    args, exact = constructs.exact_operands(18)

    @jax.jit
    def f(*args):
      ref = jax.new_ref(jnp.zeros(exact.shape))

      def body(i, _):
        ref[...] += matmul(*args)

      lax.fori_loop(0, 3, body, None)
      return ref[...]

    contract.assert_exact(jp.accelerate(f)(*args), 3 * exact, contract.F32)
    self.assertEqual(count(jp.accelerate(f), *args)[OURS], 1)

  def test_names_and_scopes_are_kept(self):
    args, _, _ = constructs.operands(19)

    @jax.jit
    def attention(*args):
      with jax.named_scope("scores"):
        return matmul(*args)

    lowered = jax.jit(jp.accelerate(attention)).lower(*args)
    text = lowered.as_text(debug_info=True)
    self.assertIn("@attention", text)
    self.assertIn("scores/block_scaled_dot", text)

  def test_concrete_keys_of_random_numbers_pass(self):
    key = jax.random.key(2)
    f = lambda: jax.random.normal(jnp.broadcast_to(key, (2,))[1], (3,))
    np.testing.assert_array_equal(jax.jit(jp.accelerate(f))(), jax.jit(f)())

  def test_pallas_kernels_are_not_entered(self):
    args, _, _ = constructs.operands(26)

    def kernel(*refs):
      *operands, out = refs
      out[...] = jax.nn.relu(dot(*(ref[...] for ref in operands)))

    call = pl.pallas_call(
      kernel,
      out_shape=jax.ShapeDtypeStruct((2, 5, 3), jnp.float32),
      interpret=True,
    )
    for function in (jp.accelerate(call), jp.accelerate(jax.jit(call))):
      found = count(function, *args)
      self.assertEqual((found["scaled_dot"], found[OURS]), (1, 0))
      np.testing.assert_array_equal(
        function(*args), np.maximum(jax.jit(dot)(*args), 0)
      )

  def test_other_threads_are_not_accelerated(self):
    args, _, _ = constructs.operands(20)
    counts = []

    def f():
      other = lambda: counts.append(count(dot, *args)[OURS])
      thread = threading.Thread(target=other)
      thread.start()
      thread.join()
      other()

    jp.accelerate(f)()
    self.assertEqual(counts[0], 0)

  def test_exception_leaves_no_trace(self):
    args, _, _ = constructs.operands(21)

    def f(*args):
      dot(*args)
      raise KeyError("mine")

    with self.assertRaisesRegex(KeyError, "mine"):
      jp.accelerate(f)(*args)
    self.assertEqual(count(dot, *args)[OURS], 0)

  def test_internal_checks_of_jax_pass(self):
    args, exact = constructs.exact_operands(22)
    for rows in constructs.programs():
      with jax.enable_checks(True):
        results = jp.accelerate(jax.jit(constructs.every(rows)))(*args)
      for (name, (_, factor, _)), y in zip(rows.items(), results, strict=True):
        with self.subTest(name):
          contract.assert_exact(y, factor * exact, contract.F32)


class LeftAloneTest(parameterized.TestCase):
  @parameterized.product(jitted=(False, True), outer=(False, True))
  @pytest.mark.sample(1)
  def test_integer_result_is_left_to_jax_with_a_warning(self, jitted, outer):
    args, exact = constructs.exact_operands(23)

    _, f = constructs.functions_in(jnp.int32)
    function = jp.accelerate(jax.jit(f) if jitted else f)
    function = jax.jit(function) if outer else function
    with self.assertWarnsRegex(
      UserWarning,
      r"accelerate: left JAX's scaled_dot at .*/acceleration_test.py:\d+ .*dot"
      r"\) as it is: the result is int32, not float32, bfloat16 or",
    ):
      result = function(*args)
    contract.assert_exact(result, exact, np.dtype(np.int32))

  def test_supported_dots_warn_of_nothing(self):
    args, _, _ = constructs.operands(24)
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      jp.accelerate(jax.jit(matmul))(*args)

  def test_symbolic_size_of_no_format_is_left_with_a_warning(self):
    (k,) = jax.export.symbolic_shape("k")
    specs = [
      jax.ShapeDtypeStruct((2, 5, 8 * k), jnp.bfloat16),
      jax.ShapeDtypeStruct((2, 5, k), jnp.bfloat16),
    ] * 2
    with self.assertWarnsRegex(
      UserWarning,
      r"symbolic, and bfloat16\[2, 5, 8\*k\] with bfloat16\[2, 5, k",
    ):
      found = jax.jit(jp.accelerate(matmul)).trace(*specs).jaxpr
    self.assertIn("scaled_matmul", str(found))


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(None, 3, "scaled_matmul")
  def test_fn_must_be_callable(self, fn):
    with self.assertRaisesRegex(
      TypeError, f"accelerate: fn must be a function, got {fn!r}; pass"
    ):
      jp.accelerate(fn)

  def test_unknown_implementation_is_refused_at_once(self):
    with self.assertRaisesRegex(
      ValueError, "accelerate: implementation must be None or one of .*'gpu'"
    ):
      jp.accelerate(dot, implementation="gpu")

  @parameterized.parameters(False, True)
  def test_forced_implementation_that_cannot_serve_is_refused(self, jitted):
    args, _, _ = constructs.operands(25)
    function = jp.accelerate(
      jax.jit(dot) if jitted else dot, implementation="cudnn"
    )
    with self.assertRaisesRegex(
      NotImplementedError, "scaled_dot: implementation='cudnn' does not support"
    ):
      jax.eval_shape(function, *args)
