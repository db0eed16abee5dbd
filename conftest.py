# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What must be set before JAX starts; which tests `make` runs.

`pytest --check` runs `WHOLE` and, of every other file, each `EVERY`-th test.
`SLOW` and `SLOW_KERNELS` have pytest's mark "slow".
"""

import gc
import os
import re
from collections.abc import Iterable

# Without it the CUDA plugin, installed for its compiler, does not start where
# there is no GPU (jaxplugin/explanation/deviceless.py).
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# Much of the time is LLVM's, in XLA:CPU. Level 1 instead of XLA's own, 3, makes
# tests of recipes a third faster and most others little. 278 programs of tests
# gave the same bits at both; level 0 did not.
# `XLA_FLAGS= make test` has XLA's own, as tests run as programs have.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
# What was measured, by the machine's user or for a machine like it, decides
# nothing in tests: they expect what the rules say.
os.environ.setdefault("JAXPLUGIN_TUNING", "off")

import jax

jax.config.update("jax_num_cpu_devices", 8)  # for the sharding tests

# What breaks most, by the start of a test's name: rules on the sources, exact
# codes, and what is emitted and rewritten.
WHOLE = (
  "hlo_tests/hlo_test.py::GoldenTest::test_holds_emitted",
  "hlo_tests/hlo_test.py::GoldenTest::test_holds_rewritten",
  "jaxplugin/core/formats_test.py",
  "jaxplugin/import_test.py",
  "jaxplugin/layering_test.py",
  "jaxplugin/quantization/codes_test.py",
  "kernels/gpu/decode_test.py",
  "tools/architecture_picture_test.py",
  "tools/bazel_targets_test.py",
)
# Small enough for the suite of each backend, quantizing, gradients and
# shardings to have their part.
EVERY = 20

# What takes minutes and says more of what other tests say too, by the start of
# a test's name: `make test` leaves it out, `make slow` runs it.
SLOW = (
  "examples/backend_package/install_test.py::MeasuredTest",
  "examples/backend_package/install_test.py::SuiteTest",
  "examples/distributed/processes_test.py::FourProcessesTest",
  "examples/distributed/train_fsdp_test.py",
  "examples/numerics/numerics_notebooks_test.py::ExecutedTest",
  "examples/quickstart/quickstart_test.py::QuantizedTest",
  "examples/serving/generate_test.py::GenerateTest",
  "examples/training/microbatches_test.py",
  "examples/training/train_test.py",
  "examples/training/training_runs_test.py",
  "hlo_tests/agreement_test.py",
  "jaxplugin/checkpoints/writing/interruption_test.py::ManyKillsTest",
  "jaxplugin/cli/commands/bench_test.py::InstructionSetTest::test_isa_limits",
  "jaxplugin/cli/commands/tune_test.py::TunedTest",
  "jaxplugin/dot/api_test.py::ChosenDotTest",
  "jaxplugin/dot/api_test.py::XlaDotTest::test_fuzzed_shapes",
  "jaxplugin/dot/backends/cpu_configs_test.py::ConfiguredDotTest",
  "jaxplugin/dot/backends/cutile_test.py::CutileDotTest",
  "jaxplugin/dot/backends/launches_test.py::AllLaunchesTest",
  "jaxplugin/dot/backends/triton_test.py::HopperDotTest",
  "jaxplugin/dot/sharding/partial_manual_test.py::MorePartialManualTest",
  "jaxplugin/exports/sharding_test.py::LongShardedExportTest",
  "jaxplugin/planning/plans_test.py::RowsTest",
  "jaxplugin/quantization/backends/triton_both_test.py::GradientStepTest",
  "jaxplugin/ragged/backends/triton_operands_test.py::GradientTest",
  "jaxplugin/ragged/backends/triton_test.py::HopperTest",
  "jaxplugin/stablehlo/module_process_test.py::FuzzTest",
  "jaxplugin/tables/ranks_test.py::TwoProcessesTest",
  "jaxplugin/tables/writing_test.py::KilledWritersTest::test_hundreds",
  "jaxplugin/training/explicit_layouts_test.py::MoreLayoutsTest",
  "jaxplugin/tuner/simulated_test.py",
  "jaxplugin/training/quantized_operand_frameworks_test.py::MeshTest::test_fsdp1",
  "kernels/cpu/tests/emulation_test.py::EmulationTest::test_kernels",
  "kernels/gpu/wgmma_compile_test.py::ManyConfigsTest",
  "kernels/inspection/ptx/matmul_kernels_test.py::FuzzTest",
  "kernels/inspection/ptx/mutations_test.py::ManyMutationsTest",
  "kernels/inspection/ptx/quantize_kernels_test.py::ManyTest",
  "kernels/inspection/ptx/tcgen05_kernels_test.py::FuzzTest",
  "kernels/inspection/ptx/tcgen05_kernels_test.py::ManyConfigsTest",
  "kernels/inspection/ptx/tcgen05_mutations_test.py::ManyMutationsTest",
)
# The same of seeds beyond the first ten of a fuzz test.
SLOW_SEEDS = re.compile(r".+::test_fuzzed_(?:shapes|sizes)_?\D*1\d$")
# The same of GPUs whose code is much as that of another one's, and of products
# whose loops are much as another product's. All tests of a kernel are, as the
# first of them compiles it.
SLOW_KERNELS = re.compile(
  r"kernels/gpu/block_scaled_matmul_compile_test\.py::CompileTest::test_\w+?"
  r"_(?:(?:gfx1250|gfx942|sm_103|sm_12[01]|sm_8[09])_"
  r"|(?:gfx|sm_)\d+_(?:\w+_(?:tma|32|64|swizzled_128)"
  r"|bf16_mxfp6|f32_mxfp4|mxfp8_mxfp4)$)"
)
SLOW_PATTERNS = (SLOW_SEEDS, SLOW_KERNELS)


def checked(names: Iterable[str]) -> set[str]:
  """Those of `names`, as pytest writes them, that `--check` runs."""
  rest: dict[str, list[str]] = {}
  found = set()
  for name in names:
    if name.startswith(WHOLE):
      found.add(name)
    else:
      rest.setdefault(name.partition("::")[0], []).append(name)
  return found.union(*(tests[::EVERY] for tests in rest.values()))


def pytest_addoption(parser):
  parser.addoption(
    "--check", action="store_true", help="run a part that takes few minutes"
  )


def pytest_configure(config):
  if config.getoption("--check"):
    # Two thirds of the time is XLA's. Programs of an earlier check that are the
    # same to the letter are read; `pytest --cache-clear` forgets them. All
    # tests without --check compile.
    jax.config.update(
      "jax_compilation_cache_dir", str(config.cache.mkdir("jax"))
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(config, items):
  for item in items:
    is_slow = any(pattern.match(item.nodeid) for pattern in SLOW_PATTERNS)
    if item.nodeid.startswith(SLOW) or is_slow:
      item.add_marker("slow")
  if config.getoption("--check"):
    names = checked(item.nodeid for item in items)
    left = [item for item in items if item.nodeid not in names]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item.nodeid in names]


def pytest_collection_finish(session):
  # Modules and the tests themselves live to the end, and the collector looked
  # through them again and again: a tenth of the time.
  gc.collect()
  gc.freeze()


def pytest_sessionfinish(session):
  gc.unfreeze()  # or nanobind takes them for leaks


def pytest_runtest_teardown(item, nextitem):
  # A process keeps what it compiled: 2.4 GB instead of 0.8 after 270 tests, of
  # which the next file uses next to nothing.
  if nextitem is None or nextitem.path != item.path:
    jax.clear_caches()
    gc.collect()
