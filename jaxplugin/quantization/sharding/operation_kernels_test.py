# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What recipes add to a device's share of an array, by Triton kernels.

Shares together have the bits that C++ kernels give the whole array: random bits
are those of the places that values have there, and scales are chosen under its
global scale.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.core import blocking, targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.quantization import operands, problems
from jaxplugin.quantization.backends import triton, xla
from jaxplugin.testing import contract, triton_ir
from jaxplugin.testing import quantization_lowerings as lowerings
from jaxplugin.testing.meshes import explicit
from jaxplugin.testing.oracles import quantization_cases

MXFP8, MXFP4, NVFP4 = jp.MXFP8, jp.MXFP4, jp.NVFP4
KEYS = (jax.random.key(np.uint32(0x87654321)), jax.random.key(5))
CHOSEN = {"four_over_six": True}
H200 = lowerings.H200


def along(*dims, lead):
  return blocking.Blocking(dims=dims, lead=lead, multiple=32)


def quantizer(format, *specs, keys=KEYS):
  """A function that quantizes by each spec with its key."""
  each = tuple(
    quantization_cases.spec(format, b, **fields) for b, fields in specs
  )
  keys = tuple(keys)[: len(each)]
  return lambda x: operands.quantize_all(x, each, keys)


LAST = along(1, lead=(0,))
FIRST = along(0, lead=(1,))
LAST_OF_THREE = along(2, lead=(0, 1))


@lowerings.needs_triton
class BitwiseTest(lowerings.InterpretedTestCase):
  def setUp(self):
    super().setUp()
    self.mesh = explicit.mesh(self, ("x", "y"))

  def assert_shares_have_the_bits(self, quantize, shape, spec):
    x = lowerings.numbers(shape, np.float32)
    expected = lowerings.by_cpu(quantize)(x)
    target = targets.named_target("h200")
    with targets.use_target(target), jax.set_mesh(self.mesh):
      sharded = jax.device_put(np.asarray(x), NamedSharding(self.mesh, spec))
      # A new function, so that JAX traces it again.
      actual = jax.jit(lambda x: quantize(x))(sharded)
    contract.assert_same_bits(actual, expected)

  @parameterized.parameters(
    (NVFP4, (LAST, {}), (64, 256), P("x", "y"), "nvfp4_stochastic_of_part"),
    (MXFP8, (FIRST, {}), (256, 64), P("y", "x"), "mxfp8_stochastic_of_part"),
    # Rows of two dimensions, neither of which a device has whole.
    (MXFP4, (LAST_OF_THREE, {}), (4, 8, 64), P("x", "y"), "mxfp4_stochastic"),
    (NVFP4, (along(1, lead=(0, 2)), {}), (4, 64, 8), P("x", None, "y"), ""),
    (NVFP4, (LAST, {"hadamard": 32, "square": (0,)}), (64, 256), P("y"), ""),
    (NVFP4, (LAST, CHOSEN), (64, 256), P("x", "y"), "four_over_six_stoch"),
    # Only the first of several merged dimensions is split.
    (NVFP4, (along(0, 1, lead=(2,)), {}), (4, 32, 64), P("x", None, "y"), ""),
  )
  @pytest.mark.sample(4)
  def test_along_one_axis(self, format, how, shape, spec, name):
    self.assert_shares_have_the_bits(quantizer(format, how), shape, spec)
    launched = " ".join(self.names)
    self.assertRegex(launched, f"quantize_{format.name}_")
    self.assertIn(name, launched)

  @parameterized.parameters(
    (NVFP4, (LAST, {}), (FIRST, {"hadamard": 16}), (64, 256), P("x", "y")),
    (MXFP8, (FIRST, {}), (LAST, {}), (128, 64), P("y", "x")),
    # Tokens of a batch, as a dense layer's: merged, or blocks of the last one.
    (MXFP4, (LAST_OF_THREE, {}), (along(0, 1, lead=(2,)), {}), (4, 32, 64),
     P("x", None, "y")),
    (NVFP4, (LAST_OF_THREE, {}), (along(1, lead=(2, 0)), {}), (4, 128, 64),
     P("x", "y")),
    (NVFP4, (LAST, CHOSEN), (FIRST, CHOSEN), (64, 256), P("x", "y")),
  )  # fmt: skip
  @pytest.mark.full
  def test_along_both_axes_from_one_read(
    self, format, first, second, shape, spec
  ):
    self.assert_shares_have_the_bits(
      quantizer(format, first, second), shape, spec
    )
    self.assertRegex(self.names[-1], f"quantize_both_{format.name}.*_of_part")

  def test_four_over_six_without_a_key(self):
    function = quantizer(NVFP4, (LAST, CHOSEN), keys=(None,))
    self.assert_shares_have_the_bits(function, (64, 256), P("x", "y"))
    self.assertRegex(self.names[-1], "quantize_nvfp4_four_over_six_")

  @parameterized.parameters(
    # Words of places carry, and the last ones are far beyond 32 bits.
    (2**32 - 100, (2**40, 96, 1)),
    (3 * 2**45 + 2**32 - 7, (2**33 + 1, 2**31 + 5, 1)),
  )
  @pytest.mark.full
  def test_places_are_of_64_bits(self, first, strides):
    x = lowerings.numbers((3, 5, 96), np.float32)
    options = problems.RecipeOptions(
      is_stochastic=True, key_impl=problems.THREEFRY, strides=strides
    )
    problem = problems.QuantizationProblem.along(
      2,
      shape=x.shape,
      dtype=x.dtype,
      format=MXFP4,
      packed=True,
      options=(options,),
    )
    key = jax.random.key_data(KEYS[0])
    words = jnp.concatenate(
      [key, jnp.asarray([first >> 32, first % 2**32], jnp.uint32)]
    )
    actual = jax.jit(
      lambda x, words: triton.quantize(x, None, problem, H200, keys=[words])
    )(x, words)
    self.assertEqual(self.names, ["quantize_mxfp4_stochastic_of_part_16x128"])
    expected = jax.jit(
      lambda x, words: xla.quantize(x, None, problem, keys=[words])
    )(x, words)
    contract.assert_same_bits(actual, expected)


@lowerings.needs_compiler
class OptimizedTest(triton_ir.WithoutPtx):
  @parameterized.parameters(
    (MXFP4, (LAST, {}), (FIRST, {}), KEYS, 1),
    # Beside it what finds the largest numbers.
    (NVFP4, (LAST, {}), (FIRST, {"hadamard": 16}), KEYS, 2),
    (NVFP4, (LAST, CHOSEN), (FIRST, CHOSEN), (None, None), 2),
  )
  @pytest.mark.full
  def test_each_gpu_runs_kernels_and_hashes_nothing_beside(
    self, format, first, second, keys, kernels
  ):
    mesh = deviceless.mesh(H200, (4,), ("x",))
    x = jax.ShapeDtypeStruct(
      (512, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("x"))
    )
    text = deviceless.compile(
      quantizer(format, first, second, keys=keys), x, target=H200, mesh=mesh
    ).as_text()
    # "_ffi" of jax-triton 0.4.
    calls = re.findall(r'target="triton_kernel_call(?:_ffi)?"', text)
    self.assertLen(calls, kernels)
    # Beside it the places of first values are computed, and no random bits;
    # there are the largest numbers of 32 programs for each axis.
    sizes = re.findall(r" u32\[([\d,]+)\]", text)
    self.assertEmpty(
      [dims for dims in sizes if math.prod(map(int, dims.split(","))) > 64]
    )
