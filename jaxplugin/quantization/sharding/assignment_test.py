# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which values of an array stay together on a device that quantizes them."""

import numpy as np
from absl.testing import parameterized

from jaxplugin.core import formats
from jaxplugin.quantization import problems
from jaxplugin.quantization.sharding import assignment


class GranulesTest(parameterized.TestCase):
  @parameterized.parameters(
    (formats.MXFP8, {}, (1, 32)),
    (formats.NVFP4, {}, (1, 16)),
    (formats.NVFP4, {"square": (0,)}, (16, 16)),
    (formats.MXFP4, {"hadamard": 16}, (1, 32)),
    (formats.MXFP4, {"hadamard": 64}, (1, 64)),
    (formats.NVFP4, {"hadamard": 64, "square": (0,)}, (16, 64)),
  )
  def test_blocks_squares_and_groups_stay_whole(
    self, format, options, granules
  ):
    problem = problems.QuantizationProblem.along(
      1,
      shape=(256, 256),
      dtype=np.dtype(np.float32),
      format=format,
      options=(problems.RecipeOptions(**options),),
    )
    self.assertEqual(assignment.quantize_granules(problem), granules)
