# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The picture in README.md is what the package decides today."""

import contextlib
import io
import json

import decision_picture
from absl.testing import absltest

from jaxplugin.cli import main
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
        # The label says whatever the target's name does not.
        self.assertRegex(label, "attached|CPU|TPU")
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
    self.assertGreaterEqual(named, 6)

  def test_words_stay_inside_their_columns(self):
    # 0.62 em a character is more than any of the usual fonts needs on average.
    column = (
      decision_picture.WIDTH
      - 2 * decision_picture.MARGIN
      - decision_picture.LABEL_WIDTH
    ) / len(decision_picture.CALLS)
    for call in decision_picture.CALLS:
      self.assertLess(len(call.title) * 0.62 * 13, column)
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
          self.assertLess(len(line) * 0.62 * 10, column)


if __name__ == "__main__":
  absltest.main()
