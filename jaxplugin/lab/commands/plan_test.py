# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`plan` of functions, and its errors. `plans_test` has models."""

from __future__ import annotations

import json
from unittest import mock

import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from jaxplugin.lab.compilation import traffic
from jaxplugin.lab.planning import plans, report
from jaxplugin.printing import progress
from jaxplugin.testing import command_lines, installed

needs_compiler = installed.needs("jax_cuda13_plugin")


def product(w, x):
  return jnp.matmul(x, w)


NAME = f"{__name__}:product"


@needs_compiler
class FunctionTest(command_lines.CommandLineTestCase):
  @pytest.mark.lab
  def test_weight_that_is_gathered_is_gathered_in_bytes(self):
    status, out, err = self.run_command(
      "plan",
      NAME,
      "--layout=fsdp=8",
      "--formats=bf16,mxfp8",
      "--arg=bfloat16[1024,512]@fsdp,-",
      "--arg=bfloat16[8192,1024]@fsdp,-",
      "--json",
    )
    self.assertEqual(status, 0, err)
    plain, quantized = report.from_json(out)
    weight = 1024 * 512 * 7 / 8
    self.assertEqual(plain.received, 2 * weight)
    # A byte a value, and one for the scale of 32.
    self.assertEqual(quantized.received, weight * (1 + 1 / 32))
    self.assertEqual({one.dtype for one in quantized.collectives}, {"u8"})
    self.assertEqual(plain.argument_bytes, 2 * (1024 * 512 + 8192 * 1024) // 8)
    self.assertEqual(json.loads(out)[0]["received_bytes"], 2 * weight)


class ProgressTest(command_lines.CommandLineTestCase):
  def test_line_names_the_layout_and_the_format(self):
    steps = []
    with (
      mock.patch.object(plans, "of_block", side_effect=RuntimeError("stop")),
      mock.patch.object(
        progress.Progress, "describe", lambda _, text: steps.append(text)
      ),
    ):
      self.check_error(["plan", "small", "--layout=fsdp=8,tp=2"], "stop")
    self.assertEqual(steps, ["compiling fsdp=8,tp=2, bf16"])


class ErrorTest(command_lines.CommandLineTestCase):
  @parameterized.parameters(
    ("gpt5 --layout=tp=2", "unknown model 'gpt5'; known: small, llama3"),
    ("small --layout=qp=2", "sizes of dp, fsdp, ep, tp"),
    ("small --layout=tp=2 --formats=fp3", "unknown format 'fp3'"),
    ("small --layout=tp=2 --target=cpu", "NVIDIA GPU"),
    ("small --layout=tp=3", "multiple of the 3 devices"),
    ("small --layout=tp=2 --gradients", "need a function"),
    ("small --layout=tp=2 --target=b1", "b1"),
    ("small --layout=tp=2 --target=mi300x", "GPU .*, got 'mi300x'"),
    (
      "small --layout=fsdp=2 --batch=4 --microbatches=4",
      "of 8, got fsdp=2 and",
    ),
    ("gpt-oss-120b --layout=ep=2 --microbatches=4", "without ep"),
    (f"{NAME} --layout=tp=2 --microbatches=2", "need a model"),
    (f"{NAME} --layout=tp=2 --batch=2", "need a model, got a function"),
    (f"{NAME} --layout=tp=2 --sequence=8", "need a model"),
    ("small", "--layout or --traffic must be given, got neither"),
    ("small --traffic --layout=tp=2", "got both"),
    ("small --traffic --target=mi300x", "GPU .*, got 'mi300x'"),
    ("small --traffic --separate", "--separate must be left out with"),
    (f"{NAME} --traffic", "unknown model"),
  )
  def test_what_is_wrong_is_said(self, line, message):
    self.check_error(("plan", *line.split()), message)


@needs_compiler
class ArgumentErrorTest(command_lines.CommandLineTestCase):
  @parameterized.parameters(
    ("bfloat16[8]@tp", r"axes of the layout \(fsdp\), each once, or -"),
    ("bfloat16[8,8]@fsdp,fsdp", "each once"),
    ("bfloat16[64]@fsdp+fsdp", "each once"),
    ("bfloat16[8]@fsdp,-", "each of its 1 dimensions"),
    ("bfloat16[8,12]@-,fsdp", "dimension 1 .* multiple of the 8 .*, got 12"),
    ("mxfp8[64,64]", "plain array"),
    ("what", "must be an array"),
  )
  @pytest.mark.sample(5)
  def test_arguments_name_axes_of_the_layout(self, argument, message):
    self.check_error(
      ("plan", NAME, "--layout=fsdp=8", f"--arg={argument}"), message
    )


class TrafficTest(command_lines.CommandLineTestCase):
  def test_fused_block_has_a_third_of_the_quantize_traffic(self):
    """By hand: a bf16 value is written, read and quantized, or only quantized.

    The norms and activation are fused. Attention's result is not.
    """
    line = "plan small --traffic --target=cpu --formats=mxfp8 --sequence=64"
    status, out, err = self.run_command(*line.split(), "--json")
    self.assertEqual(status, 0, err)
    separate, fused, *steps = report.from_json(out)
    quantized = 1 + 1 / 32
    channels, hidden = 1024, 4096
    found = [traffic.quantizing(plan.kernels) for plan in (separate, fused)]
    rows = 64
    unfused = rows * channels * (2 + 2 + quantized)
    self.assertEqual(
      found,
      [
        rows * (3 * channels + hidden) * (2 + 2 + quantized),
        rows * (2 * channels + hidden) * quantized + unfused,
      ],
    )
    self.assertLessEqual(found[1] / found[0], 0.35)
    self.assertEqual([p.format for p in steps], ["mxfp8", "mxfp8 fused"])
    self.assertIn("to separate", report.text([separate, fused]))
