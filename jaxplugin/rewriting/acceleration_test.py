# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accelerate`: the dots are replaced, in every construct, and right."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin.testing import contract, nn_cases, transformations

NT_3D = nn_cases.NT_3D
E4M3, E8M0 = nn_cases.E4M3, nn_cases.E8M0
JAX_PRIMITIVES = ("scaled_matmul_wrapper", "scaled_matmul", "scaled_dot")
OURS = "block_scaled_dot"


def count_in(jaxpr):
  """Returns how often each primitive is in a jaxpr."""
  return collections.Counter(
    eqn.primitive.name for eqn in transformations.equations(jaxpr)
  )


def count(function, *args):
  """Returns how often each primitive is in the jaxpr of a call."""
  return count_in(jax.make_jaxpr(function)(*args).jaxpr)


def functions_in(dtype):
  """Returns JAX's functions for scaled dots, with results in `dtype`."""

  def matmul(lhs, lhs_scale, rhs, rhs_scale):
    return jax.nn.scaled_matmul(
      lhs, rhs, lhs_scale, rhs_scale, preferred_element_type=dtype
    )

  def dot(lhs, lhs_scale, rhs, rhs_scale=None):
    return nn_cases.scaled_dot(
      (lhs, lhs_scale), (rhs, rhs_scale), NT_3D, dtype, lax.scaled_dot
    )

  return matmul, dot


matmul, dot = functions_in(jnp.float32)


def operands(*seed, batch=2, m=5, n=3, k=64, **make):
  """Four arrays, with their dot and its magnitudes in f64."""
  rng = nn_cases.rng_of(*seed)
  make = make or {
    "values": nn_cases.random_values,
    "scale": nn_cases.random_scale,
  }
  lhs = nn_cases.mx((batch, m, k), 2).make(rng, **make)
  rhs = nn_cases.mx((batch, n, k), 2).make(rng, **make)
  exact, magnitude = contract.dot(
    nn_cases.dequantized(*lhs), nn_cases.dequantized(*rhs), NT_3D
  )
  return jax.device_put((*lhs, *rhs)), exact, magnitude


def exact_operands(*seed):
  """Four arrays of small integers, and their dot, which f32 holds exactly."""
  args, exact, _ = operands(
    *seed, values=nn_cases.small_integers, scale=nn_cases.small_scale
  )
  return args, exact


def assert_dot(result, exact, magnitude, factor=1):
  """Asserts that a result in f32 is within the contract of `factor` dots."""
  bound = factor**2 * contract.DOT_BOUND * magnitude
  contract.assert_within(result, factor * exact, bound, contract.F32)


def assert_none_left(found):
  """Asserts that a count has no dots of JAX; returns the number of ours."""
  assert found[OURS] > 0, found
  assert not any(found[name] for name in JAX_PRIMITIVES), found
  return found[OURS]


def assert_replaced(function, *args):
  """Asserts that no dot of JAX is left; returns the number of ours."""
  return assert_none_left(count(function, *args))


def traced(functions, *args):
  """Returns a traced program of all functions, and a count for each of them."""
  functions = [jax.jit(f) for f in functions]
  program = jax.jit(lambda *args: [f(*args) for f in functions]).trace(*args)
  jaxprs = [eqn.params["jaxpr"].jaxpr for eqn in program.jaxpr.eqns]
  return program, [count_in(jaxpr) for jaxpr in jaxprs]


# Constructs. Each takes a function and returns another one of the same arrays,
# whose result is the function's times a small integer.


def in_nested_jits(f):
  return jax.jit(lambda *args: jax.jit(lambda args: {"y": f(*args)})(args)["y"])


def in_nested_functions(f):
  def outer(*args):
    def inner():
      return f(*args)

    return inner()

  return outer


def in_scan(f):
  def scan(*args):
    body = lambda carry, _: (carry + f(*args), None)
    return lax.scan(body, jnp.zeros_like(f(*args)), None, length=3)[0]

  return scan


def in_while_body(f):
  def loop(*args):
    zero = jnp.zeros_like(f(*args))
    bound = 2 * jnp.ones((), jnp.int32)
    body = lambda state: (state[0] + 1, state[1] + f(*args))
    return lax.while_loop(lambda s: s[0] < bound, body, (0, zero))[1]

  return loop


def in_while_condition(f):
  def loop(*args):
    y = f(*args)
    go_on = lambda i: (i < 2) & (jnp.abs(f(*args)).max() >= 0)
    return y * lax.while_loop(go_on, lambda i: i + 1, 0)

  return loop


def in_cond(f):
  return lambda *args: lax.cond(
    2 * jnp.ones(()) > 1,
    lambda args: f(*args),
    lambda args: f(*args) * 5,
    args,
  )


def in_switch(f):
  branches = [lambda *args, i=i: f(*args) * i for i in range(3)]
  return lambda *args: lax.switch(jnp.array(2), branches, *args)


def in_custom_jvp(f):
  g = jax.custom_jvp(f)
  g.defjvp(lambda primals, tangents: (f(*primals), f(*primals)))
  return g


def in_custom_vjp(f):
  g = jax.custom_vjp(f)
  g.defvjp(lambda *args: (f(*args), args), lambda args, ct: args)
  return g


def in_custom_vmap(f):
  g = jax.custom_batching.custom_vmap(f)
  g.def_vmap(lambda size, mapped, *args: (f(*args), True))
  return g


def in_custom_linear_solve(f):
  def solve(*args):
    # matrix: x -> x + 0 * dot. The solver solves it by hand.
    matvec = lambda x: x + 0 * f(*args)
    solver = lambda matvec, b: b + 0 * matvec(b)
    return lax.custom_linear_solve(matvec, f(*args), solver)

  return solve


def with_closed_over_constants(f):
  constant = np.full((1,), 2, np.float32)
  inner = jax.jit(lambda first, rest: f(first, *rest) * constant)
  return lambda *args: inner(args[0], args[1:])


def _each(f):
  """Applies a function of batches to arrays of one example."""
  return lambda *args: f(*(a[None] for a in args))[0]


def in_scanned_operands(f):
  def scan(*args):
    body = lambda carry, x: (carry, _each(f)(*x))
    return lax.scan(body, 0, args)[1]

  return scan


def in_nested_vmaps(f):
  mapped = jax.vmap(jax.vmap(_each(f)))
  return lambda *args: mapped(*(a[None] for a in args))[0]


def in_shard_map(f, check_vma=True):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
  spec = jax.sharding.PartitionSpec("x")
  return jax.shard_map(
    f, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=check_vma
  )


def in_scan_in_shard_map(f, check_vma=True):
  def scan(*args):
    body = lambda carry, _: (carry + f(*args), None)
    zeros = jnp.zeros((1, args[0].shape[1], args[2].shape[1]))
    return lax.scan(body, zeros, None, length=2)[0]

  return in_shard_map(scan, check_vma)


# By name: a construct, its factor, and how often it traces the function.
OF_ANY_ARRAYS = {
  "jit": (jax.jit, 1, 1),
  "nested_jits": (in_nested_jits, 1, 1),
  "nested_functions": (in_nested_functions, 1, 1),
  "scan": (in_scan, 3, 2),
  "while_body": (in_while_body, 2, 2),
  "while_condition": (in_while_condition, 2, 2),
  "cond": (in_cond, 1, 2),
  "switch": (in_switch, 2, 3),
  "checkpoint": (jax.checkpoint, 1, 1),
  "custom_jvp": (in_custom_jvp, 1, 1),
  "custom_vjp": (in_custom_vjp, 1, 1),
  "custom_vmap": (in_custom_vmap, 1, 1),
  "custom_linear_solve": (in_custom_linear_solve, 1, None),
  "composite": (lambda f: lax.composite(f, name="test.composite"), 1, 1),
  "named_scope": (lambda f: jax.named_call(f, name="attention"), 1, 1),
  "closed_over_constants": (with_closed_over_constants, 2, 1),
}
# Constructs of four arrays with a batch dimension.
OF_BATCHES = {
  "scanned_operands": (in_scanned_operands, 1, 1),
  "map": (lambda f: lambda *args: lax.map(lambda x: _each(f)(*x), args), 1, 1),
  "vmap": (lambda f: jax.vmap(_each(f)), 1, 1),
  "nested_vmaps": (in_nested_vmaps, 1, 1),
  "shard_map": (in_shard_map, 1, 1),
  "shard_map_without_vma": (lambda f: in_shard_map(f, False), 1, 1),
  "scan_in_shard_map": (in_scan_in_shard_map, 2, 1),
  "scan_in_shard_map_without_vma": (
    lambda f: in_scan_in_shard_map(f, False), 2, 1,
  ),
  "pmap": (lambda f: jax.pmap(_each(f)), 1, 1),
}  # fmt: skip


@functools.cache
def rows(is_mapped=False):
  """Returns by name: a function, its factor, and the number of its dots."""
  return {
    f"{name}_{f.__name__}": (construct(f), factor, number)
    for name, (construct, factor, number) in (
      OF_ANY_ARRAYS | OF_BATCHES
    ).items()
    # JAX has no rule to batch a composite.
    if not is_mapped or ("map" not in name and name != "composite")
    for f in (matmul, dot)
  }


def programs():
  """Returns rows by program, which has one mesh; pmap makes its own."""
  of_pmap = {name: row for name, row in rows().items() if "pmap" in name}
  return of_pmap, {n: row for n, row in rows().items() if n not in of_pmap}


def every(rows, transform=lambda f: f):
  """Returns one function of all rows, which transforms each."""
  functions = [transform(f) for f, *_ in rows.values()]
  return lambda *args: [f(*args) for f in functions]


class ConstructsTest(absltest.TestCase):
  def assert_right(self, function, rows, args, exact, magnitude):
    """Runs all rows as one program."""
    for (name, (_, factor, _)), result in zip(
      rows.items(), function(*args), strict=True
    ):
      with self.subTest(name):
        assert_dot(result, exact, magnitude, factor)

  def test_each_dot_is_replaced(self):
    args, *_ = operands(1)
    for name, (original, _, number) in rows().items():
      with self.subTest(name):
        before = count(original, *args)
        jaxs = sum(before[name] for name in JAX_PRIMITIVES)
        self.assertEqual(jaxs, number or jaxs)
        ours = assert_replaced(jp.accelerate(original), *args)
        self.assertEqual(ours, jaxs)

  def test_results_are_right(self):
    for rows in programs():
      function = jax.jit(every(rows, jp.accelerate))
      self.assert_right(function, rows, *operands(1))

  def test_results_of_a_jitted_function_are_right(self):
    for rows in programs():
      function = jp.accelerate(jax.jit(every(rows)))
      self.assert_right(function, rows, *operands(1))

  def test_results_of_eager_calls_are_right(self):
    # One function of each construct, in turns.
    pairs = zip(*[iter(rows().items())] * 2, strict=True)
    each = dict(pair[i % 2] for i, pair in enumerate(pairs))
    self.assert_right(every(each, jp.accelerate), each, *operands(1))

  def test_vmap_on_either_side_is_right(self):
    cases = [operands(2, i) for i in range(3)]
    args = [np.stack(x) for x in zip(*(c[0] for c in cases), strict=True)]
    exact, magnitude = (
      np.stack(x) for x in zip(*(c[1:] for c in cases), strict=True)
    )
    mapped = rows(is_mapped=True)
    for transform in (
      lambda f: jax.vmap(jp.accelerate(f)),
      lambda f: jp.accelerate(jax.vmap(f)),
    ):
      functions = [transform(original) for original, *_ in mapped.values()]
      program, counts = traced(functions, *args)
      for name, found in zip(mapped, counts, strict=True):
        with self.subTest(name):
          assert_none_left(found)
      run = program.lower().compile()
      self.assert_right(run, mapped, args, exact, magnitude)


class SemanticsTest(parameterized.TestCase):
  @parameterized.product(
    dtype=contract.RESULT_DTYPES, implementation=(None, "xla", "cpu")
  )
  @pytest.mark.sample(1)
  def test_result_has_the_dtype_asked_for(self, dtype, implementation):
    args, exact = exact_operands(4)
    for f in functions_in(dtype):
      function = jp.accelerate(jax.jit(f), implementation=implementation)
      self.assertEqual(
        jax.eval_shape(function, *args), jax.eval_shape(f, *args)
      )
      (config,) = nn_cases.bound_configs(function, *args)
      self.assertEqual(config.implementation, implementation)
      contract.assert_exact(function(*args), exact, dtype)

  @parameterized.parameters(False, True)
  def test_operand_without_scale_is_not_rounded(self, jitted):
    # JAX gives it a scale of ones and rounds it to bf16; one dot, one-sided.
    args, _, _ = operands(5)
    plain = nn_cases.rng_of(6).normal(size=(2, 3, 64)).astype(np.float32)
    f = jax.jit(dot) if jitted else dot
    expected = contract.dot(
      nn_cases.dequantized(*map(np.asarray, args[:2])), plain, NT_3D
    )
    for function in (jp.accelerate(f), jax.jit(jp.accelerate(f))):
      assert_dot(function(*args[:2], plain), *expected)
    (config,) = nn_cases.bound_configs(jp.accelerate(f), *args[:2], plain)
    self.assertEqual(config.lhs.format, jp.MXFP8)
    self.assertIsNone(config.rhs.format)

  def test_two_operands_without_scale_are_a_plain_product(self):
    rng = nn_cases.rng_of(11)
    lhs, rhs = (rng.normal(size=(2, n, 64)).astype(np.float32) for n in (5, 3))
    f = lambda a, b: dot(a, None, b)
    for function in (jp.accelerate(f), jax.jit(jp.accelerate(jax.jit(f)))):
      assert_dot(function(lhs, rhs), *contract.dot(lhs, rhs, NT_3D))
      self.assertEqual(count(function, lhs, rhs)["scaled_dot"], 0)

  def test_scale_of_one_block_that_is_given_is_used(self):
    values = np.ones((1, 2, 32), E4M3)
    scale = np.full((1, 2, 1), 4, np.float32).astype(E8M0)
    of_copies = lambda *args: dot(*map(jnp.copy, args))
    for function in (
      jp.accelerate(dot),
      jax.jit(jp.accelerate(dot)),
      jax.jit(jp.accelerate(of_copies)),
    ):
      result = function(values, scale, values, scale)
      np.testing.assert_array_equal(result, np.full((1, 2, 2), 512, np.float32))

  def test_scale_of_ones_that_is_given_is_no_absent_one(self):
    args, _, _ = operands(12)
    ones = np.ones((2, 5, 2), np.float32).astype(E8M0)
    function = lambda a, b: jp.accelerate(dot)(a, ones, b, ones[:, :3])
    (config,) = nn_cases.bound_configs(function, args[0], args[2])
    self.assertEqual((config.lhs.format, config.rhs.format), (jp.MXFP8,) * 2)

  def test_configs_may_have_different_block_sizes(self):
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8") for _ in range(2)]
    configs[1].block_size = 16
    rng = nn_cases.rng_of(13)
    lhs, rhs = (
      rng.integers(-8, 9, (2, n, 64)).astype(np.float32) for n in (5, 3)
    )
    function = jp.accelerate(
      lambda a, b: jax.nn.scaled_dot_general(a, b, NT_3D, configs=configs)
    )
    # E4M3 holds the integers up to 16, whatever the power of two above.
    exact, _ = contract.dot(
      lhs.astype(np.float64), rhs.astype(np.float64), NT_3D
    )
    contract.assert_exact(jax.jit(function)(lhs, rhs), exact, contract.F32)
    self.assertEqual(count(function, lhs, rhs)[OURS], 1)

  def test_jitted_function_called_before_is_accelerated_all_the_same(self):
    # JAX rounds f32 without a scale to bf16. jaxplugin does not.
    f = jax.jit(lambda *args: dot(*args))
    args = (
      jnp.ones((1, 1, 32), E4M3),
      jnp.ones((1, 1, 1)).astype(E8M0),
      jnp.full((1, 1, 32), 1 + 2**-12, jnp.float32),
    )
    jaxs, ours = 32.0, 32 + 2**-7
    for expected, function in (
      (jaxs, f),
      (jaxs, f),
      (ours, jp.accelerate(f)),
      (ours, jp.accelerate(f)),
      (jaxs, f),
      (ours, jp.accelerate(f)),
    ):
      self.assertEqual(function(*args).item(), expected)

  def test_second_call_traces_and_compiles_nothing(self):
    args, _, _ = operands(9)
    f = jax.jit(lambda *args: jax.nn.relu(dot(*args)))
    for function in (
      jp.accelerate(f),
      jp.accelerate(jax.jit(in_scan(f))),
      jp.accelerate(lambda *args: f(*args) + matmul(*args)),
    ):
      function(*args)
      with jax.log_compiles(), self.assertNoLogs("jax", "WARNING"):
        function(*args)

  @parameterized.parameters(matmul, dot)
  def test_target_in_use_is_recorded_in_replaced_dots(self, f):
    args, _, _ = operands(10)
    function = jp.accelerate(jax.jit(f))
    for name in ("b200", "h100", "b200"):
      target = jp.named_target(name, cudnn="9.13")
      (explained,) = jp.explain(function, *args, target=target)
      self.assertEqual(explained.target, target)
      with jp.use_target(target):
        (explained,) = jp.explain(function, *args)
      self.assertEqual(explained.target, target)
