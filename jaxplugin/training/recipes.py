# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Recipes: what is quantized to what in training, and how.

A layer multiplies activations by weights. Training has three products of it:

  forward  activations x weights, contracting the features
  dgrad    gradient x weights, the activations' gradient
  wgrad    gradient x activations, the weights' gradient, contracting the tokens

`dot_general(recipe=...)` quantizes the operands of each as a recipe says.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Final

from jaxplugin import quantization
from jaxplugin.core import formats
from jaxplugin.core import speaking
from jaxplugin.quantization import hadamard

_SWITCHES: Final = (
  "stochastic_rounding",
  "grad_scale_up",
  "weight_2d",
  "four_over_six",
  "quantize_forward",
  "quantize_dgrad",
  "quantize_wgrad",
  "backward_from_quantized",
)
_PRODUCTS: Final = ("dgrad", "wgrad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """What is quantized to what in the three products of a layer, and how.

  Every operand is quantized from high precision, along what its product
  contracts, to nearest, unless a field says otherwise. Each part switches off
  by itself: `dataclasses.replace(NVFP4_RECIPE, stochastic_rounding=False)`.

  Attributes:
    activation_format, weight_format: formats of activations and of weights, as
      `BlockFormat` or by name; None leaves them as they are (a product with one
      quantized side). At least one is given.
    grad_format: that of gradients of results, in dgrad and wgrad; None leaves
      them as they are. E4M3 in MXFP8 (arXiv 2506.08027);
      `jp.MXFP8_E5M2` has more range and less precision.
    scale_rounding: of MX scales, "up" or "floor", as of `quantize`. Up never
      saturates (arXiv 2506.08027).
    stochastic_rounding: gradients are rounded up or down at random, up with a
      probability equal to the discarded fraction, in dgrad and wgrad alike, by
      bits of their own. Weights and activations are rounded to nearest (arXiv
      2509.25149). It needs a key where a gradient is taken.
    grad_scale_up: floating-point scales of gradients (NVFP4) are rounded up,
      and not to the nearest. Under a scale that was rounded down a block's
      largest values saturate, where stochastic rounding is biased; under these
      none does. A scale is then the next one, up to an eighth above. It is no
      part of `NVFP4_RECIPE`, which has scales as `quantize` has.
    weight_2d: a scale covers a square of block_size x block_size weights, so
      that the weights of dgrad are those of the forward product, transposed
      (arXiv 2509.25149). One copy of their values serves both.
    wgrad_hadamard: size of the random Hadamard transform of both operands of
      wgrad, along what it contracts, before they are quantized; None for none.
      It spreads outliers over a group, and cancels in the product (arXiv
      2509.25149). `quantization/hadamard.py` has the signs: they
      are fixed.
    dgrad_hadamard: the same for dgrad (arXiv 2502.20586). Not with weight_2d:
      transformed weights are other ones than those of the forward product.
    four_over_six: E2M1 values under floating-point scales (NVFP4) are scaled to
      fill the range to 6, or to 4, a block at a time: by that which has the
      smaller sum of squared errors (arXiv 2512.02010).
    quantize_forward, quantize_dgrad, quantize_wgrad: False computes that
      product in high precision.
    backward_from_quantized: dgrad and wgrad take weights and activations as the
      forward product had them: dequantized, and quantized a second time where
      that is along another dimension. One quantized copy is kept, and the
      backward pass differentiates what was multiplied; errors of two roundings
      add up.

  Raises:
    TypeError: a field has another type, or both formats are None.
    ValueError: a name is unknown, the size of a transform is no power of two up
      to 256 or does not fit the blocks, or fields contradict each other.
  """

  activation_format: formats.BlockFormat | None
  weight_format: formats.BlockFormat | None
  grad_format: formats.BlockFormat | None
  scale_rounding: quantization.ScaleRounding = "up"
  stochastic_rounding: bool = False
  grad_scale_up: bool = False
  weight_2d: bool = False
  wgrad_hadamard: int | None = None
  dgrad_hadamard: int | None = None
  four_over_six: bool = False
  quantize_forward: bool = True
  quantize_dgrad: bool = True
  quantize_wgrad: bool = True
  backward_from_quantized: bool = False

  def __post_init__(self) -> None:
    for name in ("activation_format", "weight_format", "grad_format"):
      format = getattr(self, name)
      if format is not None:
        format = formats.resolve("Recipe", format, name)
        object.__setattr__(self, name, format)
    if self.activation_format is None and self.weight_format is None:
      raise TypeError(
        "Recipe: activation_format or weight_format must be given, got None"
        " for both; without quantization use jax.lax.dot_general"
      )
    for name in _SWITCHES:
      if not isinstance(getattr(self, name), bool):
        raise TypeError(
          f"Recipe: {name} must be True or False, got"
          f" {speaking.shown(getattr(self, name))}"
        )
    if self.scale_rounding not in quantization.SCALE_ROUNDINGS:
      raise ValueError(
        "Recipe: scale_rounding must be one of"
        f" {quantization.SCALE_ROUNDINGS}, got"
        f" {speaking.shown(self.scale_rounding)}"
      )
    self._validate_sizes()
    self._validate_together()

  def _validate_sizes(self) -> None:
    for product in _PRODUCTS:
      name, size = f"{product}_hadamard", self.hadamard(product)
      if size is None:
        continue
      if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(
          f"Recipe: {name} must be an int or None, got {speaking.shown(size)}"
        )
      if size not in hadamard.SIZES:
        raise ValueError(
          f"Recipe: {name} must be a power of two from {hadamard.SIZES[0]} to"
          f" {hadamard.SIZES[-1]}, got {size}"
        )
      for format in self.formats:
        block = format.block_size
        if size % block and block % size:
          raise ValueError(
            f"Recipe: {name} must divide the block size or be a multiple of"
            f" it, got {size} and {format} with blocks of {block}; leave"
            f" {name} out"
          )

  def _validate_together(self) -> None:
    """Refuses fields of which one leaves another nothing to do."""
    if self.stochastic_rounding and self.grad_format is None:
      raise ValueError(
        "Recipe: stochastic_rounding must be False if grad_format is None,"
        " got True; pass grad_format, or leave stochastic_rounding out"
      )
    grad_format = self.grad_format
    if self.grad_scale_up and (
      grad_format is None or grad_format.scale_is_power_of_two
    ):
      raise ValueError(
        "Recipe: grad_scale_up must be False unless gradients have"
        " floating-point scales, as in nvfp4, got"
        f" grad_format={grad_format and grad_format.name}; leave grad_scale_up"
        " out, and round powers of two with scale_rounding"
      )
    if self.weight_2d and self.weight_format is None:
      raise ValueError(
        "Recipe: weight_2d must be False if weight_format is None, got True;"
        " pass weight_format, or leave weight_2d out"
      )
    if self.weight_2d and self.dgrad_hadamard is not None:
      raise ValueError(
        "Recipe: dgrad_hadamard must be None with weight_2d, because dgrad"
        " then uses the untransformed weights of the forward pass, got"
        f" dgrad_hadamard={self.dgrad_hadamard}; leave one of them out"
      )
    if self.four_over_six and not any(
      quantization.has_four_over_six(f) for f in self.formats
    ):
      raise ValueError(
        "Recipe: four_over_six must be False unless a format has E2M1 values"
        " and floating-point scales, as nvfp4 has, got"
        f" {' and '.join(f.name for f in self.formats)}; leave four_over_six"
        " out"
      )
    if self.backward_from_quantized and not self.quantize_forward:
      raise ValueError(
        "Recipe: backward_from_quantized must be False if quantize_forward is"
        " False, because it uses the quantized operands of the forward pass,"
        " got True; leave one of them out"
      )

  @property
  def formats(self) -> tuple[formats.BlockFormat, ...]:
    """All that it quantizes to, each once."""
    given = (self.activation_format, self.weight_format, self.grad_format)
    return tuple(dict.fromkeys(f for f in given if f is not None))

  def is_quantized(self, product: str) -> bool:
    """Whether "forward", "dgrad" or "wgrad" multiplies quantized operands."""
    return bool(getattr(self, f"quantize_{product}"))

  def hadamard(self, product: str) -> Any:
    """The size of the transform of "dgrad" or "wgrad"; None for none."""
    return getattr(self, f"{product}_hadamard")


def resolve(who: str, name: str, recipe: Any) -> Recipe:
  """A recipe; of a format, or its name, the one that has it everywhere.

  Args:
    who: the function that errors name.
    name: the argument.

  Raises:
    TypeError, ValueError: it is none of these.
  """
  if isinstance(recipe, Recipe):
    return recipe
  if not isinstance(recipe, (str, formats.BlockFormat)):
    raise TypeError(
      f"{who}: {name} must be a jaxplugin.training.Recipe, a format or its"
      f" name, got {speaking.shown(recipe)}; pass"
      " jaxplugin.training.MXFP8_RECIPE or another"
    )
  format = formats.resolve(who, recipe, name)
  return Recipe(
    activation_format=format, weight_format=format, grad_format=format
  )


MXFP8_RECIPE: Final = Recipe(
  activation_format=formats.MXFP8,
  weight_format=formats.MXFP8,
  grad_format=formats.MXFP8,
)
"""MXFP8 as NVIDIA trains with it.

E4M3 for activations, weights and gradients, scales rounded up, every operand
quantized from high precision along what its own product contracts. Source:
Mishra et al., "Recipes for Pre-training LLMs with MXFP8", arXiv 2506.08027.
"""

NVFP4_RECIPE: Final = Recipe(
  activation_format=formats.NVFP4,
  weight_format=formats.NVFP4,
  grad_format=formats.NVFP4,
  stochastic_rounding=True,
  weight_2d=True,
  wgrad_hadamard=16,
)
"""NVFP4 as NVIDIA trains with it.

Weights in squares of 16 x 16, activations and gradients in blocks of 1 x 16;
a random Hadamard transform of size 16 of both operands of wgrad, and of no
other product; stochastic rounding of gradients, and of nothing else. Source:
NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149. What
it does beside products is the model's: the paper leaves the last layers, among
others, in high precision.
"""

MXFP4_RECIPE: Final = Recipe(
  activation_format=formats.MXFP4,
  weight_format=formats.MXFP4,
  grad_format=formats.MXFP4,
  stochastic_rounding=True,
  wgrad_hadamard=32,
  dgrad_hadamard=32,
)
"""MXFP4, with a transform and stochastic rounding in both backward products.

Gradients alone are rounded stochastically: a backward product is an unbiased
estimate of that with weights or activations rounded to nearest. Scales are
rounded up, so that no value saturates. The transform's signs are fixed, as in
NVFP4's. Source: Tseng, Yu, Park, "Training LLMs with MXFP4", arXiv 2502.20586,
after which this is made. There the forward product is in BF16 or FP8, and here
in MXFP4 as well; quantize_forward=False has it in high precision. There values
are multiplied by 3/4, so that none saturates under OCP's scales.
"""
