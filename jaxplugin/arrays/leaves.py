# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The arrays of a tree of parameters, with their names and their owners."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

from jaxplugin.arrays import quantized_weight, scaled_array

QUANTIZED = (scaled_array.ScaledArray, quantized_weight.QuantizedWeight)


def is_quantized(x: Any) -> bool:
  """Returns whether `x` is a quantized array."""
  return isinstance(x, QUANTIZED)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Leaf:
  """A leaf of a tree. A quantized array is one leaf.

  Attributes:
    path: the path in the tree, such as "params/block_0/mlp/kernel".
    array: the plain or quantized array.
    owner: the object that has the leaf as an attribute or item; None if
      unknown.
  """

  path: str
  array: Any
  owner: Any

  @property
  def parts(self) -> list[str]:
    return re.split(r"[/.]", self.path)

  @property
  def name(self) -> str:
    """The last part of the path, such as "kernel"."""
    return self.parts[-1]

  @property
  def module(self) -> str:
    """The path without the last part."""
    return self.path[: -len(self.name)].rstrip("/.")

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(getattr(self.array, "shape", ()))


def of(tree: Any) -> tuple[list[Leaf], Any]:
  """Returns the leaves of a tree, and its structure without them."""
  flat, structure = jax.tree_util.tree_flatten_with_path(
    tree, is_leaf=is_quantized
  )
  return [_leaf(tree, path, array) for path, array in flat], structure


def _leaf(tree: Any, keys: Sequence[Any], array: Any) -> Leaf:
  owner = _at(tree, keys[:-1])
  if keys and _text(keys[-1]) == "value" and _is_box(owner):
    keys = keys[:-1]
    owner = _at(tree, keys[:-1])
  return Leaf(path="/".join(map(_text, keys)), array=array, owner=owner)


def _is_box(owner: Any) -> bool:
  """Returns whether `owner` is a flax box around an array, like a variable."""
  return type(owner).__module__.startswith("flax.")


def _text(key: Any) -> str:
  for attribute in ("key", "name", "idx"):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)


def _at(tree: Any, keys: Sequence[Any]) -> Any:
  """Returns the item of a tree at a path; None if the tree lacks a key."""
  for key in keys:
    try:
      if isinstance(key, jax.tree_util.GetAttrKey):
        tree = getattr(tree, key.name)
      elif isinstance(key, jax.tree_util.SequenceKey):
        tree = tree[key.idx]
      elif isinstance(key, jax.tree_util.DictKey):
        tree = tree[key.key]
      else:
        return None
    except (AttributeError, IndexError, KeyError, TypeError):
      return None
  return tree
