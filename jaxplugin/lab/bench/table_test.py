# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Peers that are as accurate as ours, in tables."""

import dataclasses

from absl.testing import parameterized

from jaxplugin.lab.bench import table
from jaxplugin.printing import console
from jaxplugin.testing import bench_results


def variant(name, milliseconds, error, **fields):
  return bench_results.variant(
    name, milliseconds, relative_error=error, **fields
  )


def row(*peers, ours=1e-3):
  cpu = variant("cpu", 2, ours, is_chosen=True)
  return bench_results.row(cpu, *(variant(*peer) for peer in peers))


class BestPeerTest(parameterized.TestCase):
  @parameterized.parameters(
    # (peers, the best, the error of ours)
    ([("exact", 5, 1e-7), ("coarse", 1, 5e-3)], "exact"),
    ([("exact", 5, 1e-7), ("equal", 3, 1.09e-3)], "equal"),
    ([("exact", 5, 1e-7), ("worse", 3, 1.11e-3)], "exact"),
    ([("slow", 9, 1e-4), ("fast", 4, 1e-4)], "fast"),
    ([("coarse", 1, 5e-3)], None),
    ([("unknown", 1, None)], None),
    # Sums in f32 are equally accurate, and variants of ours are not peers.
    ([("f32", 3, 9e-7), ("bf16", 1, 2e-6)], "f32", 1e-7),
    ([("xla", 1, 1e-7), ("f32", 3, 1e-7)], "f32"),
  )
  def test_best_peer_is_the_fastest_that_is_as_accurate(
    self, peers, expected, ours=1e-3
  ):
    one = row(*peers, ours=ours)
    self.assertEqual(one.best_peer(one.variants[0]), expected)

  def test_runs_without_libraries_have_none(self):
    one = row(("f32", 1, None), ours=None)
    self.assertIsNone(one.best_peer(one.variants[0]))
    self.assertNotIn("error", table.block(one))
    self.assertNotIn("best peer", "".join(self.printed(one)))

  def printed(self, one):
    return console.text(table.summary(bench_results.run(one)))

  def test_tables_name_the_best_peer_with_its_error(self):
    one = row(("f32", 9, 1e-7), ("ggml q8_0", 1, 5.2e-3), ("bf16", 6, 1e-3))
    text = table.block(one)
    self.assertRegex(text, r"ggml q8_0 .* 5\.2e-03 .* 0\.50 ")
    self.assertIn("best peer as accurate as cpu: bf16, x 3.00", text)
    self.assertLessEqual(max(map(len, text.splitlines())), table.WIDTH)
    self.assertRegex(self.printed(one), r"best peer +x peer")
    self.assertRegex(self.printed(one), r"bf16 +3x")

  def test_names_are_whole_beside_all_peers(self):
    one = row(("f32", 9, 1e-7), ("openvino mxfp4 f32", 5, 1e-4), ("bf16", 6, 1))
    one = dataclasses.replace(one, row="16x4096x4096", formats="bf16xmxfp4")
    text = self.printed(one)
    self.assertRegex(text, r"16x4096x4096 +bf16xmxfp4 +cpu .* 2\.5x")

  def test_columns_are_aligned_at_short_times(self):
    one = bench_results.row(
      bench_results.variant("cpu", 4.5132e-3), bench_results.variant("xla", 5.0)
    )
    first, second = table.block(one).splitlines()[2:4]
    self.assertEqual(first.index(" %"), second.index(" %"), table.block(one))
