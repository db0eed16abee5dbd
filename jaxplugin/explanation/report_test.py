# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`explain` for whole models."""

import dataclasses
import functools
import json
import math
import re
import sys
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import linen, nnx

import jaxplugin as jp
from jaxplugin.core import formats, targets
from jaxplugin.dot import problems
from jaxplugin.explanation import estimates
from jaxplugin.runtime import cpu_library, triton_library
from jaxplugin.testing import acme_backend

P = jax.sharding.PartitionSpec
B200 = jp.named_target("b200", cudnn="9.13")
LOWERED_MI355X = jp.named_target("mi355x").with_library(targets.JAX_TRITON)
H200 = jp.named_target("h200")
CPU = dataclasses.replace(jp.named_target("cpu"), cpu_kernels="avx2")
X = jax.device_put(np.ones((32, 64), np.float32))
W = jp.quantize(np.ones((64, 64), np.float32), jp.MXFP8)
mxfp8 = jp.dot_general(jp.MXFP8, jp.MXFP8)


class Block(linen.Module):
  @linen.compact
  def __call__(self, x):
    y = linen.Dense(128, dot_general=mxfp8)(x)
    return x + linen.Dense(64)(linen.relu(y))


class Model(linen.Module):
  @linen.compact
  def __call__(self, x):
    return Block()(Block()(x)).sum()


class Layer(nnx.Module):
  def __init__(self, rngs):
    self.kernel = nnx.Param(rngs.params.normal((64, 64)))
    self.head = nnx.Linear(64, 64, rngs=rngs)

  def __call__(self, x):
    y = mxfp8(x, self.kernel[...], (((1,), (0,)), ((), ())))
    return self.head(y)


@functools.cache
def linen_gradient():
  model = Model()
  params = jax.eval_shape(model.init, jax.random.key(0), X)
  gradient = jax.value_and_grad(model.apply, argnums=(0, 1))
  return jp.explain(gradient, params, X, target=B200)


def quantizations(function, *args, target):
  return jp.explain(function, *args, target=target).quantizations


class ModelTest(parameterized.TestCase):
  def test_layers_and_passes_of_a_linen_model(self):
    explanation = linen_gradient()
    self.assertCountEqual(
      [(dot.layer, dot.phase) for dot in explanation],
      [
        (f"Model/Block_{i}/Dense_0", phase)
        for i in (0, 1)
        for phase in ("forward", "dgrad", "wgrad")
      ],
    )
    for dot in explanation:
      self.assertRegex(dot.source, r"report_test\.py:\d+ \(.*__call__\)")
    dgrad = next(dot for dot in explanation if dot.phase == "dgrad")
    wgrad = next(dot for dot in explanation if dot.phase == "wgrad")
    # g (32, 128) x w (64, 128); g (128, 32) x lhs (64, 32), in either order.
    sizes = lambda p: (p.k, {p.m, p.n})
    self.assertEqual(sizes(dgrad.problem), (128, {32, 64}))
    self.assertEqual(sizes(wgrad.problem), (32, {64, 128}))

  def test_products_that_are_not_block_scaled_are_named(self):
    explanation = linen_gradient()
    self.assertCountEqual(
      [(other.layer, other.phase) for other in explanation.others],
      [
        (f"Model/Block_{i}/Dense_1", phase)
        for i in (0, 1)
        for phase in ("forward", "backward", "backward")
      ],
    )
    other = next(x for x in explanation.others if x.phase == "forward")
    self.assertEqual(
      f"{other.operation} {other.description}",
      "lax.dot_general float32[32, 128] x float32[128, 64] -> float32[32, 64]",
    )
    self.assertIn("plain matmul", other.reason)

  def test_summary_counts_by_implementation(self):
    explanation = linen_gradient()
    figures = explanation.summary()
    self.assertEqual((figures["block_scaled"], figures["products"]), (6, 12))
    self.assertEqual(figures["implementations"], {"cudnn": 6})
    self.assertIn(
      "6 of 12 matmuls are block-scaled: 6 by cudnn", explanation.details()
    )

  def test_layers_of_an_nnx_model_under_a_scan_count_their_trips(self):
    @nnx.split_rngs(splits=8)
    @nnx.vmap(in_axes=0)
    def make(rngs):
      return Layer(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
      return layer(x)

    definition, state = nnx.split(make(nnx.Rngs(0)))

    def loss(state, x):
      return forward(nnx.merge(definition, state), x).sum()

    explanation = jp.explain(jax.grad(loss), state, X, target=H200)
    self.assertEqual([dot.trips for dot in explanation], [8, 8, 8])
    self.assertEqual([x.trips for x in explanation.others], [8, 8, 8])
    self.assertIn(
      "3 of 6 matmuls are block-scaled, in a run 24 of 48: 3 by triton",
      explanation.details(),
    )
    for item in (*explanation, *explanation.others):
      # nnx opens no scopes, so only the line distinguishes the layers.
      self.assertRegex(item.source, r"report_test\.py:\d+ \(Layer")

  def test_products_in_while_loops_count_once_and_that_is_said(self):
    function = lambda x: jax.lax.while_loop(
      lambda x: x[0, 0] < 1, lambda x: jp.block_scaled_dot(x @ x.T @ x, W), x
    )
    text = jp.explain(function, X, target=H200).details()
    self.assertIn("(3 in while loops with unknown trip counts, counted", text)
    self.assertIn("(in a while loop, trip count unknown)", text)

  def test_product_that_a_recipe_leaves_alone_says_so(self):
    dot_general = jp.dot_general(jp.MXFP8, jp.MXFP8, quantize_wgrad=False)
    loss = lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ()))).sum()
    explanation = jp.explain(jax.grad(loss, argnums=(0, 1)), X, X.T)
    (other,) = explanation.others
    self.assertEqual(other.phase, "wgrad")
    self.assertRegex(other.reason, "jp.dot_general computes.*high precision")

  def test_scaled_dots_of_jax_say_how_they_are_served(self):
    values = X.astype(jnp.float8_e4m3fn)
    scale = jnp.ones((32, 2), jnp.float8_e8m0fnu)

    def function(x, scale):
      y = jax.nn.scaled_matmul(x[None], x[None], scale[None], scale[None])
      return y, jax.lax.scaled_dot(x, x.T, lhs_scale=scale, rhs_scale=scale.T)

    explanation = jp.explain(function, values, scale)
    self.assertEqual(
      [other.operation for other in explanation.others],
      ["jax.nn.scaled_matmul", "jax.lax.scaled_dot"],
    )
    for other in explanation.others:
      self.assertIn("wrap the function in jp.accelerate", other.reason)
    accelerated = jp.explain(jp.accelerate(function), values, scale)
    self.assertLen(accelerated, 2)
    self.assertEmpty(accelerated.others)

  @parameterized.parameters(("b200", True), ("h100", False), ("mi355x", False))
  def test_named_gpu_without_cudnn_says_so_in_a_line(self, name, is_said):
    text = str(
      jp.explain(jp.block_scaled_dot, W, W, target=jp.named_target(name))
    )
    line = f'{name} was named without cudnn=, as in jp.named_target("{name}", '
    self.assertEqual(line in text, is_said)
    told = jp.explain(jp.block_scaled_dot, W, W, target=B200).details()
    self.assertNotIn("without cudnn=", told)

  def test_table_has_a_row_for_each_matmul(self):
    w = jp.quantize(np.ones((96, 64), "f4"), jp.NVFP4)

    def function(x, w):
      with jax.named_scope("up"):
        y = jp.linear(x, w)
      with jax.named_scope("down"):
        return y @ jnp.ones((96, 7))

    x = np.ones((3, 64), jnp.bfloat16)
    lines = str(jp.explain(function, x, w, target=B200)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("#"))
    header, up, down = (line.split() for line in lines[start : start + 3])
    self.assertEqual(
      " ".join(header),
      "# layer operands m n k runs backend global scale at least",
    )
    self.assertEqual(
      " ".join(up[:-2]), "0 up bf16 x nvfp4 3 96 64 1 triton fused"
    )
    self.assertEqual(" ".join(down[:-2]), "- down bf16 x f32 3 7 96 1 -")
    for row in (up, down):
      self.assertRegex(" ".join(row[-2:]), r"^[\d.]+ (ns|us)$")

  def test_table_has_loops_batches_groups_and_phases(self):
    w = jp.quantize(np.ones((5, 96, 64), "f4"), jp.MXFP8)

    def function(x, w):
      step = lambda x, _: (jp.ragged_dot(x, w, jnp.full((5,), 2))[:, :64], None)
      x, _ = jax.lax.scan(step, x, None, length=3)
      return x, jnp.einsum(
        "bmk,bkn->bmn", jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))
      )

    text = str(jp.explain(function, np.ones((10, 64), "f4"), w, target=B200))
    self.assertRegex(text, r"f32 x mxfp8, +\S* *10 +96 +64 +3 ")
    self.assertRegex(text, r"f32 x f32 +2 +3 +5 +4 +1 ")

  def test_json_holds_everything(self):
    explanation = linen_gradient()
    parsed = json.loads(explanation.to_json())
    for row, dot in zip(parsed["dots"], explanation, strict=True):
      self.assertEqual(row["layer"], dot.layer)
      self.assertEqual(row["problem"]["n"], dot.problem.n)
      implementation = row["decision"]["implementation"]
      self.assertEqual(implementation, dot.decision.implementation)
    self.assertLen(parsed["not_block_scaled"], 6)
    self.assertEqual(parsed["summary"]["products"], 12)
    self.assertNotEmpty(parsed["quantizations"])
    self.assertEqual(parsed["quantizations"][0]["implementation"], "triton")

  def test_decision_that_was_told_is_referred_to(self):
    def function(x, w):
      y = jp.block_scaled_dot(x, w)
      return y, jp.block_scaled_dot(x, w)

    text = jp.explain(function, X, W, target=B200).details()
    self.assertEqual(text.count("not cpu:"), 1)
    self.assertIn("\n    as [0]", text)


class QuantizationTest(parameterized.TestCase):
  """The report names the backend that lowering chooses."""

  def lowered(self, function, x, target):
    """Returns the backends whose kernels the lowered module calls."""
    with (
      jp.use_target(target),
      mock.patch.object(triton_library, "call", call),
      mock.patch.object(cpu_library, "register"),
    ):
      traced = jax.jit(function).trace(x)
      text = traced.lower(lowering_platforms=(target.platform,)).as_text()
    patterns = {"cpu": "jaxplugin_(de)?quantize", "triton": KERNEL}
    return {name for name, p in patterns.items() if re.search(p, text)}

  def told(self, function, x, target):
    """Returns the report's line, after checking it with the lowered module."""
    (told,) = quantizations(function, x, target=target)
    names = set(told.implementation.split(" and ")) - {"xla"}
    self.assertEqual(self.lowered(function, x, target), names)
    return told

  @parameterized.product(
    target=(CPU, jp.named_target("cpu"), H200, jp.named_target("mi355x")),
    format=(jp.MXFP8, jp.MXFP4, jp.NVFP4),
    axis=(0, 1),
  )
  @pytest.mark.sample(1)
  def test_what_is_told_is_what_is_lowered(self, target, format, axis):
    quantize = functools.partial(jp.quantize, format=format, axis=axis)
    told = self.told(quantize, X, target)
    self.assertEqual(told.operation, "quantize")
    self.assertIn(f"float32[32, 64] to {format}", told.description)
    self.assertEqual(told.reason != "", told.implementation == "xla")

  @parameterized.parameters(
    (jp.dequantize, CPU, "cpu", "^$"),
    (jp.dequantize, H200, "xla", "XLA fuses"),
    (jp.quantize_both, H200, "triton", "^$"),
    (jp.quantize_both, CPU, "cpu and xla",
      "a kernel per blocking.*slower for FP8 along another axis"),
  )  # fmt: skip
  def test_other_operations_are_told(self, operation, target, names, reason):
    function, x = operation, jp.quantize(X, jp.NVFP4)
    if operation is jp.quantize_both:
      function, x = functools.partial(operation, format=jp.MXFP8), X
    told = self.told(function, x, target)
    self.assertEqual(told.operation, operation.__name__)
    self.assertCountEqual(
      told.implementation.split(" and "), names.split(" and ")
    )
    self.assertRegex(told.reason, reason)

  @parameterized.parameters("uint4_128", "uint4_32_min")
  def test_dequantize_with_an_offset_is_listed(self, format):
    x = jp.quantize(np.ones((3, 32, 128), "f4"), format)
    for function, shape in (
      (jp.dequantize, (3, 32, 128)),
      (jax.vmap(jp.dequantize), (3, 32, 128)),
      (lambda x: (jp.dequantize(x[0]), jp.dequantize(x))[0], (32, 128)),
    ):
      for target in (CPU, H200):
        found = self.told(function, x, target)
        self.assertEqual(found.operation, "dequantize")
        sizes = ", ".join(map(str, shape))
        self.assertEqual(found.description, f"{format} to float32[{sizes}]")
        self.assertEqual(found.implementation, "xla")
        self.assertIn("zero points or minima", found.reason)
        count = math.prod(shape)
        parts = sum(y.nbytes for y in (x.values, x.scale, x.offset))
        num_bytes = 4 * count + parts * count // x.size
        self.assertEqual(found.estimate.num_bytes, num_bytes)

  def test_gpu_that_jax_triton_does_not_lower_for_is_told(self):
    quantize = functools.partial(jp.quantize, format=jp.MXFP8)
    triton_library._import_error.cache_clear()
    self.addCleanup(triton_library._import_error.cache_clear)
    w, experts = (jp.quantize(x, jp.MXFP8) for x in (X, X[None]))
    with mock.patch.dict(sys.modules, {"jax_triton": None}):
      told = self.told(quantize, X, H200)
      dots = [
        *jp.explain(jp.block_scaled_dot, w, w, target=H200),
        *jp.explain(jp.ragged_dot, X, experts, jnp.array([32]), target=H200),
      ]
    self.assertEqual(told.implementation, "xla")
    self.assertRegex(told.reason, "needs jax-triton, which cannot be imported")
    for dot in dots:
      self.assertEqual(dot.decision.implementation, "triton")
      self.assertRegex(dot.lowering_error, "needs jax-triton, which cannot")

  def test_each_device_of_a_partitioned_module_gets_kernels(self):
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("x",), axis_types=types)
    mesh2 = jax.make_mesh((4, 2), ("x", "y"), axis_types=types * 2)
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    quantize = functools.partial(jp.quantize, format=jp.MXFP8)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    local = jax.shard_map(
      quantize, mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    partly = jax.shard_map(
      quantize, mesh=mesh2, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    x2 = jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh2, P("x"))
    )
    # This key's bits depend on the whole array, which no device has.
    key = jax.random.key(0, impl="rbg")
    random = functools.partial(jp.quantize, format=jp.MXFP8, key=key)
    for function, given, expected, shape in (
      (quantize, x, "cpu", "float32[64, 64]"),
      (local, x, "cpu", "float32[8, 64]"),
      (partly, x2, "cpu", "float32[16, 64]"),
      (random, x, "xla", "float32[64, 64]"),
    ):
      explanation = jp.explain(function, given, target=CPU)
      (told,) = explanation.quantizations
      self.assertEqual(told.implementation, expected)
      self.assertIn(shape, told.description)
      # A device's part is lowered later, when the partitioner calls back.
      is_lowered = expected == "cpu" and function is local
      lowered = self.lowered(function, given, CPU)
      self.assertEqual(lowered, {"cpu"} if is_lowered else set())
    self.assertIn("draws random bits of a threefry2x32 key", told.reason)
    (decision,) = told.decisions
    self.assertEqual(decision.implementation, "xla")
    refusals = {r.implementation: r.reason for r in decision.refusals}
    self.assertEqual({*refusals}, {"cpu", "triton"})
    self.assertIn("got rbg", refusals["cpu"])
    self.assertIn(
      "assumed: the module is partitioned over 8 devices",
      jp.explain(quantize, x, target=CPU).details(),
    )

  def test_blocks_that_devices_do_not_share_evenly_are_told(self):
    mesh = jax.sharding.Mesh(
      np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y")
    )
    sharding = jax.sharding.NamedSharding(mesh, P(None, "y"))
    for k, parts in ((2880, 90), (4096, None)):
      x = jax.ShapeDtypeStruct((64, k), jnp.float32, sharding=sharding)
      quantize = lambda x: jp.dequantize(jp.quantize(x, jp.MXFP8))
      text = jp.explain(quantize, x, target=CPU).details()
      note = (
        f"note: dimension 1 has {parts} parts of 32 that stay whole: where mesh"
        " axis y (4) splits it, another dimension is split instead, or it is"
        " gathered; pad it to avoid that"
      )
      self.assertEqual(text.count(note), 0 if parts is None else 2)
      self.assertEqual("note:" in text, parts is not None)


class EstimateTest(parameterized.TestCase):
  def test_bytes_of_each_dtype(self):
    (size,) = jax.export.symbolic_shape("size")
    for shape, dtype, expected in (
      ((4, 6), formats.E2M1, 12),
      ((4, 6), formats.PACKED, 24),
      ((4, 6), jnp.bfloat16, 48),
      ((), jnp.float32, 4),
      ((0, 6), jnp.float32, 0),
      ((size, 6), jnp.float32, None),
    ):
      with self.subTest(shape=shape, dtype=dtype):
        aval = jax.ShapeDtypeStruct(shape, dtype)
        self.assertEqual(estimates.bytes_of([aval]), expected)

  def test_rounding_up_to_a_unit_changes_the_unit(self):
    for number, text in (
      (0.0, "0 ns"),
      (8.81e-10, "0.881 ns"),
      (9.994e-7, "999 ns"),
      (9.996e-7, "1 us"),
      (9.996e-4, "1 ms"),
      (0.9996, "1 s"),
    ):
      self.assertEqual(estimates.time_in_words(number), text)
    words = estimates.in_words(999.7, 999.6e9, 2e-6)
    self.assertEqual(words, "1 kB, 1 TFLOP, at least 2 us")

  def test_one_layer_of_a_stack_is_read(self):
    x = np.ones((4, 64), "f4")
    stack = jp.quantize(np.ones((5, 32, 64), "f4"), jp.MXFP8)
    layer = jax.jit(lambda x, w, i: jp.linear(x, w, layer=i))
    in_stack = jp.explain(layer, x, stack, 1)
    alone = jp.explain(jp.linear, x, stack[1])
    # Rows and result in f32, FP8 values, and one scale for 32 values.
    num_bytes = 4 * 64 * 4 + 32 * 64 + 32 * 2 + 4 * 32 * 4
    self.assertEqual(in_stack[0].estimate.num_bytes, num_bytes)
    self.assertEqual(alone[-1].estimate.num_bytes, num_bytes)

  def test_slices_of_a_scan_over_weights_are_copied_on_a_cpu(self):
    x = np.ones((64, 64), "f4")
    target = dataclasses.replace(jp.named_target("cpu"), cpu_kernels="avx2")

    def notes(function, *weights, target=target):
      scan = lambda x, *weights: jax.lax.scan(function, x, weights)[0]
      (dot,) = jp.explain(jax.jit(scan), x, *weights, target=target)
      return dot.decision.notes

    stack = jp.quantize(np.ones((5, 64, 64), "f4"), jp.MXFP8)
    plain = lambda x, w: (jp.linear(x, w[0]), None)
    (note,) = notes(plain, stack)
    self.assertRegex(note, "copied in each step; .* linear.layer=")
    # Bytes are viewed as floats, and the body has other functions.
    inner = jax.jit(lambda x, w: jp.linear(x, w.to_floats()))
    self.assertEqual(
      notes(lambda x, w: (inner(x, w[0]), None), stack.to_bytes()), (note,)
    )
    experts = jp.quantize(np.ones((5, 2, 64, 64), "f4"), jp.MXFP8)
    groups = lambda x, w: (jp.ragged_dot(x, w[0], jnp.array([60, 4])), None)
    (note,) = notes(groups, experts)
    self.assertRegex(note, "copied in each step; .* sizes of other layers")
    # The weights are not scanned, or are activations.
    whole = lambda x, i: (jp.linear(x, stack, layer=i[0]), None)
    for function, given in (
      (whole, jnp.arange(5)),
      (
        lambda x, y: (jp.linear(y[0] + x, stack[0]), None),
        np.ones((5, 64), "f4"),
      ),
    ):
      self.assertNotIn("copied", str(notes(function, given)))
    h100 = jp.named_target("h100")
    self.assertNotIn("scan", str(notes(plain, stack, target=h100)))

  def test_bytes_and_time_of_a_decode(self):
    n = k = 8192
    x = jax.ShapeDtypeStruct((1, k), jnp.bfloat16)
    w = jax.eval_shape(
      lambda: jp.quantize(jnp.zeros((n, k), jnp.float32), jp.NVFP4)
    )
    dot = functools.partial(
      jp.block_scaled_dot, preferred_element_type=jnp.bfloat16
    )
    explanation = jp.explain(dot, x, w, target=H200)
    # FP4 takes half a byte, a scale for 16 values one byte, a global scale 4.
    num_bytes = n * k // 2 + n * k // 16 + 4 + 2 * k + 2 * n
    found = explanation[0].estimate
    self.assertEqual((found.num_bytes, found.flops), (num_bytes, 2 * n * k))
    self.assertAlmostEqual(found.seconds, num_bytes / 4.8e12, delta=1e-12)
    self.assertEqual(found.bound, "memory")
    self.assertRegex(
      explanation.details(), r"estimate: 37\.8 MB, 134 MFLOP, at least 7\.87 us"
    )

  # Rows 64, n and k 256. A value of MXFP8 has 1 + 1 / 32 bytes, NVFP4 half a
  # byte, 1 / 16 and an f32; UINT4_128 half a byte, an f16 and a uint8.
  @parameterized.parameters(
    ("quantize", "mxfp8", 256 * 2 + 264),
    ("quantize", "nvfp4", 2 * 256 * 2 + 144, 4),
    ("quantize", "uint4_128", 256 * 2 + 128 + 2 * (2 + 1)),
    ("norm", "mxfp8", 256 * 2 + 264),
    # Under vmap each entry has a global scale, and XLA computes the norm.
    ("norm", "nvfp4", 2 * 256 * 2 + 144, 4, 2 * 256 * 4 + 144),
    # XLA computes the norm in f32.
    ("norm", "uint4_128", 256 * 4 + 128 + 2 * (2 + 1)),
    ("silu", "mxfp8", 2 * 256 * 2 + 264),
  )
  def test_bytes_of_quantizing(self, name, format, row, more=0, mapped=None):
    functions = {
      "quantize": lambda x: jp.quantize(x, format),
      "norm": lambda x: jp.nn.rms_norm(x, out_format=format),
      "silu": lambda x: jp.nn.silu_and_mul(x, x + 1, out_format=format),
    }
    function = functions[name]
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    batch = jax.ShapeDtypeStruct((3, 64, 256), jnp.bfloat16)
    explanation = jp.explain(function, x, target=H200)
    (found,) = explanation.quantizations
    self.assertEqual(found.estimate.num_bytes, 64 * row + more)
    self.assertIn(f"[64, 256] to {format}", found.description)
    self.assertRegex(explanation.details(), r"\n    estimate: \d.* \(memory\)")
    self.assertEqual(explanation.summary()["num_bytes"], 64 * row + more)
    (found,) = jp.explain(jax.vmap(function), batch, target=H200).quantizations
    row = mapped or row
    self.assertEqual(found.estimate.num_bytes, 3 * (64 * row + more))

  @parameterized.parameters((H200, True), (B200, False))
  def test_result_that_a_kernel_quantizes_is_not_written_in_f32(
    self, target, is_fused
  ):
    x = jax.eval_shape(lambda: jp.quantize(jnp.zeros((64, 256)), "mxfp8"))
    function = lambda x, w: jp.linear(x, w, out_format="mxfp8")
    implementation = "triton" if is_fused else None
    if is_fused:
      function = functools.partial(
        jp.linear, out_format="mxfp8", implementation=implementation
      )
    explanation = jp.explain(function, x, x, target=target)
    operands, result, wide = 2 * 64 * 264, 64 * 66, 64 * 64 * 4
    self.assertEqual(
      explanation[0].estimate.num_bytes,
      operands + (result if is_fused else wide),
    )
    total = operands + result + (0 if is_fused else 2 * wide)
    self.assertEqual(explanation.summary()["num_bytes"], total)

  @parameterized.parameters(
    # Dense TFLOP/s from the data sheets: FP4 and FP8 of B200; else bf16.
    (B200, jp.NVFP4, 9000),
    (B200, jp.MXFP8, 4500),
    (H200, jp.NVFP4, 989),
    (jp.named_target("mi355x"), jp.MXFP4, 2517),
    (LOWERED_MI355X, jp.MXFP4, 10066),
  )
  def test_time_of_a_large_product(self, target, format, tera_flops):
    x = jax.eval_shape(
      lambda: jp.quantize(jnp.zeros((8192, 8192), jnp.float32), format)
    )
    dot = functools.partial(
      jp.block_scaled_dot, preferred_element_type=jnp.bfloat16
    )
    (found,) = jp.explain(dot, x, x, target=target)
    self.assertEqual(found.estimate.bound, "compute")
    self.assertAlmostEqual(
      found.estimate.seconds, 2 * 8192**3 / (tera_flops * 1e12), delta=1e-9
    )

  def test_trips_multiply_the_total(self):
    def function(x):
      body = lambda x, _: (jp.block_scaled_dot(x, W), None)
      return jax.lax.scan(body, x, length=8)[0]

    explanation = jp.explain(function, X, target=H200)
    figures = explanation.summary()
    one = explanation[0].estimate
    self.assertEqual(figures["num_bytes"], 8 * one.num_bytes)
    self.assertEqual(figures["flops"], 8 * 2 * 32 * 64 * 64)
    self.assertAlmostEqual(figures["seconds"], 8 * one.seconds)

  def test_device_without_published_figures_has_no_time(self):
    explanation = jp.explain(jp.block_scaled_dot, X, W, target=CPU)
    self.assertIsNone(explanation.summary()["seconds"])
    self.assertNotIn("estimate", explanation.details())

  @parameterized.parameters(
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA B300 SXM6 AC", "b300"),
    ("NVIDIA GeForce RTX 5090", "rtx5090"),
    ("NVIDIA GB10", "gb10"),
    # Boards whose names contain these have other rates and memory.
    ("NVIDIA A100-SXM4-40GB", None),
    ("NVIDIA A100 80GB PCIe", None),
    ("NVIDIA H100 PCIe", None),
    ("NVIDIA H100 NVL", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ("NVIDIA H200 NVL", None),
    ("NVIDIA GH200 480GB", None),
    ("NVIDIA GB200", None),
    ("NVIDIA GB300", None),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
  )
  def test_local_gpu_is_known_by_the_whole_name_of_its_kind(self, kind, sheet):
    target = targets.Target(name=kind, platform="cuda")
    self.assertEqual(estimates.sheet_of(target), sheet)

  @parameterized.parameters(
    # PTX ISA, tcgen05.mma: kind::mxf8f6f4 multiplies FP4 by FP8.
    (jp.MXFP4, jp.MXFP4, True, "fp4"),
    (jp.MXFP8, jp.MXFP4, True, "fp8"),
    (jp.MXFP4, jp.MXFP8, True, "fp8"),
    (None, jp.MXFP4, True, "bf16"),
    (jp.MXFP4, jp.MXFP4, False, "bf16"),
  )
  def test_rate_is_that_of_the_wider_side(self, lhs, rhs, is_native, expected):
    sides = [
      problems.SideProblem(
        format=format, dtype=getattr(format, "values_dtype", formats.BF16)
      )
      for format in (lhs, rhs)
    ]
    found = estimates.precision_of(*sides, is_native=is_native)
    self.assertEqual(found, expected)

  def test_named_targets_have_figures_of_their_own(self):
    for name in targets.TARGET_NAMES:
      expected = None if name == "cpu" else name
      found = estimates.sheet_of(jp.named_target(name))
      self.assertEqual(found, expected)

  def test_gpu_without_published_figures_is_named(self):
    target = targets.Target(name="NVIDIA GH200 480GB", platform="cuda")
    explanation = jp.explain(jp.block_scaled_dot, X, W, target=target)
    self.assertIsNone(explanation.summary()["seconds"])
    self.assertIn(
      "no estimate: jaxplugin has no published figures for NVIDIA GH200 480GB",
      str(explanation),
    )


KERNEL = "some_triton_kernel"


def call(kernels, launch, inputs, target):
  """Replaces `triton_library.call`, which takes seconds to compile."""
  del kernels, target
  outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in launch.outputs]
  return list(jax.ffi.ffi_call(KERNEL, tuple(outputs))(*inputs))


class FlopsTest(absltest.TestCase):
  """FLOPs for utilization meters, against 2 m n k and XLA's own figure."""

  M, N, K = 32, 64, 128
  # The dots of the first target are custom calls. XLA sees those of the second.
  H100, CPU = jp.named_target("h100"), jp.named_target("cpu")

  def operands(self, *lead):
    return [
      jax.eval_shape(
        lambda x: jp.quantize(x, "mxfp8"),
        jax.ShapeDtypeStruct((*lead, rows, self.K), jnp.float32),
      )
      for rows in (self.M, self.N)
    ]

  def explain(self, target):
    return jp.explain(jp.block_scaled_dot, *self.operands(), target=target)

  def xla(self, function, *shapes):
    """Returns XLA's figures for a program of f32 arrays."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arrays).compile().cost_analysis()

  def test_dot_alone_is_what_xla_counts_for_f32(self):
    expected = self.xla(
      lambda a, b: a @ b.T, (self.M, self.K), (self.N, self.K)
    )
    self.assertEqual(expected["flops"], 2 * self.M * self.N * self.K)
    explanation = self.explain(self.H100)
    self.assertEqual(explanation.flops, expected["flops"])
    added = explanation.add_flops({"flops": -1.0, "bytes accessed": 3.0})
    self.assertEqual(added, {"flops": expected["flops"], "bytes accessed": 3.0})

  def test_dots_that_xla_sees_are_not_added(self):
    explanation = self.explain(self.CPU)
    self.assertEqual(explanation.add_flops({"flops": 7.0}), {"flops": 7.0})
    self.assertEqual(explanation.flops, 2 * self.M * self.N * self.K)

  def test_plain_products_and_loops_are_counted_as_xla_counts_them(self):
    batch, trips = 3, 5
    plain = lambda y: jax.lax.scan(
      lambda c, _: (c @ y, None), y, None, length=trips
    )[0]

    def ours(a, b, y):
      dots = lambda c, _: (c + jp.block_scaled_dot(a, b), None)
      zeros = jnp.zeros((batch, self.M, self.N), jnp.float32)
      return jax.lax.scan(dots, zeros, None, length=trips)[0], plain(y)

    square = (16, 16)
    explanation = jp.explain(
      ours,
      *self.operands(batch),
      jax.ShapeDtypeStruct(square, jnp.float32),
      target=self.H100,
    )
    one = 2 * batch * self.M * self.N * self.K
    self.assertEqual(explanation.flops, trips * (one + 2 * 16**3))
    # XLA's figure has no FLOPs of the dots, and -1 for the call in the loop.
    cost = dict(self.xla(plain, square))
    self.assertAlmostEqual(cost["flops"], 2 * 16**3, delta=trips)
    cost["flops"] -= 1
    self.assertAlmostEqual(
      explanation.add_flops(cost)["flops"], one + 2 * 16**3, delta=1 + trips
    )

  def test_gradients_count(self):
    def loss(x, w):
      return mxfp8(x, w, (((1,), (1,)), ((), ()))).sum()

    shapes = (self.M, self.K), (self.N, self.K)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    # XLA removes the forward matmul if only the gradient is used.
    for transformation, count in ((jax.grad, 2), (jax.value_and_grad, 3)):
      gradient = transformation(loss, (0, 1))
      explanation = jp.explain(gradient, *arrays, target=self.H100)
      self.assertEqual(explanation.flops, count * 2 * self.M * self.N * self.K)
    self.assertEqual(
      explanation.add_flops({"flops": -3.0})["flops"], explanation.flops
    )

  def test_program_of_this_cpus_kernels(self):
    if jp.detect_target("cpu").cpu_kernels is None:
      self.skipTest("the C++ kernels are not built")
    rng = np.random.default_rng(0)
    operands = [
      jp.quantize(rng.normal(size=(rows, self.K)).astype(np.float32), "mxfp8")
      for rows in (self.M, self.N)
    ]
    dot = lambda a, b: jp.block_scaled_dot(a, b, implementation="cpu")
    cost = jax.jit(dot).lower(*operands).compile().cost_analysis()
    self.assertLess(cost["flops"], self.M * self.N * self.K)
    added = jp.explain(dot, *operands).add_flops(cost)
    self.assertAlmostEqual(
      added["flops"], 2 * self.M * self.N * self.K, delta=1
    )

  def test_ragged_dots_of_other_packages_are_added(self):
    emit = lambda call: jnp.zeros(call.shape, call.dtype)
    acme_backend.register(self, emit, first=True, operation="ragged_dot")
    weights = jp.quantize(
      np.ones((3, self.N, self.K), "f4"), "mxfp8", batch_dims=1
    )
    explanation = jp.explain(
      jp.ragged_dot,
      np.ones((self.M, self.K), "f4"),
      weights,
      jnp.array([self.M, 0, 0]),
      target=self.CPU,
    )
    self.assertEqual(explanation.dots[0].decision.implementation, "acme")
    self.assertEqual(
      explanation.add_flops({"flops": 7.0}),
      {"flops": 7.0 + 2 * self.M * self.N * self.K},
    )

  def test_cost_without_flops_is_refused(self):
    explanation = self.explain(self.H100)
    with self.assertRaisesRegex(
      ValueError, "cost must have \"flops\", got \\['bytes accessed'\\]"
    ):
      explanation.add_flops({"bytes accessed": 1.0})
