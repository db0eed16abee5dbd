# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""HLO text that jaxlib cannot convert without help."""

import numpy as np
import pytest
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.stablehlo import modules, rewriter
from jaxplugin.testing import written_modules

CPU = jp.named_target("cpu")
_NAMES = {
  "float8_e4m3fn": "f8e4m3fn",
  "float8_e8m0fnu": "f8e8m0fnu",
  "float4_e2m1fn": "f4e2m1fn",
  "bfloat16": "bf16",
}


def shape(x):
  return f"{_NAMES[x.dtype.name]}[{','.join(map(str, x.shape))}]"


def module(arrays, result, numbers):
  """Returns an HLO module with one scaled-dot."""
  names = ("lhs", "rhs", "lhs_scale", "rhs_scale")
  lines = [
    f"  {name} = {shape(x)} parameter({i})"
    for i, (name, x) in enumerate(zip(names, arrays, strict=True))
  ]
  parameters = "\n".join(lines)
  return f"""HloModule m

ENTRY main {{
{parameters}
  ROOT dot.1 = {result} scaled-dot({", ".join(names)}),
    {numbers}, metadata={{op_name="scaled-dot"}}
}}
"""


def exact(values, scale):
  """Returns values * scale in f64, with each scale repeated over its block."""
  scale = scale.astype(np.float64).reshape(scale.shape or (1,) * values.ndim)
  blocks = np.array(values.shape) // scale.shape
  return values.astype(np.float64) * np.kron(scale, np.ones(blocks))


def random(rng, shape, dtype):
  """Returns small integers, whose products are exact in bf16."""
  return rng.integers(-2, 3, shape).astype(dtype)


def powers(rng, shape, dtype):
  return (2.0 ** rng.integers(-2, 3, shape)).astype(dtype)


class ScaledDotTest(absltest.TestCase):
  CONTRACT_1 = "lhs_contracting_dims={1}, rhs_contracting_dims={1}"
  BATCHED = (
    "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0},"
    " rhs_contracting_dims={1}"
  )

  def cases(self):
    """Returns (values' dtype, scales' dtype, shapes, result, numbers)."""
    fp8, e8m0 = "float8_e4m3fn", "float8_e8m0fnu"
    dot = ((6, 64), (4, 64))
    return (
      (fp8, e8m0, (*dot, (6, 2), (4, 2)), "f32[6,4]", self.CONTRACT_1),
      (fp8, e8m0, (*dot, (3, 1), (4, 4)), "bf16[6,4]", self.CONTRACT_1),
      (fp8, "bfloat16", (*dot, (), (2, 2)), "f16[6,4]", self.CONTRACT_1),
      (
        "float4_e2m1fn",
        fp8,
        (*dot, (6, 4), (1, 1)),
        "f32[6,4]",
        self.CONTRACT_1,
      ),
      (
        fp8,
        e8m0,
        ((2, 6, 64), (2, 64, 4), (2, 6, 2), (2, 2, 4)),
        "f32[2,6,4]",
        self.BATCHED,
      ),
    )

  @pytest.mark.full
  def test_composite_and_what_it_is_rewritten_to_are_right(self):
    rng = np.random.default_rng(0)
    for values, scales, shapes, result, numbers in self.cases():
      with self.subTest(values=values, scales=scales, shapes=shapes):
        arrays = [random(rng, s, values) for s in shapes[:2]]
        arrays += [powers(rng, s, scales) for s in shapes[2:]]
        source = modules.read(module(arrays, result, numbers), "m.hlo")
        text = str(source.module)
        self.assertIn('stablehlo.composite "xla.scaled_dot"', text)
        lhs, rhs = map(exact, arrays[:2], arrays[2:])
        rhs = rhs if len(shapes[0]) == 3 else rhs.T
        expected = (lhs @ rhs).astype(np.float32)
        (composite,) = written_modules.run(text, *arrays)
        (left_or_done,) = rewriter.rewrite_source(source, CPU)
        self.assertEqual(bool(left_or_done.error), not shapes[2])
        (rewritten,) = written_modules.run(str(source.module), *arrays)
        # Sums of 64 small multiples of 2^-4, rounded to bf16 or f16.
        for found in (composite, rewritten):
          np.testing.assert_allclose(
            found.astype(np.float32), expected, rtol=2.0**-8
          )

  def test_two_calls_of_one_kind_share_a_decomposition(self):
    rng = np.random.default_rng(0)
    arrays = [random(rng, (4, 64), "float8_e4m3fn") for _ in range(2)]
    arrays += [powers(rng, (4, 2), "float8_e8m0fnu") for _ in range(2)]
    text = module(arrays, "f32[4,4]", self.CONTRACT_1)
    line = text[text.index("  ROOT") : text.rindex("}")].strip()
    other = line.replace("ROOT dot.1", "dot.2")
    text = text.replace(line, f"{other}\n  {line}")
    found = str(modules.read(text, "m.hlo").module)
    self.assertEqual(found.count("func.func private"), 1)

  def test_scale_that_does_not_divide_is_named(self):
    rng = np.random.default_rng(0)
    arrays = [random(rng, (4, 64), "float8_e4m3fn") for _ in range(2)]
    arrays += [powers(rng, (4, n), "float8_e8m0fnu") for n in (2, 3)]
    with self.assertRaisesRegex(
      jp.ModuleError, r"m\.hlo: the scale of a scaled-dot must divide.*4x3x"
    ):
      modules.read(module(arrays, "f32[4,4]", self.CONTRACT_1), "m.hlo")


class LoopTest(absltest.TestCase):
  def test_computation_of_a_loop_is_read_once(self):
    text = """HloModule m

step {
  x = f32[8,64] parameter(0)
  q = (f8e4m3fn[8,64], f8e8m0fnu[8,2]) custom-call(x),
    custom_call_target="__op$quantize"
  v = f8e4m3fn[8,64] get-tuple-element(q), index=0
  s = f8e8m0fnu[8,2] get-tuple-element(q), index=1
  ROOT y = f32[8,64] custom-call(v, s), custom_call_target="__op$dequantize"
}

more {
  x = f32[8,64] parameter(0)
  ROOT p = pred[] constant(false)
}

ENTRY main {
  x = f32[8,64] parameter(0)
  ROOT y = f32[8,64] while(x), condition=more, body=step
}
"""
    done = rewriter.rewrite_source(modules.read(text, "m.hlo"), CPU)
    self.assertEqual(
      [item.call for item in done], ["__op$quantize", "__op$dequantize"]
    )


class CompositeTest(absltest.TestCase):
  def test_composite_without_attributes_is_read(self):
    text = """HloModule m

twice {
  x = f32[3] parameter(0)
  ROOT y = f32[3] add(x, x)
}

ENTRY main {
  x = f32[3] parameter(0)
  ROOT y = f32[3] call(x), to_apply=twice, is_composite=true,
    frontend_attributes={composite.name="mine.twice",composite.version="1"}
}
"""
    found = str(modules.read(text, "m.hlo").module)
    self.assertIn('stablehlo.composite "mine.twice"', found)
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(written_modules.run(found, x)[0], 2 * x)
