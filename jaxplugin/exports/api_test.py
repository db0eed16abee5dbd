# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules of `export` have kernels, also for targets that are not attached.

Modules of earlier releases give the same bits: docs/how_to/export.md.
"""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.exports import api
from jaxplugin.kernels.cpu import library
from jaxplugin.lab.compilation import deviceless
from jaxplugin.runtime import triton_calls
from jaxplugin.tables import resolution
from jaxplugin.testing import installed, transformations, triton_ir
from jaxplugin.testing.exported import reading, sample
from jaxplugin.testing.meshes import explicit

B200 = jp.named_target("b200", cudnn="9.13")
H100 = jp.named_target("h100")
DOT = "jaxplugin_block_scaled_dot"
TRITON = triton_calls.FFI_CALL.name
HAS_KERNELS = jp.detect_target("cpu").cpu_kernels is not None

calls_in = reading.calls_in
needs_gpu_compiler = installed.needs("jax_cuda13_plugin")


def operands(format=jp.MXFP8, m=3, n=5, k=64):
  rng = np.random.default_rng(0)
  return tuple(transformations.array(rng, format, (r, k)) for r in (m, n))


class ExportTest(parameterized.TestCase):
  @parameterized.parameters(jp.MXFP8, jp.NVFP4)
  def test_module_has_what_jit_runs_and_gives_its_bits(self, format):
    if not HAS_KERNELS:
      self.skipTest("there are no kernels for CPUs here")
    args = operands(format)
    function = jax.jit(
      lambda x, w: jp.block_scaled_dot(x, w, bias=jnp.arange(5.0))
    )
    exported = jp.export(function)(*args)
    self.assertEqual(calls_in(exported), {DOT: 1})
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(*args), function(*args))

  def test_jax_export_itself_stays_portable(self):
    args = operands()
    with self.subTest("also after export of the same function"):
      function = jax.jit(jp.block_scaled_dot)
      jp.export(function)(*args)
      self.assertEqual(calls_in(jax.export.export(function)(*args)), {})

  def test_derivative_keeps_kernels_too(self):
    if not HAS_KERNELS:
      self.skipTest("there are no kernels for CPUs here")
    x, w = jnp.ones((4, 32)), operands()[1]
    w = jax.tree.map(lambda leaf: leaf[:, : leaf.shape[1] // 2], w)
    exported = jp.export(lambda x: jp.block_scaled_dot(x, w))(x)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    self.assertNotEmpty(calls_in(exported.vjp()))
    expected = np.tile(np.asarray(jp.dequantize(w)).sum(0), (4, 1))
    gradient = jax.grad(lambda x: loaded.call(x).sum())(x)
    np.testing.assert_array_equal(gradient, expected)

  @parameterized.parameters(
    (B200, {"__op$block_scaled_dot": 1}), (H100, {TRITON: 1})
  )
  def test_gpu_that_is_not_here_gets_its_kernel(self, target, expected):
    self.require_triton(expected)
    with triton_ir.without_ptx():
      exported = jp.export(jp.block_scaled_dot, target=target)(*operands())
    self.assertEqual(exported.platforms, ("cuda",))
    self.assertEqual(calls_in(exported), expected)

  @parameterized.parameters(0, 1)
  @pytest.mark.lab
  @needs_gpu_compiler
  def test_gpu_kernels_read_a_symbolic_m(self, axis):
    self.require_triton({TRITON: 1})
    (_, w), (m,) = operands(n=256), jax.export.symbolic_shape("m")
    numbers = (((axis,), (1,)), ((), ()))
    quantized = int(axis == 1)

    def function(x):
      return jp.block_scaled_dot(
        jp.quantize(x, jp.MXFP8) if quantized else x,
        w,
        dimension_numbers=numbers,
        preferred_element_type=jnp.bfloat16,
      )

    shape_of = lambda m: (m, 64) if axis == 1 else (64, m)
    exported = jp.export(function, target=H100)(
      jax.ShapeDtypeStruct(shape_of(m), jnp.bfloat16)
    )
    self.assertEqual(calls_in(exported), {TRITON: 5 + quantized})
    loaded = jax.export.deserialize(exported.serialize())
    for rows in (1, 17, 4096):
      x = jax.ShapeDtypeStruct(shape_of(rows), jnp.bfloat16)
      hlo = deviceless.compile(loaded.call, x, target=H100).as_text()
      self.assertIn(f"constant({{{rows}}})", hlo)
      self.assertIn(f"bf16[1,{rows},256]", hlo)
      kernels = hlo.count(f'custom_call_target="{TRITON}"')
      self.assertEqual(kernels, 1 + quantized)
      self.assertNotIn("conditional", hlo)

  @pytest.mark.lab
  @needs_gpu_compiler
  def test_gpu_kernels_of_groups_read_a_symbolic_m(self):
    self.require_triton({TRITON: 1})
    weights = jp.quantize(jnp.ones((2, 64, 64)), jp.MXFP8)
    function = lambda x, sizes: jp.ragged_dot(x, weights, sizes)
    spec_of = lambda m: (
      jax.ShapeDtypeStruct((m, 64), jnp.bfloat16),
      jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    (m,) = jax.export.symbolic_shape("m")
    exported = jp.export(function, target=H100)(*spec_of(m))
    self.assertEqual(calls_in(exported), {TRITON: 4})
    loaded = jax.export.deserialize(exported.serialize())
    for rows in (1, 17, 4096):
      hlo = deviceless.compile(
        loaded.call, *spec_of(rows), target=H100
      ).as_text()
      self.assertIn(f"f32[{rows},64]", hlo)
      self.assertEqual(hlo.count(f'custom_call_target="{TRITON}"'), 1)
      self.assertNotIn("conditional", hlo)

  @pytest.mark.lab
  @needs_gpu_compiler
  def test_gpus_call_a_module_of_symbolic_m(self):
    self.require_triton({TRITON: 1})
    (_, w), (m,) = operands(n=256), jax.export.symbolic_shape("m")
    exported = jp.export(lambda x: jp.linear(x, w), target=H100)(
      jax.ShapeDtypeStruct((m, 64), jnp.bfloat16)
    )
    loaded = jax.export.deserialize(exported.serialize())
    mesh = deviceless.mesh(H100, (8,), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    sharded = jax.shard_map(
      loaded.call, mesh=mesh, in_specs=spec, out_specs=spec
    )
    for rows in (1, 17, 4096):
      x = jax.ShapeDtypeStruct((8 * rows, 64), jnp.bfloat16, sharding=sharding)
      hlo = deviceless.compile(sharded, x, target=H100, mesh=mesh).as_text()
      self.assertIn(f"bf16[1,{rows},256]", hlo)
      self.assertEqual(hlo.count(f'custom_call_target="{TRITON}"'), 1)
      self.assertNotIn("conditional", hlo)
      self.assertNotIn("all-", hlo)

  @parameterized.parameters(
    ("m, 64", "64", "m <= 16: kernels: block_scaled_ragged_small_m_bf16"),
    ("m, 64", "64", "m > 128: kernels: block_scaled_ragged_upcast_bf16"),
    ("2, 32*k", "32*k", "needs static sizes except m, got symbolic ones"),
  )
  def test_explain_has_kernels_of_groups(self, lhs, k, expected):
    scope = jax.export.SymbolicScope()
    x, w = (
      jax.ShapeDtypeStruct(
        jax.export.symbolic_shape(text, scope=scope), jnp.bfloat16
      )
      for text in (lhs, f"2, 64, {k}")
    )
    function = lambda x, w: jp.ragged_dot(
      x, jp.quantize(w, "mxfp8"), jnp.array([3, 1])
    )
    with jp.use_target(H100):
      told = jp.explain(function, x, w, for_export=True)
    self.assertIn(expected, told.details())

  @parameterized.parameters(
    ("m, 64", "5, 64", "m <= 16: kernels: block_scaled_small_m_mxfp8_"),
    ("m, 64", "5, 64", "m > 1024: kernels: block_scaled_upcast_mxfp8_"),
    ("m, 8192", "8192, 8192", "m planned as 4096: xla, modelled"),
    ("a, b, 64", "5, 64", "each kernel reads it from an array"),
    ("2, 64", "n, 64", "needs static sizes except m, got symbolic ones"),
    ("m, 32*k", "5, 32*k", "needs static sizes except m, got symbolic ones"),
    ("m, 64", "5, 64", "2 quantize or dequantize: 2 by triton"),
    ("2, m, 64", "2, 5, 64", "needs batch 1 if m is symbolic, got 2"),
  )
  def test_explain_has_kernels_or_the_reason_why_not(self, lhs, rhs, expected):
    scope = jax.export.SymbolicScope()
    specs = [
      jax.ShapeDtypeStruct(
        jax.export.symbolic_shape(text, scope=scope), jnp.float32
      )
      for text in (lhs, rhs)
    ]

    def function(x, w):
      x, w = jp.quantize(x, jp.MXFP8), jp.quantize(w, jp.MXFP8)
      dot = jp.linear if w.ndim == 2 else jp.block_scaled_dot
      return dot(x, w)

    with jp.use_target(H100):
      told = jp.explain(function, *specs, for_export=True)
    self.assertIn(expected, told.details())

  def test_each_platform_of_a_module_has_its_kernels(self):
    self.require_triton({TRITON: 1})
    args = operands()
    with triton_ir.without_ptx():
      exported = jp.export(
        jp.block_scaled_dot, ["cpu", "cuda", "tpu"], target=H100
      )(*args)
    expected = {TRITON: 1} | ({DOT: 1} if HAS_KERNELS else {})
    self.assertEqual(calls_in(exported), expected)
    np.testing.assert_array_equal(
      exported.call(*args), jp.block_scaled_dot(*args)
    )

  def require_triton(self, expected):
    if TRITON in expected:
      try:
        import jax_triton  # noqa: F401
      except ImportError as error:
        self.skipTest(f"jax-triton cannot lower here: {error}")

  def test_symbolic_sizes_keep_kernels_of_cpus(self):
    if not HAS_KERNELS:
      self.skipTest("there are no kernels for CPUs here")
    (_, w), (m,) = operands(), jax.export.symbolic_shape("m")
    experts = jp.quantize(jnp.stack([jnp.eye(64), jnp.ones((64, 64))]), "mxfp8")

    def function(x):
      x_q = jp.quantize(x, jp.MXFP8)
      y = jp.ragged_dot(x_q, experts, jnp.asarray([2, 1]))
      return jp.block_scaled_dot(x_q, w), y, jp.block_scaled_dot(w, x_q)

    exported = jp.export(function)(jax.ShapeDtypeStruct((m, 64), jnp.float32))
    self.assertEqual(
      calls_in(exported),
      {"jaxplugin_quantize": 1, DOT: 2, "jaxplugin_ragged_dot": 1},
    )
    loaded = jax.export.deserialize(exported.serialize())
    for rows in (3, 17):
      x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, 64)))
      result, expected = loaded.call(x), jax.jit(function)(x)
      jax.tree.map(np.testing.assert_array_equal, result, expected)

  def test_matrix_of_any_rows_times_a_vector(self):
    (_, w), (m,) = operands(n=1), jax.export.symbolic_shape("m")
    spec = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((m, *x.shape[1:]), x.dtype), w
    )
    exported = jp.export(jp.block_scaled_dot)(spec, w)
    for rows in (1, 9):
      x, _ = operands(m=rows)
      np.testing.assert_array_equal(
        exported.call(x, w), jp.block_scaled_dot(x, w)
      )

  def test_symbolic_k_is_left_to_operations(self):
    (k,) = jax.export.symbolic_shape("k")
    spec = jp.ScaledArray(
      jax.ShapeDtypeStruct((3, 32 * k), jp.MXFP8.values_dtype),
      jax.ShapeDtypeStruct((3, k), jp.MXFP8.scale_dtype),
      None,
      jp.MXFP8,
    )
    exported = jp.export(jp.block_scaled_dot)(spec, spec)
    self.assertEqual(calls_in(exported), {})
    x, w = operands(n=3)
    np.testing.assert_array_equal(
      exported.call(x, w), jp.block_scaled_dot(x, w)
    )
    (told,) = jp.explain(jp.block_scaled_dot, spec, spec, for_export=True)
    self.assertIn("needs a static k", str(told.decision.refusals))

  def test_config_of_this_machine_stays_here(self):
    if not HAS_KERNELS:
      self.skipTest("there are no kernels for CPUs here")
    args = operands()
    with resolution.pinned("cpu", (("threads", 1),)):
      exported = jp.export(jp.block_scaled_dot)(*args)
      lowered = jax.jit(jp.block_scaled_dot).lower(*args)
      (jitted,) = jp.explain(jp.block_scaled_dot, *args)
      (told,) = jp.explain(jp.block_scaled_dot, *args, for_export=True)
    self.assertIn("threads = ", lowered.as_text())
    self.assertNotIn("threads = ", exported.mlir_module())
    self.assertEqual(dict(jitted.decision.config), {"threads": 1})
    self.assertEqual(told.decision.config, ())
    self.assertIn("exported without threads=1", told.decision.reason)

  def test_use_target_around_it_decides_as_under_jit(self):
    with jp.use_target(B200):
      exported = jp.export(jp.block_scaled_dot, ["cuda"])(*operands())
    self.assertEqual(calls_in(exported), {"__op$block_scaled_dot": 1})

  @parameterized.parameters(
    (ValueError, ["cuda"], None, "no cuda device .*named_target.'h100'"),
    (ValueError, ["rocm"], None, "no rocm device .*named_target.'mi300x'"),
    (ValueError, ["cpu"], H100, r"platforms \('cpu',\), got one of cuda"),
    (ValueError, None, (H100, B200), "got h100 and b200, both of cuda"),
    (TypeError, None, "h100", r"got 'h100'; pass jp.named_target\('h100'\)"),
    (ValueError, ["cpuu"], None,
      "must be of cpu, cuda, rocm, tpu, got 'cpuu'$"),
    (ValueError, "CPU", None, "got 'CPU'; write it as 'cpu'"),
    (ValueError, ["gpu"], None, "got 'gpu'; of GPUs, cuda is NVIDIA's"),
    (ValueError, ["b200"], None,
      r"; a device is target=jp.named_target\('b200'"),
    (ValueError, [], None, r"at least one name, each once, got \(\)"),
    (ValueError, ["cpu", "cpu"], None, r"each once, got \('cpu', 'cpu'\)"),
    (TypeError, 3, None, "must be a sequence of strings, .* got 3$"),
    (TypeError, [None], None, r"must be a sequence of strings, .*\[None\]"),
    (TypeError, H100, None, "got Target.*; pass it as target=$"),
  )  # fmt: skip
  def test_bad_targets_are_refused(self, error, platforms, target, message):
    with self.assertRaisesRegex(error, message):
      jp.export(jp.block_scaled_dot, platforms, target=target)

  @parameterized.parameters(None, 3)
  def test_fn_must_be_a_function(self, fn):
    with self.assertRaisesRegex(TypeError, f"fn must be a function, got {fn}"):
      jp.export(fn)

  @parameterized.parameters("a_call", (["a_call"],))
  def test_names_are_no_disabled_checks(self, checks):
    with self.assertRaisesRegex(TypeError, "a_call.*custom_call\\(name\\)$"):
      jp.export(jp.block_scaled_dot, disabled_checks=checks)

  def test_forced_implementation_that_cannot_serve_is_refused(self):
    function = lambda x, w: jp.block_scaled_dot(x, w, implementation="cudnn")
    with self.assertRaisesRegex(NotImplementedError, "the target's platform"):
      jp.export(function)(*operands())

  def test_custom_calls_of_others_stay_checked(self):
    call = jax.ffi.ffi_call("of_somebody", jax.ShapeDtypeStruct((), "float32"))
    with self.assertRaisesRegex(ValueError, "no compatibility guarantees"):
      jp.export(call)(jnp.zeros(()))
    check = jax.export.DisabledSafetyCheck.custom_call("of_somebody")
    exported = jp.export(call, disabled_checks=[check])(jnp.zeros(()))
    self.assertEqual(calls_in(exported), {"of_somebody": 1})

  def test_call_targets_are_those_of_the_library(self):
    self.assertContainsSubset({DOT, "jaxplugin_dequantize"}, api.CALL_TARGETS)


MODULES = ("release_0_1",)  # the oldest first


class CompatibilityTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    if jp.detect_target("cpu").cpu_kernels is None:
      self.skipTest("there are no kernels for CPUs here")

  @parameterized.parameters(*((name,) for name in MODULES))
  def test_module_of_a_release_gives_exact_results(self, name):
    exported = jax.export.deserialize(bytearray(sample.read(name)))
    for m in (1, 5):
      results = exported.call(jnp.asarray(sample.rows(m)))
      expected = sample.expected(sample.rows(m))
      self.assertEqual({*results}, {*expected})
      for key, result in results.items():
        np.testing.assert_array_equal(
          np.asarray(result).astype(np.float64), expected[key], err_msg=key
        )

  def test_newest_of_them_calls_every_handler(self):
    exported = jax.export.deserialize(bytearray(sample.read(MODULES[-1])))
    self.assertEqual({*reading.calls_in(exported)}, {*library.HANDLERS})

  def test_export_of_today_is_of_the_same_calls(self):
    then = jax.export.deserialize(bytearray(sample.read(MODULES[-1])))
    now = jax.export.deserialize(bytearray(sample.export()))
    self.assertEqual(reading.calls_in(now), reading.calls_in(then))


M, N, K = 16, 64, 256


class ExportCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.mesh = explicit.mesh(self, kind=AxisType.Auto)
    self.rng = np.random.default_rng(0)

  def floats(self, *shape):
    return jax.device_put(self.rng.normal(size=shape))

  def put(self, tree, *spec):
    def put(leaf):
      sharding = NamedSharding(self.mesh, P(*spec) if leaf.size > 1 else P())
      return jax.device_put(np.asarray(leaf), sharding)

    return jax.tree.map(put, tree)

  def quantized(self, shape, *spec, format=jp.MXFP8):
    return self.put(jp.quantize(self.floats(*shape), format), *spec)

  def assert_as_under_jit(self, function, *args):
    """Checks the collectives against jit's, and returns them."""
    exported = jp.export(function)(*args)
    loaded = jax.export.deserialize(exported.serialize())
    ours = jax.jit(loaded.call).lower(*args).compile()
    jitted = jax.jit(function).lower(*args).compile()
    moved = reading.collectives(ours)
    self.assertEqual(moved, reading.collectives(jitted))
    result, expected = ours(*args), jitted(*args)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    return moved


class ShardedExportTest(ExportCase):
  def test_fsdp_gathers_bytes(self):
    x = self.quantized((M, K), ("a", "b"), format=jp.NVFP4)
    w = self.quantized((N, K), ("a", "b"), format=jp.NVFP4)
    moved = self.assert_as_under_jit(jp.block_scaled_dot, x, w)
    self.assertIn(("all-gather", "u8[16,128]"), moved)
    self.assertEqual({type_[:2] for _, type_ in moved}, {"u8"})

  def test_each_of_two_calls_of_one_shape_is_split_by_itself(self):
    shared = jax.jit(jp.block_scaled_dot)

    def function(x, z, w_n, w_k):
      y = jp.block_scaled_dot(x, w_n), jp.block_scaled_dot(x, w_k)
      return *y, shared(z, w_n), shared(z, w_k)

    moved = self.assert_as_under_jit(
      function,
      self.quantized((M, K)),
      self.quantized((M, K)),
      self.quantized((N, K), "b"),
      self.quantized((N, K), None, "b"),
    )
    self.assertNotEmpty(moved)
    self.assertNotIn("all-gather", {kind for kind, _ in moved})

  def test_inside_of_a_shard_map_over_some_axes(self):
    devices = self.mesh.devices.reshape(2, 2, 2)
    self.mesh = jax.sharding.Mesh(devices, ("a", "s", "b"))

    def function(x, w):
      return jax.shard_map(
        jp.block_scaled_dot,
        in_specs=P("s"),
        out_specs=P("s"),
        axis_names={"s"},
      )(x, w)

    with jax.set_mesh(self.mesh):
      moved = self.assert_as_under_jit(
        function,
        self.quantized((2, M, K), "s", "a", "b"),
        self.quantized((2, N, K), "s", None, "b"),
      )
    self.assertEqual([kind for kind, _ in moved], ["all-reduce"])

  def test_part_of_a_mesh_axis(self):
    # 16 rows over 8 devices become (2, 8) rows over a 2 x 4 mesh.
    def function(values, scale, w):
      values, scale = (x.reshape(2, M // 2, -1) for x in (values, scale))
      x = jp.ScaledArray(values, scale, None, jp.MXFP8)
      return jp.block_scaled_dot(x, w).reshape(M, N)

    self.mesh = jax.sharding.Mesh(self.mesh.devices.reshape(-1), ("a",))
    x = self.quantized((M, K), "a")
    moved = self.assert_as_under_jit(
      function, x.values, x.scale, self.quantized((N, K))
    )
    self.assertEqual(moved, [])

  @pytest.mark.full
  def test_gpus_are_exported_for_by_as_many_cpus(self):
    def function(x, w):
      y = jp.block_scaled_dot(jp.quantize(x, jp.MXFP8), w)
      return y + jp.dequantize(jp.quantize(y, jp.MXFP4))

    args = self.put(self.floats(M, K), "a"), self.quantized((N, K), "b")
    target = jp.named_target("b200", cudnn="9.13")
    exported = jp.export(function, ["cpu", "cuda"], target=target)(*args)
    calls = reading.calls_in(exported)
    self.assertEqual(calls.pop("__op$block_scaled_dot"), 1)
    if jp.detect_target("cpu").cpu_kernels is not None:
      self.assertContainsSubset({"jaxplugin_quantize": 2}, calls)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(
      jax.jit(loaded.call)(*args), jax.jit(function)(*args)
    )
    self.assertIn("sdy.manual_computation", exported.mlir_module())

  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  def test_mesh_without_devices_is_refused(self, axis_type):
    mesh = jax.sharding.AbstractMesh((8,), ("d",), (axis_type,))
    spec = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, P("d"))
      ),
      self.quantized((M, K)),
    )
    with self.assertRaisesRegex(
      NotImplementedError, "must have devices, got Abs"
    ):
      jp.export(jp.block_scaled_dot)(spec, self.quantized((N, K)))

  @parameterized.parameters(None, "auto", "explicit", "shard_map")
  def test_symbolic_sizes_on_several_devices_are_refused(self, kind):
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.sharding.Mesh(self.mesh.devices, ("a", "b"), (axis_type,) * 2)
    (m,) = jax.export.symbolic_shape("8*m")
    sharding = None if kind is None else NamedSharding(mesh, P(("a", "b")))
    x = jax.ShapeDtypeStruct((m, K), jnp.float32, sharding=sharding)
    w = self.quantized((N, K), *(("a",) if kind is None else ()))
    function = jp.linear
    if kind == "shard_map":
      spec = P(("a", "b"))
      function = jax.shard_map(
        jp.linear, mesh=mesh, in_specs=(spec, P()), out_specs=spec
      )
    elif kind == "explicit":
      w = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), w)
    message = r"must be static on several devices, got symbolic .*m, 256"
    with self.assertRaisesRegex(NotImplementedError, message):
      jp.export(function)(x, w)
    (found,) = jp.explain(function, x, w, for_export=True)
    self.assertRegex(found.error, message)

  def test_symbolic_quantize_on_several_devices_is_refused(self):
    (m,) = jax.export.symbolic_shape("8*m")
    sharding = NamedSharding(self.mesh, P(("a", "b")))
    x = jax.ShapeDtypeStruct((m, K), jnp.float32, sharding=sharding)
    function = lambda x: jp.quantize(x, "mxfp8")
    with self.assertRaisesRegex(NotImplementedError, "quantize: sizes must be"):
      jp.export(function)(x)
    (found,) = jp.explain(function, x, for_export=True).quantizations
    self.assertEqual(found.implementation, "none")
    self.assertIn("sizes must be static on several devices", found.reason)

  def test_symbolic_sizes_in_a_mesh_of_one_device(self):
    mesh = jax.sharding.Mesh(self.mesh.devices[:1, :1], ("a", "b"))
    (m,) = jax.export.symbolic_shape("m")
    w = jp.quantize(self.floats(N, K), "mxfp8")
    function = jax.shard_map(
      lambda x: jp.linear(x, w), mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )
    x = jax.ShapeDtypeStruct((m, K), jnp.float32)
    (found,) = jp.explain(function, x, for_export=True)
    self.assertEqual(found.error, "")
    exported = jp.export(function)(x)
    loaded = jax.export.deserialize(exported.serialize())
    x = self.floats(3, K)
    np.testing.assert_array_equal(loaded.call(x), jax.jit(function)(x))

  def test_devices_call_a_module_of_symbolic_size(self):
    (m,) = jax.export.symbolic_shape("m")
    w = self.quantized((N, K))
    function = lambda x: jp.linear(x, w)
    exported = jp.export(function)(jax.ShapeDtypeStruct((m, K), jnp.float32))
    loaded = jax.export.deserialize(exported.serialize())
    results = []
    for of_device in (loaded.call, function):
      spec = P(("a", "b"))
      sharded = jax.shard_map(
        of_device, mesh=self.mesh, in_specs=spec, out_specs=spec
      )
      for rows in (8, 24):
        x = np.random.default_rng(rows).normal(size=(rows, K))
        results.append(jax.jit(sharded)(jnp.asarray(x, jnp.float32)))
    half = len(results) // 2
    jax.tree.map(np.testing.assert_array_equal, results[:half], results[half:])


@pytest.mark.full
class LongShardedExportTest(ExportCase):
  def test_loop_over_layers_that_quantizes_and_one_that_nothing_uses(self):
    def layer(x, w):
      return jp.block_scaled_dot(jp.quantize(x, jp.MXFP8), w), None

    def function(x, w):
      unused = lambda _, y: y + jp.block_scaled_dot(x_q, w_q)
      y, _ = jax.lax.scan(layer, x, w)
      return jax.lax.fori_loop(0, 0, unused, y)

    x_q, w_q = self.quantized((M, K), "a"), self.quantized((K, K), "a")
    x = self.put(self.floats(M, K), ("a", "b"))
    w = self.quantized((2, K, K), None, ("a", "b"))
    moved = self.assert_as_under_jit(function, x, w)
    self.assertIn(("all-gather", "u8[256,256]"), moved)

  def test_gradients_of_a_product_that_quantizes(self):
    dot = jp.dot_general(jp.MXFP8, jp.MXFP8)

    def loss(w, x):
      return jnp.tanh(dot(x, w, (((1,), (0,)), ((), ())))).sum()

    w = self.put(self.floats(K, N), ("a", "b"))
    self.assert_as_under_jit(
      jax.grad(loss), w, self.put(self.floats(M, K), ("a", "b"))
    )

  def test_experts_stay_where_they_are(self):
    sizes = self.put(jnp.full((8,), M // 8, jnp.int32))
    experts = self.quantized((8, 64, K), ("a", "b"))
    moved = self.assert_as_under_jit(
      jp.ragged_dot, self.quantized((M, K)), experts, sizes
    )
    self.assertNotIn("all-gather", {kind for kind, _ in moved})
