# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The variants of a training step.

The step is the gradient of a transformer's block with respect to its weights
and its input: root mean square norm, causal attention, norm, and an MLP with
GELU. `quantize_dots` quantizes the four matmuls with weights by a recipe. It
does not quantize the two matmuls of attention. Weights, activations and
gradients are f32, or bf16 for the bf16 peer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import variants, verification
from jaxplugin.rewriting import quantized_dots
from jaxplugin.training import recipes

PEERS: Final = ("f32", "bf16")
_EPSILON: Final = 1e-5
_F32: Final = np.dtype(np.float32)

# Relative errors of a gradient, in the Frobenius norm. Rounding to p bits has
# an error of at most 2^-p / sqrt(3). Stochastic rounding has sqrt(2) times this
# error. The squared errors of up to 10 roundings of operands add up in a
# gradient. A missing gradient, or the gradient of another layer, has an error
# of 1 or more. A sum in f32 may lose 8 bits, by 256 roundings
# (`verification.PEER_BOUND`).
_CHAIN: Final = 10
_SIGNIFICAND_BITS: Final = {"f32": 24 - 8, "bf16": 8}

Weights = dict[str, jax.Array]


def _norm(x: jax.Array) -> jax.Array:
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  mean = jnp.square(wide).mean(-1, keepdims=True)
  return x * lax.rsqrt(mean + _EPSILON).astype(x.dtype)


def block(weights: Weights, x: jax.Array, *, is_transposed: bool) -> jax.Array:
  """Returns the block's output [tokens, channels].

  The weights "qkv", "out", "up" and "down" are [k, n], or [n, k] if
  `is_transposed`.
  """

  def linear(x: jax.Array, name: str) -> jax.Array:
    w = weights[name]
    return x @ (w.T if is_transposed else w)

  tokens, channels = x.shape
  heads = tokens, channels // workloads.HEAD_SIZE, workloads.HEAD_SIZE
  query, key, value = (
    y.reshape(heads) for y in jnp.split(linear(_norm(x), "qkv"), 3, axis=1)
  )
  y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
  x = x + linear(y.reshape(x.shape), "out")
  return x + linear(jax.nn.gelu(linear(_norm(x), "up")), "down")


def gradients(
  function: Callable[[Weights, jax.Array], jax.Array],
  weights: Weights,
  x: jax.Array,
  g: jax.Array,
) -> tuple[Weights, jax.Array]:
  """Returns the gradients of sum(function(weights, x) * g)."""
  _, vjp = jax.vjp(function, weights, x)
  return vjp(g)


class TrainingVariants:
  """The variants of one block's step on one device."""

  def __init__(
    self, row: workloads.BenchRow, pair: workloads.Pair, target: targets.Target
  ):
    self.row = row
    self.recipe = recipes.BY_FORMAT[pair.name]
    self.target = target
    # The shape (k, n) of each weight.
    self.shapes = {
      "qkv": (row.k, 3 * row.k),
      "out": (row.k, row.k),
      "up": (row.k, row.n),
      "down": (row.n, row.k),
    }
    self._operands = functools.cache(self._make_operands)
    self._expected = functools.cache(self._compute_expected)

  @property
  def flops(self) -> int:
    """FLOPs of all matmuls. Each matmul has two matmuls in its gradient."""
    weights = sum(k * n for k, n in self.shapes.values())
    attention = 2 * self.row.m * self.row.k
    return 3 * 2 * self.row.m * (weights + attention)

  def ours(self, names: Sequence[str] | None) -> list[variants.AnyVariant]:
    """Returns variants of the backends `names`. None is the chosen backends."""
    decided = variants.decided(
      functools.partial(self._quantized, None),
      (*self._operands(0, _F32), jax.random.key(0)),
      self.target,
    )
    formats = self.recipe.formats

    def make(
      backend: backends.Backend, is_chosen: bool
    ) -> Iterator[variants.Variant]:
      yield self._variant(
        backend.name,
        "ours",
        functools.partial(self._quantized, backend.name),
        bits=min(f.facts.element.significand_bits for f in formats),
        is_chosen=is_chosen,
      )

    return variants.ours(
      names, decided, backends.OPERATION, make, default=[variants.CHOSEN]
    )

  def peers(self, names: Sequence[str]) -> list[variants.AnyVariant]:
    """Returns `names` of `dot_variants.PEERS`, each with its forms."""
    return [
      self._forms(name)
      if name in PEERS
      else variants.Unavailable(name=name, reason="is not run for training")
      for name in names
    ]

  def _forms(self, name: str) -> tuple[variants.Variant, ...]:
    return tuple(
      self._variant(
        name,
        "peer",
        functools.partial(
          gradients, functools.partial(block, is_transposed=is_transposed)
        ),
        bits=_SIGNIFICAND_BITS[name],
        dtype=workloads.PLAIN_DTYPES[name],
        is_transposed=is_transposed,
        arithmetic="f32" if name == "f32" else "floats",
        form="w (n, k)" if is_transposed else "w (k, n)",
        same_as=name,
      )
      for is_transposed in (False, True)
    )

  def _quantized(
    self,
    implementation: str | None,
    weights: Weights,
    x: jax.Array,
    g: jax.Array,
    key: jax.Array,
  ) -> tuple[Weights, jax.Array]:
    function = quantized_dots.quantize_dots(
      functools.partial(block, is_transposed=False),
      self.recipe,
      key=key if self.recipe.stochastic_rounding else None,
      implementation=implementation,
    )
    return gradients(function, weights, x, g)

  def _make_operands(
    self, i: int, dtype: np.dtype, is_transposed: bool = False
  ) -> tuple[Any, ...]:
    random = np.random.default_rng(i)
    weights = {
      name: random.normal(size=shape) / math.sqrt(shape[0])
      for name, shape in self.shapes.items()
    }
    rows = (self.row.m, self.row.k)
    x, g = random.normal(size=rows), random.normal(size=rows)
    if is_transposed:
      weights = {name: w.T for name, w in weights.items()}
    return jax.tree.map(
      lambda a: jnp.asarray(a.astype(np.float32)).astype(dtype),
      (weights, x, g),
    )

  def _compute_expected(self, i: int) -> Any:
    """Returns the gradients of set i's f32 operands, computed in f64."""
    operands = jax.tree.map(np.asarray, self._operands(i, _F32))
    with jax.enable_x64(True):
      wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), operands)
      function = functools.partial(block, is_transposed=False)
      found = jax.jit(functools.partial(gradients, function))(*wide)
      return jax.tree.map(np.asarray, found)

  def check(
    self, i: int, result: Any, *, bits: int, is_transposed: bool
  ) -> None:
    """Raises WrongResultError unless each gradient is near the f64 one."""
    weights, x = result
    if is_transposed:
      weights = {name: w.T for name, w in weights.items()}
    bound = math.sqrt(_CHAIN * 2 / 3) * 2.0**-bits
    exact_weights, exact_x = self._expected(i)
    pairs = {name: (w, exact_weights[name]) for name, w in weights.items()}
    for name, (found, exact) in (pairs | {"input": (x, exact_x)}).items():
      error = np.linalg.norm(np.asarray(found, np.float64) - exact)
      error /= np.linalg.norm(exact)
      if not error <= bound:
        raise verification.WrongResultError(
          f"the gradient of {name} errs by {error:.3g} of its norm, more than"
          f" {bound:.3g}"
        )

  def _variant(
    self,
    name: str,
    role: variants.Role,
    function: Callable[..., Any],
    *,
    bits: int,
    dtype: np.dtype = _F32,
    is_transposed: bool = False,
    **fields: Any,
  ) -> variants.Variant:
    def operands(i: int) -> tuple[Any, ...]:
      made = self._operands(i, dtype, is_transposed)
      return (*made, jax.random.key(i)) if role == "ours" else made

    given = jax.tree.leaves(self._operands(0, dtype, is_transposed))
    return variants.Variant(
      name=name,
      role=role,
      function=function,
      operands=operands,
      check=functools.partial(
        self.check, bits=bits, is_transposed=is_transposed
      ),
      num_bytes=2 * sum(a.nbytes for a in given),
      flops=self.flops,
      **fields,
    )
