# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training goes the same way on any number of processes."""

import contextlib
import io
import pathlib
import re
import tempfile

import numpy as np
import pytest
import train_fsdp
from absl.testing import absltest

pytestmark = pytest.mark.full

# Sums over devices in another order differ by some roundings of f32, and an
# operand at the edge of two codes takes the other one: of 2^-4 here and there.
RELATIVE_TOLERANCE = 1e-3


def losses(*options):
  output = io.StringIO()
  with contextlib.redirect_stdout(output):
    train_fsdp.main([*options])
  found = re.findall(r"step (\d+): loss (\S+)", output.getvalue())
  return {int(step): float(loss) for step, loss in found}


class TrainTest(absltest.TestCase):
  def test_training_goes_on_with_another_number_of_processes(self):
    with tempfile.TemporaryDirectory() as folder:
      kept = ("--checkpoint", str(pathlib.Path(folder) / "a"))
      found = losses("--processes", "4", "--steps", "3", *kept)
      found |= losses("--processes", "2", "--steps", "2", *kept)
    expected = losses("--processes", "1", "--steps", "5")
    self.assertEqual([*found], [*range(5)])
    np.testing.assert_allclose(
      [*found.values()], [*expected.values()], rtol=RELATIVE_TOLERANCE
    )
    self.assertLess(found[4], 0.7 * found[0])
