# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configs of the Triton kernels in tuning tables."""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Final

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.kernels.gpu import configs
from jaxplugin.kernels.gpu import constraints
from jaxplugin.runtime import triton_library
from jaxplugin.tables import matching

_FIELDS: Final = {
  field.name: field for field in dataclasses.fields(configs.MatmulConfig)
}


def fields_of(config: configs.MatmulConfig) -> decisions.Fields:
  """Returns all fields of a config, sorted."""
  return tuple(sorted(dataclasses.asdict(config).items()))


def config_of(fields: decisions.Fields) -> configs.MatmulConfig:
  """Returns the config whose `fields_of` are `fields`.

  Raises:
    ValueError: If no config has these fields. The message names the field.
  """
  given: dict[str, Any] = dict(fields)
  if given.keys() != _FIELDS.keys():
    raise ValueError(
      f"a config of the Triton kernels must have {', '.join(sorted(_FIELDS))},"
      f" got {', '.join(given) or 'none'}"
    )
  for name, value in given.items():
    if name == "path":
      allowed, is_right = f"one of {configs.PATHS}", value in configs.PATHS
    elif isinstance(_FIELDS[name].default, bool):
      allowed, is_right = "true or false", isinstance(value, bool)
    else:
      allowed, is_right = "a whole number", type(value) is int
    if not is_right:
      raise ValueError(f"{name} must be {allowed}, got {value!r}")
  return configs.MatmulConfig(**given)


def config_error(
  fields: decisions.Fields,
  shape: configs.MatmulShape,
  target: targets.Target,
) -> str | None:
  """Returns why fields are not a config for a shape, or None if they are."""
  try:
    config = config_of(fields)
  except ValueError as error:
    return str(error)
  architecture = triton_library.architecture_of(target)
  if architecture is None:
    return f"there are no kernels for {target}"
  if config.path == "small_m" and not config.swap:
    return "swap must be true for small_m"
  if config.use_descriptors:
    refusal = triton_library.descriptors_refusal()
    if refusal is not None:
      return refusal.reason
  return constraints.config_error(config, shape, architecture)


def source(target: targets.Target) -> decisions.Source | None:
  """Returns the digest of the kernels' sources, and compiler versions."""
  return matching.triton_source(target)
