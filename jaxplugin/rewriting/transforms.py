# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `quantize_dots` was asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import numpy as np

from jaxplugin.rewriting import sites
from jaxplugin.training import api as training
from jaxplugin.training import recipes

WHO: Final = "quantize_dots"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transform:
  """What `quantize_dots` was asked for; equal ones are one key of caches.

  Attributes:
    recipe: of sites that are taken.
    where: what decides about a site, see `quantize_dots`; None is the default.
    implementation, reduce_dtype: as of `dot_general`.
    key_type: of the base key; None where there is none.
  """

  recipe: recipes.Recipe
  where: Callable[[sites.Site], Any] | None
  implementation: str | None
  key_type: Any
  reduce_dtype: np.dtype | None = None

  def decide(self, site: sites.Site) -> tuple[Any, str]:
    """The recipe of a site that can be served, or None and why it is left."""
    block_size = max(format.block_size for format in self.recipe.formats)
    reason = sites.left_by_default(site, block_size)
    if self.where is None:
      return (None, reason) if reason else (self.recipe, "")
    answer = self.where(dataclasses.replace(site, reason=reason))
    if isinstance(answer, (bool, np.bool_)):
      return (
        (self.recipe, "")
        if answer
        else (None, reason or "where returned False")
      )
    if answer is None:
      raise TypeError(
        f"{WHO}: where must return True, False or a recipe, got None for"
        f" {site.name or 'a site'} at {site.source or 'an unknown line'}"
      )
    return recipes.resolve(WHO, "the result of where", answer), ""

  def product(self, recipe: recipes.Recipe, weight: Any) -> Any:
    """A `dot_general` of a recipe, whose operand `weight` is weights."""
    return _dot_general(recipe, weight, self.implementation, self.reduce_dtype)


@functools.cache
def _dot_general(
  recipe: recipes.Recipe,
  weight: Any,
  implementation: str | None,
  reduce_dtype: np.dtype | None,
) -> Callable[..., jax.Array]:
  return training.dot_general(
    recipe=recipe,
    weight=weight,
    implementation=implementation,
    reduce_dtype=reduce_dtype,
  )
