# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of activations, attached and found by matmuls."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.jaxext import jax_private, program
from jaxplugin.quantization import prologues, quantize_primitive
from jaxplugin.testing import prologue_cases, quantization_lowerings
from jaxplugin.training import activation_gradients

# The f32 derivatives of `attached` have an error of 2^-21: the second one of
# gelu cancels. Differences in f64 have one of 2^-28.
DERIVATIVES = 2.0**-18
GATED = [p for p in prologue_cases.CASES if not p.is_norm]
SHAPE = (2, 64, 64)
FEATURES, HIDDEN = 64, 128


def gated_mlp(params, x):
  gate, up = x @ params["gate"], x @ params["up"]
  return (jax.nn.silu(gate) * up) @ params["down"]


def halves_mlp(params, x):
  both = x @ jnp.concatenate([params["gate"], params["up"]], 1)
  gate, up = jnp.split(both, 2, -1)
  return (jax.nn.silu(gate) * up) @ params["down"]


def biased_mlp(params, x, bias=None):
  bias = jnp.sin(params["down"][:, 0]) if bias is None else bias
  gate, up = (x @ params[name] + bias for name in ("gate", "up"))
  return (jax.nn.silu(gate) * up) @ params["down"]


def bias_first_mlp(params, x):
  bias = jnp.ones(HIDDEN)
  gate, up = (bias + x @ params[name] for name in ("gate", "up"))
  return (jax.nn.silu(gate) * up) @ params["down"]


def ungated_mlp(params, x, activation=jax.nn.relu):
  h = x @ params["gate"] + jnp.ones(HIDDEN)
  return activation(h) @ params["down"]


def norm_block(params, x, is_read=False, mlp=gated_mlp):
  x = x + x @ params["out"]
  y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
  y = mlp(params, y * params["norm"])
  return y + x + (jnp.cos(x) if is_read else 0)


def two_norm_blocks(params, x):
  with jax.named_scope("first"):
    x = norm_block(params, x)
  with jax.named_scope("second"):
    return norm_block(params, x)


def layer_norm_block(params, x):
  x = x @ params["out"] + x
  y = jax.nn.standardize(x, epsilon=1e-5) * params["norm"] + params["bias"]
  return x + ungated_mlp(params, y)


def post_norm_block(params, x):
  x = x + gated_mlp(params, x @ params["out"])
  return jax.nn.standardize(x, epsilon=1e-5) @ params["gate"]


def arrays(dtype=jnp.float32):
  rng = np.random.default_rng(0)
  sizes = {
    "gate": (FEATURES, HIDDEN),
    "up": (FEATURES, HIDDEN),
    "down": (HIDDEN, FEATURES),
    "out": (FEATURES, FEATURES),
  }
  params = {
    name: jax.device_put(np.asarray(rng.standard_normal(size) / 8, dtype))
    for name, size in sizes.items()
  }
  for name in ("norm", "bias"):
    params[name] = jax.device_put(np.asarray(rng.standard_normal(64), dtype))
  return params, jax.device_put(np.asarray(rng.standard_normal(SHAPE), dtype))


def scaled_derivative(rule, fn):
  """Returns `fn` with a custom rule: its derivative times -3."""
  if rule == "jvp":
    new = jax.custom_jvp(fn)

    @new.defjvp
    def _(primals, tangents):
      y, tangent = jax.jvp(fn, primals, tangents)
      return y, -3 * tangent

    return new
  new = jax.custom_vjp(fn)
  new.defvjp(
    lambda x: jax.vjp(fn, x),
    lambda vjp, g: jax.tree.map(lambda a: -3 * a, vjp(g)),
  )
  return new


def fused(fn, recipe="mxfp8"):
  return jp.quantize_dots(fn, recipe, fuse_activations=True)


def loss_of(fn):
  return lambda params, x: jnp.square(fn(params, x)).sum()


def found(fn, *args):
  """Returns the gradients that a function quantizes as it computes them."""
  lines = jp.explain(fn, *args).quantizations
  words = "gradient of "
  return sorted(line.layer for line in lines if words in line.description)


def quantized_gradients(jaxpr):
  """Returns how many gradients a jaxpr quantizes as it computes them."""
  return sum(
    "cotangent" in prologue.operands
    for operation in program.operations(jax_private.without_unused(jaxpr))
    if operation.eqn.primitive is quantize_primitive.quantize_p
    and (prologue := operation.eqn.params["problem"].prologue)
  )


def assert_near(got, want, error):
  """Checks leaves to a share of the largest number of each."""
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    atol = error * np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def exact_derivatives(prologue, x, more, cotangent):
  """Returns gradients, that of squares of x's, and a tangent, by differences.

  A result reads one gate and one up value of x. So one difference for each of
  them gives the gradient of all results.
  """
  given = {n: a.astype(np.float64) for n, a in (("x", x), *more.items())}
  step = 2.0**-14  # its square is the relative error

  def change(f, arrays, directions):
    after, before = (
      {n: a + sign * step * directions.get(n, 0) for n, a in arrays.items()}
      for sign in (1, -1)
    )
    return (f(after) - f(before)) / (2 * step)

  def result(arrays):
    more = {n: a for n, a in arrays.items() if n != "x"}
    return prologue_cases.exact(prologue, arrays["x"], more)[0]

  def gradient(f, arrays, name):
    size, k = arrays[name].shape[-1], cotangent.shape[-1]
    is_up = np.arange(size) >= k
    if prologue.halves == "interleaved":
      is_up = np.arange(size) % 2 == 1
    found = np.zeros((*cotangent.shape[:-1], size))
    for part in (is_up, ~is_up):
      if part.any():
        found[..., part] = change(f, arrays, {name: part})
    return found

  def squares(arrays):
    square = gradient(weighted, arrays, "x") ** 2
    if prologue.halves == "interleaved":
      return square[..., ::2] + square[..., 1::2]
    return sum(np.split(square, square.shape[-1] // cotangent.shape[-1], -1))

  weighted = lambda arrays: result(arrays) * cotangent
  first = {name: gradient(weighted, given, name) for name in given}
  if "bias" in given:
    first["bias"] = first["bias"].sum((0, 1))
  directions = {name: np.cos(a) for name, a in given.items()}
  return (
    (first.pop("x"), first),
    gradient(squares, given, "x"),
    change(result, given, directions),
  )


@functools.cache
def gradients_of_own_rules(form):
  """Returns gradients of functions whose rules are -3 times JAX's, or 0.

  Their matmuls are quantized unless `form` is "plain".
  """
  ones = np.full((FEATURES, HIDDEN), 1 / 8, np.float32)
  params = {"gate": ones, "up": ones, "down": ones.T}
  x = np.ones(SHAPE, np.float32)

  def clamped(params, x):  # All factors are 8, the limit.
    gate = jnp.minimum(x @ params["gate"], 8.0)
    up = lax.clamp(-8.0, x @ params["up"], 8.0)
    return (gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)) @ params["down"]

  def maximum(params, x):  # All maxima are of two zeros.
    return jnp.maximum(x @ params["gate"] - 8, 0) @ params["down"]

  def with_rule(rule, place):
    at = lambda name, f: scaled_derivative(rule, f) if place == name else f
    identity = lambda x: x
    silu = at("silu", jax.nn.silu)
    if form == "jitted silu":
      silu, identity = jax.jit(silu), jax.jit(identity)
    if form == "checkpointed silu":
      silu = jax.checkpoint(silu)

    def fn(params, x):
      gate = at("gate", identity)(x @ params["gate"])
      up = at("up", identity)(x @ params["up"])
      return at("product", identity)(silu(gate) * up) @ params["down"]

    return fn

  def gradient(fn):
    sum_of = lambda fn: lambda params, x: fn(params, x).sum()
    if form == "plain":
      return jax.grad(sum_of(fn))
    if form == "inside":
      return fused(jax.grad(sum_of(fn)))
    wrap = {"checkpoint": jax.checkpoint, "jit": jax.jit}.get(form)
    return jax.grad(sum_of(fused(wrap(fn) if wrap else fn)))

  places, functions = ["silu"], {}
  if form != "checkpointed silu":  # the other forms change each function
    places += ["gate", "up", "product"]
    functions = {"clamp": clamped, "maximum": maximum}
  functions |= {
    f"{rule} of {place}": with_rule(rule, place)
    for rule, place in itertools.product(("vjp", "jvp"), places)
  }

  @jax.jit
  def run(params, x):
    return {name: gradient(fn)(params, x) for name, fn in functions.items()}

  return run(params, x)


class AttachedTest(parameterized.TestCase):
  def test_gradients_are_those_of_the_function(self):
    def derivatives(prologue, x, more):
      def function(x, more):
        y = prologues.compute(prologue, x, more)[0]
        call = prologues.PrologueCall(prologue=prologue, x=x, more=more)
        return activation_gradients.attached(lax.stop_gradient(y), call)

      first = lambda x: jax.vjp(function, x, more)[1](cotangent)
      second = jax.grad(lambda x: (first(x)[0] ** 2).sum())(x)
      tangents = jax.tree.map(jnp.cos, (x, more))
      return first(x), second, jax.jvp(function, (x, more), tangents)[1]

    cases = [
      (p, *prologue_cases.operands(p, (3, 5, 32), jnp.float32)) for p in GATED
    ]
    cotangent = np.sin(np.arange(480, dtype=np.float32)).reshape(3, 5, 32)

    @jax.jit
    def run(given):
      return [
        derivatives(p, *args)
        for (p, *_), args in zip(cases, given, strict=True)
      ]

    given = jax.device_get([args for _, *args in cases])
    for prologue, (x, more), got in zip(GATED, given, run(given), strict=True):
      with self.subTest(str(prologue)):
        want = exact_derivatives(prologue, x, more, cotangent)
        assert_near(got, want, DERIVATIVES)


class NormTest(parameterized.TestCase):
  def test_gradients_are_those_of_jax(self):
    cases = [p for p in prologue_cases.GRADIENTS if p.is_norm]
    given = [prologue_cases.operands(p, SHAPE, jnp.float32) for p in cases]

    @jax.jit
    def run(given):
      found = []
      for prologue, (x, more) in zip(cases, given, strict=True):
        got = prologues.compute(prologue, x, more, column_sums=0)
        forward = dataclasses.replace(
          prologue, operands=("weight",), gradient=None
        )
        weight = more.get("weight", jnp.ones(SHAPE[-1]))
        f = lambda x, w, p=forward: prologues.compute(p, x, {"weight": w})[0]
        dx, dw = jax.vjp(f, x, weight)[1](more["cotangent"])
        found.append((got, (dx + more.get("residual", 0), dw)))
      return found

    for prologue, (got, want) in zip(cases, run(given), strict=True):
      with self.subTest(str(prologue)):
        assert_near(got, (*want, want[0]), 2.0**-20)

  def test_forward_mode_has_the_tangents_of_the_norm_and_of_its_x(self):
    cases = [
      p for p in prologue_cases.CASES if p.is_norm and not p.has_residual
    ]
    given = [prologue_cases.operands(p, SHAPE, jnp.float32) for p in cases]
    matmul = activation_gradients.Backward(
      shape=SHAPE, specs=(), message="", layer=""
    )

    def function(prologue, is_attached, x, more):
      y = prologues.compute(prologue, x, more)[0]
      if not is_attached:
        return y, x
      call = prologues.PrologueCall(prologue=prologue, x=x, more=more)
      return activation_gradients.attached_norm(
        lax.stop_gradient(y), call, matmul
      )

    @functools.partial(jax.jit, static_argnums=0)
    def run(is_attached, given):
      return [
        jax.jvp(
          functools.partial(function, prologue, is_attached),
          args,
          jax.tree.map(jnp.cos, args),
        )
        for prologue, args in zip(cases, given, strict=True)
      ]

    assert_near(run(True, given), run(False, given), 2.0**-20)


class FusedGradientsTest(parameterized.TestCase):
  def test_matmuls_quantize_the_gradients_of_their_results(self):
    params, x = arrays()
    plain = fused(gated_mlp)

    def scanned(params, x):
      stack = jax.tree.map(lambda a: jnp.stack([a, a / 2]), params)
      body = lambda x, p: (gated_mlp(p, x) + x, None)
      return jax.lax.scan(body, x, stack)[0]

    exact = functools.partial(jax.nn.gelu, approximate=False)
    for activation in (jax.nn.relu, jax.nn.gelu, exact, jp.nn.silu, jp.nn.gelu):
      fn = functools.partial(ungated_mlp, activation=activation)
      step = jax.grad(loss_of(fused(fn)))
      self.assertEqual(found(step, params, x), ["gate"])
    for step in (
      fused(jax.grad(loss_of(ungated_mlp))),
      jax.grad(loss_of(fused(jax.jit(ungated_mlp)))),
    ):
      self.assertEqual(found(step, params, x), ["gate"])
    steps = {
      "grad": jax.grad(loss_of(plain)),
      "constant bias": jax.grad(
        loss_of(fused(functools.partial(biased_mlp, bias=jnp.ones(HIDDEN))))
      ),
      "constant bias first": jax.grad(loss_of(fused(bias_first_mlp))),
      "grad inside": fused(jax.grad(loss_of(gated_mlp))),
      "jit": jax.grad(loss_of(fused(jax.jit(gated_mlp)))),
      "checkpoint": jax.grad(loss_of(fused(jax.checkpoint(gated_mlp)))),
      "checkpoint outside": jax.grad(loss_of(jax.checkpoint(plain))),
      "scan": jax.grad(loss_of(fused(scanned))),
    }
    # The same kernels sum the gradients of a bias.
    steps |= {
      "bias": jax.grad(loss_of(fused(biased_mlp))),
      "bias, grad inside": fused(jax.grad(loss_of(biased_mlp))),
      "bias, jit": jax.grad(loss_of(fused(jax.jit(biased_mlp)))),
      "bias, checkpoint": jax.grad(loss_of(fused(jax.checkpoint(biased_mlp)))),
    }
    for name, step in steps.items():
      with self.subTest(name):
        self.assertEqual(found(step, params, x), ["gate", "up"])
    step = jax.grad(loss_of(fused(halves_mlp)), argnums=(0, 1))
    self.assertLen(found(step, params, x), 1)

  def test_matmuls_quantize_the_gradients_of_norms_and_residuals(self):
    params, x = arrays()
    once = ["gate", "out", "up"]

    def scanned(params, x):
      return lax.scan(lambda x, _: (norm_block(params, x), None), x, None, 2)[0]

    steps = {
      "grad": (jax.grad(loss_of(fused(norm_block)), (0, 1)), once),
      "inside": (fused(jax.grad(loss_of(norm_block))), once),
      "jit": (jax.grad(loss_of(fused(jax.jit(norm_block)))), once),
      "scan": (jax.grad(loss_of(fused(scanned))), once),
      "checkpoint": (
        jax.grad(loss_of(fused(jax.checkpoint(norm_block)))), once
      ),
      # A gradient belongs to the last matmul before the norm.
      "two": (
        jax.grad(loss_of(fused(two_norm_blocks))),
        ["first"] * 3 + ["second"] * 3,
      ),
      "layer_norm": (
        jax.grad(loss_of(fused(layer_norm_block))), ["gate", "out"]
      ),
      "no residual": (
        jax.grad(loss_of(fused(post_norm_block))), ["down", "gate", "up"]
      ),
      "weights are constants": (
        lambda p, x: jax.grad(lambda x: loss_of(fused(norm_block))(p, x))(x),
        once,
      ),
    }  # fmt: skip
    for name, (step, names) in steps.items():
      with self.subTest(name):
        self.assertEqual(found(step, params, x), names)

  def test_gradient_of_a_norm_is_quantized_from_its_f32_values(self):
    params, x = arrays(jnp.bfloat16)
    dot = jp.dot_general("mxfp8", "mxfp8")
    numbers = (((2,), (0,)), ((), ()))
    params["next"] = params["up"][:, :FEATURES]
    rest = lambda params, y: y @ params["next"]

    @jax.jit
    def by_hand(params, x):
      linear = lambda x, name: dot(x, params[name], numbers)
      stream = x + linear(x, "out")
      weight = params["norm"].astype(jnp.float32)
      norm = prologues.Prologue(
        function="rms_norm", operands=("weight",), epsilon=1e-6
      )
      y = prologues.compute(norm, stream, {"weight": weight})[0]
      z, vjp = jax.vjp(
        functools.partial(fused(rest), params), y.astype(x.dtype)
      )
      g = jax.grad(lambda z: jnp.square(z + stream).sum())(z)
      more = {"weight": weight, "residual": g, "cotangent": vjp(g)[0]}
      prologue = dataclasses.replace(norm, operands=tuple(more), gradient="x")
      dx, dw, _ = prologues.compute(prologue, stream, more, column_sums=0)
      rows = lambda a: a.astype(jnp.float32).reshape(-1, a.shape[-1])
      g_q, x_q = (jp.quantize(rows(a), "mxfp8", axis=0) for a in (dx, x))
      out = jp.block_scaled_dot(
        x_q,
        g_q,
        dimension_numbers=(((0,), (0,)), ((), ())),
        preferred_element_type=x.dtype,
      )
      return out, dw.astype(x.dtype)

    model = functools.partial(norm_block, mlp=rest)
    step = jax.jit(jax.grad(loss_of(fused(model))))
    with targets.use_target(quantization_lowerings.OPERATIONS):
      got, (out, norm) = step(params, x), by_hand(params, x)
    np.testing.assert_array_equal(got["out"], out)
    np.testing.assert_array_equal(got["norm"], norm)

  def test_gradients_are_quantized_from_their_f32_values(self):
    params, x = arrays(jnp.bfloat16)
    cotangent = np.cos(np.arange(x.size)).reshape(SHAPE).astype(x.dtype)
    dot = jp.dot_general("mxfp8", "mxfp8")
    numbers = (((2,), (0,)), ((), ()))

    @jax.jit
    def by_hand(params, x):
      gate, up = (dot(x, params[n], numbers) for n in ("gate", "up"))
      call = prologues.PrologueCall(
        prologue=prologues.Prologue(function="silu_and_mul", operands=("up",)),
        x=gate,
        more={"up": up},
      )
      y = prologues.compute(call.prologue, call.x, call.more)[0]
      y = y.astype(x.dtype)
      _, vjp = jax.vjp(lambda y: dot(y, params["down"], numbers), y)
      (c,) = vjp(cotangent)
      result = {}
      for name in ("x", "up"):
        prologue = dataclasses.replace(
          call.prologue, operands=("up", "cotangent"), gradient=name
        )
        more = {"up": up, "cotangent": c}
        (g,) = prologues.compute(prologue, gate, more)
        rows = lambda a: a.astype(jnp.float32).reshape(-1, a.shape[-1])
        g_q, x_q = (jp.quantize(rows(a), "mxfp8", axis=0) for a in (g, x))
        result["gate" if name == "x" else name] = jp.block_scaled_dot(
          x_q,
          g_q,
          dimension_numbers=(((0,), (0,)), ((), ())),
          preferred_element_type=x.dtype,
        )
      return result

    step = jax.jit(
      lambda p, x: jax.vjp(lambda p: fused(gated_mlp)(p, x), p)[1](cotangent)[0]
    )
    # Kernels round the sigmoid otherwise.
    with targets.use_target(quantization_lowerings.OPERATIONS):
      got, want = step(params, x), by_hand(params, x)
    for name, value in want.items():
      np.testing.assert_array_equal(got[name], value)

  def test_gradient_of_a_bias_is_the_sum_of_the_quantized_gradient(self):
    params, x = arrays()
    bias = np.linspace(-1, 1, HIDDEN, dtype=np.float32)
    cotangent = np.cos(np.arange(x.size)).reshape(SHAPE).astype(x.dtype)
    dot = jp.dot_general("mxfp8", "mxfp8")
    numbers = (((2,), (0,)), ((), ()))

    def mlp(params, bias, x):
      return jax.nn.gelu(x @ params["gate"] + bias) @ params["down"]

    @jax.jit
    def by_hand(params, bias, x):
      z = dot(x, params["gate"], numbers)
      names = ("bias", "cotangent")
      forward = prologues.Prologue(function="gelu", operands=names[:1])
      y = prologues.compute(forward, z, {"bias": bias})[0]
      _, vjp = jax.vjp(lambda y: dot(y, params["down"], numbers), y)
      backward = dataclasses.replace(forward, operands=names, gradient="x")
      more = dict(zip(names, (bias, *vjp(cotangent)), strict=True))
      return prologues.compute(backward, z, more)[0]

    @jax.jit
    def step(params, bias, x):
      return jax.vjp(fused(mlp), params, bias, x)[1](cotangent)

    lines = jp.explain(step, params, bias, x).quantizations
    (line,) = (q for q in lines if "gradient of" in q.description)
    self.assertIn("with sums of columns", line.description)
    with targets.use_target(quantization_lowerings.OPERATIONS):
      rows = np.float64(by_hand(params, bias, x)).reshape(-1, HIDDEN)
      got = step(params, bias, x)[1]
    # An addition rounds once.
    bound = len(rows) * 2.0**-24 * np.abs(rows).sum(0)
    np.testing.assert_array_less(np.abs(got - rows.sum(0)), bound)
    # Under vmap, each entry has its own sums.
    entries = np.stack([x, -x])
    mapped = jax.vmap(functools.partial(step, params, bias))(entries)[1]
    wanted = [step(params, bias, entry)[1] for entry in entries]
    np.testing.assert_array_equal(mapped, wanted)
    # Kernels round the sigmoid otherwise, and then some codes of the result.
    error = np.abs(wanted[0] - got).max()
    self.assertLess(error, 0.01 * np.abs(got).max())

  def test_gradients_are_near_those_quantized_separately(self):
    # Blocks contain `gated_mlp` or `ungated_mlp`.
    functions = (
      *(halves_mlp, biased_mlp),
      *(two_norm_blocks, layer_norm_block, post_norm_block),
    )
    separate = functools.partial(jp.quantize_dots, recipe="mxfp8")

    @jax.jit
    def run(params, x):
      return [
        [jax.grad(loss_of(form(fn)), (0, 1))(params, x) for fn in functions]
        for form in (fused, separate)
      ]

    for a, b in zip(*map(jax.tree.leaves, run(*arrays())), strict=True):
      # The gradients' f32 bits differ, and so codes next to a tie. Such a code
      # moves its value by 1/8 at most, so 0.6 % of the codes may differ.
      error = np.linalg.norm(np.asarray(a) - np.asarray(b))
      self.assertLessEqual(error, 0.01 * np.linalg.norm(b))

  @parameterized.parameters(
    "outside", "inside", "checkpoint", "jit", "jitted silu", "checkpointed silu"
  )
  def test_derivatives_of_the_code_are_kept(self, form):
    wanted = gradients_of_own_rules("plain")
    # Another derivative is off by a factor.
    for name, got in gradients_of_own_rules(form).items():
      with self.subTest(name):
        for leaf, want in wanted[name].items():
          atol = 0.02 * abs(np.asarray(want)).max() + 1e-6
          np.testing.assert_allclose(
            got[leaf], want, rtol=0, atol=atol, err_msg=leaf
          )

  def test_other_gradients_are_quantized_separately(self):
    params, x = arrays()

    def read(params, x):
      gate, up = x @ params["gate"], x @ params["up"]
      y = (jax.nn.silu(gate) * up) @ params["down"]
      return y.sum() + gate.sum()

    def twice(params, x):
      gate, up = x @ params["gate"], x @ params["up"]
      y = jax.nn.silu(gate) * up
      return (y @ params["down"]).sum() + (y @ params["down"] * 2.0).sum()

    # The gradient of gate is a sum.
    self.assertEqual(found(jax.grad(fused(read)), params, x), ["up"])
    self.assertEmpty(found(jax.grad(fused(twice)), params, x))
    # The last entry of a map is not one of rows.
    step = jax.grad(loss_of(jax.vmap(fused(gated_mlp), (None, 1), 1)))
    self.assertEmpty(found(step, params, x))
    recipe = dataclasses.replace(
      jp.training.NVFP4_RECIPE, stochastic_rounding=False
    )
    step = jax.grad(loss_of(fused(gated_mlp, recipe)))
    self.assertEmpty(found(step, params, x))

  @parameterized.parameters(0, 1)
  def test_vmap_of_the_second_matmul_has_the_gradients_without(self, axis):
    params, x = arrays()
    x = jnp.stack([x[0]] * 32, axis)

    def mapped(params, x):
      rest = lambda gate, up: (jax.nn.silu(gate) * up) @ params["down"]
      gate, up = x @ params["gate"], x @ params["up"]
      return jax.vmap(rest, axis, axis)(gate, up)

    recipe = dataclasses.replace(
      jp.training.MXFP8_RECIPE,
      grad_format=None,
      quantize_dgrad=False,
      quantize_wgrad=False,
    )
    step = jax.grad(loss_of(fused(mapped)), (0, 1))
    self.assertLen(found(step, params, x), 0 if axis else 2)
    gradients = (
      jax.jit(jax.grad(loss_of(fused(fn, recipe)), (0, 1)))(params, x)
      for fn in (mapped, gated_mlp)
    )
    assert_near(*gradients, 2.0**-18)

  def test_explain_names_why_a_gradient_is_separate(self):
    silu = jax.nn.silu

    def second(params, gate, axis):
      return jax.vmap(lambda h: silu(h) @ params["down"], axis)(gate)

    def lines(fn):
      params, x = arrays()
      x = jnp.stack([x[0]] * 32)
      params["bias"] = params["down"][:, 0]
      found = jp.explain(jax.grad(loss_of(fused(fn))), params, x)
      for line in found.quantizations:
        self.assertRegex(line.description, r"dimensions \[|axis \d")
      chains = (c for c in found.chains if "grad" in c.name)
      return [c.outcome for c in chains]

    rows = {
      "fused": (lambda p, x: silu(x @ p["gate"]) @ p["down"], []),
      "mapped": (lambda p, x: second(p, x @ p["gate"], 0), []),
      "last": (
        lambda p, x: second(p, x @ p["gate"], 1),
        ["jax.vmap maps another dimension than the first"],
      ),
      "bias": (lambda p, x: silu(x @ p["gate"] + p["bias"]) @ p["down"], []),
      "sum and bias": (
        lambda p, x: (lambda h: silu(h) @ p["down"] + h.sum())(
          x @ p["gate"] + p["bias"]
        ),
        ["a sum with another gradient is between it and the matmul"],
      ),
      "scaled bias": (
        lambda p, x: (silu(x @ p["gate"] + p["bias"] * x[..., :1]) @ p["down"]),
        ["mul also needs its floats"],
      ),
      "norm": (norm_block, []),
      "norm of a sum": (
        functools.partial(norm_block, is_read=True),
        ["a sum with another gradient is between it and the matmul"],
      ),
      "sum": (
        lambda p, x: (lambda h: silu(h) @ p["down"] + h.sum())(x @ p["gate"]),
        ["a sum with another gradient is between it and the matmul"],
      ),
    }
    for name, (fn, reasons) in rows.items():
      with self.subTest(name):
        wanted = [f"separate: {x}" for x in reasons]
        self.assertEqual(lines(fn), wanted)

  def test_gradients_under_vmap_have_the_bits_of_those_without(self):
    params, x = arrays()
    each = functools.partial(jax.tree.map, lambda a: jnp.stack([a, a]))

    def of_each(fn, params, x):  # maps the weights too
      return jax.vmap(fused(fn))(each(params), x)

    forms = {
      "outside": lambda fn: jax.vmap(fused(fn), (None, 0)),
      "inside": lambda fn: fused(jax.vmap(fn, (None, 0))),
      "weights": lambda fn: functools.partial(of_each, fn),
      "halves of rows": lambda fn: (
        lambda p, x: jax.vmap(jax.vmap(fused(fn), (None, 0)), (None, 0))(
          p, x.reshape(2, 2, 32, -1)
        ).reshape(x.shape)
      ),
    }
    # The number of gradients, and the forms.
    functions = {
      gated_mlp: (2, [*forms]),
      biased_mlp: (2, ["weights", "halves of rows"]),
      ungated_mlp: (1, ["inside"]),
      halves_mlp: (1, ["outside"]),
      norm_block: (3, ["outside", "halves of rows"]),
    }
    rows = [
      (fn, name, count)
      for fn, (count, names) in functions.items()
      for name in ("", *names)
    ]
    forms[""] = fused
    gradients = [
      jax.jit(jax.grad(loss_of(forms[name](fn)), 1)) for fn, name, _ in rows
    ]
    traced = jax.jit(lambda *args: [f(*args) for f in gradients]).trace(
      params, x
    )
    results = traced.lower().compile()(params, x)
    jaxprs = [eqn.params["jaxpr"].jaxpr for eqn in traced.jaxpr.eqns]
    unmapped = {}
    for (fn, name, count), jaxpr, result in zip(
      rows, jaxprs, results, strict=True
    ):
      with self.subTest(f"{fn.__name__}, {name}"):
        self.assertEqual(quantized_gradients(jaxpr), count)
        # The first form of a function is that without vmap.
        np.testing.assert_array_equal(result, unmapped.setdefault(fn, result))

  def test_second_derivative_of_a_quantized_gradient_is_an_error(self):
    params, x = arrays()
    first = jax.grad(loss_of(fused(gated_mlp)))
    second = jax.grad(lambda p: first(p, x)["gate"].sum())
    with self.assertRaisesRegex(NotImplementedError, "second derivative"):
      jax.jit(second).trace(params)

  def test_devices_compute_their_part_and_shard_map_sums(self):
    params, x = arrays()
    mesh = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "model"))
    place = lambda a, *spec: jax.device_put(
      np.asarray(a), jax.sharding.NamedSharding(mesh, P(*spec))
    )
    split = {
      **params,
      "gate": place(params["gate"], None, "model"),
      "up": place(params["up"], None, "model"),
      "down": place(params["down"], "model", None),
    }

    block = functools.partial(norm_block, mlp=biased_mlp)

    @jax.jit
    def run(params, x):
      return [
        jax.grad(loss_of(fused(fn)), (0, 1))(params, x)
        for fn in (block, halves_mlp, ungated_mlp)
      ]

    want = jax.device_get(run(params, x))
    assert_near(run(split, place(x, "data")), want, 1e-5)
    rows = Mesh(np.array(jax.devices()[:2]), ("data",))

    @jax.shard_map(mesh=rows, in_specs=(P(), P("data")), out_specs=P())
    def loss(params, x):
      return jax.lax.psum(loss_of(fused(block))(params, x), "data")

    assert_near(jax.jit(jax.grad(loss))(params, x), want[0][0], 1e-5)


class PrimitiveTest(parameterized.TestCase):
  def test_vmap_of_gradients_gives_the_codes_of_each_entry(self):
    cases = [
      p
      for p in prologue_cases.GRADIENTS
      if not {"bias", "weight"} & {*p.operands}
    ]
    along = prologue_cases.along(1)

    def codes(prologue, x, more):
      (q,), *_ = quantize_primitive.produce(
        x, None, blockings=along, format=jp.MXFP8, packed=False,
        prologue=prologue, more=more,
      )  # fmt: skip
      return [leaf for leaf in q if leaf is not None]

    shape = (2, *prologue_cases.SHAPE)
    given = [prologue_cases.operands(p, shape, jnp.bfloat16) for p in cases]

    def all_of(given, wrap=lambda f: f):
      functions = [wrap(functools.partial(codes, p)) for p in cases]
      return [f(*args) for f, args in zip(functions, given, strict=True)]

    given = jax.device_get(given)
    run = jax.jit(functools.partial(all_of, wrap=jax.vmap))
    mapped, each = jax.device_get(run(given)), jax.jit(all_of)
    for i in range(2):
      entry = functools.partial(jax.tree.map, lambda a, i=i: a[i])
      for prologue, got, want in zip(
        cases, entry(mapped), each(entry(given)), strict=True
      ):
        with self.subTest(str(prologue), entry=i):
          for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(
              np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
            )
