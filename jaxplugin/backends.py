# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of backends in other packages.

A package declares a `Backend` by an entry point in the group
"jaxplugin.backends". Code calls `register_backend`. The guide is
docs/how_to/write_a_backend.md.
"""

from jaxplugin.core import error_context as _error_context
from jaxplugin.core.decisions import Plan as Plan
from jaxplugin.core.decisions import Source as Source
from jaxplugin.dot.views import Call as Call
from jaxplugin.dot.views import Operand as Operand
from jaxplugin.dot.views import OperandProblem as OperandProblem
from jaxplugin.dot.views import Problem as Problem
from jaxplugin.plugins.records import API_VERSION as API_VERSION
from jaxplugin.plugins.records import Backend as Backend
from jaxplugin.plugins.records import BackendWarning as BackendWarning
from jaxplugin.plugins.records import Refusal as Refusal
from jaxplugin.plugins.records import Status as Status
from jaxplugin.plugins.records import Tuning as Tuning
from jaxplugin.plugins.registry import register_backend as register_backend
from jaxplugin.plugins.registry import statuses as statuses
from jaxplugin.plugins.registry import unregister_backend as unregister_backend
from jaxplugin.quantization.views import DequantizeCall as DequantizeCall
from jaxplugin.quantization.views import DequantizeProblem as DequantizeProblem
from jaxplugin.quantization.views import QuantizeCall as QuantizeCall
from jaxplugin.quantization.views import QuantizeProblem as QuantizeProblem
from jaxplugin.ragged.views import RaggedCall as RaggedCall
from jaxplugin.ragged.views import RaggedProblem as RaggedProblem

__all__ = [
  "API_VERSION",
  "Backend",
  "BackendWarning",
  "Call",
  "DequantizeCall",
  "DequantizeProblem",
  "Operand",
  "OperandProblem",
  "Plan",
  "Problem",
  "QuantizeCall",
  "QuantizeProblem",
  "RaggedCall",
  "RaggedProblem",
  "Refusal",
  "Source",
  "Status",
  "Tuning",
  "register_backend",
  "statuses",
  "unregister_backend",
]

_error_context.public_module(__name__, __all__)
