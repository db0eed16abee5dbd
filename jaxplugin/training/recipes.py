# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training recipes: formats and rounding of a layer's three matmuls.

A layer multiplies activations by weights. Training has three matmuls of it:

  forward  activations x weights, contracting the features
  dgrad    gradient x weights, the activations' gradient
  wgrad    gradient x activations, the weights' gradient, contracting the tokens

`dot_general(recipe=...)` quantizes the operands of each by a recipe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from jaxplugin import quantization
from jaxplugin.core import error_context, formats
from jaxplugin.quantization import arguments, hadamard
from jaxplugin.quantization.sharding import global_scales

_PRODUCTS: Final = ("dgrad", "wgrad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """Formats and rounding of the three matmuls of a layer.

  The matmuls are forward, dgrad (gradient of activations) and wgrad (gradient
  of weights). Each quantizes its operands from high precision along its
  contracting dimension. Values round to nearest even by default.

  Attributes:
    activation_format, weight_format: `BlockFormat` or name; None leaves the
      operand unquantized. A weight format in squares sets weight_2d.
    grad_format: format of results' gradients; None leaves them unquantized.
    scale_rounding: "up" (never saturates) or "floor", for MX scale factors.
    stochastic_rounding: rounds gradients up with a probability equal to the
      discarded fraction; needs a key.
    grad_scale_up: rounds NVFP4's scale factors of gradients up, by at most 1/8,
      so that no value saturates.
    weight_2d: scales block_size x block_size weights. Forward and dgrad then
      share values.
    wgrad_hadamard: size of a Hadamard transform along the contracting
      dimension, a power of two up to 256, or None. Its signs are fixed.
    dgrad_hadamard: same for dgrad, without weight_2d.
    four_over_six: scales the largest NVFP4 value of a block to 6 or to 4,
      whichever has the smaller squared error.
    quantize_forward, quantize_dgrad, quantize_wgrad: False computes that matmul
      in high precision.
    backward_from_quantized: quantizes the dequantized forward operands in dgrad
      and wgrad. Rounding errors add up.
    axis_name: axes of a `jax.shard_map` that share global scales.

  Raises:
    TypeError: If a field has a wrong type, or both formats are None.
    ValueError: If a name is unknown, a transform's size does not fit the
      blocks, or fields contradict each other.

  Sources: arXiv 2506.08027 (MXFP8), 2509.25149 (NVFP4), 2502.20586 (dgrad's
  transform), 2512.02010 (four over six).

  Example:
    >>> import jaxplugin as jp
    >>> import dataclasses
    >>> nvfp4 = jp.training.NVFP4_RECIPE
    >>> recipe = dataclasses.replace(nvfp4, quantize_wgrad=False)
    >>> recipe.is_quantized("wgrad"), recipe.hadamard("wgrad")
    (False, 16)
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
  axis_name: str | Sequence[str] | None = None

  def __post_init__(self) -> None:
    for name in ("activation_format", "weight_format", "grad_format"):
      format = getattr(self, name)
      if format is not None:
        format = resolve_format("Recipe", format, name)
        if format.is_square:
          if name != "weight_format":
            raise ValueError(
              f"Recipe: {name} must have blocks of one row, got {format}; only"
              " weights may have square blocks"
            )
          object.__setattr__(self, "weight_2d", True)
        object.__setattr__(self, name, format.of_rows())
    if self.activation_format is None and self.weight_format is None:
      raise TypeError(
        "Recipe: activation_format or weight_format must be given, got None"
        " for both; without quantization use jax.lax.dot_general"
      )
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(field.default, bool):
        value = error_context.require_bool("Recipe", field.name, value)
        object.__setattr__(self, field.name, value)
    if self.axis_name is not None:
      names = global_scales.axis_names("Recipe", self.axis_name)
      object.__setattr__(self, "axis_name", names)
    arguments.validate_scale_rounding(
      "Recipe", self.scale_rounding, self.formats
    )
    self._validate_sizes()
    self._validate_together()

  def _validate_sizes(self) -> None:
    for product in _PRODUCTS:
      name, size = f"{product}_hadamard", self.hadamard(product)
      if size is None:
        continue
      if not error_context.is_integer(size):
        raise TypeError(
          f"Recipe: {name} must be an int or None, got"
          f" {error_context.shown(size)}"
        )
      object.__setattr__(self, name, int(size))
      if size not in hadamard.SIZES:
        raise ValueError(
          f"Recipe: {name} must be a power of two from {hadamard.SIZES[0]} to"
          f" {hadamard.SIZES[-1]}, got {size}; pass 16, or None to leave the"
          " transform out"
        )
      for format in self.formats:
        block = format.block_size
        if block and size % block and block % size:
          raise ValueError(
            f"Recipe: {name} must divide the block size or be a multiple of"
            f" it, got {size} and {format} with blocks of {block}; leave"
            f" {name} out"
          )

  def _validate_together(self) -> None:
    """Raises ValueError if one field leaves another without an effect."""
    weights, gradients = self.weight_format, self.grad_format
    if self.stochastic_rounding and gradients is None:
      raise ValueError(
        "Recipe: stochastic_rounding must be False if grad_format is None,"
        " got True; pass grad_format, or leave stochastic_rounding out"
      )
    if self.grad_scale_up and (
      gradients is None or gradients.scale_is_power_of_two
    ):
      raise ValueError(
        "Recipe: grad_scale_up must be False unless gradients have"
        " floating-point scales, as in nvfp4, got"
        f" grad_format={gradients and gradients.name}; leave grad_scale_up"
        " out, and round powers of two with scale_rounding"
      )
    if self.weight_2d and weights is None:
      raise ValueError(
        "Recipe: weight_2d must be False if weight_format is None, got True;"
        " pass weight_format, or leave weight_2d out"
      )
    if self.weight_2d and weights and not weights.block_size:
      raise ValueError(
        "Recipe: weight_2d must be False if a row of weights has one scale, got"
        f" True for {weights}; leave weight_2d out"
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
    """The different formats of this recipe."""
    given = (self.activation_format, self.weight_format, self.grad_format)
    return tuple(dict.fromkeys(f for f in given if f is not None))

  def is_quantized(self, product: str) -> bool:
    """Returns whether "forward", "dgrad" or "wgrad" has quantized operands."""
    return bool(getattr(self, f"quantize_{product}"))

  def hadamard(self, product: str) -> Any:
    """Returns the size of the transform of "dgrad" or "wgrad", or None."""
    return getattr(self, f"{product}_hadamard")


def resolve(who: str, name: str, recipe: Any) -> Recipe:
  """Returns a recipe, or the recipe that uses a format for every operand.

  Args:
    recipe: a recipe, a format, or the name of a format.

  Raises:
    TypeError: If `recipe` has another type.
    ValueError: If the name is unknown.
    NotImplementedError: If the format has zero points or minima.
  """
  if isinstance(recipe, Recipe):
    return recipe
  if not isinstance(recipe, (str, formats.BlockFormat)):
    raise TypeError(
      f"{who}: {name} must be a jaxplugin.training.Recipe, a format or its"
      f" name, got {error_context.shown(recipe)}; pass"
      " jaxplugin.training.MXFP8_RECIPE or another"
    )
  format = resolve_format(who, recipe, name)
  rows = format.of_rows()
  return Recipe(activation_format=rows, weight_format=format, grad_format=rows)


def resolve_format(who: str, format: Any, name: str) -> formats.BlockFormat:
  """Returns the format of an argument, to which products can quantize.

  Raises:
    NotImplementedError: If the format has zero points, minima or a codebook.
  """
  format = formats.resolve(who, format, name)
  if format.codebook is not None:
    raise NotImplementedError(
      f"{who}: {name} must have no codebook, got {format}. Pass"
      f" {formats.INT4_32}, or quantize with jp.quantize and multiply with"
      " jp.block_scaled_dot"
    )
  if format.offset_dtype is not None:
    other = formats.named(format.without_offset())
    if other.name == format.name:  # No named format has these fields.
      other = formats.INT8_32 if format.value_bits == 8 else formats.INT4_32
    raise NotImplementedError(
      f"{who}: {name} must have no zero points or minima, got {format}. Pass"
      f" {other}, or quantize with jp.quantize and multiply with"
      " jp.block_scaled_dot"
    )
  return format


MXFP8_RECIPE: Final = Recipe(
  activation_format=formats.MXFP8,
  weight_format=formats.MXFP8,
  grad_format=formats.MXFP8,
)
"""NVIDIA's recipe for MXFP8.

Activations, weights and gradients are E4M3, and scale factors are rounded up.
Each matmul quantizes its operands from high precision, along its contracting
dimension. Source: Mishra et al., "Recipes for Pre-training LLMs with
MXFP8", arXiv 2506.08027.
"""

NVFP4_RECIPE: Final = Recipe(
  activation_format=formats.NVFP4,
  weight_format=formats.NVFP4,
  grad_format=formats.NVFP4,
  stochastic_rounding=True,
  weight_2d=True,
  wgrad_hadamard=16,
)
"""NVIDIA's recipe for NVFP4.

Weights have scale factors for squares of 16 x 16 values, activations and
gradients for blocks of 1 x 16. Only wgrad transforms its operands (random
Hadamard transform of size 16). Only gradients are rounded stochastically.
Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv
2509.25149. The paper also leaves some layers in high precision, the last ones
among others. Do that in the model, or by `where` of `quantize_dots`.
"""

MXFP4_RECIPE: Final = Recipe(
  activation_format=formats.MXFP4,
  weight_format=formats.MXFP4,
  grad_format=formats.MXFP4,
  stochastic_rounding=True,
  wgrad_hadamard=32,
  dgrad_hadamard=32,
)
"""A recipe for MXFP4, after arXiv 2502.20586.

Both backward matmuls transform their operands and round gradients
stochastically. Weights and activations are rounded to nearest, and scale
factors are rounded up, so no value saturates. The transform has fixed signs.
Two things differ from the paper (Tseng, Yu, Park, "Training LLMs with MXFP4").
Its forward matmul is in BF16 or FP8, and this one is in MXFP4 unless
quantize_forward is False. It multiplies values by 3/4 so that none saturates
under scale factors rounded by OCP's rule.
"""

FP8_BLOCK_RECIPE: Final = Recipe(
  activation_format=formats.FP8_1X128_E8M0,
  weight_format=formats.FP8_128X128_E8M0,
  grad_format=formats.FP8_1X128_E8M0,
)
"""The recipe of DeepSeek-V3, for devices without MX instructions.

Values are E4M3, and scale factors are powers of two, rounded up. Activations
and gradients have a scale factor for 1 x 128 values, and weights for squares of
128 x 128 values. Sources: DeepSeek-V3 technical report, arXiv 2412.19437,
section 3.3; `Float8BlockScaling` of Transformer Engine.
"""

INT8_RECIPE: Final = Recipe(
  activation_format=formats.INT8_ROW,
  weight_format=formats.INT8_ROW,
  grad_format=formats.INT8_ROW,
  stochastic_rounding=True,
)
"""An experiment: INT8 with one f32 scale factor for each row.

A row lies along the contracting dimension of each matmul. Gradients are rounded
stochastically. No paper has validated this recipe at scale.
"""

# Recipes with this format for every operand, by its name.
BY_FORMAT: Final = {
  "mxfp8": MXFP8_RECIPE,
  "nvfp4": NVFP4_RECIPE,
  "mxfp4": MXFP4_RECIPE,
}
