# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random weights of a `decoder`, and the form of the weights in each variant.

A variant's name is a format, "f32" or "bf16" for plain weights, or "stored" for
the formats of a file. For quantized weights the name says how rows are
multiplied: "nvfp4" multiplies rows in bf16 (weight-only), "nvfp4 pair"
quantizes the rows too.

Plain weights have three forms. By default, each layer is a separate array. In
"f32 halves" each weight is two arrays, whose matmuls XLA:CPU can run at the
same time; it computes a matmul of a single row in one thread. In "f32 scan" the
weights are stacks, and a scan copies each layer before the layer is read.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import decoder
import jax
import jax.numpy as jnp
import numpy as np

import jaxplugin as jp

PLAIN: Final = {"f32": jnp.float32, "bf16": jnp.bfloat16}
FORMATS: Final = ("mxfp8", "mxfp4", "nvfp4")
STORED: Final = "stored"
PAIR: Final = " pair"
HALVES: Final = " halves"
SCAN: Final = " scan"
FORMS: Final = ("", HALVES, SCAN)
NAMES: Final = (
  *(name + form for name in PLAIN for form in FORMS),
  *FORMATS,
  *(name + PAIR for name in FORMATS),
)
NORMS: Final = ("attention_norm", "mlp_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A variant: how to compute, and with what."""

  name: str
  decoder: decoder.Decoder
  params: decoder.Params

  @property
  def is_unrolled(self) -> bool:
    return isinstance(self.params["layers"], tuple)

  @property
  def bytes_a_token(self) -> int:
    """Bytes of the weights that a step reads, without the embedding.

    A step reads one row of the embedding.
    """
    read = {k: v for k, v in self.params.items() if k != "embed"}
    return num_bytes(read)

  def new_cache(
    self, start: Any, slots: int, dtype: str = "float16"
  ) -> decoder.Cache:
    config = self.decoder.config
    return decoder.new_cache(
      config, start, slots, unrolled=self.is_unrolled, dtype=dtype
    )


def num_bytes(tree: Any) -> int:
  """Returns the bytes of a tree's arrays, each counted once."""
  leaves = {id(x): x.nbytes for x in jax.tree.leaves(tree)}
  return sum(leaves.values())


def random_params(config: decoder.Config, seed: int = 0) -> decoder.Params:
  """f32 weights of stacks; the head is the embedding.

  One list of normal numbers is read over and over: a million are enough for
  speed, and 134 millions take seconds.
  """
  normal = np.random.default_rng(seed).standard_normal(999_983, np.float32)

  def weight(*shape: int) -> jax.Array:
    return jnp.asarray(np.resize(normal, shape) / np.sqrt(shape[-1], dtype="f"))

  layers = {
    name: weight(config.layers, *shape)
    for name, shape in config.weights.items()
  }
  for name in NORMS:
    layers[name] = jnp.ones((config.layers, config.width))
  embed = weight(config.vocabulary, config.width)
  return {
    "embed": embed,
    "layers": layers,
    "last_norm": jnp.ones(config.width),
    "head": embed,
  }


def model(
  name: str,
  config: decoder.Config,
  params: decoder.Params,
  stored: decoder.Params | None = None,
) -> Model:
  """Returns a variant.

  Args:
    name: one of `NAMES`, or "stored" if `stored` is given.
    config: sizes of the decoder.
    params: f32 parameters, with stacks of layers.
    stored: parameters with the formats of a file.

  Raises:
    ValueError: If there is no variant of this name.
  """
  if name == STORED and stored is not None:
    how = decoder.Decoder(config=config, given="bfloat16")
    return Model(name=name, decoder=how, params=stored)
  if name not in NAMES:
    raise ValueError(f"model: name must be one of {NAMES}, got {name!r}")
  format = name.removesuffix(PAIR)
  if format in FORMATS:
    given = "bfloat16" if name == format else "quantized"
    params = quantized(params, format)
  else:
    given = "float32"
    params = plain(params, config.layers, *name.partition(" ")[::2])
  how = decoder.Decoder(config=config, given=given)
  return Model(name=name, decoder=how, params=params)


def plain(
  params: decoder.Params, layers: int, dtype: str, form: str = ""
) -> decoder.Params:
  """In "f32" or "bf16", in one of the `FORMS`."""
  embed = params["embed"].astype(PLAIN[dtype])
  cast = lambda name, w: w if name in NORMS else w.astype(PLAIN[dtype])
  stacks = {name: cast(name, w) for name, w in params["layers"].items()}
  params = params | {"embed": embed, "head": embed, "layers": stacks}
  if form == SCAN.strip():
    return params
  halves = form == HALVES.strip()

  def parts(name: str, w: jax.Array) -> Any:
    if not halves or name in NORMS:
      return w
    return tuple(map(jnp.asarray, jnp.split(w, 2)))

  own = tuple(
    {name: parts(name, w[i]) for name, w in stacks.items()}
    for i in range(layers)
  )
  return params | {"layers": own, "head": parts("head", embed)}


def quantized(params: decoder.Params, format: str) -> decoder.Params:
  """Quantized, as kernels like them; norms stay f32.

  The head is the embedding here too: rows are taken out of the one array.
  """

  def contracting(parameter: Any) -> Any:
    is_norm = parameter.path.rpartition("/")[2] in (*NORMS, "last_norm")
    return False if is_norm else -1  # weights are (..., n, k)

  untied = {name: w for name, w in params.items() if name != "embed"}
  result, _ = jp.quantize_params(untied, format, where=contracting)
  # As bytes rows can be taken out of it: XLA:CPU converts all of an 8-bit float
  # array to take some.
  result = jp.prepare_weights(result | {"head": result["head"].to_bytes()})
  return result | {"embed": result["head"]}
