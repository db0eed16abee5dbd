# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the quantized checkpoints of other tools.

`load` opens a file or a folder: safetensors with index files, or GGUF.
`quantize` writes a checkpoint in another tool's layout from plain weights, and
`save` writes one from arrays in memory.
`from_modelopt`, `from_compressed_tensors`, `from_gpt_oss`, `from_torchao`,
`from_comfyui`, `from_deepseek`, `from_mlx`, `from_gptq`, `from_awq` and
`from_gguf` convert arrays. Most results are views of the bytes.
"""

from jaxplugin.checkpoints.assembly import (
  GLOBAL_SCALE_RANGE as GLOBAL_SCALE_RANGE,
)
from jaxplugin.checkpoints.compressed_tensors import (
  from_compressed_tensors as from_compressed_tensors,
)
from jaxplugin.checkpoints.conversions import from_comfyui as from_comfyui
from jaxplugin.checkpoints.conversions import from_deepseek as from_deepseek
from jaxplugin.checkpoints.conversions import from_modelopt as from_modelopt
from jaxplugin.checkpoints.errors import CheckpointError as CheckpointError
from jaxplugin.checkpoints.errors import LayoutWarning as LayoutWarning
from jaxplugin.checkpoints.errors import NumbersWarning as NumbersWarning
from jaxplugin.checkpoints.errors import PatternWarning as PatternWarning
from jaxplugin.checkpoints.errors import (
  PreQuantScaleWarning as PreQuantScaleWarning,
)
from jaxplugin.checkpoints.gguf_blocks import from_gguf as from_gguf
from jaxplugin.checkpoints.layouts import OPEN_LAYOUTS as OPEN_LAYOUTS
from jaxplugin.checkpoints.layouts import WRITTEN_FORMATS as WRITTEN_FORMATS
from jaxplugin.checkpoints.layouts import WRITTEN_LAYOUTS as WRITTEN_LAYOUTS
from jaxplugin.checkpoints.layouts import activation_scale as activation_scale
from jaxplugin.checkpoints.layouts import from_gpt_oss as from_gpt_oss
from jaxplugin.checkpoints.loading import Checkpoint as Checkpoint
from jaxplugin.checkpoints.loading import load as load
from jaxplugin.checkpoints.mlx import from_mlx as from_mlx
from jaxplugin.checkpoints.packed_integers import from_awq as from_awq
from jaxplugin.checkpoints.packed_integers import from_gptq as from_gptq
from jaxplugin.checkpoints.torchao import from_torchao as from_torchao
from jaxplugin.checkpoints.writing.quantizing import Quantized as Quantized
from jaxplugin.checkpoints.writing.quantizing import quantize as quantize
from jaxplugin.checkpoints.writing.saving import save as save
from jaxplugin.core import error_context as _error_context

__all__ = [
  "GLOBAL_SCALE_RANGE",
  "OPEN_LAYOUTS",
  "WRITTEN_FORMATS",
  "WRITTEN_LAYOUTS",
  "Checkpoint",
  "CheckpointError",
  "LayoutWarning",
  "NumbersWarning",
  "PatternWarning",
  "PreQuantScaleWarning",
  "Quantized",
  "activation_scale",
  "from_awq",
  "from_comfyui",
  "from_compressed_tensors",
  "from_deepseek",
  "from_gguf",
  "from_gpt_oss",
  "from_gptq",
  "from_mlx",
  "from_modelopt",
  "from_torchao",
  "load",
  "quantize",
  "save",
]

_error_context.public_module(__name__, __all__)
