# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Other tools read our checkpoints, and we read theirs.

references_test.json has the tools' results. tools/checkpoint_references.py
wrote it.
"""

import json
import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.checkpoints import safetensors_files
from jaxplugin.testing import checkpoint_files as files

FACTS = json.loads(
  pathlib.Path(__file__).with_name("references_test.json").read_text()
)
CASES = [x for x in FACTS if x not in ("weight", "experts")]

# Tools multiply three f32 factors in different orders, or divide by one.
ROUNDINGS = 4 * 2.0**-24


def array(raw):
  dtype = getattr(ml_dtypes, raw["dtype"], None) or np.dtype(raw["dtype"])
  data = np.frombuffer(bytes.fromhex(raw["hex"]), dtype)
  return data.reshape(raw["shape"])


class ReferencesTest(files.CheckpointTestCase):
  def assert_near(self, path, name, reading):
    found = jp.checkpoints.load(path)[name]
    got = np.asarray(jp.dequantize(found, jnp.float32), np.float64)
    np.testing.assert_allclose(got, array(reading), rtol=ROUNDINGS, atol=0)

  @parameterized.parameters(*CASES)
  @pytest.mark.sample(1)
  def test_tool_reads_what_is_written(self, case):
    fact = FACTS[case]
    is_stack = case.endswith("experts")
    layout, format, *_ = case.split()
    name = "mlp.experts.gate_up_proj" if is_stack else "0.weight"
    source = self.file(
      {name: array(FACTS["experts" if is_stack else "weight"])}
    )
    target = source.with_name("out.safetensors")
    jp.checkpoints.quantize(
      source,
      target,
      format,
      layout=layout,
      transposed=[name] if is_stack else (),
    )
    parts = safetensors_files.open_file(target).tensors
    self.assertCountEqual(parts, fact["ours"])
    for part, raw in fact["ours"].items():
      self.assertEqual(list(parts[part].shape), raw["shape"])
      self.assertEqual(parts[part].read().dtype, array(raw).dtype)
      self.assertEqual(parts[part].read().tobytes().hex(), raw["hex"])
    self.assert_near(target, name, fact["reading"])
    # The numbers are those of the weight: NVFP4 and MXFP4 have 20 dB of SNR.
    x = array(FACTS["experts" if is_stack else "weight"]).astype(np.float64)
    if layout == "gpt-oss":
      x = x.swapaxes(-1, -2)
    error = np.linalg.norm(array(fact["reading"]) - x) / np.linalg.norm(x)
    self.assertLess(error, 0.15)

  @parameterized.parameters(*CASES)
  def test_what_the_tool_writes_is_read(self, case):
    fact = FACTS[case]
    if "theirs" not in fact:
      self.assertTrue(fact["same"] or case.startswith("gpt-oss"))
      return  # the test above reads the same bytes
    path = self.file(
      {name: array(raw) for name, raw in fact["theirs"].items()},
      fact.get("metadata"),
    )
    self.assert_near(path, "0.weight", fact["reading_of_theirs"])

  def test_tools_make_the_same_bytes_where_they_round_alike(self):
    # torchao's NVFP4 is swizzled. compressed-tensors computes its divisor from
    # the largest number, and chooses smaller scales for MXFP4. ModelOpt's MXFP4
    # rounds ties to the larger value, and gives zeros a sign.
    self.assertCountEqual(
      [case for case in CASES if not FACTS[case]["same"]],
      [
        *("torchao nvfp4", "compressed-tensors nvfp4"),
        *("compressed-tensors mxfp4", "modelopt mxfp4"),
        "gpt-oss mxfp4 experts",
      ],
    )
