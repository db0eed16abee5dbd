# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Values that stay together, and shardings in the types of quantized arrays."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.core import blocking
from jaxplugin.quantization import problems, quantize_primitive
from jaxplugin.quantization.sharding import assignment
from jaxplugin.testing import contract, prologue_cases
from jaxplugin.testing.meshes import explicit

X = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)


def _specs(x):
  return [jax.typeof(leaf).sharding.spec for leaf in (x.values, x.scale)]


def _collectives(compiled):
  """(operation, element type) of those in optimized HLO."""
  names = "all-gather|all-reduce|all-to-all|collective-permute"
  pattern = rf"= \(?(\w+)\[\S* ({names})(?:-start)?\("
  return sorted({(op, t) for t, op in re.findall(pattern, compiled.as_text())})


class GranulesTest(parameterized.TestCase):
  @parameterized.parameters(
    (jp.MXFP8, {}, (1, 32)),
    (jp.NVFP4, {}, (1, 16)),
    (jp.NVFP4, {"square": (0,)}, (16, 16)),
    (jp.MXFP4, {"hadamard": 16}, (1, 32)),
    (jp.MXFP4, {"hadamard": 64}, (1, 64)),
    (jp.NVFP4, {"hadamard": 64, "square": (0,)}, (16, 64)),
  )
  def test_blocks_squares_and_groups_stay_whole(
    self, format, options, granules
  ):
    problem = problems.QuantizationProblem.along(
      1,
      shape=(256, 256),
      dtype=np.dtype(np.float32),
      format=format,
      options=(problems.RecipeOptions(**options),),
    )
    self.assertEqual(assignment.quantize_granules(problem), granules)


class ExplicitTest(explicit.ExplicitTestCase):
  @parameterized.parameters(
    (jp.MXFP8, {}, P("a", "b"), P("a", "b")),
    (jp.NVFP4, {}, P("a", "b"), P("a", "b")),
    (jp.NVFP4, {"packed": False}, P("b", "a"), P("b", "a")),
    (jp.NVFP4, {"key": jax.random.key(1)}, P("a", "b"), P("a", "b")),
    (jp.NVFP4, {"axis": 0}, P("a", "b"), P(None, "b")),  # one block
    (jp.NVFP4, {"scale_layout": "swizzled_128x4"}, P("a", "b"), None),
    # Bits of another generator are those of the whole array.
    (jp.MXFP8, {"key": jax.random.key(1, impl="rbg")}, P("a", "b"), None),
  )
  @pytest.mark.sample(2)
  def test_bits_are_those_of_one_device(self, format, options, spec, expected):
    if options.get("scale_layout"):
      options["axis"] = 1
    function = jax.jit(lambda x: jp.quantize(x, format, **options))
    whole = function(X)
    with jax.set_mesh(self.mesh):
      lowered = function.lower(self.put(X, spec))
      result = function(self.put(X, spec))
      back = jax.jit(jp.dequantize)(result)
    self.assertNotIn("jaxplugin_partitioned", lowered.as_text())
    contract.assert_same_bits(result, whole)
    contract.assert_same_bits(back, jp.dequantize(whole))
    if expected is not None:
      self.assertEqual(_specs(result), [expected, expected])
      self.assertEqual(jax.typeof(back).sharding.spec, expected)

  def test_sums_of_columns_are_those_of_one_device(self):
    x, cotangent = np.round(4 * X), np.round(8 * X[::-1])  # exact sums

    @jax.jit
    def sums(x, cotangent):
      return quantize_primitive.produce(
        x,
        None,
        blockings=[blocking.Blocking.along(1, 2, 32)],
        format=jp.MXFP8,
        packed=False,
        prologue=prologue_cases.GRADIENTS[-1],  # of relu
        more={"cotangent": cotangent},
        column_sums=0,
      )[2]

    for spec, expected in ((P("a", "b"), P("b")), (P("b"), P(None))):
      with jax.set_mesh(self.mesh):
        found = sums(self.put(x, spec), self.put(cotangent, spec))
      self.assertEqual(jax.typeof(found).sharding.spec, expected)
      np.testing.assert_array_equal(found, np.where(x > 0, cotangent, 0).sum(0))

  def test_blocks_that_an_axis_cuts_have_a_gradient(self):
    weight = np.arange(X.size, dtype=np.float32).reshape(X.shape)
    formats = ("int8_row", "fp8_1x128", "fp8_128x128", "uint4_128")

    def function(x, format):
      x_q = jp.quantize(x, format, derivative="straight_through")
      return (jp.dequantize(x_q) * weight).sum(), x_q.without_surrogate()

    gradient = jax.grad(function, has_aux=True)

    @functools.partial(jax.jit, static_argnums=1)
    def call(x, formats):
      return [gradient(x, format) for format in formats]

    expected = dict(zip(formats, call(X, formats), strict=True))
    # Half of 256 columns are a whole block.
    for spec, cut in ((P("a", "b"), formats), (P("b", "a"), formats[::2])):
      with jax.set_mesh(self.mesh):
        results = call(self.put(X, spec), cut)
      for format, found in zip(cut, results, strict=True):
        whole = expected[format]
        with self.subTest(format=format, spec=spec):
          contract.assert_same_bits(found, whole)
          self.assertEqual(jax.typeof(found[0]).sharding.spec, spec)

  def test_one_maximum_and_no_other_collective(self):
    with jax.set_mesh(self.mesh):
      x = self.put(X, P("a", "b"))
      both = lambda x: jp.quantize_both(x, jp.NVFP4)
      found = _collectives(jax.jit(both).lower(x).compile())
    # Along rows it is one block: x is exchanged.
    self.assertIn(("all-reduce", "u32"), found)
    one = jax.jit(lambda x: jp.quantize(x, jp.NVFP4))
    with jax.set_mesh(self.mesh):
      self.assertEqual(
        _collectives(one.lower(x).compile()), [("all-reduce", "u32")]
      )

  @parameterized.parameters(jp.MXFP8, jp.NVFP4)
  @pytest.mark.sample(1)
  def test_out_sharding_sends_bytes(self, format):
    function = jax.jit(lambda x: jp.quantize(x, format, out_sharding=P("b")))
    with jax.set_mesh(self.mesh):
      x = self.put(X, P(("b", "a")))
      compiled = function.lower(x).compile()
      result = compiled(x)
    self.assertEqual(_specs(result), [P("b", None), P("b", None)])
    contract.assert_same_bits(result, jp.quantize(X, format))
    sent = {t for op, t in _collectives(compiled) if op != "all-reduce"}
    self.assertEqual(sent, {"u8"})

  def test_out_sharding_is_checked(self):
    x = X[:, :96]  # three blocks of 32
    with jax.set_mesh(self.mesh):
      for given, error, message in (
        (P(None, "a"), ValueError, "quantize: out_sharding must not cut a"
         " block.* splits 3 blocks of axis 1 into 2 parts"),
        (P("c"), ValueError, "c"),
        ("a", TypeError, "NamedSharding|PartitionSpec"),
      ):  # fmt: skip
        with self.subTest(given), self.assertRaisesRegex(error, message):
          jp.quantize(x, jp.MXFP8, out_sharding=given)
      with self.assertRaisesRegex(ValueError, "got scale_layout='swiz"):
        jp.quantize(
          X, jp.MXFP8, scale_layout="swizzled_128x4", out_sharding=P("a")
        )

  def test_dequantize_of_blocks_and_bytes_that_an_axis_cuts(self):
    # Three blocks on two devices; five 4-bit values on each of four.
    for format, k, axis in ((jp.MXFP8, 96, "a"), (jp.INT4_32, 20, "b")):
      x = jp.quantize(X[:, :k], format).unpack()
      expected = jp.dequantize(x, jnp.bfloat16)
      with self.subTest(format), jax.set_mesh(self.mesh):
        x.values = self.put(x.values, P(None, axis))
        x.scale = self.put(x.scale, P("a"))
        result = jax.jit(lambda x: jp.dequantize(x, jnp.bfloat16))(x)
        packed = jax.jit(lambda x: x.pack())(x)
        self.assertEqual(jax.typeof(result).sharding.spec, P(None, axis))
        contract.assert_same_bits(result, expected)
        contract.assert_same_bits(jp.dequantize(packed, jnp.bfloat16), expected)
