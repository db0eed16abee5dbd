# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The dispatch figure has the choices that the package makes today."""

import contextlib
import io
import json

import decision_picture
import drawing
from absl.testing import absltest

from jaxplugin import __main__ as main
from jaxplugin.core import targets


class DecisionPictureTest(absltest.TestCase):
  def test_committed_picture_is_what_is_decided_today(self):
    self.assertEqual(
      decision_picture.PICTURE.read_text(),
      decision_picture.draw(),
      "run python tools/decision_picture.py",
    )

  def test_each_device_by_name_is_what_the_command_explains(self):
    sizes = [
      "-m",
      "128",
      "-n",
      "128",
      "-k",
      "4096",
      "--out",
      "bfloat16",
      "--json",
    ]
    named = 0
    for label, target in decision_picture.devices():
      cudnn = target.cudnn_version
      if target.name not in targets.TARGET_NAMES or target != (
        targets.named_target(target.name, cudnn=cudnn)
      ):
        # The label adds facts that the target's name does not have.
        self.assertRegex(label, "CPU")
        continue
      named += 1
      self.assertStartsWith(label, target.name)
      for call in decision_picture.CALLS:
        line = ["explain", "--target", target.name]
        if cudnn is not None:
          line += ["--cudnn", targets.format_version(cudnn)]
        for side, format in (("--lhs", call.lhs), ("--rhs", call.rhs)):
          line += [side, format.name if format else "bfloat16"]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
          self.assertEqual(main.main([*line, *sizes]), 0)
        (dot,) = json.loads(out.getvalue())["dots"]
        drawn = decision_picture.decide(call, target).implementation
        self.assertEqual(dot["decision"]["implementation"], drawn, label)
    self.assertEqual(named, 3)

  def test_words_stay_inside_their_columns(self):
    column = (
      decision_picture.WIDTH
      - 2 * decision_picture.MARGIN
      - decision_picture.LABEL_WIDTH
    ) / len(decision_picture.CALLS)
    for call in decision_picture.CALLS:
      self.assertLess(len(call.title) * drawing.CHARACTER_WIDTH * 13, column)
    for _, target in decision_picture.devices():
      for call in decision_picture.CALLS:
        lines = decision_picture.remark_lines(
          decision_picture.decide(call, target),
          decision_picture.decisions.order(
            decision_picture.backends.BACKENDS, target
          ),
        )
        self.assertLessEqual(len(lines), 2, lines)
        for line in lines:
          self.assertLess(len(line) * drawing.CHARACTER_WIDTH * 10, column)

  def test_picture_has_the_answer_for_an_amd_gpu_without_jax_triton(self):
    # jax-triton lowers for AMD GPUs only if one is attached.
    (target,) = (t for _, t in decision_picture.devices() if t.name == "mi355x")
    for call in decision_picture.CALLS:
      self.assertEqual(
        decision_picture.decide(call, target).implementation, "xla"
      )
    self.assertIn("mi355x: MXFP8 x MXFP8 xla", decision_picture.description())
