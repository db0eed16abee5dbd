# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`debug_checks` reports errors of an implementation, not of its inputs.

The tests replace an implementation's `emit` by one that changes elements of the
right result. Elements that are not finite are explained if the reference has
them as well, or if an implementation's bound allows them.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.jaxext import jax_private, partitioner_private
from jaxplugin.runtime import lowering

P = jax.sharding.PartitionSpec
AxisType = jax.sharding.AxisType
M, N, K = 8, 16, 128
NUMBERS = (((1,), (0,)), ((), ()))
CPU = targets.named_target("cpu")
XLA = backends.BACKENDS["xla"]
F16, BF16 = jnp.float16, jnp.bfloat16


def quantized(rows, format=jp.MXFP8, k=K, **options):
  """Random numbers, [rows, k]."""
  x = np.random.default_rng([0, rows]).normal(size=(rows, k))
  return jp.quantize(x.astype(np.float32), format, **options)


def pair(format=jp.MXFP8):
  return quantized(M, format), quantized(N, format)


def dot(x, w, **kwargs):
  """The dot by the implementation that errors are planted in."""
  return jp.block_scaled_dot(x, w, implementation="xla", **kwargs)


def fresh(function, **kwargs):
  """Returns a function that `jax.jit` has not seen."""
  return lambda *args: function(*args, **kwargs)


def run(function, *args, **kwargs):
  """Traces and runs a function inside of checks."""
  with jp.debug_checks():
    return jax.block_until_ready(jax.jit(fresh(function, **kwargs))(*args))


class Case(parameterized.TestCase):
  def plant(self, *indices, value=np.nan, backend=XLA):
    """Makes results of a backend wrong at indices of the last dimensions."""

    def emit(*args):
      result = XLA.emit(*args)
      for index in indices:
        result = result.at[..., *index].set(value)
      return result

    self.replace_emit(emit, backend)

  def replace_emit(self, emit, backend=XLA):
    changed = dataclasses.replace(backend, emit=emit)
    patch = mock.patch.dict(backends.BACKENDS, {backend.name: changed})
    self.enter_context(patch)
    # The name of a device's share does not say that a backend was replaced.
    partitioner_private.forget_shares()
    self.addCleanup(partitioner_private.forget_shares)

  def assert_found(self, words, function, *args, **kwargs):
    with self.assertRaisesRegex(jp.NonFiniteError, words) as caught:
      run(function, *args, **kwargs)
    return str(caught.exception)

  def assert_found_once_planted(self, index, words, function, *args):
    run(function, *args)
    self.plant(index)
    self.assert_found(words, function, *args)


class FiresTest(Case):
  @pytest.mark.full
  def test_message_names_the_call_and_the_elements(self):
    self.plant((3, 5), (3, 7), (6, 1))
    x, w = pair(jp.NVFP4)

    def model(x, w):
      with jax.named_scope("attention"):
        return jp.block_scaled_dot(
          x, w, implementation="xla", preferred_element_type=BF16
        )

    text = self.assert_found("", model, x, w)
    self.assertStartsWith(
      text,
      "block_scaled_dot: 3 of the result's elements are NaN or Inf although"
      " the operands give finite ones; the first is nan at (3, 5), where the"
      " reference has ",
    )
    x, w = (np.asarray(jp.dequantize(a), np.float64) for a in (x, w))
    found = float(text.split("the reference has ")[1].split("\n")[0])
    np.testing.assert_allclose(found, x[3] @ w[5], rtol=1e-4)
    for words in (
      r"call: .*guards_test\.py:\d+ \(.*model\)",
      "name scope: attention",
      "nvfp4 x nvfp4 -> bfloat16, batch=1 m=8 n=16 k=128, result .8, 16.",
      r"lhs uint8\[8, 64\]",
      r"rhs_scale float8_e4m3fn\[16, 8\]",
      "implementation: xla, as decided for",
    ):
      self.assertRegex(text, words)

  @parameterized.parameters(
    ("xla", "cpu", {}),
    ("triton", "h200", {}),
    ("cudnn", "b200", {"cudnn_version": (9, 13, 0)}),
    ("cpu", "cpu", {"cpu_kernels": "avx2"}),
  )
  @pytest.mark.sample(1)
  def test_every_implementation_is_checked(self, name, target, changes):
    self.plant((1, 2), backend=backends.BACKENDS[name])
    target = dataclasses.replace(targets.named_target(target), **changes)
    by_override = lambda override, _: override or CPU
    patch = mock.patch.object(lowering, "resolve_target", by_override)
    self.enter_context(patch)
    function = functools.partial(jp.block_scaled_dot, implementation=name)
    args = pair()
    with jp.use_target(target):
      self.assert_found(
        rf"1 of the result(.|\n)*implementation: {name}, as", function, *args
      )

  @pytest.mark.full
  def test_under_vmap_each_entry_is_checked(self):
    x, w = pair()
    x = jax.tree.map(lambda a: jnp.stack([a, a, a]), x)
    # The mapped dimension joins the rows: (entries, rows, columns).
    self.assert_found_once_planted(
      *((2, 4, 6), r"1 of the result.*at \(4, 6\)"),
      *(jax.vmap(dot, in_axes=(0, None)), x, w),
    )

  @pytest.mark.full
  def test_products_of_the_backward_pass_are_checked(self):
    multiply = jp.dot_general(jp.MXFP8, jp.MXFP8, implementation="xla")
    loss = jax.checkpoint(lambda a, b: multiply(a, b, NUMBERS).sum())
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=s).astype(np.float32) for s in ((M, K), (K, N)))

    def wrong_in_one(call, problem, target):
      result = XLA.emit(call, problem, target)
      # The product that makes the gradient of `a` alone has this shape.
      is_dgrad = result.shape == (M, K)
      return result.at[1, 2].set(np.nan) if is_dgrad else result

    self.replace_emit(wrong_in_one)
    self.assert_found(r"result \(8, 128\)", jax.grad(loss), a, b)

  @parameterized.parameters(
    (jp.MXFP8, P("x"), AxisType.Auto),
    (jp.NVFP4, P(None, "x"), AxisType.Auto),
    (jp.NVFP4, P("x"), AxisType.Explicit),
    (jp.MXFP4, P(None, "x"), AxisType.Explicit),
  )
  @pytest.mark.full
  def test_sharded_calls_are_checked(self, format, spec, kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))

    def put(leaf):
      leaf_spec = spec if leaf.size > 1 else P()
      return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, leaf_spec))

    x, w = pair(format)
    x = jax.tree.map(put, x)
    function = dot
    if spec == P(None, "x"):
      w = jax.tree.map(put, w)
      if kind == AxisType.Explicit:  # else it is ambiguous
        function = functools.partial(dot, out_sharding=P())
    with jax.set_mesh(mesh):
      self.assert_found_once_planted((1, 2), "", function, x, w)

  def test_calls_in_a_shard_map_over_some_explicit_axes_are_checked(self):
    kinds = (AxisType.Explicit, AxisType.Explicit)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds)
    specs = {"in_specs": (P("x"), P()), "out_specs": P("x")}
    function = jax.shard_map(dot, mesh=mesh, axis_names={"x"}, **specs)
    with jax.set_mesh(mesh):
      x, w = pair()
      x = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("x")))
      w = jax.device_put(w, jax.sharding.NamedSharding(mesh, P()))
      self.assert_found_once_planted((1, 2), "", function, x, w)


class OffTest(Case):
  def texts(self, *args):
    traced = jax.jit(fresh(dot)).trace(*args)
    return str(traced.jaxpr), traced.lower().as_text()

  def test_off_nothing_is_added_to_what_is_traced(self):
    args = pair()
    before = self.texts(*args)
    jaxpr = jax.make_jaxpr(fresh(dot))(*args)
    self.assertEqual(
      [eqn.primitive.name for eqn in jaxpr.eqns], ["block_scaled_dot"]
    )
    with jp.debug_checks():
      inside = self.texts(*args)
      with jp.debug_checks(False):
        off_again = self.texts(*args)
    self.assertEqual([before] * 2, [off_again, self.texts(*args)])
    self.assertIn("debug_callback", inside[0])
    self.assertIn("callback", inside[1])
    self.assertNotIn("callback", before[1])

  def test_jitted_function_is_traced_again_inside_and_reused_outside(self):
    self.plant((1, 2))
    args = pair()
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


class RaisesTest(Case):
  def test_error_of_an_asynchronous_result_is_raised_on_leaving(self):
    self.plant((1, 2))
    with self.assertRaises(jp.NonFiniteError) as caught, jp.debug_checks():
      jax.jit(fresh(dot))(*pair())
    self.assertIsInstance(caught.exception, FloatingPointError)
    with jp.debug_checks():
      pass  # the failure of one block does not reach the next

  def test_compiled_ahead_of_time_it_checks_wherever_it_runs(self):
    self.plant((1, 2))
    args = pair()
    with jp.debug_checks():
      compiled = jax.jit(fresh(dot)).lower(*args).compile()
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
    for error in (KeyError, jax.errors.JaxRuntimeError):
      with self.assertRaisesRegex(error, "mine"), jp.debug_checks():
        raise error("mine")

  def test_error_of_the_block_tells_of_a_check_that_failed_before(self):
    self.plant((1, 2))
    # On several devices the call returns before its check is done; each has the
    # error in its share.
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    x, w = pair()
    x = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), sharding), x)
    with self.assertRaises(KeyError) as caught, jp.debug_checks():
      jax.jit(fresh(dot))(x, w)
      raise KeyError("mine")
    (note,) = caught.exception.__notes__
    self.assertRegex(note, "Before it a check failed: block_scaled_dot: 4 of")
    with jp.debug_checks():
      pass  # it is not raised once more

  def test_export_is_refused_by_jax(self):
    text = "serialization of host_callbacks"
    with self.assertRaisesRegex(Exception, text), jp.debug_checks():
      jax.export.export(jax.jit(fresh(dot)))(*pair()).serialize()

  def test_what_is_no_bool_is_an_error(self):
    for enabled in (None, 1, "on"):
      refused = self.assertRaisesRegex(TypeError, f"got {enabled!r}")
      with refused, jp.debug_checks(enabled):
        pass

  def test_gpu_that_is_not_there_is_refused_by_jax(self):
    with jp.debug_checks():
      traced = jax.jit(fresh(dot)).trace(*pair())
    if not any(d.platform == "gpu" for d in jax.devices()):
      # JAX's words about an absent platform vary.
      with self.assertRaisesRegex(
        (RuntimeError, ValueError), "gpu|the lowering platform cuda"
      ):
        traced.lower(lowering_platforms=("cuda",))


def with_leaf(x, name, index, byte):
  """A `ScaledArray` with one byte of its values or of its scale replaced."""
  leaf = np.array(getattr(x, name))
  leaf.view(np.uint8)[index] = byte
  leaves = {"values": x.values, "scale": x.scale, name: jnp.asarray(leaf)}
  return jp.ScaledArray(**leaves, global_scale=x.global_scale, format=x.format)


def spoiled(shape, index, value, others=0):
  """Returns an array of equal numbers but for those of an index."""
  x = np.full(shape, others, np.float32)
  x[index] = value
  return jax.device_put(x)


def plain_with(value):
  return spoiled((M, K), (2, 3), value, others=1)


def one_number(number):
  """lhs and rhs; one row of their product is `number`."""
  return spoiled((M, K), (2, 0), number), jp.quantize(
    np.ones((N, K), np.float32), jp.MXFP8
  )


# By name: lhs, rhs, and further arguments, of x and w.
EXPLAINED = {
  "NaN among values": lambda x, w: (with_leaf(x, "values", (2, 3), 0x7F), w,
    {}),
  "NaN among scales": lambda x, w: (x, with_leaf(w, "scale", (2, 1), 0xFF), {}),
  "NaN in a plain side": lambda x, w: (plain_with(np.nan), w, {}),
  "Inf in a plain side": lambda x, w: (plain_with(np.inf), w, {}),
  # 2^127 * 2^10 is beyond f32.
  "overflow of f32": lambda x, w: (with_leaf(x, "scale", (2, slice(None)), 254),
    with_leaf(w, "scale", (2, 1), 137), {}),
  # Halfway between the largest number and the next power of two.
  "f16 rounds to Inf": lambda x, w: (*one_number(65520),
    {"preferred_element_type": F16}),
  "bf16 rounds to Inf": lambda x, w: (*one_number(3.3961775e38),
    {"preferred_element_type": BF16}),
  "NaN in a bias": lambda x, w: (x, w,
    {"bias": spoiled((N,), 3, np.nan), "activation": "gelu"}),
  "Inf in a residual": lambda x, w: (
    x,
    w,
    {"residual": spoiled((M, N), (2, 3), -np.inf), "activation": "relu"},
  ),
  "NaN in a row's global scale": lambda x, w: (x, w,
    {"global_scale": spoiled((M, 1), 2, np.nan, others=1)}),
}  # fmt: skip


class ExplainedTest(Case):
  @parameterized.parameters(*EXPLAINED)
  @pytest.mark.sample(1)
  def test_what_the_operands_explain_passes_and_hides_nothing_else(self, name):
    *args, kwargs = EXPLAINED[name](*pair())
    result = run(dot, *args, **kwargs)
    bad = ~np.isfinite(np.asarray(result, np.float32))
    self.assertTrue(bad.any())
    self.assertFalse(bad.all())
    fine = tuple(int(i) for i in np.argwhere(~bad)[-1])
    self.plant(fine)
    text = self.assert_found("", dot, *args, **kwargs)
    self.assertStartsWith(text, "block_scaled_dot: 1 of the result")
    self.assertIn(f"nan at {fine}", text)

  @parameterized.parameters(
    # 60000 is a number of f16; the planted Inf is not its rounding.
    (F16, 60000.0, "the reference has 60000.0"),
    # A global scale rounded to bf16 may be larger by almost 2^-8.
    (BF16, 3.3895314e38 * (1 - 0.99 * 2.0**-8), None),
    # Its own sum may be as large as the next number, which rounds to Inf.
    (F16, 65500.0, None),
    # Beyond the rounding; twice the contract's bound counts as well: 2^-19.
    (jnp.float32, 3.4028235e38 * (1 - 1.5 * 2.0**-18), "the reference has"),
    (F16, 65504.0 * (1 - 1.5 * 2.0**-11), "the reference has"),
    (BF16, 3.3895314e38 * (1 - 1.5 * 2.0**-8), "the reference has"),
  )
  @pytest.mark.sample(3)
  def test_overflow_passes_only_within_the_bound_of_an_implementation(
    self, dtype, number, words
  ):
    call = (dot, *one_number(number))
    self.plant((2, 0), value=np.inf)
    if words is None:
      run(*call, preferred_element_type=dtype)
    else:
      self.assert_found(words, *call, preferred_element_type=dtype)

  def test_sum_whose_terms_overflow_in_some_order_passes(self):
    x = np.zeros((M, K), np.float32)
    x[:, :2] = [3e38, -3e38]
    args = jnp.asarray(x), jp.quantize(np.ones((N, K), np.float32), jp.MXFP8)
    self.assertTrue(np.isfinite(run(dot, *args)).all())
    self.plant((1, 2))
    run(dot, *args)

  @parameterized.parameters((0, N, K), (M, 0, K), (M, N, 0))
  @pytest.mark.sample(1)
  def test_empty_calls_pass(self, m, n, k):
    x, w = (jp.quantize(np.zeros((r, k), np.float32), jp.MXFP8) for r in (m, n))
    self.assertEqual(run(dot, x, w).shape, (m, n))

  def test_swizzled_scales_are_understood(self):
    swizzled = (quantized(n, scale_layout="swizzled_128x4") for n in (M, N))
    self.plant((1, 2))
    self.assert_found("1 of the result", dot, *swizzled)

  @pytest.mark.full
  def test_weights_that_were_prepared_are_understood(self):
    x, w = pair(jp.NVFP4)
    w = jp.prepare_weights(w, targets.named_target("h200"))
    self.assertTrue(w.is_interleaved)
    bias = spoiled((N,), 3, np.nan)
    self.plant((1, 2))
    self.assert_found("1 of the result", dot, x, w, bias=bias)
