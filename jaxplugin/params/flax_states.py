# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""State dicts of quantized arrays, for `flax.serialization`."""

from __future__ import annotations

import functools
from typing import Any, Final

from jaxplugin.arrays import quantized_weight, scaled_array
from jaxplugin.core import error_context
from jaxplugin.training import quantized_operand

_STRUCTURE: Final = "structure"
_CLASSES: Final = (
  scaled_array.ScaledArray,
  quantized_weight.QuantizedWeight,
  quantized_operand.QuantizedOperand,
)


def register_flax_serialization() -> None:
  """Registers quantized arrays with `flax.serialization`.

  Then `to_state_dict`, `from_state_dict`, `to_bytes` and `from_bytes` of flax
  keep the bits of `ScaledArray`, `QuantizedWeight` and `QuantizedOperand`. Call
  it once in a process; more calls change nothing. `import jaxplugin` does not
  import flax.

  The target of `from_state_dict` has the dtypes, shapes, formats and layouts of
  the state. `jax.eval_shape` makes one without values.

  Raises:
    ImportError: If flax is not installed.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> from flax import serialization
    >>> jp.register_flax_serialization()
    >>> params = {"w": jp.quantize(jnp.ones((4, 64)), "mxfp8")}
    >>> data = serialization.to_bytes(params)
    >>> print(serialization.from_bytes(params, data)["w"].format)
    mxfp8
  """
  from flax import serialization

  for cls in _CLASSES:
    serialization.register_serialization_state(
      cls,
      functools.partial(_state, serialization),
      functools.partial(_restored, serialization),
      override=True,
    )


def _state(serialization: Any, array: Any) -> dict[str, Any]:
  named, aux = array.tree_flatten_with_keys()
  state = {key.name: serialization.to_state_dict(x) for key, x in named}
  return {**state, _STRUCTURE: _structure(aux)}


def _restored(serialization: Any, target: Any, state: Any) -> Any:
  named, aux = target.tree_flatten_with_keys()
  who = f"from_state_dict: {type(target).__name__}"
  expected = {key.name: x for key, x in named}
  wanted = (*expected, _STRUCTURE)
  if not isinstance(state, dict) or set(state) != set(wanted):
    raise TypeError(
      f"{who}: state must be a dict with keys {list(wanted)}, got"
      f" {error_context.shown(state)}. Pass a state that to_state_dict returned"
      " after jp.register_flax_serialization()"
    )
  if state[_STRUCTURE] != _structure(aux):
    raise TypeError(
      f"{who}: state must have the structure of the target,"
      f" {_structure(aux)!r}, got {state[_STRUCTURE]!r}. Quantize"
      " and prepare the target as the saved array was"
    )
  children = []
  for name, x in expected.items():
    given = serialization.from_state_dict(x, state[name], name=name)
    if _is_other(x, given):
      raise TypeError(
        f"{who}: {name} must have the target's dtype and shape,"
        f" {error_context.shown(x)}, got {error_context.shown(given)}. Quantize"
        " and prepare the target as the saved array was"
      )
    children.append(given)
  return target.tree_unflatten(aux, children)


def _structure(aux: Any) -> str:
  """Returns the static part of a pytree as text."""
  return ", ".join(map(str, aux)) if isinstance(aux, tuple) else str(aux)


def _is_other(target: Any, given: Any) -> bool:
  if (target is None) != (given is None):
    return True
  wanted = getattr(target, "dtype", None), getattr(target, "shape", None)
  if None in wanted:
    return False
  return wanted != (given.dtype, tuple(given.shape))
