# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Records that Triton kernels take as compile-time constants."""

from __future__ import annotations

import hashlib
import inspect
import sys
import types
from typing import Any, ClassVar


class KernelConstant:
  """Base class of a frozen dataclass that a kernel takes as a constant.

  A kernel reads the record's fields and properties. Triton's cache on disk
  identifies a constant by its `cache_key`, or else by its `repr`. The `repr`
  only has the fields. Without `cache_key` an edited property would not change
  the key, and the cache would return the old kernel.
  """

  source_digest: ClassVar[str]

  def __init_subclass__(cls, **options: Any) -> None:
    super().__init_subclass__(**options)
    # On import, because a file may be edited before the first kernel.
    cls.source_digest = _source_digest(cls)

  @property
  def cache_key(self) -> str:
    """The fields, and a digest of the code that computes the properties."""
    return f"{self!r} {self.source_digest}"


def _source_digest(kind: type) -> str:
  """Returns the SHA-256 of the modules that a class's code may call.

  These are the modules of the class and of its bases, the modules of the same
  package that those import, and so on.
  """
  todo = [sys.modules[base.__module__] for base in kind.__mro__[:-1]]
  found: dict[str, str] = {}
  while todo:
    module = todo.pop()
    if module.__name__ not in found:
      found[module.__name__] = inspect.getsource(module)
      todo += _modules_of_package(module)
  text = "".join(
    f"{name}\n{source}\n" for name, source in sorted(found.items())
  )
  return hashlib.sha256(text.encode()).hexdigest()


def _modules_of_package(module: types.ModuleType) -> list[types.ModuleType]:
  """Returns the modules that `module` imports from its top-level package."""
  package = module.__name__.partition(".")[0]
  return [
    value
    for value in vars(module).values()
    if isinstance(value, types.ModuleType)
    and value.__name__.partition(".")[0] == package
  ]
