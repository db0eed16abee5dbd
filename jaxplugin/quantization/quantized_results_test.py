# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized results have the bits of `quantize` of the f32 result."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.dot import backends
from jaxplugin.testing import acme_backend, contract
from jaxplugin.testing.meshes import explicit

M, N, K = 32, 256, 64
RNG = np.random.default_rng(0)
X = RNG.standard_normal((M, K)).astype(np.float32)
W = RNG.standard_normal((N, K)).astype(np.float32)
BIAS = RNG.standard_normal(N).astype(np.float32)
EXPERTS = RNG.standard_normal((3, N, K)).astype(np.float32)
SIZES = jnp.array([20, 0, 7])
CONTRACTED = jax.lax.RaggedDotDimensionNumbers(
  (((0,), (0,)), ((), ())), (0,), ()
)
SQUARE = contract.block_format(
  "square", jnp.float8_e4m3fn, jnp.float32, 16, block_rows=16
)
OutFormat = jp.OutFormat
STRAIGHT_THROUGH = {"derivative": "straight_through"}


@functools.cache
def w_q(format="mxfp8"):
  with jax.ensure_compile_time_eval():
    return jp.quantize(W, format)


# (name, function of options).
CALLS = {
  "dot": lambda **o: jp.block_scaled_dot(jp.quantize(X, "mxfp8"), w_q(),
    bias=BIAS, residual=X @ W.T, **o),
  "dot of a batch": lambda **o: jp.block_scaled_dot(np.stack([X, 2 * X]), w_q(),
    activation="gelu", **o),
  "linear": lambda **o: jp.linear(X, w_q("nvfp4"), BIAS, "silu", **o),
  "linear with minima": lambda **o: jp.linear(X, w_q(jp.UINT4_32_MIN), **o),
  "layer": lambda **o: jp.linear(X, jp.stack([w_q(), w_q()]),
    jnp.stack([BIAS, BIAS]), layer=1, **o),
  "ragged dot": lambda **o: jp.ragged_dot(X, jp.quantize(EXPERTS, "mxfp4"),
    SIZES, activation="swiglu", **o),
  "ragged dot with minima": lambda **o: jp.ragged_dot(X,
    jp.quantize(EXPERTS, jp.UINT4_32_MIN), SIZES, **o),
  "contraction": lambda **o: jp.ragged_dot_general(
    jp.quantize(X, "mxfp8", axis=0), jp.quantize(X @ W.T, "mxfp8", axis=0),
    SIZES, CONTRACTED, **o),
}  # fmt: skip
KEY = jax.random.key(3)
OUT = {
  "mxfp8": (OutFormat("mxfp8"), lambda y: jp.quantize(y, "mxfp8")),
  "floor": (OutFormat("mxfp4", scale_rounding="floor", packed=False),
    lambda y: jp.quantize(y, "mxfp4", scale_rounding="floor", packed=False)),
  "computed": (OutFormat(jp.NVFP4, returns_amax=True),
    lambda y: (jp.quantize(y, "nvfp4"), jnp.max(jnp.abs(y)))),
  "given": (
    OutFormat("nvfp4", global_scale=0.02, returns_amax=True),
    lambda y: (
      jp.quantize(y, "nvfp4", global_scale=0.02),
      jnp.max(jnp.abs(y)),
    ),
  ),
  "key": (OutFormat("nvfp4", key=KEY),
    lambda y: jp.quantize(y, "nvfp4", key=KEY)),
  "axes": (OutFormat("mxfp8", axis=(-1, -2)),
    lambda y: jp.quantize_both(y, "mxfp8")),
  "square": (OutFormat(SQUARE), lambda y: jp.quantize(y, SQUARE)),
  "ggml": (OutFormat("int8_32", scale_rounding="ggml"),
    lambda y: jp.quantize(y, "int8_32", scale_rounding="ggml")),
  "row": (OutFormat("int8_row"), lambda y: jp.quantize(y, "int8_row")),
  "minima": (OutFormat("uint4_32_min"),
    lambda y: jp.quantize(y, "uint4_32_min")),
}  # fmt: skip
# In each program a call has some formats, and each format is in some programs.
SOME = {
  name: [out for j, out in enumerate(OUT) if name == "dot" or (i + j) % 3 == 0]
  for i, name in enumerate(CALLS)
}


def program(name, outs):
  """Returns (results with `out_format`, results of `quantize`)."""
  options = {"preferred_element_type": jnp.float32}
  y = CALLS[name](**options)
  return (
    [CALLS[name](out_format=OUT[out][0]) for out in outs],
    [OUT[out][1](y) for out in outs],
  )


def fused_backend(calls):
  """Returns the cpu backend with another kernel for `out`, recording calls."""
  cpu = backends.BACKENDS["cpu"]

  def emit(call, problem, target, out=None):
    y = cpu.emit(call, problem, target)
    if out is None:
      return y
    calls.append(out.problem)
    format = out.problem.format
    array = jp.quantize(y, format, global_scale=out.global_scale)
    amax = [jnp.max(jnp.abs(y))] if out.problem.returns_amax else []
    return [array.values, array.scale, *amax]

  return dataclasses.replace(
    cpu,
    emit=emit,
    quantized_refusal=lambda problem, out, target: (
      "" if problem.m != 1 else "it has one row"
    ),
  )


class BitsTest(parameterized.TestCase):
  @parameterized.parameters(*CALLS)
  @pytest.mark.sample(4)
  def test_bits_are_those_of_quantize(self, name):
    results, expected = jax.jit(program, static_argnums=(0, 1))(
      name, tuple(SOME[name])
    )
    for out, x, y in zip(SOME[name], results, expected, strict=True):
      with self.subTest(out):
        contract.assert_same_bits(x, y)

  def test_eager_calls_and_a_pytree_argument_give_the_same_bits(self):
    function = jax.jit(lambda x, out: jp.linear(x, w_q(), out_format=out))
    for out in ("given", "key"):
      contract.assert_same_bits(
        function(X, OUT[out][0]), jp.linear(X, w_q(), out_format=OUT[out][0])
      )

  def test_layer_is_one_kernel_for_rows_of_any_rank(self):
    stack = jp.stack([w_q(), w_q()])
    outs = [OUT[name] for name in ("mxfp8", "given")]

    @jax.jit
    def fused(*xs):
      layer = functools.partial(jp.linear, w_q=stack, layer=1)
      return [[layer(x, out_format=out) for out, _ in outs] for x in xs]

    @jax.jit
    def separate(*xs):
      ys = [jp.linear(x, w_q(), preferred_element_type=np.float32) for x in xs]
      return [[quantized(y) for _, quantized in outs] for y in ys]

    xs = X[0], X.reshape(2, M // 2, K)
    self.assertNotIn("jaxplugin_quantize", fused.lower(*xs).as_text())
    contract.assert_same_bits(fused(*xs), separate(*xs))

  def test_out_formats_are_equal_by_their_numbers(self):
    number = np.array(0.5, np.float32)
    array = jnp.float32(0.5)
    alike = 0.5, np.float32(0.5), number
    others = None, 0.25, array, jnp.float32(0.5)
    outs = [OutFormat("nvfp4", global_scale=x) for x in (*alike, *others)]
    for i, one in enumerate(outs):
      for j, other in enumerate(outs):
        is_equal = i == j or max(i, j) < len(alike)
        self.assertEqual(one == other, is_equal, (i, j))
        if is_equal:
          self.assertEqual(hash(one), hash(other))
    number[...] = 2  # no OutFormat changes with it
    self.assertEqual(outs[2].global_scale, 0.5)
    self.assertEqual(OutFormat("nvfp4", global_scale=array), outs[5])
    self.assertNotEqual(outs[0], OutFormat("mxfp8"))

  def test_values_are_rounded_once_from_f32(self):
    identity = jp.quantize(np.eye(K, dtype=np.float32), "mxfp8")
    x = X.copy()
    x[0], x[1], x[2, 5] = 0, 1e30, np.nan
    scale = jnp.float32(2.0**-10)  # much too small: values saturate
    array, amax = jp.block_scaled_dot(
      x, identity, out_format=OutFormat("nvfp4", global_scale=scale,
                                        returns_amax=True, packed=False)
    )  # fmt: skip
    # A NaN reaches its row through products with zeros.
    self.assertTrue(np.isnan(np.asarray(array.scale[2], np.float32)).all())
    np.testing.assert_array_equal(np.asarray(array.values[0], np.float32), 0)
    np.testing.assert_array_equal(np.asarray(array.scale[0], np.float32), 0)
    np.testing.assert_array_equal(np.asarray(array.values[1], np.float32), 6)
    largest = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
    np.testing.assert_array_equal(
      np.asarray(array.scale[1], np.float32), largest
    )
    self.assertEqual(amax, np.float32(1e30))

  def test_scan_of_layers(self):
    w = jnp.stack([X @ X.T * 0.01, X @ X.T * 0.02])
    stack = jp.quantize(w, "mxfp8")
    h = jp.quantize(X[:, :M], "mxfp8")
    layer = lambda h, w: jp.linear(h, w, None, "gelu", out_format="mxfp8")
    result, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), h, stack)
    for i in range(2):
      h = jp.quantize(jp.linear(h, stack[i], None, "gelu"), "mxfp8")
    contract.assert_same_bits(result, h)

  @parameterized.parameters("given", "computed")
  @pytest.mark.sample(1)
  def test_vmap_has_a_global_scale_and_an_amax_for_each_entry(self, out):
    x = np.stack([X, 3 * X])
    out, expected = OUT[out]
    ws = w_q(), jp.stack([w_q(), w_q()])

    def function(x):
      options = dict(out_format=out), dict(layer=1, out_format=out)
      results = [jp.linear(x, w, **o) for w, o in zip(ws, options, strict=True)]
      return results, [expected(jp.linear(x, w_q()))] * 2

    contract.assert_same_bits(*jax.jit(jax.vmap(function))(x))

  def test_exported_function_and_debug_checks(self):
    def function(x, implementation=None):
      options = {"implementation": implementation}
      return jp.linear(x, w_q(), out_format=OUT["given"][0], **options)

    expected = function(X)
    with jp.debug_checks():
      contract.assert_same_bits(function(X), expected)
    exported = jax.export.export(jax.jit(function))(X)  # XLA operations
    contract.assert_same_bits(exported.call(X), function(X, "xla"))


class FusedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.calls = []
    table = backends.BACKENDS | {"cpu": fused_backend(self.calls)}
    self.enter_context(mock.patch.object(backends, "table", lambda: table))

  @parameterized.parameters("mxfp8", "given")
  def test_kernel_of_the_backend_quantizes(self, name):
    out, expected = OUT[name]
    function = jax.jit(lambda x: jp.linear(x, w_q(), out_format=out))
    contract.assert_same_bits(function(X), expected(jp.linear(X, w_q())))
    (problem,) = self.calls
    self.assertEqual(problem.shape, (M, N))
    self.assertEqual(problem.has_global_scale, name == "given")
    explanation = jp.explain(function, X)
    self.assertEmpty(explanation.quantizations)
    (dot,) = explanation
    self.assertIn(
      f"result: quantized to {out.format} by the kernel of the matmul (fused)",
      dot.decision.notes,
    )

  @parameterized.parameters(
    (OUT["computed"][0], "a second pass computes the global scale"),
    (OUT["key"][0], "rounded stochastically"),
    (OUT["axes"][0], "along two axes"),
    (OutFormat("mxfp8", axis=0), "axis 0, which is not the last"),
    (OUT["square"][0], "blocks of square have 16 rows"),
    (OUT["minima"][0], "uint4_32_min has zero points, minima or a codebook"),
    (OUT["ggml"][0], "round scales like ggml"),
  )
  def test_refused_results_are_quantized_separately(self, out, reason):
    explanation = jp.explain(lambda: jp.linear(X, w_q(), out_format=out))
    self.assertRegex(
      "".join(explanation[0].decision.notes), f"separately, because.*{reason}"
    )

  def test_reasons_name_the_backend_export_and_devices(self):
    function = lambda x: jp.linear(x, w_q(), out_format="mxfp8")
    notes = lambda *args, **options: "".join(
      jp.explain(function, *args, **options)[0].decision.notes
    )
    self.assertIn("because cpu: it has one row", notes(X[:1]))
    self.assertIn("because jp.export", notes(X, for_export=True))
    mapped = jp.explain(jax.vmap(function), X[None])[0].decision
    self.assertIn("because jax.vmap", "".join(mapped.notes))
    mesh = explicit.mesh(self, kind=AxisType.Auto)
    self.assertIn("partitions the module", notes(explicit.put(mesh, X, P("a"))))
    jax.jit(function)(explicit.put(mesh, X, P("a")))
    jax.vmap(function)(X[None])
    jp.export(jax.jit(function))(X)
    self.assertEmpty(self.calls)
    empty = jp.linear(
      X[:, :0], jp.quantize(W[:, :0], "mxfp8"), out_format="mxfp8"
    )
    np.testing.assert_array_equal(empty.dequantize(), np.zeros((M, N)))
    self.assertEmpty(self.calls)


class PluginTest(parameterized.TestCase):
  def test_backend_of_another_package_does_not_see_out_format(self):
    emit = lambda call: jnp.full(call.shape, 7.0, call.dtype)
    acme_backend.register(self, emit, first=True)
    function = lambda x: jp.linear(x, w_q(), out_format="mxfp8")
    sevens = jnp.full((M, N), 7.0)
    contract.assert_same_bits(function(X), jp.quantize(sevens, "mxfp8"))
    self.assertIn(
      "result: quantized to mxfp8 separately, because acme: it does not"
      " quantize results",
      jp.explain(function, X)[0].decision.notes,
    )


def through(x):
  return jp.quantize(x, "mxfp8", **STRAIGHT_THROUGH)


DIFFERENTIATED = {
  "operand": lambda x, **o: jp.linear(x, w_q(), None, "silu", **o),
  "surrogate": lambda x, **o: jp.linear(through(x), w_q(), None, "silu", **o),
  "layer": lambda x, **o: jp.linear(x, jp.stack([w_q(), w_q()]), None, "silu",
    layer=1, **o),
  "ragged dot": lambda x, **o: jp.ragged_dot(through(x),
    jp.quantize(EXPERTS, "mxfp4"), SIZES, **o),
}  # fmt: skip


class DerivativeTest(parameterized.TestCase):
  def test_gradients_are_those_of_the_f32_result(self):
    w = w_q().dequantize()
    g = RNG.standard_normal((M, N))

    def loss(x, bias, out):
      y = jp.linear(x, w_q(), bias, "relu", out_format=out)
      return jnp.sum(jp.linear(y, jp.quantize(g, "mxfp8")))

    out = OutFormat("mxfp8", **STRAIGHT_THROUGH)
    gx, gb = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(X, BIAS, out)
    w64 = np.asarray(w, np.float64)
    y = X.astype(np.float64) @ w64.T + BIAS
    upstream = np.asarray(jp.quantize(g, "mxfp8").dequantize(), np.float64)
    cotangent = np.where(y > 0, upstream.sum(0), 0)
    # The bound of a dot, for both dots of the gradient.
    bound = 2 * contract.truncated_bound(N)
    scale = np.abs(upstream).sum(0)[None] @ np.abs(w64)
    self.assertTrue(np.all(np.abs(gx - cotangent @ w64) <= bound * scale))
    np.testing.assert_allclose(
      gb, cotangent.sum(0), rtol=0, atol=bound * M * 99
    )

  @parameterized.parameters(*DIFFERENTIATED)
  def test_without_derivative_it_is_an_error(self, name):
    call = DIFFERENTIATED[name]
    function = lambda x: call(x, out_format="mxfp8").dequantize()
    with self.assertRaisesRegex(
      NotImplementedError, 'OutFormat.*derivative="straight_through"'
    ):
      jax.make_jaxpr(jax.grad(lambda x: function(x).sum()))(X)
    stopped = lambda x: jnp.sum(function(jax.lax.stop_gradient(x)) * x[0, 0])
    jax.make_jaxpr(jax.grad(stopped))(X)

  @parameterized.parameters("surrogate", "layer", "ragged dot", "operand")
  @pytest.mark.sample(1)
  def test_surrogate_has_the_derivative_of_the_call(self, name):
    function = DIFFERENTIATED[name]

    def surrogate(x):  # a given global scale is a constant
      out = OutFormat("nvfp4", global_scale=x.max(), **STRAIGHT_THROUGH)
      return function(x, out_format=out).surrogate.sum()

    gradients = jax.jit(
      lambda x: (
        jax.grad(surrogate)(x),
        jax.grad(lambda x: function(x).sum())(x),
      )
    )
    contract.assert_same_bits(*gradients(X))


class MeshTest(parameterized.TestCase):
  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  @pytest.mark.sample(1)
  def test_bits_on_a_mesh_are_those_of_one_device(self, kind):
    mesh = explicit.mesh(self, kind=kind)
    # The sums are exact, because kernels add parts of an array in other orders.
    x = np.round(3 * X)
    w = jp.quantize(np.round(3 * W), "mxfp8")
    experts = jp.quantize(np.round(3 * EXPERTS), "mxfp4")

    def function(x, w, experts):
      return (
        jp.linear(x, w, out_format=OUT["computed"][0]),
        jp.linear(x, w, out_format=OUT["key"][0]),
        jp.ragged_dot(x, experts, SIZES, out_format=OUT["given"][0]),
      )

    expected = jax.jit(function)(x, w, experts)
    with jax.set_mesh(mesh):
      args = [
        explicit.put(mesh, array, spec)
        for array, spec in (
          (x, P("a")),
          (w, P("b")),
          (experts, P(None, "b")),
        )
      ]
      result = jax.jit(function)(*args)
      self.assertEqual(result[0][0].values.sharding.spec, P("a", "b"))
      contract.assert_same_bits(result, expected)
      one = jax.shard_map(
        lambda x, w: jp.linear(x, w, out_format="mxfp8"),
        in_specs=(P("a"), P("b")),
        out_specs=P("a", "b"),
        mesh=mesh,
      )
      contract.assert_same_bits(
        jax.jit(one)(*args[:2]), jp.linear(x, w, out_format="mxfp8")
      )


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    (lambda: OutFormat("nope"), ValueError, "OutFormat: format: .*'nope'"),
    (lambda: OutFormat("mxfp8", axis="k"), TypeError, "axis must be.*'k'"),
    (lambda: OutFormat("mxfp8", axis=(0, 1, 2)), ValueError, r"pair.*1, 2"),
    (lambda: OutFormat("mxfp8", axis=(0, 1), key=KEY), ValueError, "key must"),
    (lambda: OutFormat("mxfp8", returns_amax=1), TypeError, "must be True.*1"),
    (lambda: OutFormat("mxfp8", derivative="x"), ValueError, "derivative.*'x'"),
    (3, TypeError, "linear: out_format must be a BlockFormat.*got 3"),
    (OutFormat("mxfp8", axis=2), ValueError, "axis of out.*got 2 for"),
    (lambda: OutFormat("mxfp8", key=3), TypeError, "OutFormat: key must be"),
    (lambda: OutFormat("nf4", key=KEY), ValueError, "OutFormat: key must"),
    (OutFormat("mxfp8", key=jax.random.split(KEY)), TypeError, "one.*got key"),
    (lambda: OutFormat("mxfp8", global_scale=1.0), ValueError, "OutF.*global_"),
    (lambda: OutFormat("nvfp4", global_scale=-1), ValueError, "OutF.*got -1"),
    (lambda: OutFormat("nvfp4", global_scale="x"), TypeError, "OutF.*got 'x'"),
    (OutFormat("nvfp4", global_scale=np.ones(3)), ValueError, r"one.*\[3\]"),
    (lambda: OutFormat("mxfp4", packed=2), ValueError, "OutF.*packed.*got 2"),
    (lambda: OutFormat("mxfp8", scale_rounding="x"), ValueError, "sc.*'x'"),
    (OutFormat("mxfp8", axis=(0, 1)), TypeError, "axis 0 must be.*got 31"),
    (OutFormat("mxfp8", axis=(1, 1)), ValueError, r"axis.*once.*\(1, 1"),
  )  # fmt: skip
  def test_message(self, out, error, pattern):
    with self.assertRaisesRegex(error, pattern):
      jp.linear(X[:31], w_q(), out_format=out() if callable(out) else out)

  @parameterized.parameters(
    functools.partial(jp.linear, X), functools.partial(jp.block_scaled_dot, X)
  )
  def test_result_is_f32(self, function):
    with self.assertRaisesRegex(ValueError, "preferred_element_type must be"):
      function(w_q(), out_format="mxfp8", preferred_element_type=jnp.bfloat16)
    x = function(w_q(), out_format="mxfp8", preferred_element_type=jnp.float32)
    contract.assert_same_bits(x, function(w_q(), out_format="mxfp8"))
