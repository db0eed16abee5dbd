# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The variants of a decoder's step.

The step is written in two ways: with separate arguments for each layer's
weights, and ("in scan") by `lax.scan` over stacked layers. XLA:CPU copies the
slices of a scan, so our variants scan over the layers' indices, and `linear`
reads the stacks. Our variants and f32 are timed in both ways. Other peers are
timed with separate arguments, which is faster for all peers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import quantization
from jaxplugin.arrays import preparation, scaled_array
from jaxplugin.core import formats, targets
from jaxplugin.dot import backends, reference
from jaxplugin.dropin import linear
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import (
  decoder_model,
  dot_variants,
  operand_sets,
  variants,
  verification,
)
from jaxplugin.repro import oracle

_F32: Final = np.dtype(np.float32)
IN_SCAN: Final = " in scan"
PEERS: Final = ("f32", "bf16", "lax.scaled_dot")
# Number of weights that are checked for each matmul.
_MAX_WEIGHTS: Final = 1 << 18


@functools.partial(jax.jit, static_argnames=("shape", "layers", "format"))
def _weights(
  key: jax.Array,
  shape: tuple[int, int],
  layers: int,
  format: formats.BlockFormat,
) -> scaled_array.ScaledArray:
  """Returns quantized, normally distributed weights.

  Their standard deviation keeps the magnitude of activations. Layer i has the
  rows of the first layer, rolled by i.
  """
  x = jax.random.normal(key, shape, jnp.float32) * shape[1] ** -0.5
  stack = jnp.stack([jnp.roll(x, i, axis=0) for i in range(layers)])
  return quantization.quantize(stack, format, batch_dims=1)


class DecoderOperands:
  """Sets of operands of a decoder's step. Each is created at its first use.

  Each set has different activations. All sets share the key and value caches.
  All sets also share the weights if these are more than 2.5 times as large as
  the last-level cache. Otherwise, each set has different weights.
  """

  def __init__(
    self,
    row: workloads.BenchRow,
    format: formats.BlockFormat,
    cache_bytes: int,
  ):
    self.row = row
    self.format = format
    self._shapes = decoder_model.weight_shapes(row)
    count = row.layers * sum(n * k for n, k in self._shapes.values())
    smallest = count // format.values_encoding.values_per_byte
    past_cache = (1 + operand_sets.PAST_CACHE) * cache_bytes
    self._shares_weights = smallest > past_cache
    keys = jax.random.split(jax.random.key(0), 3)
    self._x_key, self._caches_key, self._weights_key = keys
    self._made: dict[Any, Any] = {}

  def x(self, i: int) -> jax.Array:
    """Returns f32[m, channels]."""
    key = jax.random.fold_in(self._x_key, i)
    shape = self.row.m, self.row.k
    return self._once(("x", i), lambda: jax.random.normal(key, shape))

  def caches(self) -> dict[str, jax.Array]:
    """Returns `decoder_model.CACHES`, f32[layers, m, groups, length, d]."""
    row = self.row
    shape = (
      *(row.layers, row.m, decoder_model.groups(row)),
      *(decoder_model.CACHE_LENGTH, workloads.HEAD_SIZE),
    )
    keys = jax.random.split(self._caches_key, len(decoder_model.CACHES))
    return self._once(
      "caches",
      lambda: {
        name: jax.random.normal(key, shape)
        for name, key in zip(decoder_model.CACHES, keys, strict=True)
      },
    )

  def weights(self, i: int, ready: str = "") -> dict[str, Any]:
    """Returns stacks (layers, n, k), quantized or dequantized to `ready`."""

    def make() -> dict[str, Any]:
      if ready:
        weights = self.weights(i)
        dequantized = operand_sets.dequantized
        return {n: dequantized(w, ready) for n, w in weights.items()}
      key = jax.random.fold_in(self._weights_key, self._copy_of(i))
      keys = jax.random.split(key, len(decoder_model.PRODUCTS))
      return {
        name: _weights(key, self._shapes[name], self.row.layers, self.format)
        for name, key in zip(decoder_model.PRODUCTS, keys, strict=True)
      }

    return self.arranged(i, ("weights", ready), make)

  def arranged(self, i: int, name: Any, make: Any) -> Any:
    """Returns `make()` for set i, cached by `name` and the set's weights."""
    return self._once((name, self._copy_of(i)), make)

  def sampled(
    self, i: int, layer: int, product: str, ready: str
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns a sample of columns, and their weights f64[columns, k]."""

    def make() -> tuple[np.ndarray, np.ndarray]:
      w = self.weights(i, ready)[product][layer]
      n, k = w.shape
      columns = verification.some(n, max(2, _MAX_WEIGHTS // k))
      return columns, verification.f64(w, columns)

    return self.arranged(i, ("sampled", layer, product, ready), make)

  def _copy_of(self, i: int) -> int:
    return 0 if self._shares_weights else i

  def _once(self, key: Any, make: Any) -> Any:
    if key not in self._made:
      self._made[key] = make()
    return self._made[key]


class DecoderVariants:
  """The variants of one decoder's step on one device.

  `pair.lhs` is the format of activations in each matmul, and `pair.rhs` is the
  format of weights. Results of matmuls and all other arrays are f32.
  """

  def __init__(
    self,
    row: workloads.BenchRow,
    pair: workloads.Pair,
    target: targets.Target,
    cache_bytes: int,
  ):
    assert pair.rhs is not None
    self.row = row
    self.pair = pair
    self.target = target
    self.data = DecoderOperands(row, pair.rhs, cache_bytes)
    self._given: Rounded = (
      cast(pair.plain) if pair.lhs is None else quantized(pair.lhs)
    )

  def ours(self, names: Sequence[str] | None) -> list[variants.AnyVariant]:
    """Returns variants of the backends `names`. None is the chosen backends."""

    def prepared(w: Any) -> Any:
      return preparation.prepare_weights(w, self.target)

    def form_of(implementation: str | None) -> dot_variants.Form:
      product = functools.partial(self._ours, implementation)
      return dot_variants.Form("", product, prepared)

    form = form_of(None)
    step = functools.partial(decoder_model.numbered, form.function)
    decided = variants.decided(step, self._operands(0, form, True), self.target)

    def make(
      backend: backends.Backend, is_chosen: bool
    ) -> Iterator[variants.Variant]:
      plans = [backend.plan(one.problem, self.target) for one in decided]
      for in_scan in (False, True):
        yield self._variant(
          backend.name,
          "ours",
          form_of(backend.name),
          in_scan,
          rounded=self._given,
          bound=verification.OURS_BOUND,
          relative=max(plan.relative_error for plan in plans),
          is_chosen=is_chosen,
        )

    return variants.ours(
      names, decided, backends.OPERATION, make, default=[variants.CHOSEN]
    )

  def _given_to_products(self, x: jax.Array) -> Any:
    if self.pair.lhs is None:
      return x.astype(self.pair.plain)
    return quantization.quantize(x, self.pair.lhs)

  def _ours(self, implementation: str | None, x: jax.Array, w: Any) -> Any:
    """Multiplies with a weight, or with layer i of a stack: w = (stack, i)."""
    w, layer = w if isinstance(w, tuple) else (w, None)
    return linear.linear(
      self._given_to_products(x),
      w,
      layer=layer,
      preferred_element_type=_F32,
      implementation=implementation,
    )

  def peers(self, names: Sequence[str]) -> list[variants.AnyVariant]:
    """Returns `names` of `dot_variants.PEERS`, each with its forms."""
    result: list[variants.AnyVariant] = []
    for name in names:
      reason = dot_variants.lacks(name, self.pair)
      if name not in PEERS:
        reason = "is not run for decoders"
      if reason:
        result.append(variants.Unavailable(name=name, reason=reason))
        continue
      result.append(self._peer(name, False))
      if name == "f32":
        result.append(self._peer(name, True))
    return result

  def _peer(self, name: str, in_scan: bool) -> tuple[variants.Variant, ...]:
    bound = dot_variants.peer_bound(name, self.pair)
    if name == "lax.scaled_dot":
      forms = dot_variants.scaled_dot_forms(_F32)
    else:
      forms = dot_variants.plain_forms(name, self.row.m, _F32)
    if name == "bf16":  # XLA may omit or reorder roundings to bf16
      bound += reference.rounding_error(formats.BF16)

    def linear(form: dot_variants.Form, x: jax.Array, w: Any) -> jax.Array:
      if form.ready:
        return form.function(x.astype(form.ready), w)
      return form.function(dot_variants.unpacked(self._given_to_products(x)), w)

    return tuple(
      self._variant(
        name,
        "peer",
        form._replace(function=functools.partial(linear, form)),
        in_scan,
        rounded=cast(_F32) if form.ready else self._given,
        bound=bound,
      )
      for form in forms
    )

  def _operands(
    self, i: int, form: dot_variants.Form, in_scan: bool
  ) -> tuple[Any, Any]:
    """Returns the activations, and the layers in the form's layout."""
    data = self.data

    def make() -> Any:
      weights, caches = data.weights(i, form.ready), data.caches()
      if in_scan:
        return {n: form.store(w) for n, w in weights.items()} | caches
      return tuple(
        {n: form.store(w[layer]) for n, w in weights.items()}
        | {n: cache[layer] for n, cache in caches.items()}
        for layer in range(self.row.layers)
      )

    key = form.ready, form.store, in_scan
    return data.x(i), data.arranged(i, key, make)

  def _variant(
    self,
    name: str,
    role: variants.Role,
    form: dot_variants.Form,
    in_scan: bool,
    *,
    rounded: Rounded,
    bound: float,
    relative: float = 0,
    is_chosen: bool = False,
  ) -> variants.Variant:
    step: Callable[..., Any] = decoder_model.unrolled
    if in_scan:
      is_ours = role == "ours"
      step = decoder_model.numbered if is_ours else decoder_model.scanned
    data = self.data

    def check(i: int, result: Any) -> float:
      return _check_step(
        result,
        data.x(i),
        data.caches(),
        weights=lambda layer, product: data.sampled(
          i, layer, product, form.ready
        ),
        rounded=rounded,
        bound=bound,
        relative=relative,
      )

    operands = *data.weights(0, form.ready).values(), *data.caches().values()
    return variants.Variant(
      name=name + IN_SCAN * in_scan,
      role=role,
      function=functools.partial(step, form.function),
      operands=lambda i: self._operands(i, form, in_scan),
      check=check,
      num_bytes=operand_sets.num_bytes(*operands) + 2 * data.x(0).nbytes,
      flops=decoder_model.flops(self.row),
      arithmetic=variants.arithmetic_of(
        role, form.ready == "float32", self.pair.is_fp4
      ),
      is_chosen=is_chosen,
      form=form.name,
      same_as=form.ready and form.ready + IN_SCAN * in_scan,
    )


# The check compares the input of each matmul with an f64 computation from the
# outputs of earlier matmuls. It compares the output of each matmul with an f64
# matmul of the same input, after the variant's rounding or quantization, at a
# sample of the weights. Errors of matmuls therefore do not add up. Each error
# has the bound of a single matmul, which is smaller than the error of
# quantization.

# Bound of XLA's f32 operations between two matmuls, such as sums and
# exponentials.
BETWEEN_BOUND: Final = verification.PEER_BOUND
# Bound of x + y, in units of |x| + |y|. Three values are rounded: y, XLA's sum,
# and the sum in this module.
_ADDITION_BOUND: Final = 3 * verification.UNIT

# Maps (layer, matmul) to a sample of columns, and their weights
# f64[columns, k].
Weights = Callable[[int, str], tuple[np.ndarray, np.ndarray]]
# Rounds f32[m, k] as the variant does. The result is f64.
Rounded = Callable[[np.ndarray], np.ndarray]


def _check_step(
  result: Any,
  x: Any,
  caches: dict[str, Any],
  *,
  weights: Weights,
  rounded: Rounded,
  bound: float,
  relative: float,
) -> float:
  """Checks all results of a step, and returns the largest error of a matmul.

  Args:
    result: the result of a function of `decoder_model`.
    x, caches: the inputs of the step.
    weights, rounded: see the types `Weights` and `Rounded`.
    bound, relative: as for `verification.check_dot`.

  Raises:
    WrongResultError: If a result is wrong. The text names the layer.
  """
  y, seen = result
  x = np.asarray(x)
  largest = 0.0
  keys, values = (np.asarray(caches[name]) for name in decoder_model.CACHES)

  def product(i: int, name: str) -> np.ndarray:
    nonlocal largest
    one = decoder_model.of_layer(seen, i)[name]
    given, got = np.asarray(one["input"]), np.asarray(one["output"])
    columns, w = weights(i, name)
    lhs = rounded(given)
    expected = verification.ExpectedSample(
      rows=np.arange(len(lhs)),
      columns=columns,
      exact=lhs @ w.T,
      magnitude=np.abs(lhs) @ np.abs(w).T,
    )
    try:
      error = verification.check_dot(
        got, expected, bound=bound, relative=relative
      )
    except verification.WrongResultError as wrong:
      raise verification.WrongResultError(
        f"layer {i}, {name}: {wrong}"
      ) from wrong
    largest = max(largest, error)
    return got

  def goes_into(i: int, name: str, exact: Any, magnitude: Any) -> None:
    got = np.asarray(decoder_model.of_layer(seen, i)[name]["input"])
    _compare(f"layer {i}, what goes into {name}", got, exact, magnitude)

  drift = np.zeros(x.shape)  # bound of the difference from XLA's x

  def add(y: np.ndarray) -> None:
    nonlocal x, drift
    drift = drift + _ADDITION_BOUND * (np.abs(x) + np.abs(y))
    x = x + y

  for i in range(len(keys)):
    goes_into(i, "qkv", *_norm(x, drift))
    goes_into(i, "out", *_attention(product(i, "qkv"), keys[i], values[i]))
    add(product(i, "out"))
    goes_into(i, "gate_up", *_norm(x, drift))
    gated = _gated(product(i, "gate_up"))
    goes_into(i, "down", gated, np.abs(gated))
    add(product(i, "down"))
  _compare("the result", np.asarray(y), x, drift / BETWEEN_BOUND)
  return largest


def _compare(
  what: str,
  got: np.ndarray,
  exact: np.ndarray,
  magnitude: np.ndarray,
) -> None:
  error = np.abs(got.astype(np.float64) - exact)
  limit = BETWEEN_BOUND * magnitude + np.finfo(np.float32).tiny
  if not (error <= limit).all():  # also true for NaN
    at = np.unravel_index(np.argmax(np.nan_to_num(error - limit)), error.shape)
    place = tuple(int(index) for index in at)
    raise verification.WrongResultError(
      f"{what}, at {place}: got {got[place]:.8g}, exact {exact[place]:.8g},"
      f" error {error[place]:.3g} above the bound {limit[place]:.3g}"
    )


def _norm(x: np.ndarray, drift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the norm, and the unit of its error if x has error `drift`."""
  x = x.astype(np.float64)
  mean = np.square(x).mean(axis=-1, keepdims=True)
  size = np.sqrt(mean + decoder_model.NORM_EPSILON)
  return x / size, (np.abs(x) + drift / BETWEEN_BOUND) / size


def _gated(gate_up: np.ndarray) -> np.ndarray:
  gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
  return gate / (1 + np.exp(-gate)) * up


def _attention(
  qkv: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns attention over the values, and over their magnitudes."""
  query, key, value = (
    part.astype(np.float64)
    for part in decoder_model.split_qkv(qkv, keys.shape[1])
  )
  keys = np.concatenate([keys, key], axis=2)
  values = np.concatenate([values, value], axis=2)
  scores = query @ keys.swapaxes(2, 3) / np.sqrt(workloads.HEAD_SIZE)
  part = np.exp(scores - scores.max(axis=-1, keepdims=True))
  part /= part.sum(axis=-1, keepdims=True)
  flat = lambda x: x.reshape(len(qkv), -1)
  return flat(part @ values), flat(part @ np.abs(values))


def quantized(format: Any) -> Rounded:
  """Returns the `Rounded` of a variant that quantizes to `format`."""

  def rounded(x: np.ndarray) -> np.ndarray:
    global_scale = oracle.global_scale_of(x, format)
    values, scale = oracle.quantize_rows(x, format, global_scale)
    if format.is_fp6:
      values = values.view(np.uint8)
    exact = reference.oracle_dequantize(values, scale, format)
    return exact if global_scale is None else exact * np.float64(global_scale)

  return rounded


def cast(dtype: Any) -> Rounded:
  """Returns the `Rounded` of a variant that casts to `dtype`."""
  return lambda x: x.astype(dtype).astype(np.float64)
