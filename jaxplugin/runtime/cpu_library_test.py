# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Handlers are registered at most once, and an outdated library is reported."""

import concurrent.futures
import functools
import json
import os
import pickle
import sys
import warnings
from unittest import mock

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.experimental import serialize_executable

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.kernels.cpu import library
from jaxplugin.runtime import cpu_library
from jaxplugin.testing import contract, folders

NUM_THREADS = 8
REAL_PATH = list(sys.path)
TARGET = targets.detect_target("cpu")
needs_library = absltest.skipIf(
  TARGET.cpu_kernels is None, TARGET.missing(targets.CPU_KERNELS)
)


class RegisterTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    cpu_library._register_once.cache_clear()
    self.addCleanup(cpu_library._register_once.cache_clear)
    self.register = self.enter_context(
      mock.patch.object(jax.ffi, "register_ffi_target")
    )

  @needs_library
  def test_handlers_are_registered_once_whatever_thread_comes_first(self):
    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as pool:
      list(pool.map(lambda _: cpu_library.register(), range(4 * NUM_THREADS)))
    calls = self.register.call_args_list
    self.assertEqual([args[0][0] for args in calls], list(library.HANDLERS))
    self.assertEqual({args[1]["platform"] for args in calls}, {"cpu"})

  def test_nothing_is_registered_without_a_library(self):
    error = library.LibraryError("not built")
    with (
      mock.patch.object(library, "load", side_effect=error),
      self.assertRaisesRegex(library.LibraryError, "not built"),
    ):
      cpu_library.register()
    self.register.assert_not_called()


def dot(values, scale):
  return jp.block_scaled_dot(values, values, scale, scale, implementation="cpu")


LOAD = """
  import pickle, sys
  import jax, jax.numpy as jnp
  from jax.experimental import serialize_executable
  if sys.argv[2] == "import":
    import jaxplugin
  with open(sys.argv[1], "rb") as file:
    payload = pickle.load(file)
  compiled = serialize_executable.deserialize_and_load(*payload)
  values = jnp.arange(192.0).reshape(3, 64).astype(jnp.float8_e4m3fn)
  scale = jnp.ones((3, 2), jnp.float8_e8m0fnu)
  print(bytes(jax.device_get(compiled(values, scale)).data).hex())
"""
CACHE = """
  import sys
  import jax, jax.numpy as jnp
  jax.config.update("jax_compilation_cache_dir", sys.argv[1])
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  import jaxplugin as jp
  events = []
  values = jnp.arange(192.0).reshape(3, 64).astype(jnp.float8_e4m3fn)
  scale = jnp.ones((3, 2), jnp.float8_e8m0fnu)
  jax.monitoring.register_event_listener(lambda e, **k: events.append(e))
  result = jax.jit(
    lambda v, s: jp.block_scaled_dot(v, v, s, s, implementation="cpu")
  )(values, scale)
  print(events.count("/jax/compilation_cache/cache_hits"))
  print(bytes(jax.device_get(result).data).hex())
"""


@needs_library
class OtherProcessTest(absltest.TestCase):
  """Executables that call the handlers, in processes that lower nothing."""

  def setUp(self):
    super().setUp()
    self.directory = folders.new(self)
    self.values = jnp.arange(192.0).reshape(3, 64).astype(jnp.float8_e4m3fn)
    self.scale = jnp.ones((3, 2), jnp.float8_e8m0fnu)
    exact = np.asarray(self.values).astype(np.float64)
    # Integers of at most 4 bits times powers of two are exact in f32 too.
    self.expected = (exact @ exact.T).astype(np.float32).tobytes().hex()

  def serialized(self):
    compiled = jax.jit(dot).lower(self.values, self.scale).compile()
    path = self.directory / "executable"
    path.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    return path

  @pytest.mark.full
  def test_serialized_executable_runs_where_the_package_is_imported(self):
    result = contract.run_program(LOAD, self.serialized(), "import")
    self.assertEqual(result.stdout.strip(), self.expected, result.stderr)

  @pytest.mark.full
  def test_without_the_package_it_is_an_error_that_names_the_handler(self):
    result = contract.run_program(LOAD, self.serialized(), "nothing")
    self.assertEqual(result.returncode, 1, result.stderr)
    self.assertRegex(
      result.stderr, f"NOT_FOUND.* handler registered for {library.HANDLERS[0]}"
    )

  @pytest.mark.full
  def test_entry_of_the_compilation_cache_runs_in_another_process(self):
    first, second = (
      contract.run_program(CACHE, self.directory) for _ in range(2)
    )
    for result in (first, second):
      self.assertEqual(result.returncode, 0, result.stderr)
      self.assertEqual(result.stdout.split()[1], self.expected)
    self.assertEqual(first.stdout.split()[0], "0")
    self.assertGreater(int(second.stdout.split()[0]), 0)


CUT = """
  import pathlib, sys
  import jax.ffi
  from jaxplugin.kernels.cpu import library
  for path in map(pathlib.Path, sys.argv[1:]):
    try:
      library.load(jax.ffi.include_dir(), path)
    except library.LibraryError as error:
      print(error)
    else:
      print("loaded")
"""


class TruncatedTest(parameterized.TestCase):
  """An incomplete copy raises an error, because loading it may crash."""

  @needs_library
  @pytest.mark.full
  def test_library_that_was_cut_is_an_error_and_a_whole_one_is_not(self):
    whole = library.find().read_bytes()
    if whole[:6] != b"\x7fELF\x02\x01":
      self.skipTest("the library is not a 64-bit little-endian ELF file")
    folder = folders.new(self)
    lengths = [6, 63, 64, 1000, 4096, 100_000, len(whole) // 2, len(whole) - 1]
    paths = [folder / f"{length}.so" for length in (*lengths, len(whole))]
    for path in paths:
      path.write_bytes(whole[: int(path.stem)])
    result = contract.run_program(CUT, *paths)
    # A signal would end this process, so another process loads the copies.
    self.assertEqual(result.returncode, 0, result.stderr)
    *lines, last = result.stdout.splitlines()
    self.assertEqual(last, "loaded")
    for path, length, line in zip(paths[:-1], lengths, lines, strict=True):
      least = 64 if length < 64 else len(whole)
      self.assertStartsWith(
        line,
        f"{path} is truncated: it has {length} bytes, and {least} by its"
        " header; delete it and build it again: pip install",
      )

  @parameterized.parameters(
    b"",
    b"\x7fEL",
    b"not ELF" * 10,
    b"\x7fELF\x01\x01" + bytes(range(58)),  # 32 bits
    b"\x7fELF\x02\x02" + bytes(range(58)),  # big-endian
  )
  def test_what_is_another_file_is_left_to_the_loader(self, content):
    self.assertEqual(library.least_bytes(content[:64]), 0)
    path = folders.new(self) / "x"
    path.write_bytes(content)
    with self.assertRaisesRegex(library.LibraryError, "x cannot be loaded: "):
      library.load(jax.ffi.include_dir(), path)


def editable(url):
  return {"url": url, "dir_info": {"editable": True}}


class SearchPathTest(parameterized.TestCase):
  """A checkout hides an installed package, and uses its library."""

  def setUp(self):
    super().setUp()
    root = folders.new(self).resolve()
    self.checkout, self.site = root / "checkout", root / "site"
    self.here = self.checkout / "kernels" / "cpu"
    self.built = self.checkout / "build" / "cpu"
    self.here.mkdir(parents=True)
    (self.checkout / "pyproject.toml").touch()
    self.wheel = self.site / "jaxplugin" / "kernels" / "cpu"
    self.enter_context(
      mock.patch.object(sys, "path", [str(self.checkout), str(self.site)])
    )

  def install(self, origin, site=None):
    info = (site or self.site) / "jaxplugin-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: jaxplugin\nVersion: 0.1.0\n")
    if origin is not None:
      (info / "direct_url.json").write_text(json.dumps(origin))

  def search_path(self):
    return library.search_path(self.here)

  @parameterized.named_parameters(
    ("from_an_index", lambda checkout: None, True),
    ("from_a_wheel",
      lambda _: {"url": "file:///dist/x.whl", "archive_info": {}}, True),
    ("by_pip_install_dot",
      lambda checkout: {"url": checkout.as_uri(), "dir_info": {}}, True),
    ("editable", lambda checkout: editable(checkout.as_uri()), True),
    ("another_editable", lambda _: editable("file:///elsewhere"), False),
  )  # fmt: skip
  def test_installed_library_is_found_from_its_checkout(self, origin, is_found):
    self.assertEqual(self.search_path(), (self.here, self.built))
    self.install(origin(self.checkout))
    found = (self.wheel,) if is_found else ()
    self.assertEqual(self.search_path(), (self.here, self.built, *found))

  def test_of_several_the_first_on_the_path_comes_first(self):
    base = self.site.parent / "base"
    sys.path.append(str(base))
    self.install(None)
    self.install(None, base)
    self.assertEqual(
      self.search_path()[2:],
      (self.wheel, base / self.wheel.relative_to(self.site)),
    )

  def test_wheel_looks_only_beside_itself(self):
    self.install(None)
    self.assertEqual(library.search_path(self.wheel), (self.wheel,))

  def test_build_that_failed_when_the_wheel_was_made_is_reported(self):
    self.install(None)
    self.wheel.mkdir(parents=True)
    (self.wheel / library.FAILURE_NAME).write_text("g++: not found\nmore")
    with self.assertRaisesRegex(
      library.LibraryError, r"did not compile at install: g\+\+: not found"
    ):
      library.find(self.search_path())

  @needs_library
  def test_library_of_a_wheel_of_these_sources_is_loaded_without_a_word(self):
    with mock.patch.object(sys, "path", REAL_PATH):
      content = library.find().read_bytes()
    self.install(None)
    self.wheel.mkdir(parents=True)
    path = self.wheel / library.LIBRARY_NAME
    path.write_bytes(content)
    self.assertEqual(library.find(self.search_path()), path)
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      library.load(jax.ffi.include_dir(), path)


class SourcesTest(parameterized.TestCase):
  """A library of other sources is refused."""

  def setUp(self):
    super().setUp()
    self.directory = folders.new(self)
    for name in ("CMakeLists.txt", "a.cc", "b.h", "dot/c.inl", "tests/d.cc"):
      path = self.directory / name
      path.parent.mkdir(exist_ok=True)
      path.write_text(name)

  def reason(self, digest):
    return library.stale_reason(digest, "x.so", self.directory)

  def test_the_library_here_is_built_from_the_sources_here(self):
    try:
      path = library.find()
    except library.LibraryError as error:
      self.skipTest(str(error))
    digest = library.built_from(library._open(path))
    self.assertEqual(library.stale_reason(digest, path), "")

  @parameterized.parameters("CMakeLists.txt", "a.cc", "dot/c.inl", "new.inl")
  def test_changed_and_new_sources_make_it_stale(self, name):
    digest = library.sources_digest(self.directory)
    self.assertEqual(self.reason(digest), "")
    (self.directory / "tests" / "d.cc").write_text("changed")
    self.assertEqual(self.reason(digest), "")  # no source
    (self.directory / name).write_text("changed")
    self.assertRegex(
      self.reason(digest), "^x.so was built from other sources.*pip install"
    )

  def test_renamed_source_makes_it_stale(self):
    digest = library.sources_digest(self.directory)
    (self.directory / "b.h").rename(self.directory / "dot" / "b.h")
    self.assertNotEqual(self.reason(digest), "")

  def test_nothing_is_said_where_nothing_can_be_compared(self):
    self.assertEqual(self.reason(""), "")  # not built by CMake
    self.assertNotEqual(self.reason(None), "")  # built before digests were
    (self.directory / "CMakeLists.txt").unlink()  # a wheel
    self.assertEqual(self.reason("0" * 64), "")

  @needs_library
  def test_stale_library_is_refused_with_a_reason_and_one_warning(self):
    x = jp.quantize(jnp.ones((3, 64)), jp.MXFP8)
    for function in (
      library._warn_once,
      cpu_library._register_once,
      targets._local_cpu_kernels,
      targets._detected,
    ):
      function.cache_clear()
      self.addCleanup(function.cache_clear)
    reason = "built from other sources.*Build it again: pip install"
    with (
      mock.patch.object(library, "built_from", return_value="0" * 64),
      mock.patch.object(library, "sources_digest", return_value="1" * 64),
      mock.patch.object(jax.ffi, "register_ffi_target") as register,
      warnings.catch_warnings(record=True) as caught,
    ):
      warnings.simplefilter("always")
      with self.assertRaisesRegex(library.LibraryError, reason):
        cpu_library.register()
      register.assert_not_called()
      explanation = jp.explain(jp.block_scaled_dot, x, x)
      self.assertEqual(explanation[0].decision.implementation, "xla")
      self.assertRegex(explanation.details(), f"not cpu: .*{reason}")
      dot = functools.partial(jp.block_scaled_dot, implementation="cpu")
      with self.assertRaisesRegex(NotImplementedError, f"cpu: .*{reason}"):
        jax.jit(dot).lower(x, x)
    self.assertEqual(
      [w.category for w in caught], [library.StaleLibraryWarning]
    )
    self.assertRegex(str(caught[0].message), reason)


@needs_library
class AvailableCoresTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("no cgroups", None, {}, 0),
    ("no quota", "0::/", {"cpu.max": "max 100000"}, 0),
    ("container", "0::/", {"cpu.max": "100000 100000"}, 1),
    ("parts count as one", "0::/a/b", {"a/b/cpu.max": "50000 100000"}, 1),
    ("parent", "0::/a/b", {"a/cpu.max": "9 9", "a/b/cpu.max": "max 9"}, 1),
    ("outside of the mount", "0::/docker/1f", {"cpu.max": "9 9"}, 1),
    ("more than there are", "0::/", {"cpu.max": "100000000 1000"}, 0),
    ("version 1", "5:memory:/b\n4:cpu,cpuacct:/a\n0::/",
      {"cpu/a/cpu.cfs_quota_us": "90000", "cpu/a/cpu.cfs_period_us": "100000"},
      1),
    ("version 1 without quota", "1:cpu:/",
      {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0),
    ("another controller", "4:cpuset:/", {"cpu/cpu.cfs_quota_us": "1"}, 0),
  )  # fmt: skip
  def test_quotas_of_cgroups_limit_it(self, lines, files, expected):
    root = folders.new(self)
    if lines is not None:
      (root / "self").mkdir()
      (root / "self" / "cgroup").write_text(lines + "\n")
    for name, text in files.items():
      (root / name).parent.mkdir(parents=True, exist_ok=True)
      (root / name).write_text(text + "\n")
    loaded = library.load(jax.ffi.include_dir())
    found = library.available_cores(loaded, str(root), str(root))
    self.assertEqual(found, expected or len(os.sched_getaffinity(0)))

  def test_affinity_limits_it(self):
    before = os.sched_getaffinity(0)
    self.addCleanup(os.sched_setaffinity, 0, before)
    os.sched_setaffinity(0, {min(before)})
    loaded = library.load(jax.ffi.include_dir())
    self.assertEqual(library.available_cores(loaded, "/none", "/none"), 1)
