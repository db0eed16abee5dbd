# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Raises ImportError on import if JAX is older than the oldest supported one.

Without this check an older JAX fails in another import, with an AttributeError
about a name that it does not have.
"""

from __future__ import annotations

from typing import Final

import jax

OLDEST: Final = (0, 10, 2)


def check(version: tuple[int, ...], name: str, path: str | None) -> None:
  """Raises ImportError unless `version` is supported."""
  if version < OLDEST:
    oldest = ".".join(map(str, OLDEST))
    raise ImportError(
      f"jaxplugin: needs jax {oldest} or newer, found {name} in {path}; run"
      f" pip install --upgrade 'jax>={oldest}'"
    )


check(jax.__version_info__, jax.__version__, jax.__file__)
