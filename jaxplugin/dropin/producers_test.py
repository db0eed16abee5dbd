# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms and activations, plain and quantized."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing import prologue_cases, quantization_lowerings
from jaxplugin.testing.meshes import explicit

SHAPE = (4, 32, 64)
CASES = prologue_cases.CASES
NORM, GATED = CASES[1], CASES[8]  # with residual, with interleaved halves
OUTS = {
  "mxfp8": jp.OutFormat("mxfp8"),
  "nvfp4": jp.OutFormat("nvfp4", returns_amax=True),
  "given": jp.OutFormat("nvfp4", global_scale=0.01, packed=False),
  "both": jp.OutFormat("mxfp4", axis=(-2, -1), scale_rounding="floor"),
  "key": jp.OutFormat("nvfp4", key=jax.random.key(3)),
  "rows": jp.OutFormat("fp8_row", axis=1),
  "square": jp.OutFormat("fp8_128x128"),
  "offset": jp.OutFormat("uint4_32_min", returns_amax=True),
}


def call(prologue, x, more, out_format=None):
  """Calls the public function of a prologue."""
  options = {n: more[n] for n in ("bias", "residual") if n in more}
  first = [more[n] for n in ("weight", "up") if n in more]
  if prologue.is_norm:
    options["epsilon"] = prologue.epsilon
  if prologue.function == "swigluoai":
    options |= {"alpha": prologue.alpha, "limit": prologue.limit}
    options["interleaved"] = prologue.halves == "interleaved"
  if prologue.activation == "exact_gelu":
    options["approximate"] = False
  function = getattr(jp.nn, prologue.function.removeprefix("exact_"))
  return function(x, *first, **options, out_format=out_format)


def result_of(prologue, returned):
  return returned if not prologue.has_residual else returned[0]


def quantized(y, out):
  """Returns what `quantize` returns for an f32 result."""
  options = {
    "scale_rounding": out.scale_rounding,
    "global_scale": out.global_scale,
    "packed": out.packed,
  }
  if isinstance(out.axis, tuple):
    return jp.quantize_both(y, out.format, axes=out.axis, **options)
  return jp.quantize(y, out.format, axis=out.axis, key=out.key, **options)


class ProducersTest(parameterized.TestCase):
  def test_f64_is_rounded_to_f32_and_the_sum_is_f64(self):
    with jax.enable_x64(True):
      x = jnp.linspace(-1, 1, 64, dtype=jnp.float64).reshape(2, 32)
      y, total = jp.nn.rms_norm(x, residual=x, out_format="mxfp8")
      plain = jp.nn.silu_and_mul(x, x)
    self.assertEqual((total.dtype, plain.dtype), (x.dtype, x.dtype))
    np.testing.assert_allclose(total, 2 * np.asarray(x), rtol=2.0**-24)
    self.assertEqual(y.shape, x.shape)

  def assert_bits(self, got, want):
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
      a, b = (np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in (a, b))
      np.testing.assert_array_equal(a, b)

  @parameterized.parameters(jnp.bfloat16, jnp.float16)
  def test_plain_result_has_the_dtype_of_x(self, dtype):
    cases = [prologue_cases.operands(p, (3, 5, 8), dtype) for p in CASES]

    @jax.jit
    def run(cases):
      return [call(p, *case) for p, case in zip(CASES, cases, strict=True)]

    for p, (x, more), found in zip(CASES, cases, run(cases), strict=True):
      exact, exact_sum = prologue_cases.exact(p, x, more)
      y = result_of(p, found)
      self.assertEqual(y.dtype, dtype)
      size = np.abs(exact).max(-1, keepdims=True)
      bound = float(jnp.finfo(dtype).eps) * size  # one rounding, and f32's
      self.assertLessEqual(
        (np.abs(np.asarray(y, np.float64) - exact) - bound).max(), 0
      )
      if p.has_residual:
        np.testing.assert_array_equal(np.asarray(found[1]), exact_sum)

  @parameterized.parameters(0, 1)
  @pytest.mark.sample(1)
  def test_bits_are_those_of_quantize_of_the_f32_result(self, first):
    cases = [prologue_cases.operands(p, SHAPE, jnp.float32) for p in CASES]
    outs = [
      list(OUTS.items())[(first + 4 * (i % 2) + i // 4) % len(OUTS)]
      for i in range(len(CASES))
    ]

    @jax.jit
    def run(cases):
      return [
        [result_of(p, call(p, x, more, each)) for each in (None, out)]
        for p, (x, more), (_, out) in zip(CASES, cases, outs, strict=True)
      ]

    @jax.jit
    def quantize(results):
      return [
        quantized(y, out)
        for (y, _), (_, out) in zip(results, outs, strict=True)
      ]

    # A kernel's f32 result may differ from that of XLA's operations by 4 ulp.
    with jp.use_target(quantization_lowerings.OPERATIONS):
      results = run(cases)
    wanted = quantize(results)
    for p, (name, out), (y, result), want in zip(
      CASES, outs, results, wanted, strict=True
    ):
      with self.subTest(f"{p}, {name}"):
        if out.returns_amax:
          result, amax = result
          self.assertEqual(amax, np.abs(y).max())
        self.assert_bits(result, want)

  def test_no_columns_give_an_empty_result(self):
    x = jnp.zeros((3, 0))
    out = jp.OutFormat("mxfp8", returns_amax=True)
    (found, amax), total = jp.nn.rms_norm(x, residual=x, out_format=out)
    self.assertEqual((found.shape, amax, total.shape), (x.shape, 0, x.shape))

  def test_bad_rows_and_scales(self):
    x = np.ones((4, 64), np.float32)
    x[1], x[2, 3], x[3, 3] = 0, np.nan, np.inf

    @jax.jit
    def run(x):
      small = jp.OutFormat("nvfp4", global_scale=1e-6)
      whole = jp.OutFormat("mxfp8", returns_amax=True)
      return (
        jp.nn.rms_norm(x, out_format=whole),
        jp.nn.silu_and_mul(x[:2], x[:2], out_format=small),
        jp.nn.silu_and_mul(x[:4], out_format="mxfp8"),
      )

    (norm, amax), saturated, halves = run(x)
    norm = np.asarray(norm.dequantize())
    self.assertAlmostEqual(amax, 1 / np.sqrt(1 + 1e-6), places=6)
    np.testing.assert_array_equal(norm[0], 1)
    np.testing.assert_array_equal(norm[1], 0)
    self.assertTrue(np.isnan(norm[2]).all())
    self.assertTrue(np.isnan(norm[3, :32]).all())  # the block of the Inf
    np.testing.assert_array_equal(norm[3, 32:], 0)
    most = np.float32(6 * 448 * 1e-6)
    expected = np.repeat([[most], [0]], 64, axis=1)
    np.testing.assert_allclose(saturated.dequantize(), expected, rtol=1e-6)
    halves = np.asarray(halves.dequantize())
    self.assertTrue(np.isnan(halves[2:]).all())
    self.assertTrue(np.isfinite(halves[:2]).all())

  def test_gradients_are_those_of_f64(self):
    cases = [prologue_cases.operands(p, (2, 64), jnp.float32) for p in CASES]
    rng = np.random.default_rng(1)
    out = jp.OutFormat("mxfp8", derivative="straight_through")
    weights = rng.standard_normal((2, 2, 64)).astype(np.float32)

    @jax.jit
    def run(cases):
      def loss(case, p):
        found = call(p, *case, out)
        y, s = found if p.has_residual else (found, None)
        total = (y.dequantize() * weights[0]).sum()
        return total if s is None else total + (s * weights[1]).sum()

      return [
        jax.grad(functools.partial(loss, p=p))(case)
        for p, case in zip(CASES, cases, strict=True)
      ]

    step = 1e-6
    for p, case, grads in zip(CASES, cases, run(cases), strict=True):
      leaves, tree = jax.tree.flatten(case)
      leaves = [np.asarray(leaf, np.float64) for leaf in leaves]
      along = [rng.standard_normal(leaf.shape) for leaf in leaves]

      def loss(size, p=p, leaves=leaves, along=along, tree=tree):
        moved = [a + size * b for a, b in zip(leaves, along, strict=True)]
        y, s = prologue_cases.exact(p, *jax.tree.unflatten(tree, moved))
        total = (y * weights[0]).sum()
        return total if s is None else total + (s * weights[1]).sum()

      slope = (loss(step) - loss(-step)) / (2 * step)
      terms = [
        np.asarray(g, np.float64) * d
        for g, d in zip(jax.tree.leaves(grads), along, strict=True)
      ]
      size = sum(np.abs(term).sum() for term in terms)
      with self.subTest(str(p)):
        error = abs(sum(term.sum() for term in terms) - slope)
        self.assertLess(error, 1e-6 * size)  # 2^-20

  def test_derivative_without_straight_through_is_refused(self):
    def loss(x, global_scale, name):
      global_scale = global_scale if name == "nvfp4" else None
      out = jp.OutFormat(name, global_scale=global_scale)
      return jp.nn.rms_norm(x, out_format=out).dequantize().sum()

    # The last is quantized separately.
    for argnum, name in ((0, "nvfp4"), (1, "nvfp4"), (0, "uint4_32_min")):
      with self.assertRaisesRegex(
        NotImplementedError,
        r"^rms_norm: the quantized result has no derivative",
      ):
        jax.grad(loss, argnum)(jnp.ones((2, 32)), 0.01, name)

  def test_backward_pass_keeps_x_and_no_f32_arrays(self):
    x = jnp.linspace(-1, 1, 256, dtype=jnp.bfloat16).reshape(2, 128)
    for name in ("mxfp8", "fp8_128x128"):  # in one kernel, and separately
      out = jp.OutFormat(name, derivative="straight_through")
      norm = lambda x, out=out: jp.nn.rms_norm(x, out_format=out)
      back = jax.eval_shape(
        lambda x, norm=norm: jax.vjp(lambda x: norm(x).surrogate, x)[1], x
      )
      kept = [leaf.dtype for leaf in jax.tree.leaves(back) if leaf.ndim]
      self.assertEqual(kept, [x.dtype], name)

  def test_amax_has_no_derivative(self):
    options = {"returns_amax": True, "derivative": "straight_through"}

    @jax.jit
    def run(x):
      outs = [  # in one kernel, and separately
        jp.OutFormat(name, **options) for name in ("mxfp8", "uint4_32_min")
      ]
      amax = lambda x, out: jp.nn.rms_norm(x, out_format=out)[1]
      return [jax.grad(amax)(x, out) for out in outs]

    for x_bar in run(jnp.linspace(1, 2, 64).reshape(2, 32)):
      np.testing.assert_array_equal(x_bar, 0)

  def test_transformed_functions_have_the_same_bits(self):
    x, more = prologue_cases.operands(NORM, SHAPE, jnp.bfloat16)
    weight, residual = map(np.asarray, (more["weight"], more["residual"]))
    weights = np.stack([weight * n for n in range(1, 5)])
    out = OUTS["mxfp8"]
    norm = lambda x, weight, residual: jp.nn.rms_norm(
      x, weight, residual=residual, out_format=out
    )

    @jax.jit
    def run(x, weight, residual):
      def step(carry, layer):
        y, total = norm(carry, layer, residual)
        return total, y

      return (
        norm(x, weight, residual),
        jax.vmap(norm, (0, None, 0))(x, weight, residual),
        jax.vmap(norm, (1, None, None), out_axes=1)(x, weight, residual[:, 0]),
        jax.vmap(norm)(x, weights, residual),
        [norm(*args) for args in zip(x, weights, residual, strict=True)],
        jax.lax.scan(step, x, weights),
        norm(x, weights[0], residual),
      )

    # vmap over weights leaves the kernel, whose f32 result may differ.
    with jp.use_target(quantization_lowerings.OPERATIONS):
      whole, rows, columns, each, expected, (total, layers), first = run(
        x, weight, residual
      )
      same = run(x, weight, np.broadcast_to(residual[:, :1], x.shape))[0]
    self.assert_bits(rows, whole)
    self.assert_bits(columns, same)
    self.assert_bits(each, jax.tree.map(lambda *a: np.stack(a), *expected))
    self.assert_bits(jax.tree.map(lambda a: np.asarray(a)[0], layers), first[0])
    self.assertEqual(total.dtype, jnp.bfloat16)

  def test_vmap_returns_the_amax_of_each_entry(self):
    x, more = prologue_cases.operands(NORM, SHAPE, jnp.bfloat16)
    x = x.at[1, 3, 5].set(jnp.nan)  # makes its row NaN
    out = jp.OutFormat("mxfp4", returns_amax=True)

    @jax.vmap
    def norm(x, residual):
      return call(NORM, x, {**more, "residual": residual}, out)

    y, _ = prologue_cases.exact(NORM, x, more)
    lowered = jax.jit(norm).lower(x, more["residual"])
    (quantized, amax), _ = lowered.compile()(x, more["residual"])
    np.testing.assert_allclose(
      amax, np.nanmax(np.abs(y), (1, 2)), rtol=2.0**-20
    )
    self.assertEqual(quantized.shape, SHAPE)
    # A kernel quantizes all entries at once.
    self.assertEqual(
      quantization_lowerings.kernel_calls(lowered.as_text()),
      (quantization_lowerings.TARGET.cpu_kernels is not None, 0),
    )

  def test_unused_results_are_not_computed(self):
    x, more = prologue_cases.operands(NORM, SHAPE, jnp.float32)
    both = jp.OutFormat("mxfp8", axis=(-2, -1))

    def text(use):
      function = lambda x, more: use(call(NORM, x, more, both))
      return jax.jit(function).lower(x, more).as_text()

    text_of_sum = text(lambda found: found[1])
    self.assertNotIn("rsqrt", text_of_sum)
    self.assertIn("stablehlo.add", text_of_sum)
    one, two = (
      text(lambda found, n=n: found[0][:n]).count("f8E4M3FN>") for n in (1, 2)
    )
    self.assertBetween(one, 1, two - 1)
    both = jp.OutFormat("mxfp8", returns_amax=True)
    unused, used = (
      text(lambda found, n=n: found[0][:n]).count("tensor<f32>") for n in (1, 2)
    )
    self.assertLess(unused, used)

  def test_estimate_counts_each_pass_over_x(self):
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    target = jp.named_target("h100").with_library("jax-triton")
    sizes = []
    for axis in (-1, 0):
      out = jp.OutFormat("mxfp8", axis=axis)
      (found,) = jp.explain(
        functools.partial(jp.nn.rms_norm, out_format=out), x, target=target
      ).quantizations
      sizes.append(found.estimate.num_bytes)
    written = 256 * 512 * 33 / 32  # values and scales
    self.assertEqual(sizes[0], 256 * 512 * 2 + written)
    # A pass before computes the statistics of each row.
    self.assertEqual(sizes[1], 2 * 256 * 512 * 2 + written)

  def test_explain_names_the_separate_prologue(self):
    x = jax.ShapeDtypeStruct((64, 2, 256), jnp.bfloat16)
    first = jp.OutFormat("mxfp8", axis=0)
    norm = functools.partial(jp.nn.rms_norm, out_format=first)
    target = jp.named_target("b200")
    target = target.with_library("jax-triton")
    text = jp.explain(norm, x, target=target).details()
    self.assertIn("after rms_norm", text)
    self.assertRegex(
      text, "the prologue is a separate XLA operation, because tri"
    )

  @parameterized.parameters(
    (TypeError, r"rms_norm: weight must have shape \(32,\), got \(3,\)",
     lambda x: jp.nn.rms_norm(x, x[0, :3])),
    (TypeError, r"layer_norm: residual must have the shape of x, got \(32,\)",
     lambda x: jp.nn.layer_norm(x, residual=x[0])),
    (TypeError, "silu_and_mul: up must be float32.*got int32",
     lambda x: jp.nn.silu_and_mul(x, x.astype(jnp.int32))),
    (TypeError, "gelu_and_mul: gate must have an even last.*3",
     lambda x: jp.nn.gelu_and_mul(x[:, :3])),
    (TypeError, r"relu: bias must have shape \(32,\), got \(64,\)",
     lambda x: jp.nn.relu(x, bias=x.reshape(-1))),
    (TypeError, "silu: x must have rank 1 or more",
     lambda x: jp.nn.silu(x[0, 0])),
    (TypeError, "gelu: approximate must be", lambda x: jp.nn.gelu(x, 1)),
    (TypeError, "gelu_and_mul: approximate must be .* False, got None",
     lambda x: jp.nn.gelu_and_mul(x, approximate=None)),
    (TypeError, "swigluoai: gate must have rank 1 or more",
     lambda x: jp.nn.swigluoai(x[0, 0])),
    (ValueError, "swigluoai: limit must be a number from 0 to 3.4.*got inf",
     lambda x: jp.nn.swigluoai(x, limit=np.inf)),
    (TypeError, "swigluoai: interleaved must be",
     lambda x: jp.nn.swigluoai(x, interleaved=1)),
    (ValueError, "rms_norm: epsilon must be a number from 0 to .*got -1",
     lambda x: jp.nn.rms_norm(x, epsilon=-1)),
    (ValueError, r"swigluoai: alpha must be a number from -3.4.*got 1e\+39",
     lambda x: jp.nn.swigluoai(x, alpha=1e39)),
    (TypeError, "silu_and_mul: the size of axis 1 must be a multiple of 32",
     lambda x: jp.nn.silu_and_mul(x, out_format="mxfp8")),
    (ValueError, "rms_norm: axis of out_format must name dim.*each once",
     lambda x: jp.nn.rms_norm(
       x, out_format=jp.OutFormat("mxfp8", axis=(1, -1))
     )),
  )  # fmt: skip
  def test_errors_name_the_rule_and_the_value(self, kind, message, run):
    with self.assertRaisesRegex(kind, message):
      run(jnp.ones((2, 32)))


AMAX = jp.OutFormat("mxfp8", returns_amax=True)
SHARDED = (
  *((NORM, "nvfp4"), (NORM, OUTS["both"]), (CASES[5], OUTS["nvfp4"])),
  *((GATED, OUTS["key"]), (NORM, AMAX), (CASES[5], AMAX), (CASES[11], AMAX)),
)


@jax.jit
def run_sharded(given):
  return [
    call(p, *operands, out)
    for (p, out), operands in zip(SHARDED, given, strict=True)
  ]


@functools.cache
def one_device():
  """Returns operands and the results of one device."""
  given = [
    prologue_cases.operands(p, (8, 32, 256), jnp.bfloat16) for p, _ in SHARDED
  ]
  return given, run_sharded(given)


class ShardingCases:
  """The bits of one device, for shardings of rows and columns."""

  def test_results_have_the_bits_of_one_device(self):
    given, expected = one_device()
    spec = P("a", None, "b")
    place = lambda a: self.put(a, spec if a.ndim == 3 else P("b"))
    found = run_sharded(jax.tree.map(place, given))
    ProducersTest.assert_bits(self, found, expected)


class AutoShardingTest(ShardingCases, explicit.AutoTestCase):
  def test_explain_names_what_the_mesh_changes(self):
    x = self.put(jnp.ones((8, 256)), P("a", "b"))
    for function, out, note in (
      (jp.nn.rms_norm, "mxfp8", "dimension 1 of size 256 stays whole"),
      (jp.nn.silu_and_mul, "mxfp8", "x is resharded where a mesh axis splits"),
      (jp.nn.rms_norm, "nvfp4", "because each device finds the amax"),
    ):
      explained = jp.explain(functools.partial(function, out_format=out), x)
      self.assertIn(note, explained.details())


class ExplicitShardingTest(ShardingCases, explicit.ExplicitTestCase):
  pass
