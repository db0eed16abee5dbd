# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures outside of generated tables are those of the committed results.

A failure prints the line or the phrase that the page must have.
"""

import functools
import json
import statistics
import subprocess

import readme_table
from absl.testing import absltest, parameterized

from jaxplugin.lab.bench import results

ROOT = readme_table.README.parent
KERNELS = ROOT / "kernels" / "cpu" / "README.md"
HOW_TO = ROOT / "docs" / "how_to"
RESULTS = readme_table.DIRECTORY / "results"
AVX512 = "cpu_epyc_avx512_2_cores"
AVX2 = "cpu_epyc_avx2_2_cores_limited"
AVX2_FLOATS = "cpu_epyc_zen3_avx2_2_cores_floats"
DECODER = "decoder:4x2048x5632"
FORMATS = readme_table.FORMATS


@functools.cache
def run(name):
  return results.read(RESULTS / f"{name}.json")


class Row:
  """One row of a run."""

  def __init__(self, name, row, formats):
    (self.row,) = (
      r for r in run(name).rows if (r.row, r.formats) == (row, formats)
    )
    self.chosen = next(v.name for v in self.row.variants if v.is_chosen)

  def variant(self, name):
    return next(v for v in self.row.variants if v.name == name)

  def ms(self, name=None):
    return self.variant(name or self.chosen).time.median

  def ratio(self, other, ours=None):
    """The median ratio by rounds."""
    return self.row.ratios_to(self.variant(ours or self.chosen))[other].median

  def by_medians(self, other):
    return self.ms(other) / self.ms()

  def share(self):
    return self.variant(self.chosen).roof_fraction


def factor(value):
  return f"{value:.2f}" if value < 1.95 else f"{value:.1f}"


def percent(value):
  return f"{100 * value:.0f} %"


def line(label, file, row, cell, formats=FORMATS):
  """A line of a table with a column for each format."""
  cells = [cell(Row(file, row, format)) for format in formats]
  return f"| {label} | {' | '.join(cells)} |"


def ratio_to(other, ours=None):
  return lambda row: factor(row.ratio(other, ours))


def share(row):
  return percent(row.share())


def bytes_of_f32(row):
  """How many times as many bytes as ours f32 reads and writes at least."""
  ours = row.variant(row.chosen)
  return f"{row.variant('f32').num_bytes / ours.num_bytes:.1f}"


GOALS = (
  line("at 4096^2", AVX512, "1x4096x4096", ratio_to("f32")),
  line("at 8192^2", AVX512, "1x8192x8192", ratio_to("f32")),
  line(
    "at 8192^2, by medians (rounds differ)",
    AVX512,
    "1x8192x8192",
    lambda row: factor(row.by_medians("f32")),
  ),
  line("floor counted in bytes", AVX512, "1x8192x8192", bytes_of_f32),
  line("in `bench` with JAX's call, at 4096^2", AVX512, "1x4096x4096", share),
  line("in `bench` with JAX's call, at 8192^2", AVX512, "1x8192x8192", share),
  line("reached", AVX512, "16x4096x4096", ratio_to("bf16")),
  line("reached", AVX512, "128x4096x4096", ratio_to("bf16")),
  line("at 1024^3", AVX512, "1024x1024x1024", ratio_to("bf16")),
  line("at 2048^3", AVX512, "2048x2048x2048", ratio_to("bf16")),
  line("reached", AVX512, "quantize:4096x4096", share),
  line("reached", AVX512, "dequantize:4096x4096", share),
  line("reached", AVX512, DECODER, ratio_to("f32", "cpu in scan")),
  line("at 4096^2", AVX2, "1x4096x4096", ratio_to("f32")),
  line("at 8192^2", AVX2, "1x8192x8192", ratio_to("f32")),
  line("16 rows", AVX2, "16x4096x4096", ratio_to("f32")),
  line("128 rows", AVX2, "128x4096x4096", ratio_to("f32")),
  line("at 1024^3", AVX2, "1024x1024x1024", ratio_to("f32")),
  line("at 2048^3", AVX2, "2048x2048x2048", ratio_to("f32")),
  line("reached", AVX2, "quantize:4096x4096", share),
  line("reached", AVX2, "dequantize:4096x4096", share),
  line("reached", AVX2, DECODER, ratio_to("f32", "cpu in scan")),
  *(
    line(
      row,
      AVX2_FLOATS,
      row,
      lambda row: f"{row.ratio('f32'):.2f}x",
      ("f32xmxfp4", "f32xnvfp4", "f32xmxfp8", "f32xint4_32"),
    )
    for row in (
      "16x4096x4096",
      "64x4096x4096",
      "512x4096x4096",
      "2048x2048x2048",
    )
  ),
)


class CpuKernelsTest(parameterized.TestCase):
  @parameterized.parameters(*GOALS)
  def test_page_has_the_line(self, expected):
    self.assertIn(expected, KERNELS.read_text().splitlines())

  def test_page_has_the_phrases(self):
    page = " ".join(KERNELS.read_text().split())
    reads = [f"{run(name).ceilings.read / 1e9:.0f}" for name in (AVX512, AVX2)]
    scans = [Row(AVX512, DECODER, f).ms("cpu in scan") for f in FORMATS]
    sixteen = [
      factor(Row(AVX512, "16x4096x4096", f"f32x{f}").ratio("bf16"))
      for f in ("mxfp8", "nvfp4")
    ]
    one = [
      Row(AVX512, "1x4096x4096", f"f32x{f}").ms()
      / Row(AVX512, "1x4096x4096", f).ms()
      for f in ("mxfp8", "nvfp4")
    ]
    many = Row(AVX512, "128x4096x4096", "mxfp8")
    cubes = {f: Row(AVX512, "1024x1024x1024", f).ms() for f in FORMATS}
    avx2 = {f: Row(AVX2, "2048x2048x2048", f).ms() for f in FORMATS}
    for phrase in (
      f"{reads[0]} and {reads[1]} GB/s",
      f"It takes {scans[0]:.1f} ms in MXFP8, {scans[1]:.1f} ms in MXFP4 and"
      f" {scans[2]:.1f} ms in NVFP4",
      f"reach {sixteen[0]} (MXFP8) and {sixteen[1]} (NVFP4)",
      f"the ratios are {one[0]:.1f} and {one[1]:.1f}",
      f"MXFP8 has {percent(many.share())} of the rate",
      f"The dots take {cubes['nvfp4']:.1f} and {cubes['mxfp4']:.1f} ms",
      f"2048^3 is {avx2['mxfp8'] / avx2['mxfp4']:.1f}x faster in MXFP4 than in"
      f" MXFP8, and {avx2['mxfp8'] / avx2['nvfp4']:.1f}x faster in NVFP4",
      f"MXFP8 takes {Row(AVX2, '1024x1024x1024', 'mxfp8').ms():.1f} ms",
    ):
      self.assertIn(phrase, page)


class FilesTest(absltest.TestCase):
  def test_commits_are_in_this_repository(self):
    def git(*arguments):
      command = ["git", "-C", str(ROOT), *arguments]
      return subprocess.run(command, capture_output=True, text=True)

    depth = git("rev-parse", "--is-shallow-repository")
    if depth.returncode or depth.stdout.strip() != "false":
      self.skipTest("needs a checkout with all commits")
    for path in RESULTS.glob("*.json"):
      commit = json.loads(path.read_text())["environment"]["commit"]
      if commit is not None:  # measured at a version that is not in it
        found = git("cat-file", "-e", commit.removesuffix("+"))
        self.assertEqual(found.returncode, 0, f"{path.name}: {commit}")


class PagesTest(absltest.TestCase):
  def test_guide_of_decoding_has_the_gain_of_unrolled_layers(self):
    gains = [
      Row(AVX512, row.row, row.formats).ratio("cpu in scan", "cpu")
      for row in run(AVX512).rows
      if row.kind == "decoder"
    ]
    self.assertIn(
      f"{min(gains):.2f}x to {max(gains):.2f}x faster than the same step with a"
      " scan",
      " ".join((HOW_TO / "decode_loop.md").read_text().split()),
    )

  def test_method_has_the_ratios_of_training(self):
    page = (ROOT / "docs" / "benchmarks" / "method.md").read_text()
    name = f"{AVX512}_training"
    for peer in ("f32", "bf16"):
      expected = line(
        peer,
        name,
        "training:512x512x2048",
        lambda row, peer=peer: f"{row.ratio(peer):.2f}",
        formats=("mxfp8", "nvfp4", "mxfp4"),
      )
      self.assertIn(expected, page.splitlines())

  def test_guide_of_microbatches_has_the_table(self):
    page = (HOW_TO / "gradient_accumulation.md").read_text()
    folder = ROOT / "examples" / "training" / "results" / "microbatches"
    recipes = json.loads((folder / f"{AVX512}.json").read_text())["recipes"]
    names = {
      "weights": "weights quantized once",
      "operands": "weights and shared inputs quantized once",
      "f32": "f32, not quantized",
    }
    for recipe, variants in recipes.items():
      for name, label in names.items():
        gain = variants[name]["each_over_this"]
        self.assertIn(
          f"| {recipe.upper()} | {label} | {gain['median']:.2f}x |"
          f" {gain['q1']:.2f}x to {gain['q3']:.2f}x |",
          page.splitlines(),
        )
    gain = recipes["nvfp4"]["weights"]["each_over_this"]
    self.assertIn(f"between {gain['min']:.2f}x and {gain['max']:.2f}x", page)

  def test_gpu_page_has_the_table_of_a_layer(self):
    page = readme_table.GPU_PAGE.read_text().splitlines()
    for name, label in (
      ("layer", "forward"),
      ("layer_training", "forward and backward"),
    ):
      data = json.loads((RESULTS / f"gpu_h100_{name}.json").read_text())
      for tokens, row in data["tokens"].items():
        fused = row["mxfp8 fused"]
        times = [
          f"{each['ms']['median']:#.3g}".rstrip(".")
          for each in (row["bf16"], row["mxfp8"], fused)
        ]
        ratios = [
          f"{fused[f'speedup_over_{other}']['median']:.2f}"
          for other in ("bf16", "separate")
        ]
        error = f"{fused['error']:.1e}".replace("e-0", "e-")
        cells = [label, tokens, *times, *ratios, error]
        self.assertIn(f"| {' | '.join(cells)} |", page)

  def test_serving_page_has_the_table_of_the_text(self):
    page = (ROOT / "docs" / "benchmarks" / "serving_results.md").read_text()
    data = json.loads((RESULTS / f"{AVX512}_serving.json").read_text())
    (text,) = (r for r in data["runs"] if r["what"] == "text")
    for row in text["rows"]:
      name = "f32 weights and rows" if row["name"] == "f32" else row["name"]
      equal = sum(tokens == 64 for tokens in row["equal_tokens"])
      error = row["logits_errors"]["llama.cpp"]
      shown = f"{error:.1%}" if error else "0"
      self.assertIn(
        f"| {name} | {equal} of 10 | {row['agreement']:.1%} | {shown} |"
        f" {row['perplexity']:.3f} |",
        page.splitlines(),
      )

  def test_serving_page_has_the_table_of_speed(self):
    page = (ROOT / "docs" / "benchmarks" / "serving_results.md").read_text()
    runs = []
    for name in (AVX512, "cpu_epyc_zen3_avx2_2_cores"):
      data = json.loads((RESULTS / f"{name}_serving.json").read_text())
      runs += data["runs"]
    for speed in runs:
      if speed["what"] != "speed":
        continue
      setting = lambda row: (row["prompt_tokens"], row["decoded_tokens"])
      peers = {
        setting(row): row for row in speed["rows"] if row["name"] == "llama.cpp"
      }
      for row in speed["rows"]:
        peer = peers[setting(row)]
        prompt, token = "prompt_seconds", "token_seconds"
        by_prompt, by_token = (
          statistics.median(
            a / b for a, b in zip(peer[key], row[key], strict=True)
          )
          for key in (prompt, token)
        )
        milliseconds = 1e3 * statistics.median(row[prompt])
        rate = 1 / statistics.median(row[token])
        self.assertIn(
          f"| {speed['threads']} | {row['name']} | {row['prompt_tokens']} |"
          f" {milliseconds:.0f} | {by_prompt:.2f} |"
          f" {row['decoded_tokens']} | {rate:.0f} | {by_token:.2f} |",
          page.splitlines(),
        )

  def test_guide_of_export_has_the_table(self):
    page = (HOW_TO / "export.md").read_text()
    data = json.loads(
      (RESULTS / "cpu_xeon_avx512_2_cores_export.json").read_text()
    )
    labels = (
      "one device",
      "the weight's rows over two devices",
      "k over two devices",
    )
    for label, row in zip(labels, data["rows"], strict=True):
      ours, jax = (
        row["variants"][name]["times_jit"]
        for name in ("jp.export", "jax.export")
      )
      self.assertIn(
        f"| {label} | {ours['median']:.2f} | {ours['q1']:.2f} to"
        f" {ours['q3']:.2f} | {jax['median']:.0f} |",
        page.splitlines(),
      )
