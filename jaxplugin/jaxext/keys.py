# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of `jax.random` made from a key and a number."""

from __future__ import annotations

from typing import Any
from typing import Final

import jax

# `fold_in` of these implementations mixes the key and the number, so the order
# of folds changes the result. `fold_in` of "unsafe_rbg" is the exclusive or of
# the key and bits made from the number. Folding 0 and then 1 therefore equals
# folding 1 and then 0, and folding a number twice restores the first key.
_SENSITIVE_TO_ORDER: Final = frozenset({"threefry2x32", "rbg"})


def fold_in(key: Any, number: Any) -> jax.Array:
  """Returns a key that depends on `key`, on `number` and on their order.

  It is `jax.random.fold_in(key, number)` for JAX's "threefry2x32" and "rbg".
  For other implementations the key is split first, which mixes its bits.
  """
  if jax.random.key_impl(key) not in _SENSITIVE_TO_ORDER:
    (key,) = jax.random.split(key, 1)
  return jax.random.fold_in(key, number)
