# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`debug_checks` tells errors of an implementation from those of its inputs."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.jaxext import jax_private
from jaxplugin.runtime import lowering
from jaxplugin.testing.dot_suite import planted

P = jax.sharding.PartitionSpec
AxisType = jax.sharding.AxisType
M, N, K = planted.M, planted.N, planted.K
NUMBERS = (((1,), (0,)), ((), ()))
CPU = targets.named_target("cpu")


class FiresTest(planted.Case):
  @pytest.mark.full
  def test_message_names_the_call_and_the_elements(self):
    self.plant((3, 5), (3, 7), (6, 1))
    x, w = planted.quantized(M, jp.NVFP4), planted.quantized(N, jp.NVFP4)

    def model(x, w):
      with jax.named_scope("attention"):
        return planted.dot(x, w, preferred_element_type=jnp.bfloat16)

    with self.assertRaises(jp.NonFiniteError) as caught:
      planted.run(model, x, w)
    text = str(caught.exception)
    self.assertStartsWith(
      text,
      "block_scaled_dot: 3 of the result's elements are NaN or Inf although"
      " the operands give finite ones; the first is nan at (3, 5), where the"
      " reference has ",
    )
    product = (
      np.asarray(jp.dequantize(x), np.float64)[3]
      @ np.asarray(jp.dequantize(w), np.float64)[5]
    )
    expected = float(text.split("the reference has ")[1].split("\n")[0])
    np.testing.assert_allclose(expected, product, rtol=1e-4)
    self.assertRegex(text, r"call: .*guards_test\.py:\d+ \(.*model\)")
    self.assertIn("name scope: attention", text)
    self.assertIn(
      "nvfp4 x nvfp4 -> bfloat16, batch=1 m=8 n=16 k=128, result (8, 16)", text
    )
    self.assertIn("lhs uint8[8, 64]", text)
    self.assertIn("rhs_scale float8_e4m3fn[16, 8]", text)
    self.assertIn("implementation: xla, as decided for", text)

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  @pytest.mark.full
  def test_each_number_that_is_not_finite_is_found(self, value):
    self.plant((0, 0), value=value)
    with self.assertRaisesRegex(jp.NonFiniteError, f"first is {value} at"):
      planted.run(planted.dot, planted.quantized(M), planted.quantized(N))

  @parameterized.parameters(
    ("xla", "cpu"), ("triton", "h200"), ("cudnn", "b200"), ("cpu", "cpu")
  )
  @pytest.mark.sample(1)
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

    x, w = planted.quantized(M), planted.quantized(N)
    with (
      jp.use_target(target),
      self.assertRaisesRegex(
        jp.NonFiniteError, rf"1 of the result(.|\n)*implementation: {name}, as"
      ),
    ):
      planted.run(function, x, w)

  @pytest.mark.full
  def test_eager_calls_are_checked(self):
    self.plant((1, 2))
    # A size of its own: what is compiled for an eager call is kept.
    x, w = planted.quantized(M, k=96), planted.quantized(N, k=96)
    with self.assertRaises(jp.NonFiniteError), jp.debug_checks():
      planted.dot(x, w)

  @pytest.mark.full
  def test_under_vmap_each_entry_is_checked(self):
    def function(x, w):
      return jax.vmap(planted.dot, in_axes=(0, None))(x, w)

    stack = lambda a: jnp.stack([a, a, a])
    x, w = jax.tree.map(stack, planted.quantized(M)), planted.quantized(N)
    planted.run(function, x, w)
    # The mapped dimension joins the rows: (entries, rows, columns).
    self.plant((2, 4, 6))
    with self.assertRaisesRegex(
      jp.NonFiniteError, r"1 of the result.*at \(4, 6\)"
    ):
      planted.run(function, x, w)

  @pytest.mark.full
  def test_products_of_the_backward_pass_are_checked(self):
    multiply = jp.dot_general(jp.MXFP8, jp.MXFP8, implementation="xla")

    def loss(a, b):
      return jax.checkpoint(lambda a, b: multiply(a, b, NUMBERS).sum())(a, b)

    rng = np.random.default_rng(0)
    a = rng.normal(size=(M, K)).astype(np.float32)
    b = rng.normal(size=(K, N)).astype(np.float32)

    def wrong_in_one(call, problem, target):
      result = planted.XLA.emit(call, problem, target)
      # The product that makes the gradient of `a` alone has this shape.
      is_dgrad = result.shape == (M, K)
      return result.at[1, 2].set(np.nan) if is_dgrad else result

    self.replace_emit(wrong_in_one)
    with self.assertRaisesRegex(jp.NonFiniteError, r"result \(8, 128\)"):
      planted.run(jax.grad(loss), a, b)

  @pytest.mark.full
  def test_inside_of_scan_and_cond(self):
    def function(x, w):
      def body(carry, _):
        y = jax.lax.cond(
          carry > 1, planted.dot, lambda x, w: jnp.zeros((M, N)), x, w
        )
        return carry + 1, y

      return jax.lax.scan(body, 0, None, length=4)

    x, w = planted.quantized(M), planted.quantized(N)
    planted.run(function, x, w)
    self.plant((1, 2))
    with self.assertRaises(jp.NonFiniteError):
      planted.run(function, x, w)

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

    x = jax.tree.map(put, planted.quantized(M, format))
    w = planted.quantized(N, format)
    function = planted.dot
    if spec == P(None, "x"):
      w = jax.tree.map(put, w)
      if kind == AxisType.Explicit:  # else it is ambiguous
        function = functools.partial(planted.dot, out_sharding=P())
    with jax.set_mesh(mesh):
      planted.run(function, x, w)
      self.plant((1, 2))
      with self.assertRaises(jp.NonFiniteError):
        planted.run(function, x, w)

  @pytest.mark.full
  def test_inside_of_shard_map_each_share_is_checked(self):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    function = jax.shard_map(
      lambda x, w: planted.dot(x, w),
      mesh=mesh,
      in_specs=(P("x"), P()),
      out_specs=P("x"),
    )
    x, w = planted.quantized(M), planted.quantized(N)
    planted.run(function, x, w)
    self.plant((1, 2))
    with self.assertRaisesRegex(jp.NonFiniteError, r"result \(2, 16\)"):
      planted.run(function, x, w)


class OffTest(planted.Case):
  def texts(self, function, *args):
    traced = jax.jit(lambda *args: function(*args)).trace(*args)
    return str(traced.jaxpr), traced.lower().as_text()

  def test_off_nothing_is_added_to_what_is_traced(self):
    args = planted.quantized(M), planted.quantized(N)
    before = self.texts(planted.dot, *args)
    jaxpr = jax.make_jaxpr(lambda *args: planted.dot(*args))(*args)
    self.assertEqual(
      [eqn.primitive.name for eqn in jaxpr.eqns], ["block_scaled_dot"]
    )
    with jp.debug_checks():
      inside = self.texts(planted.dot, *args)
      with jp.debug_checks(False):
        off_again = self.texts(planted.dot, *args)
    self.assertEqual(before, off_again)
    self.assertEqual(before, self.texts(planted.dot, *args))
    self.assertIn("debug_callback", inside[0])
    self.assertIn("callback", inside[1])
    self.assertNotIn("callback", before[1])

  def test_jitted_function_is_traced_again_inside_and_reused_outside(self):
    self.plant((1, 2))
    args = planted.quantized(M), planted.quantized(N)
    traces = []

    @jax.jit
    def function(x, w):
      traces.append(1)
      return planted.dot(x, w)

    function(*args)
    with self.assertRaises(jp.NonFiniteError), jp.debug_checks():
      function(*args)
    function(*args)
    self.assertLen(traces, 2)


class RaisesTest(planted.Case):
  def test_error_of_an_asynchronous_result_is_raised_on_leaving(self):
    self.plant((1, 2))
    args = planted.quantized(M), planted.quantized(N)
    with (
      self.assertRaises(jp.NonFiniteError) as caught,
      jp.debug_checks(),
    ):
      jax.jit(lambda *args: planted.dot(*args))(*args)
    self.assertIsInstance(caught.exception, FloatingPointError)

  def test_compiled_ahead_of_time_it_checks_wherever_it_runs(self):
    self.plant((1, 2))
    args = planted.quantized(M), planted.quantized(N)
    with jp.debug_checks():
      compiled = (
        jax.jit(lambda *args: planted.dot(*args)).lower(*args).compile()
      )
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
    args = jax.tree.map(put, planted.quantized(M)), planted.quantized(N)
    with self.assertRaises(KeyError) as caught, jp.debug_checks():
      jax.jit(lambda *args: planted.dot(*args))(*args)
      raise KeyError("mine")
    (note,) = caught.exception.__notes__
    self.assertRegex(note, "Before it a check failed: block_scaled_dot: 4 of")
    with jp.debug_checks():
      pass  # it is not raised once more

  def test_failure_of_one_block_does_not_reach_the_next(self):
    self.plant((1, 2))
    args = planted.quantized(M), planted.quantized(N)
    with self.assertRaises(jp.NonFiniteError):
      planted.run(planted.dot, *args)
    with jp.debug_checks():
      pass

  def test_export_is_refused_by_jax(self):
    args = planted.quantized(M), planted.quantized(N)
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    with (
      self.assertRaisesRegex(Exception, "serialization of host_callbacks"),
      jp.debug_checks(),
    ):
      jax.export.export(jax.jit(lambda x, w: planted.dot(x, w)))(
        *specs
      ).serialize()

  @parameterized.parameters(None, 1, "on")
  @pytest.mark.sample(1)
  def test_what_is_no_bool_is_an_error(self, enabled):
    with (
      self.assertRaisesRegex(TypeError, f"got {enabled!r}"),
      jp.debug_checks(enabled),
    ):
      pass

  def test_gpu_that_is_not_there_is_refused_by_jax(self):
    specs = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
      (planted.quantized(M), planted.quantized(N)),
    )
    with jp.debug_checks():
      traced = jax.jit(lambda x, w: planted.dot(x, w)).trace(*specs)
    if not any(d.platform == "gpu" for d in jax.devices()):
      # Of a platform and a backend that JAX has not, in words that vary.
      with self.assertRaisesRegex(
        (RuntimeError, ValueError), "gpu|the lowering platform cuda"
      ):
        traced.lower(lowering_platforms=("cuda",))


if __name__ == "__main__":
  absltest.main()
