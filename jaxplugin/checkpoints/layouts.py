# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoint layouts: names, parts and configurations of each tool's weights.

`LAYOUTS` has a record for each layout. To add one, write its record and the
functions that only this layout needs, here or in a module of the tool, such as
`bitsandbytes.py`. `entries.py` has the steps that layouts share, and
`assembly.py` computes with the arrays of a weight.

Sources of gpt-oss: the weights of openai/gpt-oss; OCP MX v1.0, section 5;
`Mxfp4Config` of transformers 5.
"""

from __future__ import annotations

import math
from typing import Any, Final

import jax
import jax.numpy as jnp

from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import (
  assembly,
  bitsandbytes,
  compressed_tensors,
  entries,
  gguf_blocks,
  mlx,
  named_scales,
  packed_integers,
  records,
  stored,
  torchao,
)
from jaxplugin.core import formats

# Names of Hugging Face, and the original ones.
_GPT_OSS_SUFFIXES: Final = (("_blocks", "_scales"), (".blocks", ".scales"))
_GPT_OSS_BYTES: Final = formats.MXFP4.block_size // 2  # of a block
_SCALE_WHO: Final = "checkpoints.activation_scale"


# gpt-oss.


def from_gpt_oss(blocks: Any, scales: Any) -> scaled_array.ScaledArray:
  """Converts expert weights of gpt-oss: MXFP4, for `ragged_dot`.

  The numbers are::

    weight[e, i, j] = ldexp(value[e, i, j], scales[e, i, j // 32] - 127)

  The first weight of an expert has interleaved rows of gate and up, for
  `ragged_dot(..., activation="swigluoai")`.

  Args:
    blocks: uint8[..., n, k / 32, 16], the low nibble first.
    scales: uint8[..., n, k / 32], E8M0.

  Returns:
    A `ScaledArray` of views, [..., n, k].

  Raises:
    TypeError: If a dtype or a shape differs.

  Source: the weights of openai/gpt-oss.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> blocks = np.full((4, 32, 2, 16), 0x22, np.uint8)  # E2M1's 0010 is 1
    >>> scales = np.full((4, 32, 2), 127, np.uint8)  # 2^0
    >>> experts = jp.checkpoints.from_gpt_oss(blocks, scales)
    >>> print(experts.format, experts.shape, jp.dequantize(experts)[0, 0, 0])
    mxfp4 (4, 32, 64) 1.0
  """
  who = "checkpoints.from_gpt_oss"
  assembly.require_arrays(who, {"blocks": blocks, "scales": scales})
  _require_gpt_oss(who, blocks, scales)
  values = blocks.reshape(*blocks.shape[:-2], math.prod(blocks.shape[-2:]))
  return assembly.assemble(formats.MXFP4, values, scales)


def _require_gpt_oss(who: str, blocks: Any, scales: Any) -> None:
  """Raises TypeError unless blocks and scales are those that gpt-oss has."""
  is_right = (
    len(blocks.shape) >= 3
    and blocks.shape[-1] == _GPT_OSS_BYTES
    and tuple(blocks.shape[:-1]) == tuple(scales.shape)
    and scales.shape[-1] > 0
    and blocks.dtype == formats.PACKED
    and scales.dtype in (formats.PACKED, formats.E8M0)
  )
  if not is_right:
    raise TypeError(
      f"{who}: blocks must be uint8[..., n, k / 32, {_GPT_OSS_BYTES}] and"
      f" scales uint8[..., n, k / 32], got {assembly.brief(blocks)} and"
      f" {assembly.brief(scales)}"
    )


def _recognize_gpt_oss(
  contents: records.Contents, blocks: stored.StoredTensor
) -> records.Entry | None:
  if blocks.dtype != formats.PACKED:
    return None
  for values, scales_suffix in _GPT_OSS_SUFFIXES:
    base = blocks.name.removesuffix(values)
    name = f"{base}{scales_suffix}"
    if base == blocks.name:
      continue
    scales = contents.tensors.get(name)
    if scales is None and len(blocks.shape) > 2:
      contents.part(blocks, name)  # raises an error that names it
    if scales is not None and scales.dtype == formats.PACKED:
      _require_gpt_oss(entries.WHO, blocks, scales)
      format = formats.MXFP4
      return entries.entry(
        *("gpt-oss", format, from_gpt_oss, (blocks, scales)),
        name=base,
        shape=(*scales.shape[:-1], scales.shape[-1] * format.block_size),
      )
  return None


def _gpt_oss_tensors(
  name: str, array: scaled_array.ScaledArray
) -> dict[str, Any]:
  # The original name "mlp1_weight" has a dot, names of Hugging Face do not.
  dot = "." if name.endswith("_weight") else "_"
  found = entries.tensors_of(array, f"{name}{dot}blocks", f"{name}{dot}scales")
  shape = (*array.scale.shape, array.block_size // 2)
  return {**found, f"{name}{dot}blocks": array.values.reshape(shape)}


def _gpt_oss_refusal(decision: records.TensorDecision) -> str | None:
  if len(decision.tensor.shape) == 2:
    return (
      "layout gpt-oss stores only quantized experts; choose another layout for"
      " this weight"
    )
  return None


def _gpt_oss_config(
  format: formats.BlockFormat, left: list[str]
) -> dict[str, Any]:
  return {"quant_method": str(format), "modules_to_not_convert": left}


# The first layout that recognizes a weight reads it.
LAYOUTS: Final = (
  gguf_blocks.LAYOUT,
  bitsandbytes.LAYOUT,
  named_scales.MODELOPT_LAYOUT,
  compressed_tensors.LAYOUT,
  records.Layout(
    name="gpt-oss",
    recognize=_recognize_gpt_oss,
    formats=(formats.MXFP4,),
    tensors=_gpt_oss_tensors,
    refusal=_gpt_oss_refusal,
    config=_gpt_oss_config,
    transposes_stacks=True,
  ),
  torchao.LAYOUT,
  named_scales.COMFYUI_LAYOUT,
  named_scales.MODELOPT_SWIZZLED_LAYOUT,
  named_scales.DEEPSEEK_LAYOUT,
  *packed_integers.LAYOUTS,
  mlx.LAYOUT,
)
BY_NAME: Final = {layout.name: layout for layout in LAYOUTS}

OPEN_LAYOUTS: Final = named_scales.OPEN_LAYOUTS
# `quantize` uses the first one by default.
WRITTEN_LAYOUTS: Final = tuple(x.name for x in LAYOUTS if x.formats)
WRITTEN_FORMATS: Final = tuple(map(str, compressed_tensors.LAYOUT.formats))


def find_written(who: str, layout: str) -> records.Layout:
  """Returns a layout that can be written.

  Raises:
    ValueError: If there is no such layout.
  """
  if layout not in WRITTEN_LAYOUTS:
    raise ValueError(
      f"{who}: layout must be one of {', '.join(WRITTEN_LAYOUTS)}, got"
      f" {layout!r}"
    )
  return BY_NAME[layout]


def require_format(
  who: str, layout: records.Layout, format: formats.BlockFormat
) -> None:
  """Raises ValueError unless a layout stores a format."""
  if format in layout.formats:
    return
  others = [x.name for x in LAYOUTS if format in x.formats]
  if not others:
    raise ValueError(
      f"{who}: format must be one that a layout stores, got {format};"
      f" choose {', '.join(WRITTEN_FORMATS)}"
    )
  raise ValueError(
    f"{who}: layout {layout.name} stores"
    f" {', '.join(map(str, layout.formats))}, got {format}; for {format} choose"
    f" layout {', '.join(others)}"
  )


def activation_scale(layout: str, scale: Any) -> jax.Array:
  """Returns the calibrated `global_scale` of an activation.

  ModelOpt's and ComfyUI's `input_scale` and torchao's `act_per_tensor_scale`
  multiply, as `jp.quantize(x, "nvfp4", global_scale=)` takes them.
  compressed-tensors' `input_global_scale` divides.

  Args:
    layout: "modelopt", "modelopt-swizzled", "comfyui", "torchao" or
      "compressed-tensors".
    scale: the tensor, one float.

  Returns:
    f32[], which multiplies.

  Raises:
    ValueError: If the layout has no such scale.
    TypeError: If scale is not one float.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> scale = np.float32([64])
    >>> jp.checkpoints.activation_scale("compressed-tensors", scale)
    Array(0.015625, dtype=float32)
  """
  found = {x.name: x.activation_scale for x in LAYOUTS if x.activation_scale}
  if layout not in found:
    raise ValueError(
      f"{_SCALE_WHO}: layout must be one of {', '.join(found)}, got {layout!r}"
    )
  return _multiplier(scale, found[layout][1])


def read_activation_scale(
  entry: records.Entry, scale: stored.StoredTensor
) -> jax.Array:
  """Returns f32[] that multiplies, of the tensor `entry.activation_scale`.

  The `input_scale` of FP8 and INT8 multiplies in each layout.
  """
  assert entry.layout is not None
  leaf, divides = BY_NAME[entry.layout].activation_scale or ("", False)
  return _multiplier(scale.read(), divides and scale.name.endswith(leaf))


def _multiplier(scale: Any, divides: bool) -> jax.Array:
  if not isinstance(scale, float):
    assembly.require_arrays(_SCALE_WHO, {"scale": scale})
  given = scaled_array.as_array(_SCALE_WHO, "scale", scale)
  if given.size != 1 or not jnp.issubdtype(given.dtype, jnp.floating):
    raise TypeError(
      f"{_SCALE_WHO}: scale must be one float, got {assembly.brief(given)}"
    )
  given = given.astype(jnp.float32).reshape(())
  return 1 / given if divides else given
