# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers, emitted calls and errors of the backend "cutile".

`tile_language` runs the kernel's source on NumPy arrays. Only `InstalledTest`
needs cuda-tile. No GPU has run the kernel. The contract's whole suite takes
minutes:

  python -m jaxplugin.cutile_test --whole
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin import cutile
from jaxplugin.core import formats, targets
from jaxplugin.dot import backends, views
from jaxplugin.kernels.gpu.cutile import assembler, plans
from jaxplugin.runtime import lowering
from jaxplugin.testing import interpreted as triton_testing
from jaxplugin.testing.dot_suite import suite
from jaxplugin.testing.interpreter import tile_language

B200 = targets.named_target("b200", cudnn="9.13")
# Formats whose pairs one matrix instruction multiplies.
KINDS = (
  (jp.MXFP8, jp.MXFP8),
  (jp.MXFP8_E5M2, jp.MXFP8_E5M2),
  (jp.MXFP8, jp.MXFP4),
  (jp.MXFP4, jp.MXFP8_E5M2),
  (jp.MXFP4, jp.MXFP4),
  (jp.NVFP4, jp.NVFP4),
)


def interpreted(launch, inputs):
  """`cutile._call` on NumPy arrays."""
  # FP8 has no NumPy layout that a callback may rely on: bytes.
  given = [
    jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x
    for x in inputs
  ]

  def on_host(*inputs):
    names = [x.name for x in launch.inputs]
    arrays = map(np.array, inputs)
    return tile_language.run(launch, dict(zip(names, arrays, strict=True)))

  def in_thread(*inputs):
    return triton_testing.THREAD.submit(on_host, *inputs).result()

  output = launch.output
  result = jax.ShapeDtypeStruct(output.shape, output.dtype)
  return jax.pure_callback(in_thread, result, *given)


def interpret(test):
  """Has a test's dots run on NumPy arrays."""
  for module, name, replacement in (
    (cutile, "_call", interpreted),
    (assembler, "missing", lambda: ""),
    (
      lowering,
      "resolve_target",
      lambda override, _: override or triton_testing.CPU,
    ),
  ):
    test.enter_context(mock.patch.object(module, name, replacement))


@pytest.mark.full
class CutileDotTest(suite.DotShapesTestCase):
  """The shapes of the contract's suite; a call that it refuses goes to xla."""

  implementation = "cutile"
  kinds = KINDS
  cases_per_test = 1
  subnormal_spacing = 2.0**-149

  def setUp(self):
    super().setUp()
    interpret(self)

  def dot(self, *args, **kwargs):
    with jp.use_target(B200):
      try:
        return jp.block_scaled_dot(*args, implementation="cutile", **kwargs)
      except NotImplementedError as error:
        if not re.search(
          "cutile: (needs both|multiplies)",
          str(error),
        ):
          raise
    return jp.block_scaled_dot(*args, implementation="xla", **kwargs)


class WholeDotTest(suite.DotSuite, CutileDotTest):
  """All of it."""

  cases_per_test = 2


if "--whole" in sys.argv:
  sys.argv.remove("--whole")
else:
  del WholeDotTest


def quantized(format, rows, k, seed=0):
  rng = np.random.default_rng(seed)
  return jp.quantize(rng.normal(size=(rows, k)).astype(np.float32), format)


def lowered(*args, target=B200, **kwargs):
  """StableHLO of a dot, for a GPU that is not there."""
  dot = functools.partial(
    jp.block_scaled_dot, implementation="cutile", **kwargs
  )
  with jp.use_target(target):
    return jax.jit(dot).trace(*args).lower(lowering_platforms=("cuda",))


def fake_call(seen):
  """Patches `assembler.assemble` to return a fake cubin."""

  def assemble(specification, **_):
    seen.append(specification)
    return assembler.Assembled(symbol=specification["name"], cubin=b"cubin\0")

  return (
    mock.patch.object(assembler, "missing", lambda: ""),
    mock.patch.object(assembler, "assemble", assemble),
    mock.patch.dict("sys.modules", {"cuda.tile.jax": mock.MagicMock()}),
  )


class ValuesTest(parameterized.TestCase):
  @parameterized.parameters(
    # Padded rows of k; a batch, and rhs as a weight is prepared; both sides
    # merged out of several dimensions.
    (jp.NVFP4, jp.NVFP4, (130, 48), (40, 48), False),
    (jp.MXFP8, jp.MXFP4, (3, 20, 128), (3, 140, 128), True),
    (jp.MXFP4, jp.MXFP4, (2, 65, 64), (96, 64), False),
  )
  def test_call_with_everything(self, lhs_format, rhs_format, lhs, rhs, ready):
    interpret(self)
    rng = np.random.default_rng(0)
    x, w = (
      jp.quantize(rng.normal(size=shape).astype(np.float32), format)
      for shape, format in ((lhs, lhs_format), (rhs, rhs_format))
    )
    exact = [np.asarray(jp.dequantize(a), np.float64) for a in (x, w)]
    product = exact[0] @ np.swapaxes(exact[1], -1, -2)
    bias = rng.normal(size=rhs[-2]).astype(np.float32)
    residual = rng.normal(size=product.shape).astype(np.float32)
    if ready:
      w = jp.ScaledArray(
        w.values,
        jp.swizzle_scale(w.scale),
        w.global_scale,
        rhs_format,
        scale_layout="swizzled_128x4",
      )
    with jp.use_target(B200):
      found = jp.block_scaled_dot(
        x,
        w,
        bias=bias,
        activation="relu",
        residual=residual,
        implementation="cutile",
      )
    expected = np.maximum(product + bias, 0) + residual
    np.testing.assert_allclose(
      found, expected, rtol=0, atol=4e-7 * np.abs(expected).max()
    )


class EmittedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.seen = []
    for patch in fake_call(self.seen):
      self.enter_context(patch)

  def test_the_call_has_code_grid_and_buffers_in_the_kernels_order(self):
    # 3 x 2 tiles of 256 x 256; lhs_scale and rhs_scale in tiles of 512 bytes.
    x, w = quantized(jp.MXFP8, 600, 512), quantized(jp.MXFP8, 500, 512)
    text = lowered(
      x, w, bias=np.ones(500, np.float32), preferred_element_type=jnp.bfloat16
    ).as_text()
    (line,) = re.findall(r".*@cutile_launch.*", text)
    # out comes first in the kernel, and last among inputs and outputs.
    self.assertIn("buffer_ids = dense<[5, 0, 1, 2, 3, 4]>", line)
    self.assertIn("grid_x = 6 : i32", line)
    self.assertIn('function_name = "cutile_mxfp8_mxfp8_256x256x128_2cta"', line)
    self.assertIn("num_inputs = 5 : i32", line)
    self.assertIn("index_bitwidths = dense<32> : tensor<6xi32>", line)
    self.assertIn('cubin_code = "cubin\\00"', line)
    operands = re.search(r" : \((.*)\) -> (.*)", line)
    self.assertEqual(
      operands[1],
      "tensor<1x600x512xf8E4M3FN>, tensor<1x5x4x32x16xui8>,"
      " tensor<1x500x512xf8E4M3FN>, tensor<1x4x4x32x16xui8>,"
      " tensor<1x1x500xf32>",
    )
    self.assertEqual(operands[2], "tensor<1x600x500xbf16>")
    (specification,) = self.seen
    self.assertEqual(specification["gpu_code"], "sm_100")
    self.assertEqual(specification["num_ctas"], 2)

  def test_swizzled_scales_of_a_weight_are_not_moved(self):
    moves = lambda *args: lowered(*args).as_text().count("stablehlo.transpose")
    # k = 48 ends inside of a tile of scales: the weight's scale is brought into
    # the linear layout and swizzled again.
    for k, expected in ((256, 1), (48, 3)):
      x, w = quantized(jp.NVFP4, 128, k), quantized(jp.NVFP4, 300, k)
      self.assertEqual(moves(x, w), 2)
      swizzled = jp.ScaledArray(
        *(w.values, jp.swizzle_scale(w.scale), w.global_scale, jp.NVFP4),
        scale_layout="swizzled_128x4",
      )
      with self.subTest(k=k):
        self.assertEqual(moves(x, swizzled), expected)

  def test_code_is_compiled_for_the_target(self):
    x = quantized(jp.MXFP4, 32, 64)
    for name in ("b200", "b300", "rtx5090"):
      lowered(x, x, target=targets.named_target(name))
    architectures = [each["gpu_code"] for each in self.seen]
    self.assertEqual(architectures, ["sm_100", "sm_103", "sm_120"])

  def test_rewritten_modules_take_it_too(self):
    x = jax.ShapeDtypeStruct((128, 256), formats.E4M3)
    scale = jax.ShapeDtypeStruct((128, 8), formats.E8M0)

    def dot(*args):
      return jax.ffi.ffi_call(
        "__op$block_scaled_dot", jax.ShapeDtypeStruct((128, 128), jnp.float32),
        custom_call_api_version=1,
      )(*args)  # fmt: skip

    module = jax.jit(dot).lower(x, x, scale, scale).as_text()
    text = jp.rewrite(module, B200, implementation="cutile")
    self.assertIn("@cutile_launch", text)
    self.assertNotIn("__op$block_scaled_dot", text)


class DecisionTest(parameterized.TestCase):
  def explained(self, target=B200, lhs=jp.MXFP8, rhs=jp.MXFP8, k=256, **kwargs):
    x, w = quantized(lhs, 130, k), quantized(rhs, 64, k)
    dot = functools.partial(jp.block_scaled_dot, **kwargs)
    (found,) = jp.explain(dot, x, w, target=target)
    return found

  def reason(self, **kwargs):
    refusals = self.explained(**kwargs).decision.refusals
    return {r.implementation: r.reason for r in refusals}["cutile"]

  def test_it_is_refused_or_no_default_with_the_reason(self):
    on = lambda name: {"target": targets.named_target(name)}
    for changes, reason in (
      (on("b200"), "^supported, but used only if requested$"),
      (on("b300"), "^supported, but used only if requested$"),
      (on("rtx5090"), "^supported, but used only if requested$"),
      (on("h100"), "sm_103, sm_120, .* is h100"),
      (on("gb10"), "the target is gb10"),
      (on("cpu"), "needs an NVIDIA GPU"),
      ({"rhs": jp.MXFP8_E5M2}, "no FP8 type contains both E4M3 and E5M2"),
      ({"rhs": jp.MXFP6_E2M3}, "multiplies FP8 and FP4, got mxfp6_e2m3"),
      ({"lhs": jp.NVFP4, "rhs": jp.MXFP4}, "one kind of scale"),
    ):
      with self.subTest(reason):
        self.assertRegex(self.reason(**changes), reason)

  def test_asked_for_it_is_told_what_it_does(self):
    found = self.explained(
      lhs=jp.NVFP4, rhs=jp.NVFP4, k=48, implementation="cutile"
    )
    self.assertEqual(found.decision.implementation, "cutile")
    self.assertEqual(found.decision.padding, "k 48 to 64")
    self.assertEqual(found.decision.global_scale, "fused")
    notes = " ".join(found.decision.notes)
    self.assertIn("kernel: cutile_nvfp4_nvfp4_256x256x256_2cta", notes)
    self.assertIn("no GPU has run it yet", notes)
    self.assertIn("scales of lhs and rhs are swizzled before each call", notes)

  def test_forced_on_hopper_raises_with_the_reason(self):
    x = quantized(jp.MXFP8, 32, 64)
    with self.assertRaisesRegex(
      NotImplementedError, "cutile: compiles for sm_"
    ):
      lowered(x, x, target=targets.named_target("h200"))

  def test_candidates_are_of_the_problem(self):
    problem = views.problem_of(self.explained().problem)
    found = [cutile.config_of(c) for c in cutile.candidates(problem, B200)]
    self.assertNotEmpty(found)
    for config in found:
      launch = cutile.launch_of(problem, B200, config=config)
      self.assertEndsWith(launch.name, str(config))
    self.assertEqual(
      cutile.candidates(problem, targets.named_target("h100")), []
    )


class ConfigTest(parameterized.TestCase):
  """Configs as tables of measured choices have them."""

  CONFIG = dataclasses.asdict(
    plans.TileConfig(block_m=128, block_n=256, block_k=128)
  )

  def problem(self):
    x = quantized(jp.MXFP8, 512, 256)
    (found,) = jp.explain(jp.block_scaled_dot, x, x, target=B200)
    return found.problem

  def test_every_candidate_is_its_fields_and_holds(self):
    problem, backend = self.problem(), backends.table()["cutile"]
    found = backend.tunable.candidates(problem, B200)
    self.assertNotEmpty(found)
    for fields in found:
      config = cutile.config_of(dict(fields))
      self.assertEqual(dict(fields), dataclasses.asdict(config))
      self.assertIsNone(backend.config_error(fields, problem, B200))

  def test_config_that_does_not_hold_is_told(self):
    problem, backend = self.problem(), backends.table()["cutile"]
    for changes, reason in (
      ({"block_m": 256}, "128 for each of one or two CTAs"),
      ({"block_k": 96.0}, "block_k must be a whole number above 0, got 96.0"),
      ({"group_m": 0}, "group_m must be a whole number above 0, got 0"),
      ({"warps": 4}, "must have block_k, block_m, .*, got .*warps"),
    ):
      fields = tuple({**self.CONFIG, **changes}.items())
      self.assertRegex(backend.config_error(fields, problem, B200), reason)

  def test_configured_backend_plans_and_emits_so(self):
    seen = []
    for patch in fake_call(seen):
      self.enter_context(patch)
    problem = self.problem()
    backend = backends.table()["cutile"].configured((*self.CONFIG.items(),))
    notes = " ".join(backend.plan(problem, B200).notes)
    self.assertIn(
      "kernel: cutile_mxfp8_mxfp8_128x256x128 the kernel was compiled", notes
    )
    table = {**backends.table(), "cutile": backend}
    with mock.patch.object(backends, "table", lambda: table):
      x = quantized(jp.MXFP8, 512, 256)
      lowered(x, x)
    self.assertEqual(seen[0]["name"], "cutile_mxfp8_mxfp8_128x256x128")

  def test_without_cuda_tile_no_table_holds(self):
    with mock.patch.object(assembler, "missing", lambda: "needs cuda-tile"):
      self.assertIsNone(cutile.source(B200))
    with mock.patch.object(assembler, "missing", lambda: ""):
      found = cutile.source(B200)
    self.assertLen(found.kernels, 64)
    self.assertEqual(found.toolchain[0][0], "cuda-tile")


class ErrorTest(parameterized.TestCase):
  def lower(self, **patches):
    for name, value in patches.items():
      self.enter_context(mock.patch.object(assembler, name, value))
    x = quantized(jp.MXFP8, 32, 64)
    return lowered(x, x)

  def test_without_cuda_tile_lowering_says_what_to_install(self):
    with self.assertRaisesRegex(
      NotImplementedError,
      r"block_scaled_dot: implementation cutile: needs cuda-tile, which is not"
      r" installed; pip install 'cuda-tile\[tileiras\]'; or leave",
    ):
      self.lower(
        missing=lambda: f"needs cuda-tile, which is not installed;"
        f" {assembler.INSTALL}"
      )

  def test_code_that_does_not_compile_is_told_with_its_name(self):
    def assemble(specification):
      raise assembler.AssemblerError(f"{specification['name']}: no registers")

    with self.assertRaisesRegex(
      NotImplementedError, "cutile: cutile_mxfp8_mxfp8_128x128x128: no regist"
    ):
      self.lower(missing=lambda: "", assemble=assemble)

  def test_explain_tells_what_lowering_lacks(self):
    self.enter_context(
      mock.patch.object(assembler, "missing", lambda: "needs cuda-tile")
    )
    x = quantized(jp.MXFP8, 32, 64)
    dot = functools.partial(jp.block_scaled_dot, implementation="cutile")
    (found,) = jp.explain(dot, x, x, target=B200)
    self.assertEqual(found.lowering_error, "needs cuda-tile")


@absltest.skipIf(assembler.missing(), assembler.missing() or "-")
class InstalledTest(absltest.TestCase):
  """With cuda-tile: compiled, and as its own lowering has it; never run."""

  def test_lowered_for_a_gpu_that_is_not_there(self):
    x, w = quantized(jp.NVFP4, 300, 512), quantized(jp.NVFP4, 256, 512)
    text = lowered(x, w, preferred_element_type=jnp.bfloat16).as_text()
    (line,) = re.findall(r".*@cutile_launch.*", text)
    self.assertIn('cubin_code = "\\7FELF', line)

  def test_the_calls_attributes_are_those_of_cuda_tiles_own(self):
    import cuda.tile as ct
    import cuda.tile._compile as ct_compile
    from cuda.tile import jax as ct_jax

    def scaled(x, y):
      ct.store(y, ct.bid(0), ct.load(x, ct.bid(0), 16) * 2)

    def own(x):
      out = ct_jax.OutputPlaceholder(x.shape, x.dtype)
      return ct_jax.cutile_call((4,), ct.kernel(scaled), (x, out))

    def attributes(text):
      (line,) = re.findall(r".*@cutile_launch.*", text)
      (found,) = re.findall(r"mhlo.backend_config = \{(.*?)\}, operand", line)
      found = re.sub(r'"(\\.|[^"\\])*"', '""', found)
      return sorted(
        re.sub(r"dense<.*?> : tensor<\d+x(\w+)>", r"\1", x.strip())
        for x in re.sub(r"\[[^]]*\]", "", found).split(", ")
      )

    with mock.patch.object(ct_compile, "get_sm_arch", lambda: "sm_100"):
      x = jax.ShapeDtypeStruct((64,), np.float32)
      theirs = jax.jit(own).trace(x).lower(lowering_platforms=("cuda",))
    x = quantized(jp.MXFP8, 32, 64)
    numbers = re.compile(r"\b\d+ : ")
    self.assertEqual(
      [numbers.sub("", x) for x in attributes(lowered(x, x).as_text())],
      [numbers.sub("", x) for x in attributes(theirs.as_text())],
    )
