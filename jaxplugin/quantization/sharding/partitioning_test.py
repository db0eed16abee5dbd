# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharded arrays get the bits of one device, and results move as bytes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.core import blocking
from jaxplugin.lab.compilation import deviceless, traffic
from jaxplugin.lab.planning import collectives as collectives_lib
from jaxplugin.quantization import operands
from jaxplugin.testing import (
  contract,
  folders,
  quantization_lowerings,
  triton_ir,
)
from jaxplugin.testing.meshes import explicit
from jaxplugin.testing.oracles import quantization_cases

K = 2880  # 90 blocks of 32, which 8 devices do not share evenly
COLLECTIVE = re.compile(
  r"= \(?(\w+)\[([\d,]*)\].*? (all-gather|all-reduce|reduce-scatter|all-to-all"
  r"|collective-permute)(?:-start)?\("
)
KEY = jax.random.key(7)


def numbers(*shape):
  """Normal numbers; some blocks are zero, and one has a NaN."""
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  flat = x.reshape(-1)
  flat[: flat.size // 8] = 0
  flat[flat.size // 2] = np.nan
  return x


def collectives(text):
  """(kind, element type, elements) of each collective, sorted."""
  return sorted(
    (kind, dtype, int(np.prod([int(d) for d in dims.split(",") if d])))
    for dtype, dims, kind in COLLECTIVE.findall(text)
  )


def quantized(format, *specs, **kwargs):
  """Quantizes by each spec, stochastically if the spec has a key."""
  along = lambda b: (
    blocking.Blocking.along(b, 2, format.block_size)
    if isinstance(b, int)
    else b
  )
  each = tuple(
    quantization_cases.spec(format, along(b), **more) for b, more in specs
  )
  return lambda x, *keys: operands.quantize_all(x, each, keys or (None,) * 2)


def blocked(dims, ndim, multiple):
  lead = tuple(d for d in range(ndim) if d not in dims)
  return blocking.Blocking(dims=dims, lead=lead, multiple=multiple)


class MeshTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.mesh = explicit.mesh(self, ("x", "y"), AxisType.Auto, (4, 2))

  def put(self, x, *spec):
    return jax.device_put(np.asarray(x), NamedSharding(self.mesh, P(*spec)))

  def assert_same_bits(self, function, x, spec, *more):
    """Returns optimized HLO of a sharded call, which has one device's bits."""
    expected = jax.jit(function)(x, *more)
    function = jax.jit(function)
    sharded = self.put(x, *spec)
    self.result = function(sharded, *more)
    contract.assert_same_bits(self.result, expected)
    return function.lower(sharded, *more).compile().as_text()


class BitsTest(MeshTestCase):
  @parameterized.product(
    case=(
      (jp.MXFP8, ("x", "y")),
      (jp.MXFP6_E3M2, ("y", "x")),
      (jp.MXFP4, (None, ("x", "y"))),
      (jp.NVFP4, ("y", "x")),
    ),
  )
  @pytest.mark.sample(4)
  def test_both_axes_have_the_bits_of_one_device(self, case):
    format, spec = case

    def function(x):
      both = jp.quantize_both(x, format, packed=False)
      return both, [jp.dequantize(x, jnp.bfloat16) for x in both]

    text = self.assert_same_bits(function, numbers(256, 512), spec)
    for leaf in jax.tree.leaves(self.result):
      if leaf.ndim == 2 and leaf.size > 1:
        expected = NamedSharding(self.mesh, P(*spec))
        self.assertTrue(leaf.sharding.is_equivalent_to(expected, 2))
    # One maximum for the tensor, whatever it is blocked along.
    scales = [("all-reduce", "u32", 2)] if format.has_global_scale else []
    self.assertEqual(collectives(text), scales)

  @parameterized.parameters(
    (jp.MXFP8, (None, ("x", "y"))),
    (jp.NVFP4, (None, ("x", "y"))),
    (jp.NVFP4, (("x", "y"), None)),
  )
  @pytest.mark.sample(1)
  def test_blocks_that_devices_do_not_share_evenly(self, format, spec):
    x = numbers(64, K)
    text = self.assert_same_bits(lambda x: jp.quantize_both(x, format), x, spec)
    # x is exchanged, and not gathered; no intermediate moves.
    found = collectives(text)
    self.assertNotIn("s32", [dtype for _, dtype, _ in found])

  @parameterized.product(
    format=(jp.MXFP4, jp.NVFP4), spec=(P(("x", "y")), P(None, ("x", "y")))
  )
  @pytest.mark.sample(2)
  def test_packed_results_leave_jit_with_uneven_shardings(self, format, spec):
    sharding = NamedSharding(self.mesh, spec)
    place = lambda leaf: jax.lax.with_sharding_constraint(leaf, sharding)

    @jax.jit
    def quantize(x):
      result = jp.quantize(place(x), format)
      return jax.tree.map(lambda x: place(x) if x.size > 1 else x, result)

    # XLA:CPU gathers the scales as f32, which would flush code 0.
    x = np.random.default_rng(4).normal(size=(3, 480)).astype(np.float32)
    actual = jax.device_get(quantize(x))
    contract.assert_same_bits(actual, jp.quantize(x, format))

  @parameterized.parameters(
    # Each along its own axis: random bits, a transform, both.
    ((0, {}), (1, {"hadamard": 16}), ("x", "y")),
    ((1, {"scale_up": True}), (0, {}), ("y", "x")),
    ((1, {"four_over_six": True}), None, ("x", "y")),
    ((1, {"square": (0,)}), None, ("y", "x")),
    ((1, {"square": (0,), "hadamard": 64}), None, (None, ("x", "y"))),
    # Merged dimensions, padding, and no dimension at all.
    ((blocked((0, 1), 2, 16), {}), None, (("x", "y"), None)),
    ((blocked((1,), 2, 48), {}), None, ("y", "x")),
    ((blocked((), 2, 16), {}), None, ("x", "y")),
  )
  @pytest.mark.sample(2)
  def test_options_of_recipes_have_the_bits_of_one_device(
    self, first, second, spec
  ):
    specs = [first] if second is None else [first, second]
    keys = (KEY, None)[: len(specs)]
    if "square" in first[1] or "four_over_six" in first[1]:
      keys = (None,)
    self.assert_same_bits(
      quantized(jp.NVFP4, *specs), numbers(64, 256), spec, *keys
    )

  @parameterized.parameters(("rbg", True), ("threefry2x32", False))
  @pytest.mark.sample(1)
  def test_bits_that_no_device_draws_alone(self, impl, partitionable):
    key = jax.random.key(1, impl=impl)
    with jax.threefry_partitionable(partitionable):
      self.assert_same_bits(
        lambda x: jp.quantize(x, jp.MXFP4, key=key), numbers(8, 64), ("x",)
      )

  @pytest.mark.full
  def test_global_scales_that_are_given_or_not_of_all(self):
    x = numbers(8, 4, 64)
    for kwargs in ({"global_scale": 0.25}, {"batch_dims": 1}):
      self.assert_same_bits(
        lambda x, kwargs=kwargs: jp.dequantize(
          jp.quantize(x, jp.NVFP4, **kwargs)
        ),
        x,
        ("x", None, "y"),
      )


class OptimizedTest(MeshTestCase, triton_ir.WithoutPtx):
  @quantization_lowerings.needs_library
  @parameterized.parameters(jp.MXFP8, jp.NVFP4)
  @pytest.mark.sample(1)
  def test_each_cpu_runs_kernels(self, format):
    x = self.put(np.ones((64, 256), np.float32), "x", "y")
    function = jax.jit(lambda x: jp.dequantize(jp.quantize(x, format)))
    text = function.lower(x).compile().as_text()
    self.assertRegex(text, r'"jaxplugin_quantize"')
    self.assertRegex(text, r'"jaxplugin_dequantize"')
    # Each has its share.
    self.assertRegex(text, r"f32\[16,128\]\S* custom-call")

  @quantization_lowerings.needs_compiler
  @parameterized.parameters(("b200", jp.NVFP4), ("h200", jp.MXFP8))
  @pytest.mark.full
  def test_each_gpu_runs_one_kernel_and_bytes_are_gathered(self, name, format):
    target = jp.named_target(name)
    mesh = deviceless.mesh(target, (4,), ("x",))
    rows = NamedSharding(mesh, P("x"))
    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16, sharding=rows)
    whole = NamedSharding(mesh, P())

    def both(x):
      x = jp.quantize_both(x, format)
      return [
        jax.lax.with_sharding_constraint(jp.dequantize(a), whole) for a in x
      ]

    compiled = deviceless.compile(both, x, target=target, mesh=mesh)
    text = compiled.as_text()
    # One that makes both, and before it what finds the largest numbers.
    kernels = 2 if format.has_global_scale else 1
    # "_ffi" of jax-triton 0.4.
    self.assertLen(
      re.findall(r'target="triton_kernel_call(?:_ffi)?"', text), kernels
    )
    found = collectives_lib.of_compiled(compiled, mesh)
    per_byte = 2 if format.is_fp4 else 1
    num_bytes = 512 * 1024 // per_byte + 512 * 1024 // format.block_size
    # Three quarters of both results come from other devices.
    self.assertEqual(
      collectives_lib.received(found, kind="all-gather", dtype="u8"),
      2 * num_bytes * 3 / 4,
    )
    rest = [(c.kind, c.dtype) for c in found if c.dtype != "u8"]
    scale = [("all-reduce", "u32")] if format.has_global_scale else []
    self.assertEqual(rest, scale)

  @quantization_lowerings.needs_compiler
  @pytest.mark.full
  def test_xla_compiles_no_kernel_for_the_maximum(self):
    """It would for each tensor, where the maximum is one of f32."""
    target = jp.named_target("b200")
    mesh = deviceless.mesh(target, (8,), ("x",))
    x = jax.ShapeDtypeStruct(
      (512, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("x"))
    )
    folder = folders.new(self)
    with jp.use_target(target):
      lowered = jax.jit(lambda x: jp.quantize(x, jp.NVFP4)).lower(x)
      compiled = lowered.compile({"xla_dump_to": str(folder)})
    # Those that four programs of each have found, of 16 rows.
    self.assertEqual(
      collectives(compiled.as_text()), [("all-reduce", "u32", 4)]
    )
    kernels = [path.read_text() for path in folder.glob("*.ptx")]
    if not kernels:
      self.skipTest("XLA of this jaxlib wrote no PTX")
    self.assertEmpty([text for text in kernels if "all_reduce" in text])

  @quantization_lowerings.needs_compiler
  @parameterized.parameters((jp.MXFP8, 1), (jp.MXFP4, 1), (jp.NVFP4, 2))
  @pytest.mark.sample(2)
  def test_gpus_read_their_share_once_for_each_thing_to_know(
    self, format, reads
  ):
    """One read finds the global scales, one quantizes along both axes.

    Each result is written once, what is packed along rows too.
    """
    target = jp.named_target("b200")
    mesh = deviceless.mesh(target, (4,), ("x",))
    x = jax.ShapeDtypeStruct(
      (1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("x"))
    )
    compiled = deviceless.compile(
      lambda x: jp.quantize_both(x, format), x, target=target, mesh=mesh
    )
    share = 1024 * 1024 // 4
    per_value = format.value_bits / 8 + 1 / format.block_size
    least = share * (2 * reads + 2 * per_value)
    moved = traffic.num_bytes(traffic.of_compiled(compiled))
    # A few bytes for each tile of 64 by 64.
    self.assertBetween(moved, least, 1.01 * least)
