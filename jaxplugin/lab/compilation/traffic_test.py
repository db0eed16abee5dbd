# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes of kernels are those by hand, and those that XLA counts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.lab.compilation import deviceless, traffic
from jaxplugin.testing import installed

needs_compiler = installed.needs("jax_cuda13_plugin")

# f32[64] has 256 bytes.
TEXT = """HloModule m

%sliced (p: f32[8,64], i: s32[]) -> f32[1,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %half = bf16[8,64]{1,0} convert(%p)
  ROOT %slice = bf16[1,64]{1,0} dynamic-slice(%half, %i, %zero), dynamic_slice_sizes={1,64}
}

%updated (p: f32[8,64], row: f32[1,64], i: s32[]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %row = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[8,64]{1,0} dynamic-update-slice(%p, %row, %i, %zero)
}

%body (state: (s32[], f32[64])) -> (s32[], f32[64]) {
  %state = (s32[], f32[64]{0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %x = f32[64]{0} get-tuple-element(%state), index=1
  %next = f32[64]{0} negate(%x)
  ROOT %tuple = (s32[], f32[64]{0}) tuple(%n, %next)
}

%condition (state: (s32[], f32[64])) -> pred[] {
  %state = (s32[], f32[64]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%small (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %copy = f32[64]{0} copy(%x)
}

%large (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %one = f32[64]{0} negate(%x)
  ROOT %two = f32[64]{0} negate(%one)
}

ENTRY %main (x: f32[64], stack: f32[8,64], i: s32[], code: f4e2m1fn[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %stack = f32[8,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %code = f4e2m1fn[64]{0} parameter(3)
%LINE%
}
"""  # noqa: E501
STATE = "%state = (s32[], f32[64]{0}) tuple(%i, %x)"
LOOP = (
  "%loop = (s32[], f32[64]{0}) while(%state), condition=%condition, body=%body"
)
TRIPS = ', backend_config={"known_trip_count":{"n":"5"}}'
SUM = (
  "%bits = u32[64]{0} bitcast(%x)",
  "ROOT %sum = f32[64]{0} add(%x, %bits)",
)
CALL = (
  '%call = (u8[64]{0}, u8[4096]{0}) custom-call(%x), custom_call_target="f"',
  "ROOT %first = u8[64]{0} get-tuple-element(%call), index=0",
)
# Lines of the entry computation, and (bytes read, bytes written, times).
ROWS = {
  "array_is_read_once": (SUM, [(256, 256, 1)]),
  "scratch_is_free": (CALL, [(256, 64, 1)]),
  "fp4_is_half_a_byte": (
    ["ROOT %y = f32[64]{0} convert(%code)"],
    [(32, 256, 1)],
  ),
  "copy_is_whole": (
    [
      "%copy = f32[8,64]{1,0} copy(%stack)",
      "ROOT %y = f32[1,64]{1,0} slice(%copy), slice={[0:1], [0:64]}",
    ],
    [(2048, 2048, 1), (256, 256, 1)],
  ),
  "fused_slice_is_read": (
    ["ROOT %y = bf16[1,64] fusion(%stack, %i), kind=kLoop, calls=%sliced"],
    [(256 + 4, 128, 1)],
  ),
  "fused_update_is_written": (
    [
      "%row = f32[1,64]{1,0} bitcast(%x)",
      "ROOT %y = f32[8,64] fusion(%stack, %row, %i), kind=kLoop,"
      " calls=%updated",
    ],
    [(256 + 4, 256, 1)],
  ),
  "update_is_written": (
    [
      "%row = f32[1,64]{1,0} bitcast(%x)",
      "ROOT %y = f32[8,64]{1,0} dynamic-update-slice(%stack, %row, %i, %i)",
    ],
    [(256 + 4, 256, 1)],
  ),
  "trips_count": ([STATE, f"ROOT {LOOP}{TRIPS}"], [(256, 256, 5)]),
  "largest_branch_counts": (
    [
      "ROOT %y = f32[64]{0} conditional(%i, %x, %x),"
      " branch_computations={%small, %large}"
    ],
    [(256, 256, 1)] * 2,
  ),
  "collectives_do_not_count": (
    [
      "%start = f32[64]{0} all-reduce-start(%x), to_apply=%small",
      "ROOT %done = f32[64]{0} all-reduce-done(%start)",
    ],
    [],
  ),
}


def of_lines(lines):
  return traffic.of_text(
    TEXT.replace("%LINE%", "\n".join(map("  ".__add__, lines)))
  )


class RulesTest(parameterized.TestCase):
  @parameterized.parameters(*ROWS)
  def test_bytes_are_those_by_hand(self, name):
    lines, expected = ROWS[name]
    found = [(k.read, k.written, k.times) for k in of_lines(lines)]
    self.assertEqual(found, expected)

  def test_loop_without_a_count_is_a_bound(self):
    (kernel,) = of_lines([STATE, f"ROOT {LOOP}"])
    self.assertTrue(kernel.is_bound)
    self.assertEqual(kernel.times, 1)


def norm(x, y):
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) + y


class CompiledTest(parameterized.TestCase):
  @parameterized.parameters(
    lambda x, y: jnp.sin(x) * y,
    lambda x, y: x @ y,
    norm,
  )
  def test_bytes_are_those_of_xla(self, function):
    """XLA analyzes fusions and dots, but not custom calls."""
    x = jnp.ones((256, 256))
    compiled = jax.jit(function).lower(x, x).compile()
    found = traffic.num_bytes(traffic.of_compiled(compiled))
    self.assertEqual(found, compiled.cost_analysis()["bytes accessed"])

  def test_activation_with_a_fused_reshape_does_not_quantize(self):
    text = """HloModule m

%fused (p: f32[8,64]) -> bf16[512] {
  %p = f32[8,64]{1,0} parameter(0)
  %exp = f32[8,64]{1,0} exponential(%p), metadata={op_name="jit(silu)/exp"}
  %half = bf16[8,64]{1,0} convert(%exp)
  ROOT %flat = bf16[512]{0} bitcast(%half), metadata={op_name="bfloat16 to mxfp8 by cpu/reshape"}
}

ENTRY %main (x: f32[8,64]) -> u8[528] {
  %x = f32[8,64]{1,0} parameter(0)
  %y = bf16[512]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="bfloat16 to mxfp8 by cpu/reshape"}
  ROOT %q = u8[528]{0} custom-call(%y), custom_call_target="q", metadata={op_name="bfloat16 to mxfp8 by cpu/ffi_call"}
}
"""  # fmt: skip  # noqa: E501
    first, second = traffic.of_text(text)
    self.assertEqual((first.kind, second.kind), ("producer", "quantize"))
    # The bf16 array is written and read, and bytes are written.
    self.assertEqual(second.quantizing, 2 * 1024 + 528)

  def test_random_numbers_and_vector_norms_are_no_producers(self):
    def function(x):
      noise = jax.random.normal(jax.random.key(0), x.shape)
      return x * noise, jnp.linalg.norm(x, axis=0)

    compiled = jax.jit(function).lower(jnp.ones((64, 64))).compile()
    kinds = {kernel.kind for kernel in traffic.of_compiled(compiled)}
    self.assertEqual(kinds, {"other"})

  def test_quantizing_is_what_it_is_by_hand(self):
    """A value has 2 bytes in bf16, and 1 + 1 / 32 in MXFP8."""
    rows, k = 64, 256
    x = jnp.ones((rows, k), jnp.bfloat16)

    def separate(x):
      with jax.named_scope("norm"):
        y = norm(x.astype(jnp.float32), 0).astype(x.dtype)
      return jp.quantize(y, "mxfp8")

    fused = lambda x: jp.nn.rms_norm(x, out_format="mxfp8")
    size, quantized = rows * k * 2, rows * k * (1 + 1 / 32)
    found = {}
    for function in separate, fused:
      kernels = traffic.of_compiled(jax.jit(function).lower(x).compile())
      found[function] = traffic.quantizing(kernels)
      kinds = {kernel.kind for kernel in kernels}
      self.assertEqual("producer" in kinds, function is separate)
      self.assertIn("quantize", kinds)
    # Written, read, and written again.
    self.assertEqual(found[separate], size + size + quantized)
    self.assertEqual(found[fused], quantized)
    (kernel,) = kernels
    self.assertEqual(kernel.num_bytes, size + quantized)

  @needs_compiler
  @pytest.mark.lab
  def test_two_global_scales_are_fused_into_a_dot_of_xla(self):
    """No kernel writes f32."""
    n = 2048
    x = jax.eval_shape(lambda: jp.quantize(jnp.zeros((n, n)), "nvfp4"))
    dot = functools.partial(
      jp.block_scaled_dot,
      preferred_element_type=jnp.bfloat16,
      implementation="xla",
    )
    compiled = deviceless.compile(dot, x, x, target=jp.named_target("h200"))
    kernels = traffic.of_compiled(compiled)
    found = [(k.read, k.written) for k in kernels if k.num_bytes > 1000]
    size, quantized = n * n * 2, n * n * (1 / 2 + 1 / 16)
    # Both operands are dequantized to bf16, and multiplied.
    self.assertEqual(found[:2], [(quantized, size)] * 2)
    ((read, written),) = found[2:]
    self.assertBetween(read, 2 * size, 2 * size + 16)
    self.assertEqual(written, size)

  @needs_compiler
  @pytest.mark.lab
  def test_two_passes_of_nvfp4_are_what_they_are_by_hand(self):
    """The first pass reads for the global scale, the second one quantizes."""
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    size, quantized = 64 * 256 * 2, 64 * 256 * (1 / 2 + 1 / 16)
    h200 = jp.named_target("h200")

    def separate(x):
      return jp.quantize(jnp.sin(x), "nvfp4")

    fused = lambda x: jp.nn.rms_norm(x, out_format="nvfp4")
    for function, expected in (
      (separate, 3 * size + quantized),
      (fused, size + quantized),
    ):
      compiled = deviceless.compile(function, x, target=h200)
      found = traffic.quantizing(traffic.of_compiled(compiled))
      # Partial maxima and the global scale are some hundred bytes.
      self.assertBetween(found, expected, expected + 2000)

  @needs_compiler
  @pytest.mark.lab
  def test_second_launch_of_a_norm_reads_the_sum_of_the_first(self):
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    size, quantized, statistics = 64 * 256 * 2, 64 * 256 * (1 + 1 / 32), 64 * 12
    out = jp.OutFormat("mxfp8", axis=0)

    def norms(x, *residuals):
      results = []
      for residual in residuals:
        y, x = jp.nn.rms_norm(x, residual=residual, out_format=out)
        results.append(y)
      return results, x

    for count in (1, 2):
      compiled = deviceless.compile(
        norms, *[x] * (1 + count), target=jp.named_target("h200")
      )
      found = traffic.quantizing(traffic.of_compiled(compiled))
      # The next norm's first launch also reads the sum, as all norms do.
      self.assertEqual(found, count * (size + 2 * statistics + quantized))

  def test_weights_are_separate(self):
    dot = jp.dot_general("mxfp8", "mxfp8")

    def function(weights, x):
      return dot(x, weights, (((1,), (0,)), ((), ())))

    x = jnp.ones((64, 64), jnp.bfloat16)
    kernels = traffic.of_compiled(jax.jit(function).lower(x, x).compile())
    found = traffic.table(kernels)
    # The activations are read, and values and scales written.
    self.assertEqual(found["quantize"], (1, 64 * 64 * (2 + 1 + 1 / 32)))
    self.assertGreaterEqual(found["weight"][1], found["quantize"][1])
    self.assertIn("matmul", found)


if __name__ == "__main__":
  absltest.main()
