# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Table of quantize calls that every backend computes with the same bits.

The tests of each backend run all rows and compare with XLA's operations, which
other tests compare with NumPy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import quantization
from jaxplugin.core import blocking, formats
from jaxplugin.quantization import operands, problems
from jaxplugin.testing import quantization_lowerings

MXFP8, MXFP8_E5M2 = formats.MXFP8, formats.MXFP8_E5M2
MXFP6_E2M3, MXFP6_E3M2 = formats.MXFP6_E2M3, formats.MXFP6_E3M2
MXFP4, NVFP4 = formats.MXFP4, formats.NVFP4
BF16 = jnp.bfloat16
F16 = np.float16


@dataclasses.dataclass(frozen=True)
class Case:
  """A call that quantizes one array.

  Attributes:
    name: what the row tests.
    call: function of the array.
    shape: of the array.
    dtype: of the array.
    make: function of shape and dtype that returns the array.
    cpu: number of CPU kernels that the module for a CPU calls.
    triton: names of the launched Triton kernels without their tiles, in any
      order; None if the row accepts any. Empty if XLA's operations quantize.
    target: the GPU that Triton's interpreter stands for.
    is_full: whether only `make test-all` runs the row.
  """

  name: str
  call: Callable[[jax.Array], Any]
  shape: tuple[int, ...]
  dtype: Any = np.float32
  make: Callable[..., jax.Array] = quantization_lowerings.numbers
  cpu: int = 1
  triton: tuple[str, ...] | None = None
  target: str = "h200"
  is_full: bool = False

  def array(self) -> jax.Array:
    """Returns the array that the call quantizes."""
    return self.make(self.shape, self.dtype)


def plain(format, **options):
  """Returns `jp.quantize` with arguments."""
  return functools.partial(quantization.quantize, format=format, **options)


def both(format, **options):
  """Returns `jp.quantize_both` with arguments."""
  return functools.partial(quantization.quantize_both, format=format, **options)


def scaled(call, global_scale):
  """Returns `call` with a traced global scale, which is not checked."""
  traced = jax.jit(lambda x, g: call(x, global_scale=g))
  return lambda x: traced(x, global_scale)


def mapped(call, **options):
  """Returns `call` under vmap over the second dimension."""
  return jax.vmap(functools.partial(call, **options), in_axes=1)


def spec(format, along, scale_rounding="up", **options):
  """Returns a spec with `RecipeOptions`."""
  return operands.QuantizeSpec(
    format=format,
    along=along,
    scale_rounding=scale_rounding,
    options=problems.RecipeOptions(**options),
  )


def manner(format, dims, ndim=2, multiple=None, **fields):
  """Returns the manner that merges `dims` into one blocked dimension."""
  along = blocking.Blocking(
    dims=dims,
    lead=tuple(d for d in range(ndim) if d not in dims),
    multiple=multiple or format.block_size,
  )
  return spec(format, along, **fields)


def recipe(*args, seed=None, **fields):
  """Returns `operands.quantize` in a manner; a seed rounds at random."""
  key = None if seed is None else jax.random.key(np.uint32(seed))
  found = manner(*args, **fields)
  return lambda x: operands.quantize(x, found, key)


def recipes(format, sizes, seed=None, **fields):
  """Returns `operands.quantize_all` along the last and the first dimensions."""
  manners = tuple(
    manner(format, dims, 3, multiple=32, hadamard=size, **fields)
    for dims, size in zip(((2,), (0, 1)), sizes, strict=True)
  )
  keys = (None, None)
  if seed is not None:
    keys = tuple(jax.random.fold_in(jax.random.key(seed), i) for i in range(2))
  return lambda x: operands.quantize_all(x, manners, keys)


def blocked(format, dims, leads, packed=False, for_products=False):
  """Returns `operands.quantize_all` with merged and padded dimensions."""
  return functools.partial(
    operands.quantize_all,
    specs=tuple(
      spec(format, blocking.Blocking(dims=d, lead=l, multiple=32))
      for d, l in zip(dims, leads, strict=True)
    ),
    keys=(None,) * len(dims),
    packed=packed,
    for_products=for_products,
  )


def times(factor):
  """Returns a function that makes normal numbers, the largest one last."""

  def make(shape, dtype):
    x = np.random.default_rng(1).normal(size=shape) * factor
    x = x.astype(dtype)
    x.reshape(-1)[-1] *= 64
    return jax.device_put(x)

  return make


def blocks_of_all_scales(shape, dtype):
  """Returns blocks whose scales are zero, subnormal and normal, and ties."""
  rng = np.random.default_rng(8)
  x = rng.normal(size=shape) * 2.0 ** rng.integers(-30, 1, shape)
  rows, k = shape
  x *= np.repeat(2.0 ** rng.integers(-12, 1, (rows, k // 16)), 16, 1)
  x[::2] = np.round(x[::2] * 64) / 64
  return jax.device_put(x.astype(dtype))


def spoiled(bad):
  """Returns a function that puts `bad` next to the largest numbers."""

  def make(shape, dtype):
    x = np.random.default_rng(3).normal(size=shape).astype(dtype)
    x[1, 3, 5], x[1, 3, 6], x[1, 9, 5] = bad, 600.0, -50.0
    return jax.device_put(x)

  return make


def digits(dims):
  """Returns dimensions as part of a name."""
  return "".join(map(str, dims or ())) or "none"


AMAX, AMAX_BOTH = "global_scale_of_few", "finite_amax_both"
ONE, TWO = ("quantize_nvfp4",), ("quantize_both_nvfp4",)
FULL = {"is_full": True}
PAIR = {"cpu": 2}
SWIZZLED = {"scale_layout": "swizzled_128x4"}
FLOOR = {"scale_rounding": "floor"}
BITS = {"seed": 0x87654321}
CHOSEN = {"four_over_six": True}
ALL = {"hadamard": 32, "square": (0,), **BITS}
LEADS = ((0, 1), (2,))
KEYED = plain(NVFP4, key=jax.random.key(1))

# fmt: off
PLAIN = (
  Case("mxfp8_3d", plain(MXFP8), (3, 7, 64)),
  Case("mxfp8_axis_0", plain(MXFP8, axis=0), (544,), BF16, **FULL),
  Case("mxfp8_middle", plain(MXFP8, axis=1), (2, 160, 5), cpu=0, **FULL),
  Case("e5m2_middle", plain(MXFP8_E5M2, axis=1), (2, 160, 5), BF16, cpu=0),
  Case("e5m2_1d", plain(MXFP8_E5M2), (544,), F16, **FULL),
  Case("e2m3_one_column", plain(MXFP6_E2M3, axis=1), (16, 32, 1), F16, cpu=0),
  Case("e2m3_3d", plain(MXFP6_E2M3), (3, 7, 64), BF16, **FULL),
  Case("e3m2_1d", plain(MXFP6_E3M2), (544,), BF16),
  Case("e3m2_middle", plain(MXFP6_E3M2, axis=1), (2, 160, 5), cpu=0, **FULL),
  Case("mxfp4_middle", plain(MXFP4, axis=1), (2, 160, 5), BF16),
  Case("mxfp4_3d", plain(MXFP4), (3, 7, 64), F16, **FULL),
  Case("nvfp4_one_column", plain(NVFP4, axis=1), (16, 32, 1), F16),
  Case("nvfp4_1d", plain(NVFP4), (544,), BF16, **FULL),
  Case("nvfp4_middle", plain(NVFP4, axis=1), (2, 160, 5), **FULL),
  Case("mxfp8_floor_a100", plain(MXFP8, **FLOOR), (9, 96), target="a100"),
  Case("mxfp8_floor", plain(MXFP8, **FLOOR), (9, 96), **FULL),
  Case("e5m2_floor_a100", plain(MXFP8_E5M2, **FLOOR), (9, 96), target="a100",
       **FULL),
  Case("e5m2_floor", plain(MXFP8_E5M2, **FLOOR), (9, 96), **FULL),
  Case("mxfp4_floor_a100", plain(MXFP4, **FLOOR), (9, 96), target="a100",
       **FULL),
  Case("mxfp4_floor", plain(MXFP4, **FLOOR), (9, 96)),
  *(
    Case(f"global_scale_{g}", scaled(plain(NVFP4), g), (7, 96), triton=ONE,
         is_full=g not in (2.0**-65, 0.0))
    for g in (1.0, 0.37, 2.0**-65, 1e-40, 3e38, 0.0, np.nan)
  ),
  *(
    Case(f"global_scale_{g}_with_key", scaled(KEYED, g), (7, 96),
         triton=("quantize_nvfp4_stochastic",), is_full=g != 1.0)
    for g in (1.0, 0.37, 2.0**-65, 1e-40, 3e38, 0.0, np.nan)
  ),
  *(
    Case(f"few_rows_times_{f}", plain(NVFP4), (40, 128), make=times(f),
         triton=(AMAX, *ONE), is_full=f != 0.0)
    for f in (0.0, 1e-38, 1e-44, 1e36)
  ),
  *(
    Case(f"rows_times_{f}", plain(NVFP4), (516, 128), make=times(f),
         triton=("finite_amax", *ONE), is_full=f != 1e-38)
    for f in (0.0, 1e-38, 1e-44, 1e36)
  ),
  # 513 tiles by 512 programs.
  Case("many_rows", plain(NVFP4), (8200, 128), make=times(1.0),
       triton=("finite_amax", *ONE), **FULL),
  *(
    Case(f"{f.name}_vmap", mapped(plain(f)), (4, 6, 64), is_full=f != MXFP4,
         triton=(f"quantize_{f.name}",))
    for f in formats.KNOWN if f is not NVFP4
  ),
  # XLA's operations compute one global scale for each entry.
  Case("nvfp4_vmap", mapped(plain(NVFP4), global_scale=0.01), (4, 6, 64),
       triton=ONE),
  Case("mxfp8_tiles_3d", plain(MXFP8, **SWIZZLED), (3, 7, 96)),
  Case("e5m2_tiles_tail", plain(MXFP8_E5M2, **SWIZZLED), (130, 160), **FULL),
  Case("e2m3_tiles", plain(MXFP6_E2M3, **SWIZZLED), (128, 64), **FULL),
  Case("e3m2_tiles_tail", plain(MXFP6_E3M2, **SWIZZLED), (130, 160), **FULL),
  Case("mxfp4_tiles_3d", plain(MXFP4, **SWIZZLED), (3, 7, 96), **FULL),
  Case("mxfp4_tiles", plain(MXFP4, **SWIZZLED), (128, 64), **FULL),
  Case("nvfp4_tiles_tail", plain(NVFP4, **SWIZZLED), (130, 160), **FULL),
  Case("nvfp4_tiles_3d", plain(NVFP4, **SWIZZLED), (3, 7, 96), **FULL),
  Case("mxfp4_bytes_axis_0", plain(MXFP4, axis=0), (64, 96)),
  Case("mxfp4_codes", plain(MXFP4, packed=False), (64, 96), **FULL),
  Case("nvfp4_bytes", plain(NVFP4), (64, 96), **FULL),
  Case("nvfp4_codes_axis_0", plain(NVFP4, axis=0, packed=False), (64, 96)),
)

BOTH = (
  Case("mxfp8_both_3d", both(MXFP8, axes=(1, 2)), (3, 32, 160), BF16,
       triton=("quantize_both_mxfp8",)),
  Case("e5m2_both", both(MXFP8_E5M2), (64, 96), **FULL,
       triton=("quantize_both_mxfp8_e5m2",)),
  Case("mxfp4_both", both(MXFP4), (64, 96), **PAIR, **FULL,
       triton=("quantize_both_mxfp4",)),
  Case("nvfp4_both", both(NVFP4), (64, 96), **PAIR, triton=(AMAX_BOTH, *TWO)),
  Case("nvfp4_both_3d", both(NVFP4, axes=(1, 2)), (3, 32, 160), BF16, **PAIR,
       triton=(AMAX_BOTH, *TWO), **FULL),
  Case("both_nan", both(NVFP4), (2, 64, 64), make=spoiled(np.nan), **PAIR),
  Case("both_inf", both(NVFP4), (2, 64, 64), make=spoiled(np.inf), **PAIR,
       **FULL),
  Case("both_floor_a100", both(MXFP8, **FLOOR), (32, 96), F16, target="a100"),
  Case("both_floor", both(MXFP8, **FLOOR), (32, 96), F16, **FULL),
  Case("mxfp4_both_floor", both(MXFP4, **FLOOR), (32, 96), F16, **PAIR, **FULL),
  Case("both_global_scale", scaled(both(NVFP4), 2.0**-65), (32, 64), **PAIR,
       triton=TWO),
  Case("both_zero_scale", scaled(both(NVFP4), 0.0), (32, 64), **PAIR,
       triton=TWO, **FULL),
  Case("both_codes", both(NVFP4, packed=False), (64, 96), **PAIR, **FULL),
  Case("mxfp8_both_vmap", mapped(both(MXFP8)), (32, 3, 64),
       triton=("quantize_both_mxfp8",), **FULL),
  Case("nvfp4_both_vmap", mapped(both(NVFP4), global_scale=0.01), (32, 3, 64),
       **PAIR, triton=TWO),
  Case("both_first_is_used", jax.jit(lambda x: both(NVFP4)(x)[0]), (32, 64),
       triton=(AMAX, *ONE), **FULL),
  Case("both_second_is_used", jax.jit(lambda x: both(NVFP4)(x)[1]), (32, 64),
       triton=("finite_amax", *ONE)),
  Case("e2m3_both_tails", blocked(MXFP6_E2M3, ((2,), (1,)), ((0, 1), (0, 2))),
       (2, 33, 77), triton=("quantize_both_mxfp6_e2m3",), **FULL),
  Case("e3m2_both_of_one", blocked(MXFP6_E3M2, ((1,), (0,)), ((0,), (1,))),
       (1, 1), make=times(1.0), triton=("quantize_both_mxfp6_e3m2",)),
  # As in a dense layer: rows of a batch merge, and are written transposed.
  Case("mxfp8_merged", blocked(MXFP8, ((2,), (0, 1)), LEADS), (3, 5, 40),
       **PAIR,
       triton=("quantize_both_mxfp8",)),
  *(
    Case(f"{name}_{order}", blocked(format, dims, leads, **options), shape,
         **PAIR, triton=triton, is_full=(name, order) != ("batch", "bytes"))
    for name, format, shape, dims, leads, triton in (
      ("rows", NVFP4, (3, 5, 40), ((2,), (0, 1)), LEADS, (AMAX_BOTH, *TWO)),
      ("columns", NVFP4, (40, 3, 5), ((0,), (1, 2)), ((1, 2), (0,)),
       (AMAX_BOTH, *TWO)),
      ("tails", MXFP4, (2, 3, 33, 77), ((3,), (2,)), ((0, 1, 2), (0, 1, 3)),
       ("quantize_both_mxfp4",)),
      # Whole blocks of the last dimension are written as if they had merged.
      ("batch", NVFP4, (3, 32, 40), ((1,), (2,)), ((2, 0), (0, 1)),
       (AMAX_BOTH, *TWO)),
      ("inner", NVFP4, (2, 3, 32, 2, 32), ((4,), (2,)),
       ((0, 1, 2, 3), (0, 3, 4, 1)), (AMAX_BOTH, *TWO)),
    )
    for order, options in (
      ("codes", {}),
      ("bytes", {"packed": True}),
      ("bytes_for_products", {"packed": True, "for_products": True}),
    )
  ),
  Case("mxfp8_inner", blocked(MXFP8, ((1, 2), (3, 4)), ((0, 3, 4), (0, 1, 2))),
       (2, 3, 5, 2, 9), **PAIR, triton=("quantize_both_mxfp8",), **FULL),
  Case("mxfp8_batch", blocked(MXFP8, ((2,), (1,)), ((0, 1), (2, 0))),
       (3, 64, 40), triton=("quantize_both_mxfp8",), **FULL),
  # Matmuls on CPUs read values with the blocked dimension last.
  *(
    Case(f"mxfp8_{name}_for_products",
         blocked(MXFP8, dims, leads, for_products=True), shape, dtype, cpu=cpu,
         is_full=name not in ("rows", "turned"))
    for name, shape, dtype, dims, leads, cpu in (
      ("both", (64, 96), F16, ((1,), (0,)), ((0,), (1,)), 2),
      ("padded", (75, 96), BF16, ((0,), (1,)), ((1,), (0,)), 2),
      ("tails", (75, 40), BF16, ((0,), (1,)), ((1,), (0,)), 2),
      ("batch", (3, 64, 32), F16, ((2,), (1,)), ((0, 1), (2, 0)), 2),
      ("columns", (3, 5, 40), BF16, ((2,), (0, 1)), LEADS, 2),
      ("rows", (3, 5, 64), np.float32, ((2,), (0, 1)), LEADS, 2),
      ("inner", (2, 3, 32, 2, 32), np.float32, ((4,), (2,)),
       ((0, 1, 2, 3), (0, 3, 4, 1)), 2),
      ("turned", (2, 3, 32, 64), np.float32, ((3,), (2,)),
       ((0, 1, 2), (3, 0, 1)), 2),
      ("moved", (2, 3, 4, 32, 5), BF16, ((3,),), ((4, 1, 0, 2),), 1),
    )
  ),
  Case("axes_around_another", blocked(MXFP8, ((0,), (2,)), ((1, 2), (0, 1))),
       (32, 9, 40), triton=("quantize_mxfp8",) * 2),
  Case("blocks_around_another", blocked(MXFP8, ((0,), (2,)), ((1, 2), (0, 1))),
       (32, 9, 64), triton=("quantize_both_mxfp8",), **FULL),
)

RECIPES = (
  Case("mxfp8_hadamard", recipe(MXFP8, (1,), hadamard=16), (75, 128), **FULL),
  Case("mxfp8_square", recipe(MXFP8, (0,), square=(1,)), (128, 75), **FULL),
  Case("mxfp8_square_bf16", recipe(MXFP8, (1,), square=(0,)), (40, 96), BF16,
       **FULL),
  Case("mxfp8_bits", recipe(MXFP8, (1,), **BITS), (75, 128), **FULL),
  Case("e5m2_bits", recipe(MXFP8_E5M2, (0,), **BITS), (128, 75), **FULL),
  Case("e2m3_all", recipe(MXFP6_E2M3, (1,), **ALL), (75, 128)),
  Case("mxfp4_hadamard_2", recipe(MXFP4, (0,), hadamard=2), (128, 75), **FULL),
  Case("mxfp4_hadamard_64", recipe(MXFP4, (1,), hadamard=64), (75, 128),
       triton=("quantize_mxfp4_hadamard64",)),
  Case("mxfp4_bits_floor", recipe(MXFP4, (0,), **BITS, **FLOOR), (128, 75),
       **FULL),
  Case("mxfp4_bits_bf16", recipe(MXFP4, (1,), **BITS), (40, 96), BF16),
  Case("mxfp4_all", recipe(MXFP4, (1,), **ALL), (75, 128), **FULL),
  Case("nvfp4_hadamard", recipe(NVFP4, (0,), hadamard=16), (128, 75), **FULL),
  Case("nvfp4_hadamard_bf16", recipe(NVFP4, (1,), hadamard=16), (40, 96), BF16,
       **FULL),
  Case("nvfp4_square", recipe(NVFP4, (1,), square=(0,)), (75, 128), **FULL),
  Case("nvfp4_bits", recipe(NVFP4, (0,), **BITS), (128, 75), **FULL),
  Case("nvfp4_chosen", recipe(NVFP4, (1,), **CHOSEN), (75, 128), **FULL),
  Case("nvfp4_all", recipe(NVFP4, (1,), **ALL, **CHOSEN), (75, 128)),
  Case("nvfp4_up", recipe(NVFP4, (0,), scale_up=True, **BITS), (128, 75)),
  *(
    Case(f"{how}_of_{f}", recipe(NVFP4, (1,), **options), (33, 64),
         make=times(f), is_full=f != 1e-40)
    for how, options in (("bits", BITS), ("chosen", CHOSEN))
    for f in (1e-40, 1e-30, 1e-10, 1.0, 1e36)
    # XLA:CPU flushes numerators that are subnormal.
    if (how, f) != ("chosen", 1e-40)
  ),
  *(
    Case(f"all_scales_{i}", recipe(NVFP4, (1,), **options), (64, 256),
         make=blocks_of_all_scales, **FULL)
    for i, options in enumerate((
      CHOSEN, {**CHOSEN, **BITS}, {"scale_up": True},
      {**CHOSEN, "scale_up": True},
    ))
  ),
  Case("raw_key", lambda x: operands.quantize(
    x, manner(MXFP4, (2, 0), 3, 64, hadamard=64, square=(1,)),
    jax.random.PRNGKey(7)), (5, 45, 12)),
  Case("rows_in_squares", recipe(NVFP4, (1,), 3, square=(2,)), (64, 40, 3)),
  Case("columns_in_squares", recipe(NVFP4, (2,), 3, square=(1,)), (3, 40, 64),
       **FULL),
  *(
    Case(f"{f.name}_blocks_{digits(dims)}_squares_{digits(square)}",
         recipe(f, dims, 3, 32, square=square, hadamard=16, **options),
         (5, 36, 41), triton=triton,
         is_full=(f, dims) not in ((MXFP8, (0,)), (NVFP4, (2, 1))))
    for f, options in ((MXFP8, {}), (NVFP4, {**CHOSEN, "scale_up": True}))
    for dims, square, triton in (
      ((0,), (1, 2), None), ((1,), (2, 0), ()), ((2,), (0,), ()),
      ((0, 1), (2,), None), ((2, 1), None, None), ((), (0, 2), ()),
    )
  ),
  *(
    Case(f"{f.name}_bits_of_blocks_{digits(dims)}",
         recipe(f, dims, 3, 32, seed=1, square=square), (6, 40, 33), BF16,
         triton=triton, is_full=(f, dims) not in ((NVFP4, (0,)), (MXFP8, (1,))))
    for f in (MXFP8, MXFP8_E5M2, MXFP6_E3M2, MXFP4, NVFP4)
    for dims, square, triton in (
      ((0,), (2,), ()), ((1,), None, None), ((2, 0), None, None),
    )
  ),
  Case("mxfp8_gradient", recipes(MXFP8, (None, 16), 13), (2, 21, 96), **PAIR,
       **FULL),
  Case("mxfp8_activation", recipes(MXFP8, (None, 16)), (2, 21, 96), **PAIR,
       **FULL),
  Case("mxfp4_gradient", recipes(MXFP4, (32, 32), 13), (2, 21, 96), **PAIR,
       triton=("quantize_both_mxfp4_hadamard32_stochastic",)),
  *(
    Case(f"mxfp4_gradient_{i}_is_used",
         jax.jit(lambda x, i=i: recipes(MXFP4, (32, 32), 13)(x)[i]),
         (2, 21, 96), triton=("quantize_mxfp4_hadamard32_stochastic",), **FULL)
    for i in range(2)
  ),
  Case("mxfp4_activation", recipes(MXFP4, (None, 32)), (2, 21, 96), **PAIR,
       **FULL),
  Case("nvfp4_gradient", recipes(NVFP4, (None, 16), 13), (2, 21, 96), **PAIR,
       **FULL),
  Case("nvfp4_activation", recipes(NVFP4, (None, 16)), (2, 21, 96), **PAIR,
       triton=("finite_amax_both_plain_and_hadamard16",
               "quantize_both_nvfp4_plain_and_hadamard16")),
  Case("chosen_activation_of_nvfp4", recipes(NVFP4, (None, 16), **CHOSEN),
       (2, 21, 96), **PAIR, **FULL),
)
# fmt: on

CASES = (*PLAIN, *BOTH, *RECIPES)


def rows(*, is_full, for_triton=False):
  """Returns (name, case) of each case, the rows of a parameterized test."""
  return [
    (case.name, case)
    for case in CASES
    if case.is_full == is_full and not (for_triton and case.triton == ())
  ]
