# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` by Triton kernels: its bits in the interpreter, and its modules.

In Triton's interpreter, kernels are compared with the C++ kernels.
api_bits_test.py compares those with NumPy, and cpu_test.py with operations.
"""

import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.arrays import layouts
from jaxplugin.core import formats, targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.quantization import backends, problems, quantize_primitive
from jaxplugin.quantization.backends import triton
from jaxplugin.runtime import lowering, triton_library
from jaxplugin.testing import contract, quantization_lowerings, triton_ir
from jaxplugin.testing.oracles import quantization_cases

MXFP8, MXFP8_E5M2 = formats.MXFP8, formats.MXFP8_E5M2
MXFP4, NVFP4 = formats.MXFP4, formats.NVFP4
P = jax.sharding.PartitionSpec
CPU = quantization_lowerings.OPERATIONS
H200 = targets.named_target("h200")
# One for each architecture of an NVIDIA GPU.
NVIDIA_TARGETS = ("a100", "l40s", "h200", "b200", "b300", "rtx5090", "gb10")
X = jax.ShapeDtypeStruct((512, 768), jnp.bfloat16)
WITHOUT_TRITON = H200.without_library(targets.JAX_TRITON, "it is away")
MXFP8_TRIP, NVFP4_TRIP = map(quantization_lowerings.round_trip, (MXFP8, NVFP4))


def of_three_formats(x):
  return (
    quantization.quantize(x, MXFP8),
    quantization.quantize(x, MXFP4, axis=0),
    quantization.quantize(x, NVFP4),
  )


@quantization_lowerings.needs_triton
class BitwiseTest(quantization_lowerings.InterpretedTestCase):
  def check(self, case):
    target = targets.named_target(case.target)
    self.assert_same_bits(case.call, case.array(), target)
    if case.triton is not None:
      launched = [name.rpartition("_")[0] for name in self.names]
      self.assertCountEqual(launched, case.triton)

  @parameterized.named_parameters(
    *quantization_cases.rows(is_full=False, for_triton=True)
  )
  def test_kernels_have_the_bits_of_quantize(self, case):
    self.check(case)

  @parameterized.named_parameters(
    *quantization_cases.rows(is_full=True, for_triton=True)
  )
  @pytest.mark.sample(1)
  def test_more_kernels_have_the_bits_of_quantize(self, case):
    self.check(case)

  @parameterized.parameters(
    (MXFP8, (37, 352), {}),
    (MXFP4, (3, 5, 96), {"packed": True}),
    (NVFP4, (37, 80), {}),
    (NVFP4, (1, 512), {"global_scale": np.float32(0.37)}),
  )
  def test_kernel_that_reads_m_has_the_bits_of_quantize(
    self, format, shape, options
  ):
    x = quantization_lowerings.numbers(shape, jnp.bfloat16)
    call = functools.partial(quantization.quantize, format=format, **options)
    target = dataclasses.replace(H200, core_count=1)
    with mock.patch.object(
      problems.QuantizationProblem, "sizes_are_static", False
    ):
      self.assert_same_bits(call, x, target)
    self.assertEndsWith(self.names[0], "_of_m")
    self.assertLen(self.names, 1)

  @parameterized.product(
    format=(MXFP8, MXFP8_E5M2, NVFP4), shape=((3, 7, 96), (130, 160), (128, 64))
  )
  @pytest.mark.sample(1)
  def test_whole_tiles_are_written_for_a_product(self, format, shape):
    x = quantization_lowerings.numbers(shape, np.float32)
    given = jnp.float32(0.37) if format.has_global_scale else None

    def in_tiles(x):
      target = targets.overriding_target()
      return quantize_primitive.quantize_in_whole_tiles(
        x, given, format, target
      )

    self.assert_same_bits(in_tiles, x)
    with targets.use_target(CPU):
      values, scale = in_tiles(x)
      linear = quantization.quantize(
        x, format, global_scale=given, packed=False
      )
    *batch, rows, _ = shape
    more = [(0, 0)] * len(batch) + [(0, -rows % 128), (0, 0)]
    np.testing.assert_array_equal(
      np.asarray(values).astype(np.float32),
      np.pad(np.asarray(linear.values).astype(np.float32), more),
    )
    np.testing.assert_array_equal(
      np.asarray(scale).view(np.uint8),
      np.asarray(layouts.swizzle_scale(linear.scale)).view(np.uint8),
    )

  def test_inside_of_shard_map_each_share_is_quantized_in_place(self):
    mesh = jax.make_mesh((8,), ("x",))
    quantize = jax.shard_map(
      lambda x: quantization.quantize(x, MXFP8),
      mesh=mesh,
      in_specs=P("x"),
      out_specs=P("x"),
    )
    x = quantization_lowerings.numbers((16, 64), np.float32)
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    self.assert_same_bits(
      jax.jit(quantize), jax.device_put(np.asarray(x), sharding)
    )


def triton_calls(function, x=X, target=H200, platforms=("cuda",)):
  """Returns how many kernels a module calls."""
  with targets.use_target(target):
    text = quantization_lowerings.lowered_text(function, x, platforms=platforms)
  return text.count("@triton_kernel_call")


@quantization_lowerings.needs_jax_triton
class LoweringTest(triton_ir.WithoutPtx):
  """Which modules call the kernels."""

  @parameterized.parameters("linear", "swizzled_128x4")
  def test_kernel_writes_each_layout_and_nothing_rearranges_it(self, layout):
    quantize = lambda x: quantization.quantize(x, MXFP8, scale_layout=layout)
    with targets.use_target(H200):
      text = quantization_lowerings.lowered_text(
        quantize, X, platforms=("cuda",)
      )
    self.assertEqual(text.count("@triton_kernel_call"), 1)
    self.assertNotIn("stablehlo.transpose", text)
    text = quantization_lowerings.lowered_text(quantize, X)
    moved = text.count("stablehlo.transpose")
    self.assertEqual(moved > 0, layout != "linear")

  @parameterized.named_parameters(
    # (name, function, count, other arguments of `triton_calls`)
    ("dequantizes_by_operations", MXFP8_TRIP, 1, {}),
    ("each_platform", NVFP4_TRIP, 2, {"platforms": ("cuda", "cpu")}),
    *(
      (name, NVFP4_TRIP, 0, {"platforms": (name,)})
      for name in ("cpu", "tpu", "rocm")
    ),
    ("amd_gpu_that_is_not_attached", MXFP8_TRIP, 0,
     {"target": targets.named_target("mi355x"), "platforms": ("rocm",)}),
    ("without_triton", MXFP8_TRIP, 0, {"target": WITHOUT_TRITON}),
    ("empty", NVFP4_TRIP, 0, {"x": jax.ShapeDtypeStruct((0, 64), "float32")}),
  )  # fmt: skip
  def test_module_calls_kernels(self, function, count, options):
    self.assertEqual(triton_calls(function, **options), count)

  def test_exported_module_gets_operations(self):
    with targets.use_target(H200):
      exported = jax.export.export(jax.jit(NVFP4_TRIP), platforms=("cuda",))(X)
    self.assertNotIn("triton_kernel_call", exported.mlir_module())

  @parameterized.parameters(
    # The partitioner assigns automatic axes later.
    (jax.sharding.AxisType.Auto, 0),
    (jax.sharding.AxisType.Explicit, 1),
  )
  @pytest.mark.sample(1)
  def test_partitioned_module_leaves_kernels_to_each_device(self, kind, count):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    x = jax.ShapeDtypeStruct(
      X.shape, X.dtype, sharding=jax.sharding.NamedSharding(mesh, P("x"))
    )
    self.assertEqual(triton_calls(MXFP8_TRIP, x), count)


@quantization_lowerings.needs_jax_triton
class CompiledTest(parameterized.TestCase):
  @parameterized.parameters(*NVIDIA_TARGETS)
  @pytest.mark.sample(3)
  def test_kernels_are_compiled_for_each_gpu(self, name):
    target = targets.named_target(name)
    calls = triton_calls(of_three_formats, target=target)
    self.assertEqual(calls, 1 + 1 + 2)


@quantization_lowerings.needs_compiler
class OptimizedTest(triton_ir.WithoutPtx):
  """Programs that XLA's GPU compiler emits without a GPU."""

  def opcodes(self, text):
    """Opcodes of the entry computation's instructions."""
    entry = text[text.index("\nENTRY") :]
    return set(re.findall(r"^  (?:ROOT )?%\S+ = .*? ([a-z-]+)\(", entry, re.M))

  @parameterized.product(name=("h200", "b200"), dtype=("bfloat16", "float32"))
  @pytest.mark.full
  def test_only_kernels_run(self, name, dtype):
    compiled = deviceless.compile(
      lambda x: [quantization.quantize(x, f) for f in formats.FORMATS],
      jax.ShapeDtypeStruct(X.shape, dtype),
      target=targets.named_target(name),
    )
    text = compiled.as_text()
    self.assertEqual(text.count(" custom-call("), 1 + 1 + 1 + 2)
    self.assertContainsSubset({"triton_kernel_call"}, re.findall(r"\w+", text))
    self.assertContainsSubset(
      self.opcodes(text),
      {"parameter", "custom-call", "get-tuple-element", "bitcast", "tuple"},
    )

  def test_operations_would_be_seen(self):
    text = deviceless.compile(
      lambda x: quantization.quantize(x, MXFP8), X, target=WITHOUT_TRITON
    ).as_text()
    self.assertIn("fusion", self.opcodes(text))
    self.assertNotIn("triton_kernel_call", text)

  def test_fp8_along_the_first_axis_is_written_in_place(self):
    text = deviceless.compile(
      lambda x: quantization.quantize(x, MXFP8, axis=0), X, target=H200
    ).as_text()
    self.assertNotIn("transpose", text)
    self.assertNotIn("fusion", self.opcodes(text))

  @parameterized.parameters(MXFP8, NVFP4)
  @pytest.mark.sample(1)
  def test_inside_of_shard_map_each_gpu_runs_the_kernels(self, format):
    mesh = deviceless.mesh(H200, (4,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    quantize = jax.shard_map(
      lambda x: quantization.dequantize(quantization.quantize(x, format)),
      mesh=mesh,
      in_specs=P("x"),
      out_specs=P("x"),
    )
    text = deviceless.compile(
      quantize,
      jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding),
      target=H200,
      mesh=mesh,
    ).as_text()
    width = 768 // (2 if format.is_fp4 else 1)
    self.assertRegex(text, rf"u8\[1,128,{width}\].*triton_kernel_call")


def problem(**changes):
  fields = {
    "shape": (512, 768),
    "dtype": np.dtype(jnp.bfloat16),
    "format": MXFP8,
    "axis": 1,
  }
  return problems.QuantizationProblem.along(**(fields | changes))


def chosen(problem, target):
  """The implementation on a target, and why not another one."""
  module = lowering.Module(platforms=(target.platform,))
  with mock.patch.object(triton_library, "lowering_refusal", lambda _: None):
    told = backends.explained(problem, module, target)
  return told.implementation, told.reason


OTHER_FORMAT = contract.block_format(
  "mxfp8_per_16", formats.E4M3, formats.E8M0, 16
)


class ChoiceTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, "cpu", "needs an NVIDIA or AMD GPU, the target's platform is cpu"),
    ({"format": OTHER_FORMAT}, "h200", "supports mxfp8.*got mxfp8_per_16"),
    ({"dtype": np.dtype(np.float64)}, "h200", "float16, got float64"),
    ({"shape": jax.export.symbolic_shape("32*m, 64"), "axis": 0}, "h200",
      "needs static sizes, or one blocked dimension"),
    ({"shape": (None, 768), "scale_layout": layouts.SWIZZLED}, "h200",
      "needs a linear scale of an unsharded array"),
    ({"shape": (0, 768)}, "h200", "needs sizes of at least 1"),
    ({"shape": (2**31 * 32, 64)}, "h200",
      r"needs 4294967296 programs, a launch has at most 2147483647"),
  )  # fmt: skip
  def test_refusals_say_why(self, changes, name, reason):
    target = targets.named_target(name)
    refusal = triton.supports(problem(**changes), target)
    self.assertRegex(refusal.reason, reason)

  def test_architecture_without_kernels_is_refused(self):
    target = dataclasses.replace(H200, compute_capability=(7, 5))
    refusal = triton.supports(problem(), target)
    self.assertRegex(refusal.reason, "has kernels for sm_80.*sm_75")

  def test_triton_is_chosen_for_each_named_gpu_if_it_can_lower(self):
    for name in targets.TARGET_NAMES:
      target = targets.named_target(name)
      choose = functools.partial(chosen, problem())
      expected = "xla" if name == "cpu" else "triton"
      self.assertEqual(
        choose(target.with_library(targets.JAX_TRITON))[0], expected, name
      )
      if target.platform == "rocm":
        implementation, reason = choose(target)
        self.assertEqual(implementation, "xla")
        self.assertRegex(reason, "triton.*only if one is attached")

  @parameterized.parameters(
    ({}, "avx2", "cpu", ""),
    ({}, None, "xla", "cpu: the target has no CPU kernels"),
    ({"axis": 0}, "avx2", "xla", "cpu: kernels are slower for FP8"),
    ({"axis": 0, "format": NVFP4}, "avx2", "cpu", ""),
    (
      {"format": OTHER_FORMAT},
      "avx2",
      "xla",
      "cpu: its kernels do not support",
    ),
  )
  def test_choice_on_cpus(self, changes, kernels, implementation, reason):
    target = dataclasses.replace(CPU, cpu_kernels=kernels)
    told, why = chosen(problem(**changes), target)
    self.assertEqual(told, implementation)
    self.assertStartsWith(why, reason)

  def test_problem_is_printed_by_what_it_asks_for(self):
    self.assertEqual(str(problem()), "bfloat16[512, 768] to mxfp8, axis 1")
