# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Selects the tensors to quantize, and gives a reason for each other tensor.

By default, names decide: embeddings, norms, heads, routers, vision towers and
convolutions stay unquantized.

Source: `default_disabled_quantizers` of NVIDIA Model Optimizer 0.47. Other
tools quantize more.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import jax

from jaxplugin.checkpoints import errors, records, stored
from jaxplugin.checkpoints import names as naming
from jaxplugin.checkpoints.writing import weights
from jaxplugin.core import formats

_FLOATS: Final = ("F32", "BF16", "F16")

# Patterns of names that stay unquantized, and the reason.
_UNQUANTIZED: Final = (
  (
    r"embed|(^|\.)(wte|wpe|relative_attention_bias)(\.|$)|^shared\.weight$",
    "an embedding",
  ),
  (r"norm|(^|\.)ln_?\w?(\.|$)", "a norm"),
  (r"lm_head|output_layer|^output\.|proj_out\.|^score\.|classifier", "a head"),
  (
    r"router|(block_sparse_moe|mlp|moe|ffn)\.gate(\.|$)|shared_expert_gate",
    "a router",
  ),
  (r"vision_tower|vision_model|visual|multi_modal_projector", "for images"),
  (r"conv1d|in_proj_[ab](\.|$)", "of a state-space layer"),
  (r"^mtp\.", "of multi-token prediction"),
)
_HEAD: Final = "lm_head"
_STACK: Final = re.compile(r"expert|mlp[12]_weight$")
# Models whose experts, and models whose matrices, have k before n.
_K_BEFORE_N: Final = ("gpt_oss", "llama4", "llama4_text")
_K_BEFORE_N_NAMES: Final = re.compile(r"experts\.(gate_up_proj|down_proj)$")
_CONV1D: Final = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionRules:
  """The caller's choice of weights, and the model type.

  Attributes:
    include: globs of names to quantize; None for the default.
    exclude: globs of names that stay unquantized.
    transposed: globs of stacks [E, k, n].
    model_type: `model_type` of config.json, "" if it has none.
  """

  include: Sequence[str] | None = None
  exclude: Sequence[str] = ()
  transposed: Sequence[str] = ()
  model_type: str = ""


def choose(
  who: str,
  tensors: Iterable[stored.StoredTensor],
  layout: records.Layout,
  format: formats.BlockFormat,
  rules: SelectionRules,
) -> list[records.TensorDecision]:
  """Returns a decision for each tensor.

  Raises:
    CheckpointError: If a glob matches nothing that can be quantized, no tensor
      can be quantized, a bias shows that k is another dimension, or two tensors
      would have the same name.
  """
  by_name = {tensor.name: tensor for tensor in tensors}
  for what in ("exclude", "transposed", "include"):
    for pattern in getattr(rules, what) or ():
      matched = [x for x in by_name if naming.matches([pattern], x)]
      if not matched:
        near = naming.near(pattern, by_name)
        hint = f" near names: {', '.join(near)};" if near else ""
        raise errors.CheckpointError(
          f"{who}: {what}={pattern!r} must match a tensor;{hint} list their"
          " names with dry_run=True (--dry-run)"
        )
      shapes = [by_name[x].shape for x in matched]
      if what == "transposed" and all(len(shape) != 3 for shape in shapes):
        raise errors.CheckpointError(
          f"{who}: transposed={pattern!r} must match experts of shape"
          f" [E, k, n], got {matched[0]!r} of shape {list(shapes[0])}"
        )
  found = [
    _decide(who, tensor, layout, format, rules, by_name)
    for tensor in by_name.values()
  ]
  for pattern in rules.include or ():
    of_it = [x for x in found if naming.matches([pattern], x.tensor.name)]
    if all(x.format is None for x in of_it):
      raise errors.CheckpointError(
        f"{who}: include={pattern!r} must match a tensor that can be"
        f" quantized, got {of_it[0].tensor.name!r} ({of_it[0].reason})"
      )
  if all(x.format is None for x in found):
    raise errors.CheckpointError(
      f"{who}: none of the {len(found)} tensors can be quantized to {format}"
      f" in layout {layout.name}, the first being {found[0].tensor.name!r}"
      f" ({found[0].reason})"
      if found
      else f"{who}: the checkpoint must have tensors, got none"
    )
  require_one_name_each(who, found)
  return found


def unquantized_modules(
  decisions: Iterable[records.TensorDecision],
) -> list[str]:
  """Returns modules whose weights are copied, and the head."""
  decisions = list(decisions)
  quantized = {
    naming.module_of(x.tensor.name) for x in decisions if x.format is not None
  }
  copied = {
    naming.module_of(x.tensor.name)
    for x in decisions
    if x.format is None
    and len(x.tensor.shape) > 1
    and not x.tensor.name.endswith("bias")
  }
  # The head stays unquantized even if it is another name of an embedding.
  return sorted({*copied, _HEAD} - quantized)


def _decide(
  who: str,
  tensor: stored.StoredTensor,
  layout: records.Layout,
  format: formats.BlockFormat,
  rules: SelectionRules,
  others: Mapping[str, stored.StoredTensor],
) -> records.TensorDecision:
  reason = _reason(tensor, rules)
  decision = records.TensorDecision(
    tensor=tensor, format=format, axis=_axis(tensor, rules)
  )
  if reason := reason or refusal(layout, decision):
    return records.TensorDecision(tensor=tensor, reason=reason)
  _require_bias_agrees(who, decision, others)
  x = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
  array = weights.abstract(layout, format, decision.axis, x)
  parts = weights.parts(layout, array, tensor.name)
  return dataclasses.replace(decision, parts=parts)


def refusal(layout: records.Layout, decision: records.TensorDecision) -> str:
  """Returns why a layout cannot store a weight, or ""."""
  format, k = decision.format, decision.tensor.shape[decision.axis]
  assert format is not None
  may_be_short = format.may_be_short and not format.has_pairs
  if not may_be_short and k % format.block_size:
    return f"k={k} is not a multiple of {format.block_size}"
  return layout.refusal(decision) or ""


def _reason(tensor: stored.StoredTensor, rules: SelectionRules) -> str:
  """Returns why a tensor is not quantized to any format, or ""."""
  name = tensor.name
  if naming.matches(rules.exclude, name):
    return "excluded"
  if rules.include is not None and not naming.matches(rules.include, name):
    return "not included"
  if tensor.type_name not in _FLOATS:
    return f"{tensor.type_name} is not one of {', '.join(_FLOATS)}"
  if len(tensor.shape) not in (2, 3):
    return f"rank {len(tensor.shape)}"
  if not math.prod(tensor.shape):
    return "empty"
  if len(tensor.shape) == 2 and rules.model_type in _CONV1D:
    return f"k comes before n in {rules.model_type}"
  if rules.include is not None:
    return ""
  for pattern, what in _UNQUANTIZED:
    if re.search(pattern, name):
      return what
  if len(tensor.shape) == 2 and not name.endswith(naming.WEIGHT):
    return "not named *.weight"
  is_stack = _STACK.search(name) and not name.endswith("bias")
  if len(tensor.shape) == 3 and not is_stack:
    return "rank 3, and not named experts"
  return ""


def _axis(tensor: stored.StoredTensor, rules: SelectionRules) -> int:
  """Returns the axis of k: the last one, except in experts of some models."""
  if len(tensor.shape) != 3:
    return -1
  if naming.matches(rules.transposed, tensor.name):
    return -2
  is_before = rules.model_type in _K_BEFORE_N and _K_BEFORE_N_NAMES.search(
    tensor.name
  )
  return -2 if is_before else -1


def _require_bias_agrees(
  who: str,
  decision: records.TensorDecision,
  others: Mapping[str, stored.StoredTensor],
) -> None:
  """Raises CheckpointError if a bias has k numbers instead of n."""
  weight, axis = decision.tensor, decision.axis
  if len(weight.shape) != 3:
    return
  base = weight.name.removesuffix("weight")
  for name in (f"{weight.name}_bias", f"{base}bias"):
    bias = others.get(name)
    other = -3 - axis  # the other of -1 and -2
    if bias is None or len(bias.shape) != 2:
      continue
    n, k = weight.shape[other], weight.shape[axis]
    if bias.shape[1] != n and bias.shape[1] == k:
      raise errors.CheckpointError(
        f"{who}: {weight.name!r}: the bias {name!r} of shape"
        f" {list(bias.shape)} must have n numbers, and k is assumed to be"
        f" dimension {3 + axis} of {list(weight.shape)};"
        + (
          f" pass transposed=[{weight.name!r}] (--transposed)"
          if axis == -1
          else " leave the weight out of transposed"
        )
      )


def require_one_name_each(
  who: str, found: Iterable[records.TensorDecision]
) -> None:
  """Raises CheckpointError if two tensors to write have the same name."""
  seen: set[str] = set()
  for decision in found:
    for name in decision.parts or [decision.tensor.name]:
      if name in seen:
        raise errors.CheckpointError(
          f"{who}: two tensors would have the name {name!r}; exclude one, or"
          " choose another layout"
        )
      seen.add(name)
