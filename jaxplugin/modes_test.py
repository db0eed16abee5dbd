# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every public function gives the same bits in each mode of JAX.

`ENTRIES` has the programs, `NOT_HERE` every other public name, with the reason.
A public name that is in neither fails a test. The modes that only refuse
programs are tried together on the traced and lowered program.
"""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from absl.testing import parameterized
from jax import lax
from jax.experimental import checkify

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.training import products


def functions_of(module, names=None):
  """Returns the names of a module's public functions."""
  return [
    name
    for name in names or vars(module)
    if name[0].islower()
    and not isinstance(getattr(module, name), types.ModuleType)
  ]


# How the names of each public module begin in `covers`.
PUBLIC = {
  "": functions_of(jp, jp.__all__),
  "nn.": functions_of(jp.nn),
  "training.": functions_of(jp.training),
  "checkpoints.": functions_of(jp.checkpoints),
  "checkpoint_policies.": [
    name
    for name in functions_of(jp.checkpoint_policies)
    if getattr(jp.checkpoint_policies, name).__module__
    == jp.checkpoint_policies.__name__
  ],
}

M, N, K, GROUPS = 32, 32, 64, 2
ALONG_LAST = (((1,), (1,)), ((), ()))


def exact_numbers(*shape, seed, scale=1):
  """Floats that E2M1 holds, every block along any axis with the largest, 6.

  Quantizing them to any format loses nothing, sums of products are exact in
  f32 in any order.
  """
  codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
  x = np.random.default_rng(seed).choice(codes, shape)
  x[..., ::16] = 6
  x[..., ::16, :] = 6
  x[..., 1::4] *= -1
  return x * np.float32(scale)


X, W = exact_numbers(M, K, seed=0), exact_numbers(N, K, seed=1)
STACK = exact_numbers(GROUPS, N, K, seed=2)
BIAS, RESIDUAL = np.ones(N, np.float32), np.ones((M, N), np.float32)
SIZES = np.array([20, 9], np.int32)
FORMATS = (jp.MXFP8, jp.MXFP6_E2M3, jp.MXFP4, jp.NVFP4)
RECIPES = (
  jp.training.MXFP8_RECIPE,
  jp.training.NVFP4_RECIPE,
  jp.training.MXFP4_RECIPE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A program of public functions.

  Attributes:
    covers: names of the functions that it calls.
    run: the program.
    args: arrays that it takes.
    expected: its results as NumPy has them in f64, or None.
    magnitude: the largest sum |a * b| of a result.
    is_traced: whether `jax.jit` can trace it.
    has_key: whether it takes a key after `args`.
  """

  covers: tuple[str, ...]
  run: Callable[..., Any]
  args: tuple[Any, ...]
  expected: Callable[[], Any] | None = None
  magnitude: float = 6
  is_traced: bool = True
  has_key: bool = False


def scale_rows(w):
  """Returns the scale factors of a stack as f32[..., 32]."""
  return w.scale.astype(jnp.float32).reshape(-1, 32)


ENTRIES: dict[str, Entry] = {}


def entry(*covers, **kwargs):
  def add(run):
    ENTRIES[run.__name__] = Entry(covers=covers, run=run, **kwargs)
    return run

  return add


def by_each(function, **options):
  """Returns the function by the chosen implementation, and by xla."""
  return [
    functools.partial(function, implementation=implementation, **options)
    for implementation in (None, "xla")
  ]


def twice(x):
  return jnp.stack([x, x])


def straight_through(x, format, **options):
  return jp.quantize(x, format, derivative="straight_through", **options)


def gradients(f, *args):
  return jax.grad(lambda *args: f(*args).sum(), tuple(range(len(args))))(*args)


# Quantization and arrays.


@entry("quantize", "dequantize", args=(X,), expected=lambda: [X] * len(FORMATS))
def quantize(x):
  return [jp.dequantize(jp.quantize(x, format)) for format in FORMATS]


@entry("quantize", "dequantize", args=(X,), has_key=True, expected=lambda: X)
def quantize_stochastically(x, key):
  return jp.dequantize(jp.quantize(x, jp.NVFP4, key=key))


@entry("quantize", args=(STACK,))
def quantize_stack(stack):
  options = {"batch_dims": 1, "packed": True, "scale_layout": "swizzled_128x4"}
  stacked = jp.quantize(stack, jp.NVFP4, **options)
  padded = jp.quantize(stack[..., :40], jp.MXFP8, pad=True)
  named = jax.vmap(
    lambda x: jp.quantize(x, jp.NVFP4, axis_name="i"), axis_name="i"
  )(stack)
  return stacked, padded, named


@entry("quantize", args=(X,), expected=lambda: np.ones_like(X))
def quantize_straight_through(x):
  f = lambda x: jp.dequantize(straight_through(x, jp.NVFP4))
  return jax.grad(lambda x: f(x).sum())(x)


@entry("quantize_both", "dequantize", args=(X,), expected=lambda: [X] * 4)
def quantize_both(x):
  both = (*jp.quantize_both(x, jp.MXFP8), *jp.quantize_both(x, jp.NVFP4))
  return [jp.dequantize(blocked) for blocked in both]


@entry("pack_fp4", "unpack_fp4", "swizzle_scale", "unswizzle_scale", args=(X,))
def layouts(x):
  x_q = jp.quantize(x, jp.NVFP4, packed=False)
  packed = jp.pack_fp4(x_q.values)
  tiles = jp.swizzle_scale(x_q.scale)
  return (
    packed,
    jp.unpack_fp4(packed).astype(jnp.float32),
    tiles.astype(jnp.float32),
    jp.unswizzle_scale(tiles, x_q.scale.shape).astype(jnp.float32),
  )


@entry(
  *("concatenate", "stack", "legacy_global_scales", "shard", "shardings"),
  args=(STACK,),
)
def array_functions(stack):
  parts = [jp.quantize(x, jp.NVFP4) for x in stack]
  both = jp.stack(parts)
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  jp.shardings(both, sharding)
  return (
    jp.concatenate(parts),
    both[0],
    both[:, :16].dequantize(),
    both[jnp.array(1)].T,
    jp.legacy_global_scales(both),
    jp.shard(both, sharding),
  )


@entry("prepare_weights", "unprepare_weights", "linear", args=(X, W))
def weights(x, w):
  prepared = jp.prepare_weights(jp.quantize(w, jp.MXFP4))
  return jp.linear(x, prepared), jp.unprepare_weights(prepared)


@entry(
  *("nn.rms_norm", "nn.layer_norm", "nn.silu_and_mul", "nn.gelu_and_mul"),
  *("nn.swigluoai", "nn.silu", "nn.gelu", "nn.relu", "dequantize"),
  args=(X, X[0]),
)
def producers(x, weight):
  out = jp.OutFormat("mxfp4", derivative="straight_through")
  calls = [
    lambda x, out: jp.nn.rms_norm(x, weight, residual=x, out_format=out),
    lambda x, out: jp.nn.layer_norm(x, weight, weight, out_format=out),
    lambda x, out: jp.nn.silu_and_mul(x, bias=weight, out_format=out),
    lambda x, out: jp.nn.gelu_and_mul(x, x, out_format=out),
    lambda x, out: jp.nn.swigluoai(x, out_format=out),
    lambda x, out: jp.nn.silu(x, out_format=out),
    lambda x, out: jp.nn.gelu(x, bias=weight, out_format=out),
    lambda x, out: jp.nn.relu(x, out_format=out),
  ]
  norm = lambda x: calls[0](x, out)[0].dequantize()
  return [f(x, o) for f in calls for o in (None, "nvfp4")], gradients(norm, x)


# Dots.


def dot_expected():
  product = X.astype(np.float64) @ W.T
  return [product, np.maximum(product + 1, 0) + 1] * (2 * len(FORMATS))


@entry(
  "block_scaled_dot",
  "quantize",
  args=(X, W, BIAS, RESIDUAL),
  expected=dot_expected,
  magnitude=K * 36,
)
def dot(x, w, bias, residual):
  rest = {"bias": bias, "activation": "relu", "residual": residual}
  results = []
  for format in FORMATS:
    x_q, w_q = jp.quantize(x, format), jp.quantize(w, format)
    for f in by_each(jp.block_scaled_dot):
      results += [f(x_q, w_q), f(x_q, w_q, **rest)]
  return results


@entry("block_scaled_dot", args=(X, STACK))
def dot_batched(x, stack):
  w_q = jp.quantize(stack, jp.NVFP4, batch_dims=1)
  rows = jp.quantize(twice(x), jp.NVFP4)
  numbers = (((2,), (2,)), ((0,), (0,)))
  return [
    (jax.vmap(f, (None, 0))(x, w_q), f(rows, w_q, dimension_numbers=numbers))
    for f in by_each(jp.block_scaled_dot)
  ]


@entry("block_scaled_dot", "linear", args=(X, W, BIAS))
def dot_gradients(x, w, bias):
  results = []
  for format in (jp.MXFP8, jp.NVFP4):
    w_q = jp.quantize(w, format)
    through = functools.partial(straight_through, format=format)
    for dot, linear in zip(
      by_each(jp.block_scaled_dot),
      by_each(jp.linear, activation="gelu"),
      strict=True,
    ):
      both = lambda x, w, f=dot, q=through: f(q(x), q(w))
      results += [
        gradients(both, x, w),
        gradients(lambda x, f=dot, w_q=w_q: f(x, w_q), x),
        gradients(lambda x, b, f=linear, w_q=w_q: f(x, w_q, b), x, bias),
      ]
  return results


@entry("linear", args=(X, STACK, np.array(1, np.int32)))
def linear_of_layer(x, stack, layer):
  w_q = jp.quantize(stack, jp.NVFP4, batch_dims=1)
  rows = jp.quantize(x, jp.NVFP4)
  return (
    jp.linear(x, w_q, layer=layer),
    jp.linear(rows, w_q[0]),
    lax.scan(lambda x, w: (x, jp.linear(x, w)), x, w_q)[1],
  )


@entry("block_scaled_dot", "debug_checks", "ragged_dot", args=(X, W, STACK))
def debug_checks(x, w, stack):
  sizes = jnp.asarray(SIZES)
  with jp.debug_checks():
    return (
      jp.block_scaled_dot(jp.quantize(x, jp.NVFP4), jp.quantize(w, jp.NVFP4)),
      jp.ragged_dot(x, jp.quantize(stack, jp.MXFP8), sizes),
      jp.ragged_dot_general(x, x, sizes, CONTRACTION),
    )


# Ragged dots.

CONTRACTION = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def ragged_expected():
  rows = np.zeros((M, N))
  for i, group in enumerate(np.repeat([0, 1], SIZES)):
    rows[i] = X[i].astype(np.float64) @ STACK[group].T
  return [rows] * 6


@entry(
  "ragged_dot",
  args=(X, STACK, SIZES),
  expected=ragged_expected,
  magnitude=K * 36,
)
def ragged_dot(x, stack, sizes):
  results = []
  for format in (jp.MXFP8, jp.NVFP4):
    w_q = jp.quantize(stack, format, batch_dims=1)
    for rows in (x, jp.quantize(x, format)):
      results.append(jp.ragged_dot(rows, w_q, sizes))
    results.append(jp.ragged_dot(rows, w_q, sizes, implementation="xla"))
  return results


@entry("ragged_dot", args=(X, STACK, SIZES, np.ones((GROUPS, N), np.float32)))
def ragged_dot_transforms(x, stack, sizes, bias):
  w_q = jp.quantize(stack, jp.NVFP4, batch_dims=1)
  results = []
  for f in by_each(jp.ragged_dot, activation="swiglu"):
    with_bias = lambda x, bias, f=f: f(x, w_q, sizes, bias=bias)
    results += [
      with_bias(x, bias),
      gradients(with_bias, x, bias),
      jax.vmap(f, (0, None, None))(twice(x), w_q, sizes),
      jax.vmap(f, (0, None, 0))(twice(x), w_q, twice(sizes)),
    ]
  return results, straight_through(stack, jp.MXFP8, batch_dims=1)


@entry("ragged_dot", args=(X, STACK, SIZES))
def ragged_dot_straight_through(x, stack, sizes):
  def loss(x, stack):
    weights = straight_through(stack, jp.MXFP8, batch_dims=1)
    return jp.ragged_dot(straight_through(x, jp.MXFP8), weights, sizes)

  return gradients(loss, x, stack)


@entry("ragged_dot_general", "align_groups", args=(X, STACK, SIZES))
def ragged_dot_general(x, stack, sizes):
  rows, aligned = jp.align_groups(x, sizes, 32)
  numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
  results = [
    aligned,
    jp.ragged_dot_general(
      x, jp.quantize(stack, jp.MXFP8), sizes, numbers, implementation="xla"
    ),
  ]
  blocked = jp.quantize(rows, jp.NVFP4, axis=0)
  numbers = {"ragged_dot_dimension_numbers": CONTRACTION}
  for f in by_each(jp.ragged_dot_general, **numbers):
    results += [
      f(blocked, blocked, aligned),
      gradients(lambda x, y, f=f: f(x, y, sizes), x, 2 * x),
      jax.vmap(f, (0, None, None))(twice(x), x, sizes),
    ]
  return results


# Training.


@entry("dot_general", args=(X, W))
def dot_general_of_formats(x, w):
  results = []
  for dot in (
    jp.dot_general(jp.MXFP8, jp.MXFP8),
    jp.dot_general(jp.NVFP4, None),
    jp.dot_general(jp.MXFP8, jp.MXFP4, implementation="xla"),
  ):
    f = functools.partial(dot, dimension_numbers=ALONG_LAST)
    results += [f(x, w), gradients(f, x, w)]
  return results


def dot_of_recipe(recipe, key):
  dot = jp.dot_general(recipe=recipe, weight="rhs")
  return functools.partial(dot, dimension_numbers=ALONG_LAST, key=key)


@entry("dot_general", args=(X, W), has_key=True)
def dot_general_of_recipes(x, w, key):
  results = []
  for recipe in RECIPES:
    f = dot_of_recipe(recipe, key)
    results += [f(x, w), gradients(f, x, w), jax.jvp(f, (x, w), (w, x))[1]]
  return results


@entry(
  *("quantize_operand", "training.primals", "training.with_primals"),
  *("training.promote_dtype", "dot_general"),
  args=(X, W),
  has_key=True,
)
def operands(x, w, key):
  results = []
  for recipe in RECIPES:
    w_q = jp.quantize_operand(w, recipe, contracting=1)
    f = dot_of_recipe(recipe, key)

    def loss(x, w, w_q=w_q, f=f):
      x, held = jp.training.promote_dtype(
        x, jp.training.with_primals(w_q, w), dtype=jnp.float32
      )
      return f(x, held)

    results.append(gradients(loss, x, jp.training.primals(w_q)))
  return results


@entry("quantize_dots", args=(X, STACK), has_key=True)
def quantize_dots(x, stack, key):
  square = stack @ stack.swapaxes(1, 2)

  def loss(params, x):
    first, layers = params
    h = jax.nn.relu(x @ first.T)
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, layers)
    return jax.jit(jnp.matmul)(h, layers[0]).sum()

  results = []
  for recipe in RECIPES:
    quantized = jp.quantize_dots(loss, recipe, key=key)
    results.append(jax.grad(quantized)((stack[0], square), x))
  return results


@entry("training.accumulate", args=(W, X))
def sums_of_microbatches(w, x):
  loss = lambda w, x: jp.linear(jp.quantize(x, jp.MXFP8), w).mean()
  return jp.training.accumulate(loss, 2)(w, x)


@entry("training.ragged_dot_general", args=(X, STACK, SIZES), has_key=True)
def training_ragged(x, stack, sizes, key):
  results = []
  for recipe in RECIPES:
    f = lambda x, w, recipe=recipe: jp.training.ragged_dot_general(
      x, w, sizes, recipe=recipe, key=key
    )
    results += [f(x, stack), gradients(f, x, stack)]
  return results


@entry(
  *("checkpoint_policies." + n for n in PUBLIC["checkpoint_policies."]),
  args=(X, W),
)
def checkpoint_policies(x, w):
  policies = jp.checkpoint_policies
  f = jp.dot_general(jp.MXFP8, jp.MXFP8)

  def loss(x, w):
    return jnp.sin(f(x, w, ALONG_LAST)).sum()

  return [
    jax.grad(jax.checkpoint(loss, policy=policy))(x, w)
    for policy in (
      policies.dots_saveable,
      policies.dots_with_no_batch_dims_saveable,
      policies.quantized_saveable,
      policies.for_block_scaled_dots(jax.checkpoint_policies.dots_saveable),
      policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    )
  ]


# Drop-ins.


@entry(
  "nn.scaled_matmul",
  "nn.scaled_dot",
  "scaled_dot",
  args=(X, W),
  expected=lambda: [(X.astype(np.float64) @ W.T)[None]] * 4,
  magnitude=K * 36,
)
def scaled(x, w):
  x_q, w_q = jp.quantize(x[None], jp.MXFP8), jp.quantize(w[None], jp.MXFP8)
  arrays = x_q.values, w_q.values, x_q.scale, w_q.scale
  options = {
    "lhs_scale": x_q.scale,
    "rhs_scale": w_q.scale.swapaxes(1, 2),
    "dimension_numbers": (((2,), (1,)), ((0,), (0,))),
    "preferred_element_type": np.float32,
  }
  weights = w_q.values.swapaxes(1, 2)
  return [
    *(f(*arrays) for f in by_each(jp.nn.scaled_matmul)),
    *(f(x_q.values, weights) for f in by_each(jp.scaled_dot, **options)),
  ]


@entry(
  *("nn.scaled_dot_general", "nn.get_scaled_dot_general_config"), args=(X, W)
)
def scaled_dot_general(x, w):
  results = []
  for mode in jp.nn.MODES:
    configs = [jp.nn.get_scaled_dot_general_config(mode) for _ in range(3)]
    f = functools.partial(
      jp.nn.scaled_dot_general, dimension_numbers=ALONG_LAST, configs=configs
    )
    results += [f(x, w), gradients(f, x, w)]
  return results


@entry("accelerate", args=(X, W, STACK, SIZES))
def accelerate(x, w, stack, sizes):
  x_q, w_q = jp.quantize(x[None], jp.MXFP8), jp.quantize(w[None], jp.MXFP8)
  stack_q = jp.quantize(stack, jp.MXFP8)

  def ragged(x, stack_q):
    weights = stack_q.dequantize().swapaxes(1, 2)
    return lax.ragged_dot(x, weights, sizes)

  return (
    jp.accelerate(jax.nn.scaled_matmul)(
      x_q.values, w_q.values, x_q.scale, w_q.scale
    ),
    gradients(lambda x: jp.accelerate(ragged)(x, stack_q), x),
  )


@entry("quantize_params", "accept_quantized", args=(X, W))
def accept_quantized(x, w):
  def model(params, x):
    return jnp.tanh(x @ params["layer"]["kernel"]) @ params["head"]

  params = {"layer": {"kernel": w.T}, "head": w}
  results = []
  for format in (jp.MXFP8, jp.NVFP4):
    quantized, _ = jp.quantize_params(params, format, min_size=0)
    f = functools.partial(jp.accept_quantized(model), quantized)
    results += [f(x), gradients(f, x)]
  return results


@entry(
  "checkpoints.activation_scale",
  *("checkpoints.from_comfyui", "checkpoints.from_deepseek"),
  *("checkpoints.from_mlx", "checkpoints.from_modelopt"),
  *("checkpoints.from_compressed_tensors", "checkpoints.from_gpt_oss"),
  *("checkpoints.from_torchao", "checkpoints.from_gguf"),
  *("checkpoints.from_gptq", "checkpoints.from_awq"),
  args=(
    np.arange(N * K // 2, dtype=np.uint8).reshape(N, K // 2),
    np.full((N, K // 16), 56, np.uint8),
    np.full((N, K // 32), 127, np.uint8),
    np.full((N, K // 32, 17), 127, np.uint8),
  ),
)
def conversions(values, e4m3, e8m0, gguf):
  as_type = lax.bitcast_convert_type
  scale = as_type(jnp.asarray(e4m3), jnp.float8_e4m3fn)
  number = np.float32(0.125)
  words = as_type(jnp.asarray(values).reshape(N, K // 8, 4), jnp.uint32)
  exponents = as_type(jnp.asarray(e8m0), jnp.float8_e8m0fnu)
  tiles = as_type(jp.swizzle_scale(scale), jnp.uint8)
  signed = as_type(jnp.asarray(values), jnp.int8)
  blocks = values.reshape(1, N, K // 32, 16)
  integers = as_type(words, jnp.int32)
  scales = jnp.ones((2, N), jnp.float16)
  made = (
    jp.checkpoints.from_comfyui(
      values, as_type(tiles, jnp.float8_e4m3fn), number
    ),
    jp.checkpoints.from_deepseek(signed, exponents),
    jp.checkpoints.from_mlx(words, e8m0),
    jp.checkpoints.from_modelopt(values, scale, number),
    jp.checkpoints.from_modelopt(values, e8m0),
    jp.checkpoints.from_compressed_tensors(values, scale, 1 / number),
    jp.checkpoints.from_torchao(values, scale, number),
    jp.checkpoints.from_gguf(gguf, "mxfp4"),
    jp.checkpoints.from_gpt_oss(blocks, e8m0[None]),
    jp.checkpoints.from_gptq(integers.T, scales),
    jp.checkpoints.from_awq(integers.reshape(K, N // 8), scales),
  )
  activation = jp.checkpoints.activation_scale("compressed-tensors", number)
  return [activation, *(x.dequantize() for x in made)]


# Programs that JAX does not trace.


@entry(
  *("checkpoints.load", "checkpoints.quantize", "checkpoints.save"),
  args=(),
  is_traced=False,
)
def checkpoint():
  with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(folder) / "model.safetensors"
    safetensors.numpy.save_file(
      {"model.layers.0.mlp.up_proj.weight": W.astype(ml_dtypes.bfloat16)},
      source,
    )
    target = pathlib.Path(folder) / "quantized.safetensors"
    jp.checkpoints.quantize(source, target, "nvfp4", verify=True)
    saved = pathlib.Path(folder) / "saved.safetensors"
    jp.checkpoints.save(saved, dict(jp.checkpoints.load(target)))
    found = jp.checkpoints.load(saved)
    (array,) = dict(found).values()
    return jp.dequantize(jax.tree.map(jnp.asarray, array))


# Public functions without a program.
READS = "it reads a program, a target or a table, and computes no array"
SETS = "it sets what other functions choose, and computes no array"
NOT_HERE = {
  "detect_target": READS,
  "explain": READS,
  "export": "it lowers a program for other devices",
  "info": READS,
  "named_target": READS,
  "options": SETS,
  "register_backend": SETS,
  "register_flax_serialization": SETS,
  "rewrite": READS,
  "tuning": SETS,
  "tuning_digest": READS,
  "use_target": SETS,
}

# The contract's bound, and three roundings of each operand's scale.
TOLERANCE = (16 + 6) * 2.0**-24

# Each refuses programs and changes no value.
STRICT = {
  "jax_check_tracer_leaks": True,
  "jax_enable_custom_prng": True,
  "jax_enable_x64": True,
  "jax_legacy_prng_key": "error",
  "jax_numpy_dtype_promotion": "strict",
  "jax_numpy_rank_promotion": "raise",
}


@contextlib.contextmanager
def configured(**options):
  before = {name: getattr(jax.config, name) for name in options}
  try:
    for name, value in options.items():
      jax.config.update(name, value)
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)


def arguments(entry):
  return entry.args + ((jax.random.key(7),) if entry.has_key else ())


def run(entry, *args):
  """Returns the program's results as NumPy arrays, jitted if possible."""
  f = jax.jit(entry.run) if entry.is_traced else entry.run
  return [np.asarray(x) for x in jax.tree.leaves(f(*args))]


@functools.cache
def plain(name):
  return run(ENTRIES[name], *arguments(ENTRIES[name]))


def as_bytes(x):
  return np.ascontiguousarray(x).view(np.uint8)


def named(cases):
  return [(name, name) for name in cases]


TRACED = [name for name, entry in ENTRIES.items() if entry.is_traced]


# Programs that are run: each mode compiles them again.
EXECUTED = (
  *("quantize", "quantize_both", "accelerate", "dot", "dot_general_of_formats"),
  *("ragged_dot", "scaled", "scaled_dot_general", "dot_general_of_recipes"),
)


class ModesTest(parameterized.TestCase):
  def assert_same(self, name, got):
    want = plain(name)
    self.assertEqual(len(got), len(want))
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
      self.assertEqual((x.shape, x.dtype), (y.shape, y.dtype), f"result {i}")
      np.testing.assert_array_equal(as_bytes(x), as_bytes(y), f"result {i}")

  @parameterized.named_parameters(
    named(name for name, entry in ENTRIES.items() if entry.expected)
  )
  def test_values_are_numpys(self, name):
    entry = ENTRIES[name]
    want = entry.expected()
    want = want if isinstance(want, list) else [want]
    for x, y in zip(plain(name), want, strict=True):
      error = np.abs(x.astype(np.float64) - y).max()
      self.assertLessEqual(error, TOLERANCE * entry.magnitude)

  @parameterized.named_parameters(named(TRACED))
  def test_refusing_modes_take_it(self, name):
    entry = ENTRIES[name]
    args = jax.device_put(arguments(entry))
    with configured(**STRICT):
      jax.jit(lambda *args: entry.run(*args)).lower(*args)

  @parameterized.parameters(*formats.NAMED)
  def test_refusing_modes_take_each_format(self, format):
    x, w = jnp.ones((M, 128)), jnp.ones((128, 128))

    def function(x, w):
      first, last = (jp.quantize(w, format, axis=axis) for axis in (0, 1))
      return first.dequantize(), jp.linear(x, last)

    with configured(**STRICT):
      jax.jit(function).trace(x, w)

  @parameterized.named_parameters(named(EXECUTED))
  @pytest.mark.sample(2)
  def test_checked_values_and_transfers_keep_the_bits(self, name):
    entry = ENTRIES[name]
    args = jax.device_put(arguments(entry))
    f = jax.jit(lambda *args: entry.run(*args))
    modes = configured(jax_debug_nans=True, **STRICT)
    with modes, jax.transfer_guard("disallow"):
      results = f(*args)
    self.assert_same(name, [np.asarray(x) for x in jax.tree.leaves(results)])

  @parameterized.named_parameters(named(EXECUTED[:-1]))
  @pytest.mark.sample(2)
  def test_without_jit_the_bits_are_the_same(self, name):
    entry = ENTRIES[name]
    eager = dataclasses.replace(entry, is_traced=False)
    with jax.disable_jit():
      results = run(eager, *arguments(entry))
    self.assert_same(name, results)

  def test_every_public_name_is_tried_or_has_a_reason(self):
    public = {prefix + n for prefix, names in PUBLIC.items() for n in names}
    tried = {name for entry in ENTRIES.values() for name in entry.covers}
    self.assertEmpty(tried - public, "no such public name")
    self.assertEmpty(tried & NOT_HERE.keys(), "tried, and has a reason")
    self.assertEqual(public - tried, NOT_HERE.keys())

  @parameterized.named_parameters(
    ("big_endian", lambda x: x.astype(x.dtype.newbyteorder(">"))),
    ("every_other_row", lambda x: np.repeat(x, 2, axis=0)[::2]),
    ("column_major", np.asfortranarray),
    ("reversed", lambda x: x[::-1][::-1]),
  )
  @pytest.mark.sample(2)
  def test_numpy_arrays_of_any_memory_order(self, changed):
    w_q = jp.quantize(STACK, jp.MXFP8)
    for f in (
      lambda x: jp.quantize(x, jp.NVFP4),
      lambda x: jp.linear(x, w_q[0]),
      lambda x: jp.ragged_dot(x, w_q, changed(SIZES)),
    ):
      got, want = (jax.tree.leaves(f(x)) for x in (changed(X), X))
      for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(as_bytes(x), as_bytes(y))


class CheckifyTest(parameterized.TestCase):
  @parameterized.parameters(
    ("block_quantize", lambda w: jp.quantize(scale_rows(w), jp.MXFP8)),
    ("block_dequantize", lambda w: jp.dequantize(w)),
    ("block_scaled_dot", lambda w: jp.linear(X, w[0])),
    ("block_scaled_ragged_dot", lambda w: jp.ragged_dot(X, w, SIZES)),
  )
  @pytest.mark.sample(2)
  def test_nan_in_a_result_names_the_operation(self, primitive, f):
    checked = jax.jit(checkify.checkify(f, errors=checkify.nan_checks))
    w_q = jp.quantize(STACK, jp.MXFP8)
    error, _ = checked(w_q)
    self.assertIsNone(error.get())
    scale = w_q.scale.at[0, 0, 0].set(jnp.nan)
    error, _ = checked(jp.ScaledArray(w_q.values, scale, None, jp.MXFP8))
    self.assertIn(f"nan generated by primitive: {primitive}.", error.get())


class KeysTest(parameterized.TestCase):
  @parameterized.parameters("threefry2x32", "rbg", "unsafe_rbg")
  @pytest.mark.sample(2)
  def test_order_of_numbers_decides(self, impl):
    key = jax.random.key(3, impl=impl)
    made = {
      jax.random.key_data(
        products.fold_in(products.fold_in(key, i), j)
      ).tobytes()
      for i in range(4)
      for j in range(4)
    }
    self.assertLen(made, 16)


class IntegersTest(parameterized.TestCase):
  @parameterized.parameters(
    np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64
  )
  @pytest.mark.sample(2)
  def test_group_sizes_mean_what_they_say(self, dtype):
    w_q = jp.quantize(STACK, jp.MXFP8)
    want = jp.ragged_dot(X, w_q, SIZES)
    given = jp.ragged_dot(X, w_q, SIZES.astype(dtype))
    np.testing.assert_array_equal(given, want)
    # Sizes beyond the rows end with the rows, also where i32 would wrap.
    largest = np.array([20, min(np.iinfo(dtype).max, 2**40)], dtype)
    want = jp.ragged_dot(X, w_q, np.array([20, M - 20]))
    np.testing.assert_array_equal(jp.ragged_dot(X, w_q, largest), want)
