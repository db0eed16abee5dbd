# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How many kernels a dot takes, by XLA's GPU compiler without a GPU.

x in bf16 times a weight that was prepared at load; where the weight's format
asks for it x is quantized by `jp.quantize` in the same program. All launches of
the program count: what quantizes, pads, swizzles, multiplies, adds and cuts.

The table next to this file has them by GPU. After an intended change,
regenerate it with

  python -m jaxplugin.dot.backends.launches_test --regenerate
"""

from __future__ import annotations

import os

import pytest

if __name__ == "__main__":  # before JAX is imported: no GPU is asked for
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.lab.commands import compile
from jaxplugin.lab.compilation import deviceless
from jaxplugin.testing import installed

TABLE = pathlib.Path(__file__).with_suffix(".json")
# One of each generation, because the backends and their needs differ.
TARGETS = {
  "a100": jp.named_target("a100"),
  "h200": jp.named_target("h200"),
  "b200": jp.named_target("b200", cudnn="9.13"),
  "b200 without cuDNN": jp.named_target("b200"),
  "rtx5090": jp.named_target("rtx5090"),
}
# By x and weight; bfloat16 is not quantized.
PAIRS = (
  ("mxfp8", "mxfp8"),
  ("nvfp4", "nvfp4"),
  ("mxfp4", "mxfp4"),
  ("bfloat16", "nvfp4"),
  ("bfloat16", "mxfp4"),
)

ROWS = (16, 128)
N, K = 4096, 2048


def program(target, lhs_format, rhs_format, m):
  """Compiles a matmul for one of `TARGETS`."""
  rhs_format = formats.by_name(rhs_format)
  weight = jax.ShapeDtypeStruct((N, K), jnp.bfloat16)
  weight = jax.eval_shape(
    lambda w: jp.prepare_weights(jp.quantize(w, rhs_format), TARGETS[target]),
    weight,
  )

  def f(x, w):
    if lhs_format != "bfloat16":
      x = jp.quantize(x, formats.by_name(lhs_format))
    return jp.block_scaled_dot(x, w, preferred_element_type=jnp.bfloat16)

  x = jax.ShapeDtypeStruct((m, K), jnp.bfloat16)
  compiled = deviceless.compile(f, x, weight, target=TARGETS[target])
  return compile.of_executable(
    "dot", TARGETS[target], compiled.runtime_executable()
  )


def row_of(target, lhs_format, rhs_format):
  """Kernels by number of rows."""
  return {
    str(m): program(target, lhs_format, rhs_format, m).kernels for m in ROWS
  }


def key_of(lhs_format, rhs_format):
  return f"{lhs_format} x {rhs_format}"


@functools.cache
def table():
  return json.loads(TABLE.read_text())


@installed.needs_gpu_compilers
class LaunchesTest(parameterized.TestCase):
  @parameterized.product(target=tuple(TARGETS), pair=PAIRS)
  @pytest.mark.full
  def test_kernels_are_as_many_as_the_table_has(self, target, pair):
    self.assertEqual(row_of(target, *pair), table()[target][key_of(*pair)])

  @parameterized.parameters((jp.NVFP4, None), (jp.NVFP4, 3.0), (jp.MXFP8, 3.0))
  @pytest.mark.full
  def test_devices_multiply_by_two_global_scales_in_the_product(
    self, format, factor
  ):
    target = TARGETS["b200 without cuDNN"]
    mesh = deviceless.mesh(target, (8,), ("x",))

    def f(x, w):
      return jp.block_scaled_dot(
        x, w, global_scale=factor, preferred_element_type=jnp.bfloat16
      )

    def spec(rows, axes):
      x = jax.ShapeDtypeStruct((rows, K), jnp.bfloat16)
      x = jax.eval_shape(lambda x: jp.quantize(x, format), x)

      def placed(x):
        spec = P(axes if x.shape[0] == rows else None)
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

      return jax.tree.map(placed, x)

    compiled = deviceless.compile(
      f, spec(8 * N, "x"), spec(N, None), target=target, mesh=mesh
    )
    found = compile.of_executable("dot", target, compiled.runtime_executable())
    # Three scales are multiplied before.
    is_of_three = format is jp.NVFP4 and factor is not None
    self.assertEqual(found.kernels, 1 + is_of_three, found.hlo(elide=True))

  def test_rows_that_are_cut_are_scaled_by_the_same_kernel(self):
    # Otherwise the product of both global scales would need another kernel.
    cut = program("b200", "nvfp4", "nvfp4", 16)
    self.assertEqual(cut.custom_calls["__cudnn$blockScaledDot"], 1)
    text = cut.hlo(elide=True)
    self.assertRegex(text, rf"\(f32\[128,{N}\]\S*, u8\[0\]\S*\) custom-call")
    self.assertRegex(
      text, rf"ROOT \S+ = bf16\[16,{N}\]\S* fusion\(.*w_global_scale"
    )
    whole = program("b200", "nvfp4", "nvfp4", 128).hlo(elide=True)
    self.assertRegex(whole, rf"\(bf16\[128,{N}\]\S*, u8\[0\]\S*\) custom-call")


def regenerate():
  rows = {
    target: {key_of(*pair): row_of(target, *pair) for pair in PAIRS}
    for target in TARGETS
  }
  TABLE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
  if "--regenerate" in sys.argv:
    regenerate()
  else:
    absltest.main()
