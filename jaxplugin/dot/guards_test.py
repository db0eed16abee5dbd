# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`debug_checks` tells errors of an implementation from those of its inputs.

Errors are planted: an implementation's `emit` is replaced by one that changes
elements of the right result.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext.partitioner import calls_private
from jaxplugin.runtime import lowering

P = jax.sharding.PartitionSpec
AxisType = jax.sharding.AxisType
M, N, K = 8, 16, 128
NUMBERS = (((1,), (0,)), ((), ()))
XLA = backends.BACKENDS["xla"]
CPU = targets.named_target("cpu")


def planted(*indices, value=np.nan):
  """An `emit` that is wrong at some indices of the last two dimensions."""

  def emit(*args):
    result = XLA.emit(*args)
    for index in indices:
      result = result.at[..., *index].set(value)
    return result

  return emit


def quantized(rows, format=jp.MXFP8, seed=0, k=K):
  x = np.random.default_rng([seed, rows]).normal(size=(rows, k))
  return jp.quantize(x.astype(np.float32), format)


def dot(x, w, **kwargs):
  return jp.block_scaled_dot(x, w, implementation="xla", **kwargs)


def run(function, *args):
  """Traces afresh, inside of checks, and runs."""
  with jp.debug_checks():
    return jax.block_until_ready(jax.jit(lambda *args: function(*args))(*args))


class GuardsTestCase(parameterized.TestCase):
  def plant(self, *indices, value=np.nan, backend=XLA):
    self.replace_emit(planted(*indices, value=value), backend)

  def replace_emit(self, emit, backend=XLA):
    changed = dataclasses.replace(backend, emit=emit)
    self.enter_context(
      mock.patch.dict(backends.BACKENDS, {backend.name: changed})
    )
    # The name of a device's share does not say that a backend was replaced.
    calls_private.forget_shares()
    self.addCleanup(calls_private.forget_shares)


class FiresTest(GuardsTestCase):
  def test_message_names_the_call_and_the_elements(self):
    self.plant((3, 5), (3, 7), (6, 1))
    x, w = quantized(M, jp.NVFP4), quantized(N, jp.NVFP4)

    def model(x, w):
      with jax.named_scope("attention"):
        return dot(x, w, preferred_element_type=jnp.bfloat16)

    with self.assertRaises(jp.NonFiniteError) as caught:
      run(model, x, w)
    text = str(caught.exception)
    self.assertStartsWith(
      text,
      "block_scaled_dot: 3 of the result's elements are NaN or Inf without a"
      " cause in the operands; the first is nan at (3, 5), where the reference"
      " has ",
    )
    product = (
      np.asarray(jp.dequantize(x), np.float64)[3]
      @ np.asarray(jp.dequantize(w), np.float64)[5]
    )
    expected = float(text.split("the reference has ")[1].split("\n")[0])
    np.testing.assert_allclose(expected, product, rtol=1e-4)
    self.assertRegex(text, r"call: .*guards_test\.py:\d+ \(dot\)")
    self.assertIn("name scope: attention", text)
    self.assertIn(
      "nvfp4 x nvfp4 -> bfloat16, batch=1 m=8 n=16 k=128, result (8, 16)", text
    )
    self.assertIn("lhs uint8[8, 64]", text)
    self.assertIn("rhs_scale float8_e4m3fn[16, 8]", text)
    self.assertIn("implementation: xla, as decided for", text)

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_each_number_that_is_not_finite_is_found(self, value):
    self.plant((0, 0), value=value)
    with self.assertRaisesRegex(jp.NonFiniteError, f"first is {value} at"):
      run(dot, quantized(M), quantized(N))

  @parameterized.parameters(
    ("xla", "cpu"), ("triton", "h200"), ("cudnn", "b200"), ("cpu", "cpu")
  )
  def test_every_implementation_is_checked(self, name, target):
    backend = backends.BACKENDS[name]
    self.plant((1, 2), backend=backend)
    kernels = {"cpu_kernels": "avx2"} if name == "cpu" else {}
    cudnn = {"cudnn_version": (9, 13, 0)} if name == "cudnn" else {}
    target = dataclasses.replace(
      targets.named_target(target), **kernels, **cudnn
    )
    self.enter_context(
      mock.patch.object(
        lowering, "resolve_target", lambda override, _: override or CPU
      )
    )

    def function(x, w):
      return jp.block_scaled_dot(x, w, implementation=name)

    x, w = quantized(M), quantized(N)
    with (
      jp.use_target(target),
      self.assertRaisesRegex(
        jp.NonFiniteError, rf"1 of the result(.|\n)*implementation: {name}, as"
      ),
    ):
      run(function, x, w)

  def test_eager_calls_are_checked(self):
    self.plant((1, 2))
    # A size of its own: what is compiled for an eager call is kept.
    x, w = quantized(M, k=96), quantized(N, k=96)
    with self.assertRaises(jp.NonFiniteError), jp.debug_checks():
      dot(x, w)

  def test_under_vmap_each_entry_is_checked(self):
    def function(x, w):
      return jax.vmap(dot, in_axes=(0, None))(x, w)

    stack = lambda a: jnp.stack([a, a, a])
    x, w = jax.tree.map(stack, quantized(M)), quantized(N)
    run(function, x, w)
    # The mapped dimension joins the rows: (entries, rows, columns).
    self.plant((2, 4, 6))
    with self.assertRaisesRegex(
      jp.NonFiniteError, r"1 of the result.*at \(4, 6\)"
    ):
      run(function, x, w)

  def test_products_of_the_backward_pass_are_checked(self):
    multiply = jp.dot_general(jp.MXFP8, jp.MXFP8, implementation="xla")

    def loss(a, b):
      return jax.checkpoint(lambda a, b: multiply(a, b, NUMBERS).sum())(a, b)

    rng = np.random.default_rng(0)
    a = rng.normal(size=(M, K)).astype(np.float32)
    b = rng.normal(size=(K, N)).astype(np.float32)

    def wrong_in_one(call, problem, target):
      result = XLA.emit(call, problem, target)
      # The product that makes the gradient of `a` alone has this shape.
      is_dgrad = result.shape == (M, K)
      return result.at[1, 2].set(np.nan) if is_dgrad else result

    self.replace_emit(wrong_in_one)
    with self.assertRaisesRegex(jp.NonFiniteError, r"result \(8, 128\)"):
      run(jax.grad(loss), a, b)

  def test_inside_of_scan_and_cond(self):
    def function(x, w):
      def body(carry, _):
        y = jax.lax.cond(carry > 1, dot, lambda x, w: jnp.zeros((M, N)), x, w)
        return carry + 1, y

      return jax.lax.scan(body, 0, None, length=4)

    x, w = quantized(M), quantized(N)
    run(function, x, w)
    self.plant((1, 2))
    with self.assertRaises(jp.NonFiniteError):
      run(function, x, w)

  @parameterized.parameters(
    (jp.MXFP8, P("x"), AxisType.Auto),
    (jp.NVFP4, P(None, "x"), AxisType.Auto),
    (jp.NVFP4, P("x"), AxisType.Explicit),
    (jp.MXFP4, P(None, "x"), AxisType.Explicit),
  )
  def test_sharded_calls_are_checked(self, format, spec, kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))

    def put(leaf):
      leaf_spec = spec if leaf.size > 1 else P()
      return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, leaf_spec))

    x = jax.tree.map(put, quantized(M, format))
    w = quantized(N, format)
    function = dot
    if spec == P(None, "x"):
      w = jax.tree.map(put, w)
      if kind == AxisType.Explicit:  # else it is ambiguous
        function = functools.partial(dot, out_sharding=P())
    with jax.set_mesh(mesh):
      run(function, x, w)
      self.plant((1, 2))
      with self.assertRaises(jp.NonFiniteError):
        run(function, x, w)

  def test_inside_of_shard_map_each_share_is_checked(self):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    function = jax.shard_map(
      lambda x, w: dot(x, w),
      mesh=mesh,
      in_specs=(P("x"), P()),
      out_specs=P("x"),
    )
    x, w = quantized(M), quantized(N)
    run(function, x, w)
    self.plant((1, 2))
    with self.assertRaisesRegex(jp.NonFiniteError, r"result \(2, 16\)"):
      run(function, x, w)


def with_leaf(x, name, index, byte):
  """A `ScaledArray` with one byte of its values or of its scale replaced."""
  leaf = np.array(getattr(x, name))
  leaf.view(np.uint8)[index] = byte
  leaves = {"values": x.values, "scale": x.scale, name: jnp.asarray(leaf)}
  return jp.ScaledArray(
    leaves["values"], leaves["scale"], x.global_scale, x.format
  )


def nan_value():
  return (with_leaf(quantized(M), "values", (2, 3), 0x7F), quantized(N)), {}


def nan_scale():
  return (quantized(M), with_leaf(quantized(N), "scale", (2, 1), 0xFF)), {}


def nan_plain():
  x = np.ones((M, K), np.float32)
  x[2, 3] = np.nan
  return (jnp.asarray(x), quantized(N)), {}


def infinite_plain():
  x = np.ones((M, K), np.float32)
  x[2, 3] = np.inf
  return (jnp.asarray(x), quantized(N)), {}


def f32_overflow():
  # 2^127 * 2^10 is beyond f32.
  x = with_leaf(quantized(M), "scale", (2, slice(None)), 254)
  return (x, with_leaf(quantized(N), "scale", (2, 1), 137)), {}


def cast_overflow(dtype, number):
  """One row beyond what a 16-bit result holds, and inside of f32."""

  def make():
    x = np.zeros((M, K), np.float32)
    x[2, 0] = number
    w = np.ones((N, K), np.float32)
    return (jnp.asarray(x), jp.quantize(w, jp.MXFP8)), {
      "preferred_element_type": dtype
    }

  return make


def nan_bias():
  bias = jnp.zeros((N,)).at[3].set(np.nan)
  return (quantized(M), quantized(N)), {"bias": bias, "activation": "gelu"}


def infinite_residual():
  residual = jnp.zeros((M, N)).at[2, 3].set(-np.inf)
  return (quantized(M), quantized(N)), {
    "residual": residual,
    "activation": "relu",
  }


def nan_global_scale_of_a_row():
  scale = jnp.ones((M, 1)).at[2].set(np.nan)
  return (quantized(M), quantized(N)), {"global_scale": scale}


EXPLAINED = (
  nan_value,
  nan_scale,
  nan_plain,
  infinite_plain,
  f32_overflow,
  # Rounds to Inf: halfway between the largest and the next power of two.
  cast_overflow(jnp.float16, 65520.0),
  cast_overflow(jnp.bfloat16, 3.3961775e38),
  nan_bias,
  infinite_residual,
  nan_global_scale_of_a_row,
)


class ExplainedTest(GuardsTestCase):
  @parameterized.parameters(*EXPLAINED)
  def test_what_the_operands_explain_passes_and_hides_nothing_else(self, make):
    args, kwargs = make()
    function = lambda *args: dot(*args, **kwargs)
    bad = ~np.isfinite(np.asarray(run(function, *args), np.float32))
    self.assertTrue(bad.any())
    self.assertFalse(bad.all())
    fine = tuple(int(i) for i in np.argwhere(~bad)[-1])
    self.plant(fine)
    with self.assertRaises(jp.NonFiniteError) as caught:
      run(function, *args)
    self.assertStartsWith(
      str(caught.exception), "block_scaled_dot: 1 of the result"
    )
    self.assertIn(f"nan at {fine}", str(caught.exception))

  def test_implementation_that_overflows_at_a_finite_result_is_caught(self):
    # 60000 is a number of f16; the planted Inf is not its rounding.
    args, kwargs = cast_overflow(jnp.float16, 60000.0)()
    self.plant((2, 0), value=np.inf)
    with self.assertRaisesRegex(jp.NonFiniteError, "the reference has 60000.0"):
      run(lambda *args: dot(*args, **kwargs), *args)

  @parameterized.parameters(
    # Its own sum may be as large as the next number, which rounds to Inf.
    (jnp.float16, 65500.0),
    # A global scale rounded to bf16 may be larger by almost 2^-8.
    (jnp.bfloat16, 3.3895314e38 * (1 - 0.99 * 2.0**-8)),
  )
  def test_overflow_within_the_bound_of_an_implementation_passes(
    self, dtype, number
  ):
    args, kwargs = cast_overflow(dtype, number)()
    self.plant((2, 0), value=np.inf)
    run(lambda *args: dot(*args, **kwargs), *args)

  @parameterized.parameters(
    # Twice the contract's bound counts as well: 2^-19.
    (jnp.float32, 3.4028235e38, 2.0**-18),
    (jnp.float16, 65504.0, 2.0**-11),
    (jnp.bfloat16, 3.3895314e38, 2.0**-8),
  )
  def test_overflow_beyond_the_rounding_of_its_dtype_is_caught(
    self, dtype, largest, rounding
  ):
    args, kwargs = cast_overflow(dtype, largest * (1 - 1.5 * rounding))()
    self.plant((2, 0), value=np.inf)
    with self.assertRaisesRegex(jp.NonFiniteError, "the reference has"):
      run(lambda *args: dot(*args, **kwargs), *args)

  def test_sum_whose_terms_overflow_in_some_order_passes(self):
    x = np.zeros((M, K), np.float32)
    x[:, :2] = [3e38, -3e38]
    args = jnp.asarray(x), jp.quantize(np.ones((N, K), np.float32), jp.MXFP8)
    self.assertTrue(np.isfinite(run(dot, *args)).all())
    self.plant((1, 2))
    run(dot, *args)

  @parameterized.parameters((0, N, K), (M, 0, K), (M, N, 0))
  def test_empty_calls_pass(self, m, n, k):
    x = jp.quantize(np.zeros((m, k), np.float32), jp.MXFP8)
    w = jp.quantize(np.zeros((n, k), np.float32), jp.MXFP8)
    self.assertEqual(run(dot, x, w).shape, (m, n))

  def test_swizzled_scales_are_understood(self):
    x, w = quantized(M), quantized(N)
    swizzled = lambda a: jp.ScaledArray(
      a.values, jp.swizzle_scale(a.scale), None, a.format,
      scale_layout="swizzled_128x4",
    )  # fmt: skip
    self.plant((1, 2))
    with self.assertRaisesRegex(jp.NonFiniteError, "1 of the result"):
      run(dot, swizzled(x), swizzled(w))

  def test_weights_that_were_prepared_are_understood(self):
    w = jp.prepare_weights(quantized(N, jp.NVFP4), targets.named_target("h200"))
    self.assertTrue(w.is_interleaved)
    bias = jnp.zeros((N,)).at[3].set(np.nan)
    self.plant((1, 2))
    with self.assertRaisesRegex(jp.NonFiniteError, "1 of the result"):
      run(lambda x, w: dot(x, w, bias=bias), quantized(M, jp.NVFP4), w)


class OffTest(GuardsTestCase):
  def texts(self, function, *args):
    traced = jax.jit(lambda *args: function(*args)).trace(*args)
    return str(traced.jaxpr), traced.lower().as_text()

  def test_off_nothing_is_added_to_what_is_traced(self):
    args = quantized(M), quantized(N)
    before = self.texts(dot, *args)
    jaxpr = jax.make_jaxpr(lambda *args: dot(*args))(*args)
    self.assertEqual(
      [eqn.primitive.name for eqn in jaxpr.eqns], ["block_scaled_dot"]
    )
    with jp.debug_checks():
      inside = self.texts(dot, *args)
      with jp.debug_checks(False):
        off_again = self.texts(dot, *args)
    self.assertEqual(before, off_again)
    self.assertEqual(before, self.texts(dot, *args))
    self.assertIn("debug_callback", inside[0])
    self.assertIn("callback", inside[1])
    self.assertNotIn("callback", before[1])

  def test_jitted_function_is_traced_again_inside_and_reused_outside(self):
    self.plant((1, 2))
    args = quantized(M), quantized(N)
    traces = []

    @jax.jit
    def function(x, w):
      traces.append(1)
      return dot(x, w)

    function(*args)
    with self.assertRaises(jp.NonFiniteError), jp.debug_checks():
      function(*args)
    function(*args)
    self.assertLen(traces, 2)


class RaisesTest(GuardsTestCase):
  def test_error_of_an_asynchronous_result_is_raised_on_leaving(self):
    self.plant((1, 2))
    args = quantized(M), quantized(N)
    with (
      self.assertRaises(jp.NonFiniteError) as caught,
      jp.debug_checks(),
    ):
      jax.jit(lambda *args: dot(*args))(*args)
    self.assertIsInstance(caught.exception, FloatingPointError)

  def test_compiled_ahead_of_time_it_checks_wherever_it_runs(self):
    self.plant((1, 2))
    args = quantized(M), quantized(N)
    with jp.debug_checks():
      compiled = jax.jit(lambda *args: dot(*args)).lower(*args).compile()
    with self.assertRaisesRegex(
      jax.errors.JaxRuntimeError,
      "NonFiniteError: block_scaled_dot: 1 of the result",
    ):
      jax.block_until_ready(compiled(*args))
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      jax_private.wait_for_effects()  # JAX may keep it; not for the next test
    with self.assertRaises(jp.NonFiniteError), jp.debug_checks():
      compiled(*args)

  def test_other_errors_of_the_block_are_left_alone(self):
    with self.assertRaisesRegex(KeyError, "mine"), jp.debug_checks():
      raise KeyError("mine")
    with (
      self.assertRaisesRegex(jax.errors.JaxRuntimeError, "mine"),
      jp.debug_checks(),
    ):
      raise jax.errors.JaxRuntimeError("mine")

  def test_error_of_the_block_tells_of_a_check_that_failed_before(self):
    self.plant((1, 2))
    # On several devices the call returns before its check is done; each has the
    # error in its share.
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    put = lambda leaf: jax.device_put(leaf, sharding)
    args = jax.tree.map(put, quantized(M)), quantized(N)
    with self.assertRaises(KeyError) as caught, jp.debug_checks():
      jax.jit(lambda *args: dot(*args))(*args)
      raise KeyError("mine")
    (note,) = caught.exception.__notes__
    self.assertRegex(note, "Before it a check failed: block_scaled_dot: 4 of")
    with jp.debug_checks():
      pass  # it is not raised once more

  def test_failure_of_one_block_does_not_reach_the_next(self):
    self.plant((1, 2))
    args = quantized(M), quantized(N)
    with self.assertRaises(jp.NonFiniteError):
      run(dot, *args)
    with jp.debug_checks():
      pass

  def test_export_is_refused_by_jax(self):
    args = quantized(M), quantized(N)
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    with (
      self.assertRaisesRegex(Exception, "serialization of host_callbacks"),
      jp.debug_checks(),
    ):
      jax.export.export(jax.jit(lambda x, w: dot(x, w)))(*specs).serialize()

  @parameterized.parameters(None, 1, "on")
  def test_what_is_no_bool_is_an_error(self, enabled):
    with (
      self.assertRaisesRegex(TypeError, f"got {enabled!r}"),
      jp.debug_checks(enabled),
    ):
      pass

  def test_gpu_that_is_not_there_is_refused_by_jax(self):
    specs = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
      (quantized(M), quantized(N)),
    )
    with jp.debug_checks():
      traced = jax.jit(lambda x, w: dot(x, w)).trace(*specs)
    if not any(d.platform == "gpu" for d in jax.devices()):
      # Of a platform and a backend that JAX has not, in words that vary.
      with self.assertRaisesRegex(
        (RuntimeError, ValueError), "gpu|the lowering platform cuda"
      ):
        traced.lower(lowering_platforms=("cuda",))


if __name__ == "__main__":
  absltest.main()
