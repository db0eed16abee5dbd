# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command, as it is called."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.lab.bench import (
  devices,
  execution,
  measurement,
  results,
  roofline,
  table,
  timing,
  training_step,
)
from jaxplugin.lab.bench.peers import codec_variants, dot_variants, verification
from jaxplugin.testing import acme_backend, bench_results, command_lines

OPTIONAL = ("matplotlib", "rich", "torch")
STEPS = "measuring the limits of this machine\nmeasuring 2 rows\n"
# Timed beside rows that read, on CPUs.
READS = ("read", "read by numpy", "read huge pages")


class InstructionSetTest(command_lines.CommandLineTestCase):
  @pytest.mark.full
  def test_isa_limits_xla_and_kernels(self):
    """Runs a process, because the limit must precede the first device."""
    better = ("amx_bf16", "avx512_bf16", "avx512")
    if jp.detect_target("cpu").cpu_kernels not in better:
      self.skipTest("needs AVX-512 and the kernels")
    path = self.directory / "run.json"
    options = "--quick --isa avx2 --rounds 2 --seconds 0.01 --peers f32"
    subprocess.run(
      [sys.executable, "-m", "jaxplugin", "bench", *options.split()]
      + ["--shapes", "8x64x64", "--formats", "mxfp4", "--json", str(path)],
      check=True,
      capture_output=True,
    )
    found = results.read(path)
    self.assertEqual(found.environment["instruction_set"], "avx2")
    self.assertIn("--xla_cpu_max_isa=AVX2", found.environment["xla_flags"])
    self.assertAlmostEqual(found.ceilings.int8, 2 * found.ceilings.f32)

  def test_isa_is_refused_where_it_cannot_be_had(self):
    """Here JAX has devices, and the kernels have chosen."""
    if jp.detect_target("cpu").cpu_kernels == "avx2":
      self.skipTest("has just that")
    with absltest.mock.patch.dict(os.environ):
      self.check_error(
        ["bench", "--quick", "--isa", "avx2"],
        "--isa avx2 needs a CPU with kernels",
      )


class BenchTestCase(command_lines.CommandLineTestCase):
  def setUp(self):
    super().setUp()
    # Warm and cold matter to times, on which nothing here depends.
    self.enter_context(
      absltest.mock.patch.object(
        devices, "cpu_cache_bytes", lambda: (1 << 12, "a test")
      )
    )
    self.enter_context(
      absltest.mock.patch.object(execution, "WARM_UP_SECONDS", 0.0)
    )
    tiny = roofline.CeilingSizes(side=256, product=64, rounds=2)
    self.enter_context(
      absltest.mock.patch.object(roofline, "QUICK_SIZES", tiny)
    )

  def recorded_samples(self):
    """A list that gets the samples of all that is timed from now on."""
    taken = []
    in_turns = timing.in_turns

    def recorded(*args, **kwargs):
      taken.append(in_turns(*args, **kwargs))
      return taken[-1]

    self.enter_context(absltest.mock.patch.object(timing, "in_turns", recorded))
    return taken

  def run_bench(self, *arguments):
    """Returns the exit status, stdout and stderr."""
    return self.run_command("bench", *map(str, arguments))

  def measure(self, shapes, formats, *options):
    """Measures rows. Returns the results as well."""
    path = self.directory / "r.json"
    status, out, err = self.run_bench(
      *("--platform", "cpu", "--quick", "--rounds", "3", "--seconds", "0.01"),
      *("--shapes", shapes, "--formats", formats, "--json", path, "--verbose"),
      *options,
    )
    return status, out, err, results.read(path)


class RunTest(BenchTestCase):
  @pytest.mark.lab
  def test_small_run_is_verified_timed_printed_and_kept(self):
    # JAX has it on CPUs since 0.12.
    refuse = absltest.mock.Mock(side_effect=NotImplementedError("not on a CPU"))
    self.enter_context(
      absltest.mock.patch.object(dot_variants.jax.nn, "scaled_matmul", refuse)
    )
    taken = self.recorded_samples()
    status, out, err, run = self.measure("2x64x96,quantize:32x64", "mxfp8")
    self.assertEqual((status, err), (0, STEPS))
    dot, codec = run.rows
    (samples,) = (s for s in taken if {"xla", "read"} <= s.keys())
    self.check_dot(dot, samples)
    self.assertEqual(
      [(v.name, v.status) for v in codec.variants],
      [
        (name, "ok")
        for name in ("jp.quantize", "by xla", "copy", "warm copy", "fresh copy")
      ],
    )
    self.assertLessEqual(max(map(len, out.splitlines())), table.WIDTH)
    self.assertIn("2x64x96  mxfp8 -> float32", out)
    self.assertRegex(out, r"not run:\n  nn.scaled_matmul.*not on a CPU")
    self.assertEqual(run.environment["versions"]["jaxplugin"], jp.__version__)
    path = self.directory / "r.json"
    shown = self.run_bench("--show", path, "--verbose")
    self.assertEqual(shown, (0, out, ""))
    status, printed, _ = self.run_bench("--show", path, "--json")
    self.assertEqual((status, printed), (0, path.read_text()))
    self.assertGreater(run.ceilings.read, 1e8)

  def check_dot(self, row, samples):
    by_name = {v.name: v for v in row.variants}
    chosen = [v.name for v in row.variants if v.is_chosen]
    target = jp.detect_target("cpu")
    self.assertEqual(chosen, ["cpu" if target.cpu_kernels else "xla"])
    for name in ("xla", "f32", "bf16", "lax.scaled_dot", *READS):
      self.assertEqual(by_name[name].status, "ok", name)
      self.assertEqual(by_name[name].time.count, 3)
    for name in ("xla", "f32", "bf16"):
      self.assertIsNotNone(by_name[name].other_time)
    self.assertLess(by_name["xla"].error, 16)
    # Values and scales of both sides, and 2 x 64 floats.
    quantized = (2 + 64) * (96 + 3) + 2 * 64 * 4
    self.assertEqual(by_name["xla"].num_bytes, quantized)
    self.assertEqual(by_name["bf16"].num_bytes, (2 + 64) * 96 * 2 + 512)
    self.assertEqual(by_name["xla"].flops, 2 * 2 * 64 * 96)
    peer = by_name["nn.scaled_matmul"]
    self.assertEqual((peer.status, peer.time), ("unavailable", None))
    ratios = {(r.ours, r.other): r.ratio for r in row.ratios}
    pairs = zip(samples["f32"], samples["xla"], strict=True)
    self.assertAlmostEqual(
      ratios["xla", "f32"].median,
      sorted(f32 / xla for f32, xla in pairs)[1],
      places=3,
    )

  @pytest.mark.lab
  def test_decoder_and_training_are_verified_timed_and_compared(self):
    status, out, err, run = self.measure(
      "decoder:1x64x64x2,training:32x64x128",
      *("mxfp8", "--peers", "f32,bf16,ggml"),
    )
    self.assertEqual((status, err), (0, STEPS))
    decoder, training = run.rows
    chosen = "cpu" if jp.detect_target("cpu").cpu_kernels else "xla"
    for row, kind, sizes, timed in (
      (
        *(decoder, "decoder", (2, 64, 64)),
        [chosen, f"{chosen} in scan", "f32", "f32 in scan", "bf16", *READS],
      ),
      (training, "training", (32, 128, 64), [chosen, "f32", "bf16"]),
    ):
      self.assertEqual((row.kind, row.m, row.n, row.k), (kind, *sizes))
      self.assertEqual([v.name for v in row.variants if v.time], timed)
      ours = [v for v in row.variants if v.role == "ours"]
      ratios = {(v.name, other) for v in ours for other in row.ratios_to(v)}
      names = {v.name for v in ours}
      self.assertEqual(ratios, {(a, b) for a in names for b in timed if a != b})
    self.assertLess(decoder.variants[0].error, 32)
    # 3 products of each of 4 weights, and attention's.
    flops = 6 * 32 * (4 * 64 * 64 + 2 * 64 * 128 + 2 * 32 * 64)
    self.assertEqual(training.variants[0].flops, flops)
    for text in (
      "decoder:1x64x64x2  mxfp8 -> float32",
      "training:32x64x128  mxfp8 -> float32",
      "ggml (decoder:1x64x64x2 mxfp8): is not run for decoders",
      "ggml (training:32x64x128 mxfp8): is not run for training",
    ):
      self.assertIn(text, out)
    paths = [self.directory / "r.json"] * 2
    compared, told, _ = self.run_bench("--compare", *paths)
    self.assertEqual(compared, 0)
    self.assertIn(f"decoder:1x64x64x2 mxfp8->float32: f32 / {chosen}", told)

  @pytest.mark.lab
  def test_wrong_gradients_are_found(self):
    row, pair = bench_results.parsed("training:32x64x128")
    made = training_step.TrainingVariants(row, pair, jp.detect_target("cpu"))
    (variant,) = made.ours(["xla"])
    weights, x = jax.jit(variant.function)(*variant.operands(0))
    variant.check(0, (weights, x))
    for name in weights:
      wrong = {**weights, name: -weights[name]}
      with self.assertRaisesRegex(
        verification.WrongResultError, f"gradient of {name} errs by"
      ):
        variant.check(0, (wrong, x))
    with self.assertRaisesRegex(verification.WrongResultError, "of input errs"):
      variant.check(0, (weights, x[::-1]))

  @pytest.mark.lab
  def test_wrong_result_is_told_not_timed_and_fails_the_run(self):
    right = dot_variants.dot.block_scaled_dot

    def wrong(*args, implementation, **kwargs):
      result = right(*args, implementation=implementation, **kwargs)
      return result.at[0, 0].add(0.5) if implementation == "xla" else result

    with absltest.mock.patch.object(
      dot_variants.dot, "block_scaled_dot", wrong
    ):
      status, out, err, run = self.measure(
        *("2x32x64", "nvfp4", "--peers", "none", "--implementations", "xla")
      )
    self.assertEqual(status, 1)
    self.assertIn("xla WRONG: at (0, 0): got", out)
    self.assertIn("2x32x64 nvfp4: xla is wrong", err)
    variant, *_ = run.rows[0].variants
    self.assertEqual((variant.status, variant.time), ("wrong", None))

  @pytest.mark.lab
  def test_failure_of_ours_fails_the_run_and_of_a_peer_is_told(self):
    def fail(*args, **kwargs):
      raise RuntimeError("no such luck")

    with (
      absltest.mock.patch.object(codec_variants, "_quantize_portably", fail),
      absltest.mock.patch.object(dot_variants.lax, "scaled_dot", fail),
    ):
      status, out, err, _ = self.measure(
        *("2x32x64,quantize:32x64", "mxfp8", "--peers", "lax.scaled_dot"),
        *("--implementations", "xla,triton,chosen"),
      )
    self.assertEqual(status, 1)
    self.assertIn("by xla FAILED: RuntimeError: no such luck", out)
    self.assertIn("by xla is failed", err)
    self.assertRegex(
      out,
      r"not run:\n  triton.*platform is cpu\n  lax.scaled_dot.*no such luck",
    )
    self.assertNotIn("lax.scaled_dot", err)

  @pytest.mark.lab
  def test_rows_without_time_are_left_out_and_told(self):
    status, out, _, run = self.measure(
      "2x32x64,4x32x64", "mxfp8", "--budget", "0.001"
    )
    self.assertEqual(status, 0)
    self.assertIn("left out, no time: 2x32x64 mxfp8, 4x32x64 mxfp8", out)
    self.assertEqual(run.left_out, ("2x32x64 mxfp8", "4x32x64 mxfp8"))

  def measure_two_rows(self, measure, *options):
    ceilings = bench_results.CEILINGS
    patch = absltest.mock.patch.object
    with (
      patch(roofline, "measure", return_value=ceilings),
      patch(devices, "environment", return_value=bench_results.ENVIRONMENT),
      patch(measurement, "RowMeasurement") as measuring,
    ):
      measuring.return_value.measure.side_effect = measure
      measuring.return_value.ceilings = ceilings
      return self.measure("2x32x64,4x32x64", "mxfp8", *options)

  def test_appending_keeps_rows_that_another_run_appends_meanwhile(self):
    path = self.directory / "r.json"

    def measure(row, pair):
      other = bench_results.row(row=f"another {row}")
      results.append(bench_results.run(other), path)
      return bench_results.row(row=str(row))

    status, out, _, run = self.measure_two_rows(measure, "--append")
    names = ["another 2x32x64", "2x32x64", "another 4x32x64", "4x32x64"]
    self.assertEqual(sorted(row.row for row in run.rows), sorted(names))
    self.assertEqual(status, 0)
    for name in names:
      self.assertIn(name, out)

  def test_interrupted_run_prints_the_rows_that_were_measured(self):
    row = bench_results.row(bench_results.variant("cpu", 2, is_chosen=True))
    status, out, err, run = self.measure_two_rows([row, KeyboardInterrupt])
    self.assertEqual([one.row for one in run.rows], ["1x4096x4096"])
    self.assertEqual(status, 130)
    self.assertIn("1x4096x4096", out)
    self.assertIn("bench: interrupted", err)

  def test_summary_has_a_line_for_each_row(self):
    wrong = bench_results.variant("xla", 1, status="wrong", time=None)
    run = bench_results.run(
      bench_results.row(
        bench_results.variant("cpu", 2, is_chosen=True),
        bench_results.variant("xla", 1),
        bench_results.variant("f32", 4),
        bench_results.variant("bf16", 5),
      ),
      bench_results.row(
        wrong, bench_results.variant("f32", 4), formats="nvfp4"
      ),
      left_out=("8x32x64 mxfp4",),
    )
    path = self.directory / "r.json"
    results.write(run, path)
    status, out, err = self.run_bench("--show", path)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    self.assertIn("row formats backend ms x f32 x bf16 of roof", lines)
    self.assertIn("1x4096x4096 mxfp8 cpu 2 2x 2.5x 100 %", lines)
    self.assertIn("1x4096x4096 nvfp4 xla WRONG", lines)
    self.assertIn("left out, no time: 8x32x64 mxfp4", lines)
    self.assertEqual((status, "xla is wrong" in err), (1, True))


class CompareTest(BenchTestCase):
  def write_run(self, name, milliseconds):
    path = self.directory / name
    run = bench_results.run(
      bench_results.row(
        bench_results.variant("cpu", milliseconds),
        bench_results.variant("f32", 4),
      )
    )
    results.write(run, path)
    return path

  @parameterized.parameters(
    (1.0, "5", 0), (1.04, "5", 0), (1.1, "5", 1), (0.5, "5", 0),
    (1.1, "20", 0), (1.1, "1", 1),
  )  # fmt: skip
  def test_status_tells_of_a_regression(self, milliseconds, percent, expected):
    paths = self.write_run("a", 1.0), self.write_run("b", milliseconds)
    threshold = ("--threshold", float(percent) / 100) if percent != "5" else ()
    status, out, err = self.run_bench("--compare", *paths, *threshold)
    self.assertEqual((status, err), (expected, ""))
    self.assertIn("1x4096x4096 mxfp8->float32: f32 / cpu", out)
    self.assertEqual("REGRESSED" in out, bool(expected))
    self.assertIn(
      f"{expected} of 1 ratios regressed by more than {percent} %", out
    )

  def test_bad_files_and_thresholds_are_told(self):
    path = str(self.write_run("a", 1.0))
    other = self.write("b", "{}")
    self.check_error(
      ["bench", "--compare", path, other], "b must be a file of results"
    )
    missing = str(self.directory / "c")
    self.check_error(["bench", "--compare", path, missing], "c: No such file")
    self.check_error(
      ["bench", "--compare", path, path, "--threshold", "5"],
      "--threshold must be between 0 and 1, got 5",
    )

  def test_options_without_effect_are_refused(self):
    path = str(self.write_run("a", 1.0))
    for name, line in (
      ("append", f"--show {path} --append"),
      ("rounds", f"--show {path} --rounds 3"),
      ("threshold", f"--show {path} --threshold 0.1"),
      ("json", f"--compare {path} {path} --json"),
      ("show", f"--compare {path} {path} --show {path}"),
    ):
      self.check_error(
        ["bench", *line.split()], f"--{name} must be left out with --"
      )


class BadArgumentsTest(BenchTestCase):
  @parameterized.parameters(
    ("--shapes llama9", "unknown shape 'llama9'; known: llama3-8b"),
    ("--formats int3", "unknown formats 'int3'; known: mxfp8"),
    ("--shapes 1x32x48 --formats mxfp4", "multiple of 32 for mxfp4, got k=48"),
    ("--peers cublas", "unknown --peers 'cublas'; known: f32, bf16"),
    (
      "--implementations cuda",
      "unknown --implementations 'cuda'; known: cudnn, triton, cpu, xla, cut",
    ),
    ("--m 0", "--m must be positive integers"),
    ("--rounds 0", "--rounds must be above 0, got 0"),
    ("--seconds nan", "--seconds must be above 0, got nan"),
    ("--budget -1", "--budget must be above 0"),
    ("--implementations none", "unknown --implementations 'none'"),
    ("--shapes quantize:4x32 --m 1", "--m must be left out for rows without"),
    ("--shapes decoder:1x64x64 --out bf16", "--out must be left out without"),
    (
      "--shapes quantize:4x32 --formats bf16xnvfp4",
      "must be of both sides, got bf16xnvfp4",
    ),
    ("--append", "--append needs a file, pass --json FILE"),
    ("--threshold 0.1", "--threshold needs --compare"),
    ("--json no/such/r.json", "no/such/r.json: No such file"),
    ("--json .", r"\. is not a regular file"),
    ("--platform tpu", "invalid choice: 'tpu'"),
  )
  def test_are_told_with_what_is_known(self, line, pattern):
    self.check_error(["bench", "--platform", "cpu", *line.split()], pattern)

  def test_backends_of_the_ragged_dot_are_known(self):
    acme_backend.register(self, lambda call: None, operation="ragged_dot")
    self.check_error(
      ["bench", "--platform", "cpu", "--implementations", "acme,cuda"],
      "unknown --implementations 'cuda'; known: .*, acme, chosen",
    )

  def test_missing_gpu_is_told(self):
    try:
      jax.devices("gpu")
    except RuntimeError:
      self.check_error(
        ["bench", "--platform", "gpu"], "JAX has no gpu device, only cpu"
      )
    else:
      self.skipTest("there is a GPU")


class ImportTest(absltest.TestCase):
  @pytest.mark.lab
  def test_neither_the_package_nor_the_command_loads_what_is_optional(self):
    program = (
      "import sys, jaxplugin, jaxplugin.__main__;"
      f"print([m for m in {OPTIONAL} if m in sys.modules])"
    )
    done = subprocess.run(
      [sys.executable, "-c", program],
      cwd=pathlib.Path(jp.__file__).parents[1],
      capture_output=True,
      text=True,
      check=True,
    )
    self.assertEqual(done.stdout.strip(), "[]")
