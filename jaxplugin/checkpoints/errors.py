# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is said of a checkpoint that breaks a rule, or has one of its own."""


class CheckpointError(ValueError):
  """A checkpoint breaks a rule, or cannot be written.

  The message names the file, the tensor and the rule.
  """


class PreQuantScaleWarning(UserWarning):
  """Some weights are right only with inputs multiplied by a pre_quant_scale."""
