# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Files that reproduce wrong results.

`save` (`saving.py`) writes a program and the statistics of its data to a file.
`tapping.py` collects the operands of the program's block-scaled calls.
`replay` (`replaying.py`) compares each call with NumPy in f64 (`oracle.py`).
Both use the format of `operation/repro_files.py`. If the environment variable
JAXPLUGIN_REPRO_DIR names a folder, `operation/failures.py` writes a file when a
kernel fails or a check finds a wrong result.
"""

from jaxplugin.core import error_context as _error_context
from jaxplugin.operation.repro_files import ReproError as ReproError
from jaxplugin.repro.replaying import Comparison as Comparison
from jaxplugin.repro.replaying import Replay as Replay
from jaxplugin.repro.replaying import ReplayedCall as ReplayedCall
from jaxplugin.repro.replaying import replay as replay
from jaxplugin.repro.saving import save as save

__all__ = [
  "Comparison",
  "Replay",
  "ReplayedCall",
  "ReproError",
  "replay",
  "save",
]

_error_context.public_module(__name__, __all__)
