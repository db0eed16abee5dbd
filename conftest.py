# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sets options before JAX is imported, and selects the tests of a leg.

`pytest --leg=LEG` runs a part of the tests:

  check   tests of the leg `test` with the mark `smoke` (`make check`)
  test    tests without the marks `full` and `lab`; n rows of each test with
          the mark `sample(n)`, or in a class that has it (`make test`)
  lab     tests with the mark `lab`, except those of `full` (`make test-lab`)
  all     every test (`make test-all`, and pytest without --leg)

The leg `test` also runs `--extra` of the rows that `sample` leaves out. The
seed that chooses them is printed; `--seed` repeats a choice.
"""

import gc
import inspect
import os
import random

# The CUDA plugin is installed for its compiler. Without this option it does not
# start on a machine without a GPU (jaxplugin/lab/compilation/deviceless.py).
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# LLVM takes much of the time of the tests. Level 0 instead of XLA's default, 3,
# compiles their programs a third faster, and every test passes at both levels.
# `XLA_FLAGS= make test` uses XLA's default level, as users' programs do.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# NumPy multiplies with one thread. Threads of OpenBLAS that wait use CPU time:
# two took six times as much as one for the dots of kernels/cpu/tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tests expect the built-in choices, not choices measured on this machine.
os.environ.setdefault("JAXPLUGIN_TUNING", "off")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # for the sharding tests
# Filtering the traceback of an error takes JAX longer than raising it.
jax.config.update("jax_traceback_filtering", "off")

LEGS = ("check", "test", "lab", "all")


def sampled(rows: list, count: int) -> list:
  """Returns `count` of `rows`, evenly spaced, with the first and the last."""
  if count >= len(rows):
    return rows
  if count == 1:
    return rows[:1]
  step = (len(rows) - 1) / (count - 1)
  return [rows[round(number * step)] for number in range(count)]


def chosen(items: list, leg: str, extra: int, seed: int) -> list:
  """Returns the pytest items of `items` that `leg` runs, in their order."""
  if leg == "all":
    return items
  tests: dict[tuple, list] = {}
  for item in items:
    marks = {mark.name for mark in item.iter_markers()}
    is_in_leg = {
      "check": "smoke" in marks and "lab" not in marks,
      "test": "lab" not in marks,
      "lab": "lab" in marks,
    }[leg]
    if is_in_leg and "full" not in marks:
      # Each row of a parameterized test wraps the same function.
      test = (item.parent.nodeid, inspect.unwrap(item.obj))
      tests.setdefault(test, []).append(item)
  kept, others = set(), []
  for rows in tests.values():
    mark = rows[0].get_closest_marker("sample")
    sample = sampled(rows, mark.args[0]) if mark else rows
    kept.update(sample)
    others += [row for row in rows if row not in sample]
  kept.update(random.Random(seed).sample(others, min(extra, len(others))))
  return [item for item in items if item in kept]


def without_repeated_skips(items: list) -> list:
  """Returns `items` with one skipped test for each file and skip reason.

  Tests that unittest does not skip all stay.
  """
  seen, kept = set(), []
  for item in items:
    skipped = [part for part in (item.obj, item.cls) if _is_skipped(part)]
    if skipped:
      skip = (item.path, skipped[0].__unittest_skip_why__)
      if skip in seen:
        continue
      seen.add(skip)
    kept.append(item)
  return kept


def _is_skipped(part) -> bool:
  return getattr(part, "__unittest_skip__", False)


def pytest_addoption(parser):
  parser.addoption("--leg", choices=LEGS, default="all", help="which tests")
  parser.addoption("--extra", type=int, default=0, help="rows beyond samples")
  parser.addoption("--seed", type=int, help="chooses the rows of --extra")


def pytest_configure(config):
  if config.option.seed is None:
    config.option.seed = random.randrange(1_000_000)
  if hasattr(config, "workerinput"):
    config.option.seed = config.workerinput["seed"]
  # XLA takes two thirds of the time. JAX's compilation cache keeps the programs
  # of other tests and earlier runs; `pytest --cache-clear` deletes them.
  if hasattr(config, "cache"):
    directory = config.cache.mkdir(f"jax-{jax.lib.__version__}")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
  # Each pytest-xdist process selects the tests, so all need the same seed.
  node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config):
  return f"leg {config.option.leg}, seed {config.option.seed}"


def pytest_collection_modifyitems(config, items):
  option = config.option
  kept = chosen(items, option.leg, option.extra, option.seed)
  kept = without_repeated_skips(kept)
  if len(kept) < len(items):
    in_leg = set(kept)
    left = [item for item in items if item not in in_leg]
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collection():
  # Modules and collected tests live until the end. Without gc.disable and
  # gc.freeze the garbage collector visits them again and again, a fifth of the
  # time of a collection and a tenth of that of the tests.
  gc.disable()
  try:
    return (yield)
  finally:
    gc.enable()


def pytest_collection_finish(session):
  gc.collect()
  gc.freeze()


def pytest_sessionfinish(session):
  gc.unfreeze()  # otherwise nanobind reports frozen objects as leaks


def pytest_runtest_teardown(item, nextitem):
  # Compiled programs of 270 tests grow a process from 0.8 GB to 2.4 GB. The
  # next test file uses almost none of them. What remains lives until the end.
  if nextitem is None or nextitem.path != item.path:
    jax.clear_caches()
    gc.collect()
    gc.freeze()
