# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The roofline: what is drawn, and files of it."""

from absl.testing import parameterized

from jaxplugin.lab.bench.report import plot
from jaxplugin.testing import bench_results


def two_rows():
  return bench_results.run(
    bench_results.row(
      bench_results.variant("cpu", 2.5),
      bench_results.variant("xla", 20),
      bench_results.variant("f32", 5),
      bench_results.variant("torch", 10),
    ),
    bench_results.row(
      bench_results.variant("cpu", 4, num_bytes=10**7, flops=10**9),
      bench_results.variant("f32", 3),
      row="64x512x512",
      formats="nvfp4",
    ),
    # Nothing to draw of these.
    bench_results.row(
      bench_results.variant("cpu", 4, flops=0), kind="quantize"
    ),
    bench_results.row(
      bench_results.variant("cpu", 4, status="wrong", time=None)
    ),
  )


class PlotTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.axes = plot.figure(two_rows()).axes[0]

  def test_axes_and_texts_say_what_they_show(self):
    axes = self.axes
    self.assertEqual((axes.get_xscale(), axes.get_yscale()), ("log", "log"))
    self.assertIn("operations for each byte", axes.get_xlabel())
    self.assertIn("GFLOP/s", axes.get_ylabel())
    # 0.1 GB at 50 GB/s takes 2 ms: 80 % of 2.5 ms, 50 % of 4 ms. Rates: 800 and
    # 500 beside 400 and 2/0.003.
    title = axes.get_title(loc="left")
    self.assertIn("cpu: 50 to 80 % of what the machine allows", title)
    self.assertIn("0.75 to 2 times as fast as the best peer", title)
    texts = [text.get_text() for text in axes.texts]
    self.assertIn("1x4096x4096 mxfp8", texts)
    self.assertIn("64x512x512 nvfp4", texts)
    self.assertTrue(any("A device, jax 0.10.2" in text for text in texts))

  def test_points_stand_at_rate_over_the_products_own_intensity(self):
    points = {
      scatter.get_label(): scatter.get_offsets().tolist()
      for scatter in self.axes.collections
    }
    # 2e9 operations on 1e8 bytes, in 2.5 ms; 1e9 on 1e7, in 4 ms.
    self.assertEqual(points["cpu"], [[20, 800], [100, 500]])
    self.assertEqual(points["f32"][0], [20, 400])
    self.assertEqual(points["torch"], [[20, 200]])

  def test_variants_have_a_marker_and_the_colour_of_their_implementation(self):
    names = ("triton", "triton prepared", "triton tma", "f32")
    run = bench_results.run(
      bench_results.row(*(bench_results.variant(n, 2) for n in names))
    )
    points = plot.figure(run).axes[0].collections
    colors = [tuple(s.get_facecolor()[0]) for s in points]
    self.assertLen(set(colors[:3]), 1)
    self.assertLen(set(colors), 2)
    markers = {str(s.get_paths()[0].vertices.tolist()) for s in points}
    self.assertLen(markers, 4)

  def test_line_is_the_roof_of_memory_and_arithmetic(self):
    x, y = self.axes.lines[0].get_data()
    self.assertAlmostEqual(y[0], 50 * x[0])
    self.assertAlmostEqual(y[-1], 900)
    self.assertLess(x[0], 20)
    self.assertGreater(x[-1], 100)

  def test_run_without_products_is_refused(self):
    with self.assertRaisesRegex(ValueError, "at least one timed matmul"):
      plot.figure(bench_results.run())

  def test_file_names_are_checked(self):
    with self.assertRaisesRegex(ValueError, "must end in .png, .* got a.gif"):
      plot.check("a.gif")
