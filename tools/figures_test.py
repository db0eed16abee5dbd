# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Committed figures equal the output of the programs that draw them."""

import pathlib
import re
import xml.etree.ElementTree

import figures
from absl.testing import parameterized

SVG = "{http://www.w3.org/2000/svg}"
WIDTH = 920


class FiguresTest(parameterized.TestCase):
  @parameterized.parameters(*figures.DRAWN)
  def test_committed_figure_is_what_the_program_draws(self, name):
    self.assertEqual(
      figures.path(name).read_text(),
      figures.DRAWN[name](),
      "run python tools/figures.py",
    )

  @parameterized.parameters(
    *(path.name for path in sorted(figures.FIGURES.glob("*.svg")))
  )
  def test_figure_has_a_title_and_words_stay_inside(self, name):
    root = xml.etree.ElementTree.parse(figures.FIGURES / name).getroot()
    self.assertNotEmpty(root.find(f"{SVG}title").text)
    self.assertGreater(len(root.find(f"{SVG}desc").text), 60)
    for element in root.iter(f"{SVG}text"):
      width = len(element.text) * int(element.get("font-size")) * 0.62
      left = float(element.get("x"))
      left -= {"start": 0, "middle": width / 2, "end": width}[
        element.get("text-anchor")
      ]
      self.assertGreaterEqual(left, 0, element.text)
      self.assertLessEqual(left + width, WIDTH, element.text)

  def test_every_figure_is_on_a_page(self):
    docs = pathlib.Path(figures.FIGURES).parent
    text = "\n".join(page.read_text() for page in docs.rglob("*.md"))
    used = set(re.findall(r"figures/(\w+\.svg)", text))
    self.assertEqual(used, {p.name for p in figures.FIGURES.glob("*.svg")})

  def test_speedups_are_ratios_of_the_table(self):
    times = figures.readme_table.times(figures.results.read(figures.RESULTS))
    row = times["1x4096x4096"]
    plain = min(row["f32"], row["bf16"])
    words = f"1 x 4096 x 4096: MXFP8 {plain / row['mxfp8']:.2f}, "
    self.assertIn(words, figures.speed_cpu())
    self.assertIn(f"NVFP4 {plain / row['nvfp4']:.2f}", figures.speed_cpu())

  def test_page_on_serving_has_the_rates_of_the_figure(self):
    docs = figures.ROOT / "docs"
    page = (docs / "benchmarks" / "serving_results.md").read_text()
    for name, (prompt, decode) in figures.serving_rates().items():
      with self.subTest(name):
        ms = 1e3 * 140 / prompt
        row = rf"\| 2 \| {name} \| 140 \| {ms:.0f} \| [\d.]+ \| 128 \|"
        self.assertRegex(page, rf"{row} {decode:.0f} \|")

  def test_page_on_numerics_has_the_ratios_of_the_figure(self):
    page = (figures.ROOT / "docs" / "concepts" / "numerics.md").read_text()
    for format, found in figures.sqnr_table().items():
      cells = " | ".join(f"{value:.1f}" for value in found.values())
      name = format.upper().replace("_", " ")
      self.assertIn(f"| {name} | {cells} |", page)

  def test_swizzled_byte_is_the_one_of_the_formula(self):
    # Byte number 16 (row mod 32) + 4 (row div 32) + column, in order.
    labels = re.findall(r">(\d+),(\d+)<", figures.swizzle())
    self.assertLen(labels, 512)
    for position, (row, column) in enumerate(labels):
      row, column = int(row), int(column)
      self.assertEqual(position, 16 * (row % 32) + 4 * (row // 32) + column)
