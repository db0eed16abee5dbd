# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of backends in other packages.

A package declares a `Backend` by an entry point in the group
"jaxplugin.backends". Code calls `register_backend`. The guide is
docs/how_to/write_a_backend.md.
"""

import typing as _typing

from jaxplugin.core import speaking as _speaking
from jaxplugin.core.decisions import Plan as Plan
from jaxplugin.core.decisions import Source as Source
from jaxplugin.dot.plugins.records import API_VERSION as API_VERSION
from jaxplugin.dot.plugins.records import Backend as Backend
from jaxplugin.dot.plugins.records import BackendWarning as BackendWarning
from jaxplugin.dot.plugins.records import Refusal as Refusal
from jaxplugin.dot.plugins.records import Status as Status
from jaxplugin.dot.plugins.records import Tuning as Tuning
from jaxplugin.dot.plugins.registry import register_backend as register_backend
from jaxplugin.dot.plugins.registry import statuses as statuses
from jaxplugin.dot.plugins.registry import (
  unregister_backend as unregister_backend,
)
from jaxplugin.dot.plugins.views import Call as Call
from jaxplugin.dot.plugins.views import Operand as Operand
from jaxplugin.dot.plugins.views import OperandProblem as OperandProblem
from jaxplugin.dot.plugins.views import Problem as Problem

__all__ = [
  "API_VERSION",
  "Backend",
  "BackendWarning",
  "Call",
  "Operand",
  "OperandProblem",
  "Plan",
  "Problem",
  "Refusal",
  "Source",
  "Status",
  "Tuning",
  "register_backend",
  "statuses",
  "unregister_backend",
]


def __dir__() -> list[str]:
  return list(__all__)


if not _typing.TYPE_CHECKING:

  def __getattr__(name: str) -> _typing.NoReturn:
    raise _speaking.missing_attribute(__name__, name)
