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
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import quantization
from jaxplugin.arrays import preparation
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import reference
from jaxplugin.dropin import linear
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import decoder_check
from jaxplugin.lab.bench.peers import decoder_model
from jaxplugin.lab.bench.peers import dot_variants
from jaxplugin.lab.bench.peers import operand_sets
from jaxplugin.lab.bench.peers import variants
from jaxplugin.lab.bench.peers import verification

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
  """Sets of operands of a decoder's step.

  Each set has different activations. All sets share the key and value caches.
  All sets also share the weights if these are more than 2.5 times as large as
  the last-level cache. Otherwise, each set has different weights.

  Attributes:
    sizes: sizes of the decoder.
    format: format of the weights.
  """

  def __init__(
    self,
    row: workloads.BenchRow,
    format: formats.BlockFormat,
    cache_bytes: int,
  ):
    self.sizes = decoder_model.DecoderSizes.of(row)
    self.format = format
    self._cache_bytes = cache_bytes
    keys = jax.random.split(jax.random.key(0), 3)
    self._x_key, self._caches_key, self._weights_key = keys
    self._made: dict[Any, Any] = {}

  def x(self, i: int) -> jax.Array:
    """Returns f32[m, channels]."""
    key = jax.random.fold_in(self._x_key, i)
    shape = self.sizes.rows, self.sizes.channels
    return self._once(("x", i), lambda: jax.random.normal(key, shape))

  def caches(self) -> dict[str, jax.Array]:
    """Returns `decoder_model.CACHES`, f32[layers, m, groups, length, d]."""
    shape = self.sizes.layers, *self.sizes.cache
    keys = jax.random.split(self._caches_key, len(decoder_model.CACHES))
    return self._once(
      "caches",
      lambda: {
        name: jax.random.normal(key, shape)
        for name, key in zip(decoder_model.CACHES, keys, strict=True)
      },
    )

  def quantized(self, i: int) -> dict[str, scaled_array.ScaledArray]:
    """Returns stacks (layers, n, k) of `decoder_model.PRODUCTS`."""
    copy = self._copy_of(i)
    key = jax.random.fold_in(self._weights_key, copy)
    keys = jax.random.split(key, len(decoder_model.PRODUCTS))
    shapes = self.sizes.weights
    return self._once(
      ("quantized", copy),
      lambda: {
        name: _weights(key, shapes[name], self.sizes.layers, self.format)
        for name, key in zip(decoder_model.PRODUCTS, keys, strict=True)
      },
    )

  def ready(self, i: int, dtype: Any) -> dict[str, jax.Array]:
    """Returns the dequantized stacks, rounded to `dtype`."""
    dtype = np.dtype(dtype)
    return self._once(
      (dtype.name, self._copy_of(i)),
      lambda: {
        n: quantization.dequantize(w, dtype)
        for n, w in self.quantized(i).items()
      },
    )

  def arranged(self, i: int, name: Any, make: Any) -> Any:
    """Returns `make()` for set i, cached by `name` and the set's weights."""
    return self._once((name, self._copy_of(i)), make)

  def sampled(
    self, i: int, layer: int, product: str, ready: str
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns a sample of columns, and their weights f64[columns, k].

    Args:
      i: the set.
      layer: the layer.
      product: one of `decoder_model.PRODUCTS`.
      ready: dtype of dequantized weights; "" if weights are quantized.
    """

    def make() -> tuple[np.ndarray, np.ndarray]:
      stacks = self.ready(i, ready) if ready else self.quantized(i)
      w: Any = stacks[product][layer]
      n, k = w.shape
      columns = verification.some(n, max(2, _MAX_WEIGHTS // k))
      return columns, verification.f64(w, columns)

    return self.arranged(i, ("sampled", layer, product, ready), make)

  def _copy_of(self, i: int) -> int:
    sizes = self.sizes
    values = sizes.layers * sum(n * k for n, k in sizes.weights.values())
    smallest = values // self.format.values_encoding.values_per_byte
    past = smallest > (1 + operand_sets.PAST_CACHE) * self._cache_bytes
    return 0 if past else i

  def _once(self, key: Any, make: Any) -> Any:
    if key not in self._made:
      self._made[key] = make()
    return self._made[key]


class _DecoderForm(NamedTuple):
  """A way to write the matmuls with weights.

  Attributes:
    name: the name of the form; "" for our variants.
    linear: computes one matmul.
    ready: dtype of dequantized weights; "" if weights are quantized.
    store: converts the weights to the layout of this form, before timing.
    stored: the name of the layout.
  """

  name: str
  linear: decoder_model.Linear
  ready: str = ""
  store: Callable[[Any], Any] = lambda w: w
  stored: str = ""


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
    self._given: decoder_check.Rounded = (
      decoder_check.cast(pair.plain)
      if pair.lhs is None
      else decoder_check.quantized(pair.lhs)
    )

  def ours(self, names: Sequence[str] | None) -> list[variants.AnyVariant]:
    """Returns variants of the backends `names`. None is the chosen backends."""

    def form_of(implementation: str | None) -> _DecoderForm:
      product = functools.partial(self._ours, implementation)
      return _DecoderForm("", product, store=self._prepared)

    form = form_of(None)
    step = functools.partial(decoder_model.numbered, form.linear)
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
      names, decided, backends.table(), make, default=[variants.CHOSEN]
    )

  def _prepared(self, w: Any) -> Any:
    return preparation.prepare_weights(w, self.target)

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
        result.append(variants.missing_peer(name, reason))
      elif name == "lax.scaled_dot":
        result.append(self._scaled_dot(name))
      else:
        result.append(self._plain(name, False))
        if name == "f32":
          result.append(self._plain(name, True))
    return result

  def _plain(self, name: str, in_scan: bool) -> variants.Forms:
    dtype = workloads.PLAIN_DTYPES[name]
    # XLA may omit or reorder roundings to bf16.
    cast = 0 if name == "f32" else reference.rounding_error(dtype)
    return self._forms(
      name,
      dot_variants.plain_forms(name, self.row.m, _F32),
      lambda x: x.astype(dtype),
      in_scan,
      decoder_check.cast(_F32),
      ready=dtype.name,
      bound=verification.PEER_BOUND + cast,
    )

  def _scaled_dot(self, name: str) -> variants.Forms:
    return self._forms(
      name,
      dot_variants.scaled_dot_forms(_F32),
      lambda x: dot_variants.unpacked(self._given_to_products(x)),
      False,
      self._given,
      bound=dot_variants.scaled_dot_bound(self.pair),
    )

  def _forms(
    self,
    name: str,
    forms: Sequence[dot_variants.Form],
    convert: Callable[[jax.Array], Any],
    in_scan: bool,
    rounded: decoder_check.Rounded,
    *,
    ready: str = "",
    bound: float,
  ) -> variants.Forms:
    """Returns a peer that converts activations and multiplies in `forms`."""

    def decoder_form(form: dot_variants.Form) -> _DecoderForm:
      return _DecoderForm(
        form.name,
        lambda x, w: form.function(convert(x), w),
        ready,
        dot_variants.transposed
        if form.is_transposed
        else dot_variants.unpacked,
        "(k, n)" if form.is_transposed else "(n, k)",
      )

    made = tuple(
      self._variant(
        name,
        "peer",
        decoder_form(form),
        in_scan,
        rounded=rounded,
        bound=bound,
      )
      for form in forms
    )
    return variants.Forms(
      name=made[0].name, role="peer", forms=made, of_floats=bool(ready)
    )

  def _operands(
    self, i: int, form: _DecoderForm, in_scan: bool
  ) -> tuple[Any, Any]:
    """Returns the activations, and the layers in the form's layout."""
    data = self.data

    def make() -> Any:
      weights: dict[str, Any] = (
        data.ready(i, form.ready) if form.ready else data.quantized(i)
      )
      caches = data.caches()
      if in_scan:
        return {n: form.store(w) for n, w in weights.items()} | caches
      return tuple(
        {n: form.store(w[layer]) for n, w in weights.items()}
        | {n: cache[layer] for n, cache in caches.items()}
        for layer in range(self.row.layers)
      )

    key = form.ready, form.stored, in_scan
    return data.x(i), data.arranged(i, key, make)

  def _variant(
    self,
    name: str,
    role: variants.Role,
    form: _DecoderForm,
    in_scan: bool,
    *,
    rounded: decoder_check.Rounded,
    bound: float = verification.PEER_BOUND,
    relative: float = 0,
    is_chosen: bool = False,
  ) -> variants.Variant:
    step: Callable[..., Any] = decoder_model.unrolled
    if in_scan:
      is_ours = role == "ours"
      step = decoder_model.numbered if is_ours else decoder_model.scanned
    data = self.data

    def check(i: int, result: Any) -> float:
      return decoder_check.check(
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

    weights: dict[str, Any] = (
      data.ready(0, form.ready) if form.ready else data.quantized(0)
    )
    x = data.x(0)
    return variants.Variant(
      name=name + IN_SCAN * in_scan,
      role=role,
      function=functools.partial(step, form.linear),
      operands=lambda i: self._operands(i, form, in_scan),
      check=check,
      num_bytes=operand_sets.num_bytes(
        *weights.values(), *data.caches().values()
      )
      + 2 * x.nbytes,
      flops=data.sizes.flops,
      arithmetic=variants.arithmetic_of(
        role, form.ready == "float32", self.pair.is_fp4
      ),
      is_chosen=is_chosen,
      form=form.name,
    )
