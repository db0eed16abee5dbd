# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ragged dots of experts quantize norms and gated activations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin.testing.models import normal

ROWS, MODEL, HIDDEN = 21, 64, 96
SIZES = (5, 0, 9, 4)  # three rows have no group
EXPERTS = len(SIZES)
SHAPES = {
  "gate": (EXPERTS, MODEL, HIDDEN),
  "up": (EXPERTS, MODEL, HIDDEN),
  "down": (EXPERTS, HIDDEN, MODEL),
}
# The numbers of `jp.ragged_dot`, with weights [groups, n, k].
NUMBERS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))


def params_of(dtype=jnp.float32):
  return {
    "norm": 1 + normal(MODEL, dtype=dtype) / 8,
    **{n: normal(*s, dtype=dtype) / 8 for n, s in SHAPES.items()},
  }


def quantized(params):
  where = lambda p: 1 if p.array.ndim == 3 else False
  return jp.quantize_params(params, "mxfp8", where=where)[0]


def sizes():
  return jnp.array(SIZES, jnp.int32)


def llama(x, w):
  h = x.astype(jnp.float32)
  h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
  return w * h.astype(x.dtype)


def mixtral(params, x, sizes):
  """The experts of a Mixtral block, whose rows are sorted."""
  dot = functools.partial(lax.ragged_dot, group_sizes=sizes)
  h = llama(x, params["norm"])
  gate = dot(h, params["gate"])
  up = lax.ragged_dot_general(
    h, params["up"].swapaxes(1, 2), sizes, NUMBERS, preferred_element_type=None
  )
  return dot(jax.nn.silu(gate) * up, params["down"])


def by_producers(params, x, sizes, out_format="mxfp8"):
  """`mixtral` by functions that quantize their results."""
  weights = {n: jp.quantize(params[n].mT, "mxfp8") for n in SHAPES}
  dot = functools.partial(
    jp.ragged_dot, group_sizes=sizes, preferred_element_type=x.dtype
  )
  h = jp.nn.rms_norm(x, params["norm"], epsilon=1e-6, out_format=out_format)
  gate, up = dot(h, weights["gate"]), dot(h, weights["up"])
  y = jp.nn.silu_and_mul(gate, up, out_format=out_format)
  return dot(y, weights["down"])


def gpt_oss(params, x, sizes):
  """The experts of a gpt-oss block, with a bias for each expert."""
  dot = functools.partial(lax.ragged_dot, group_sizes=sizes)
  of_row = functools.partial(
    jnp.repeat, repeats=sizes, axis=0, total_repeat_length=len(x)
  )
  y = dot(x, params["gate_up"]) + of_row(params["gate_up_bias"])
  gate, up = y[..., ::2], y[..., 1::2]
  gate, up = jnp.clip(gate, None, 7.0), jnp.clip(up, -7.0, 7.0)
  y = (up + 1) * (gate * jax.nn.sigmoid(gate * 1.702))
  return dot(y, params["down"]) + of_row(params["down_bias"])


def gpt_oss_params(dtype):
  shapes = {
    "gate_up": (EXPERTS, MODEL, 2 * HIDDEN),
    "gate_up_bias": (EXPERTS, 2 * HIDDEN),
    "down": (EXPERTS, HIDDEN, MODEL),
    "down_bias": (EXPERTS, MODEL),
  }
  return {n: normal(*s, dtype=dtype) for n, s in shapes.items()}


def gpt_oss_by_producers(params, x, sizes):
  dot = functools.partial(
    jp.ragged_dot, group_sizes=sizes, preferred_element_type=x.dtype
  )
  expert = jnp.repeat(jnp.arange(EXPERTS), sizes, total_repeat_length=len(x))
  weights = {n: jp.quantize(params[n].mT, "mxfp8") for n in ("gate_up", "down")}
  y = dot(jp.quantize(x, "mxfp8"), weights["gate_up"])
  y = jp.nn.swigluoai(y + params["gate_up_bias"][expert], out_format="mxfp8")
  return dot(y, weights["down"]) + params["down_bias"][expert]


def gpt_oss_in_f64(params, x):
  """The experts of the first rows, with quantized weights in f64."""
  f64 = lambda a: np.asarray(a, np.float64)
  w = {
    n: f64(jp.quantize(params[n].mT, "mxfp8").dequantize())
    for n in ("gate_up", "down")
  }
  quantized = lambda y: f64(
    jp.quantize(jnp.asarray(y, jnp.float32), "mxfp8").dequantize()
  )
  expert = np.repeat(range(EXPERTS), SIZES)
  x = quantized(x[: len(expert)])
  y = np.einsum("mk,mnk->mn", x, w["gate_up"][expert])
  y += f64(params["gate_up_bias"])[expert]
  gate, up = np.minimum(y[:, ::2], 7), np.clip(y[:, 1::2], -7, 7)
  y = quantized(gate / (1 + np.exp(-1.702 * gate)) * (up + 1))
  y = np.einsum("mk,mnk->mn", y, w["down"][expert])
  return y + f64(params["down_bias"])[expert]


def accepted(fn, activations="mxfp8", fuse_activations=True):
  return jp.accept_quantized(
    fn, activations=activations, fuse_activations=fuse_activations
  )


def outcomes(function, *args):
  return [(c.name, c.outcome) for c in jp.explain(function, *args).chains]


class AcceptedExpertsTest(parameterized.TestCase):
  def transformed(self, by_hand, model, params, stored, x, more=()):
    """Returns a result by hand; checks that transformed models have its bits.

    Args:
      more: further functions of the stored weights, x and the sizes.
    """
    function = accepted(model)

    @jax.jit
    def all_of_them(params, stored, x, sizes):
      step = functools.partial(function, stored)
      return (
        by_hand(params, x, sizes),
        step(x, sizes),
        accepted(jax.checkpoint(model))(stored, x, sizes),
        jax.vmap(step)(x[None], sizes[None])[0],
        lax.scan(lambda x, _: (step(x, sizes), None), x, length=1)[0],
        *(f(stored, x, sizes) for f in more),
      )

    first, *others = all_of_them(params, stored, x, sizes())
    for i, y in enumerate(others):
      np.testing.assert_array_equal(first, y, err_msg=str(i))
    return first

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_result_has_the_bits_of_producers(self, dtype):
    params, x = params_of(dtype), normal(ROWS, MODEL, dtype=dtype)
    more = jax.checkpoint(accepted(mixtral)), accepted(jax.jit(mixtral))
    first = self.transformed(
      by_producers, mixtral, params, quantized(params), x, more
    )
    self.assertGreater(np.abs(np.asarray(first, np.float32)).max(), 0.1)

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_experts_of_gpt_oss_have_the_bits_of_producers(self, dtype):
    params, x = gpt_oss_params(dtype), normal(ROWS, MODEL, dtype=dtype)
    where = lambda p: 1 if p.array.ndim == 3 else False
    stored, _ = jp.quantize_params(params, "mxfp8", where=where)
    self.assertEqual(
      outcomes(accepted(gpt_oss), stored, x, sizes()),
      [("swigluoai with interleaved halves", "fused")],
    )
    first = self.transformed(gpt_oss_by_producers, gpt_oss, params, stored, x)
    exact = gpt_oss_in_f64(params, x)
    error = np.asarray(first, np.float64)[: len(exact)] - exact
    # bf16 rounds gate and up by 2^-9. One code in 2^5 then differs by 2^-4. In
    # f32 only codes next to a tie differ.
    tolerance = 2.0**-6 if dtype == jnp.bfloat16 else 2.0**-10
    self.assertLess(np.linalg.norm(error), tolerance * np.linalg.norm(exact))

  def test_layers_of_a_scan_are_fused(self):
    stack = jax.tree.map(
      lambda x: np.stack([x, x[::-1]]), jax.device_get(params_of())
    )
    x = normal(ROWS, MODEL)

    def model(params, x, sizes):
      step = lambda x, p: (x + mixtral(p, x, sizes), None)
      return lax.scan(step, x, params)[0]

    where = lambda p: 2 if p.array.ndim == 4 else False
    stored, _ = jp.quantize_params(stack, "mxfp8", where=where)
    got = jax.jit(accepted(model))(stored, x, sizes())
    layer = jax.jit(lambda p, x, sizes: x + by_producers(p, x, sizes))
    want = x
    for i in range(2):
      params = jax.tree.map(lambda x, i=i: x[i], stack)
      want = layer(params, want, sizes())
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    found = jp.explain(accepted(model), stored, x, sizes()).chains
    self.assertLen(found, 3)
    self.assertEqual({(c.outcome, c.trips) for c in found}, {("fused", 2)})

  def test_norm_in_the_function_of_its_matmul_has_one_line(self):
    args = quantized(params_of()), normal(ROWS, MODEL), sizes()
    found = outcomes(accepted(jax.jit(mixtral)), *args)
    self.assertLen(found, 3)
    self.assertEqual({outcome for _, outcome in found}, {"fused"})

  def test_rows_are_quantized_without_prologues(self):
    params, x = params_of(), normal(ROWS, MODEL)
    for format in ("mxfp8", "nvfp4"):
      dot = jax.jit(accepted(lax.ragged_dot, format, False))
      got = dot(x.at[-1].set(999), quantized(params)["gate"], sizes())
      rows = jp.quantize(x.at[sum(SIZES) :].set(0), format).dequantize()
      weights = jp.quantize(params["gate"].mT, "mxfp8").dequantize()
      rows, weights = (np.asarray(a, np.float64) for a in (rows, weights))
      expert = np.repeat(range(EXPERTS), SIZES)
      want = np.zeros((ROWS, HIDDEN))
      want[: len(expert)] = np.einsum(
        "mk,mnk->mn", rows[: len(expert)], weights[expert]
      )
      # f32 sums of 64 exact products below 16
      np.testing.assert_allclose(got, want, rtol=0, atol=64 * 16 * 2.0**-24)

  @parameterized.parameters(True, False)
  def test_derivatives_are_those_of_the_model_in_f64(self, is_fused):
    # The loss is linear in the result, so quantizing changes no gradient.
    params, ones = params_of(), normal(ROWS, MODEL)
    gate, up = normal(ROWS, HIDDEN), normal(HIDDEN, ROWS).T

    def loss(down, gate, up, ones, sizes):
      y = lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)
      return (y * ones).sum()

    def second(function):
      first = jax.grad(jax.jit(function), (1, 2))
      of_first = lambda *args: sum(jnp.sin(x).sum() for x in first(*args))
      return first, jax.grad(of_first, (1, 2))

    def exact_loss(down, gate, up, ones, sizes):
      del sizes
      expert = np.repeat(range(EXPERTS), SIZES)
      y = gate / (1 + jnp.exp(-gate)) * up
      y = jnp.einsum("mk,mkn->mn", y[: len(expert)], down[expert])
      return (y * ones[: len(expert)]).sum()

    stored = quantized(params)["down"]
    dequantized = stored.dequantize()
    got = [
      jax.jit(f)(stored, gate, up, ones, sizes())
      for f in second(accepted(loss, fuse_activations=is_fused))
    ]
    with jax.enable_x64(True):
      exact = [np.asarray(a, np.float64) for a in (dequantized, gate, up, ones)]
      want = [jax.jit(f)(*exact, sizes()) for f in second(exact_loss)]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      self.assertGreater(abs(np.asarray(b)).max(), 0.1)
      np.testing.assert_allclose(
        a, b, rtol=0, atol=1e-5 * abs(np.asarray(b)).max()
      )

  def test_reasons_why_rows_are_separate(self):
    params, x = params_of(), normal(ROWS, MODEL)

    def transposed(params, x, sizes):
      numbers = lax.RaggedDotDimensionNumbers(
        (((0,), (1,)), ((), ())), (1,), (0,)
      )
      h = llama(x.T, params["norm"][:ROWS]).astype(x.dtype)
      return lax.ragged_dot_general(h, params["gate"], sizes, numbers)

    def reason(function):
      found = outcomes(function, quantized(params), x, sizes())
      self.assertLen(set(found), len({name for name, _ in found}))
      return {outcome for _, outcome in found}

    self.assertEqual(
      reason(accepted(transposed)),
      {"separate: the matmul needs its dimensions in another order"},
    )
    self.assertEqual(
      reason(accepted(mixtral, fuse_activations=False)),
      {"separate: pass fuse_activations=True to accept_quantized"},
    )
    self.assertEqual(
      reason(accepted(mixtral, "nvfp4")),
      {"separate: rows without a group must not change the scale of nvfp4"},
    )


class QuantizedExpertsTest(absltest.TestCase):
  def test_result_has_the_bits_of_producers(self):
    params, x = params_of(), normal(ROWS, MODEL)
    function = jp.quantize_dots(mixtral, "mxfp8", fuse_activations=True)

    @jax.jit
    def both(params, x, sizes):
      return by_producers(params, x, sizes), function(params, x, sizes)

    want, got = both(params, x, sizes())
    self.assertGreater(np.abs(np.asarray(want)).max(), 0.1)
    np.testing.assert_array_equal(want, got)

  def test_lines_say_which_rows_are_fused(self):
    names = ["rms_norm with weight"] * 2 + ["silu_and_mul with up"]

    def check(outcome, recipe, transform=lambda f: f, model=mixtral, **options):
      function = jp.quantize_dots(model, recipe, **options)
      loss = lambda *args: function(*args).sum()
      args = params_of(), normal(ROWS, MODEL), sizes()
      found = outcomes(transform(loss), *args)
      self.assertEqual(found, [(name, outcome) for name in names])

    fused = {"fuse_activations": True}
    wgrad = "wgrad moves the rows of each group to whole blocks"
    check(f"fused; not in training, because {wgrad}", "mxfp8", **fused)
    check(f"separate: {wgrad}", "mxfp8", jax.grad, **fused)
    high = dataclasses.replace(jp.training.MXFP8_RECIPE, quantize_wgrad=False)
    also = "XLA also computes it for block_scaled_ragged_contraction"
    check(f"fused; {also}", high, jax.grad, **fused)
    check("separate: pass fuse_activations=True to quantize_dots", "mxfp8")
    check(
      "separate: rows without a group must not change the scale of nvfp4",
      *("nvfp4", jax.grad),
      **fused,
    )
    check(
      "separate: the matmul is not quantized: where returned False",
      *("mxfp8", jax.grad),
      where=lambda site: False,
    )

  def test_matmuls_of_this_package_in_the_code_have_a_line(self):
    w = normal(EXPERTS, MODEL, MODEL)
    w_q, norm = jp.quantize(w, "mxfp8"), lambda x: llama(x, jnp.ones(MODEL))
    recipe = {"recipe": "mxfp8"}
    dot = jp.dot_general(**recipe, weight="rhs")
    one, numbers = w_q[0], (((1,), (0,)), ((), ()))

    def model(w, x, sizes):
      x = jp.linear(norm(x), one)
      x = jp.linear(jp.quantize(jax.nn.silu(x) * (x @ w[1]), "mxfp8"), one)
      x = jp.ragged_dot(norm(x), w_q, sizes)
      x = dot(norm(x), w[0], numbers)
      return jp.training.ragged_dot_general(norm(x), w, sizes, **recipe)

    def in_scan(w, x, sizes):
      step = lambda x, _: (model(w, x, sizes), None)
      return lax.scan(step, x, length=3)[0]

    by_weights = (
      "separate: the code calls a matmul by quantized weights; pass it the"
      " result of jp.nn.rms_norm(..., out_format=...)"
    )
    by_recipe = (
      "separate: the code calls a matmul with a recipe; call"
      " jax.lax.dot_general or jax.lax.ragged_dot in its place"
    )
    rows = f"float32[{ROWS}, {MODEL}]"
    want = [
      (f"block_scaled_dot of {rows}", by_weights),
      (
        f"quantize of {rows}",
        "separate: the code calls jp.quantize; pass out_format= to"
        " jp.nn.silu_and_mul",
      ),
      (f"ragged_dot of {rows}", by_weights),
      *[(f"a matmul with a recipe of {rows}", by_recipe)] * 2,
    ]
    args = w, normal(ROWS, MODEL), sizes()
    for f, trips in ((model, 1), (jax.jit(model), 1), (in_scan, 3)):
      function = jp.quantize_dots(f, "mxfp8", fuse_activations=True)
      found = jp.explain(function, *args).chains
      self.assertEqual([(c.dot, c.outcome) for c in found], want)
      self.assertEqual({c.trips for c in found}, {trips})
    stored = jp.quantize(w.mT, "mxfp8").transpose(0, 2, 1)
    accept = lambda w, x, sizes: (
      jp.linear(norm(x), one),
      dot(norm(x), x.T, numbers),
      lax.ragged_dot(x, w, sizes),
    )
    found = jp.explain(accepted(accept), stored, *args[1:]).chains
    self.assertEqual([(c.dot, c.outcome) for c in found], [want[0], want[-1]])

  def test_rows_in_another_layout_are_separate(self):
    numbers = lax.RaggedDotDimensionNumbers(
      (((0,), (1,)), ((), ())), (1,), (0,)
    )

    def model(params, x, sizes):
      h = jax.nn.silu(x.T) * x[::-1].T
      return lax.ragged_dot_general(h, params["gate"], sizes, numbers)

    function = jp.quantize_dots(model, "mxfp8", fuse_activations=True)
    args = params_of(), normal(ROWS, MODEL), sizes()
    self.assertEqual(
      outcomes(function, *args),
      [
        (
          "silu_and_mul with up",
          "separate: the matmul needs its dimensions in another order",
        )
      ],
    )


if __name__ == "__main__":
  absltest.main()
