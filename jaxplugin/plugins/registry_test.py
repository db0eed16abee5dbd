# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends by entry point and by code: found, refused and never stale."""

import concurrent.futures
import dataclasses
import importlib
import itertools
import os
import sys
import textwrap
import threading
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.dot import backends
from jaxplugin.plugins import registry
from jaxplugin.testing import acme_backend, contract, folders
from jaxplugin.testing.measured import dot_tables

MODULE_NUMBERS = itertools.count()
Refusal = jp.backends.Refusal


def source(name="acme", *, version=1, result=7.0, platforms=("cpu",)):
  """Returns a module whose backend returns `result` for calls of one column."""
  return f"""
import jaxplugin as jp

BACKEND = jp.Backend(
  name={name!r},
  api_version={version},
  platforms={platforms},
  supports=lambda problem, target: None,
  emit=lambda call: call.finish(0 * call.lhs.dequantized()[..., :1] + {result}),
)
"""


def backend(name="acme", *, result=7.0, **changes):
  """Returns `result` for calls of one column."""
  emit = lambda call: jnp.full(call.shape, result, call.dtype)
  return acme_backend.create(emit, **{"name": name, **changes})


LAZY_PROXY = """
class Proxy:
  @property
  def __class__(self):
    raise RuntimeError("unbound")

BACKEND = Proxy()
"""


def operands():
  rng = np.random.default_rng(0)
  return tuple(
    jp.quantize(jax.device_put(rng.normal(size=(rows, 64))), "mxfp8")
    for rows in (3, 1)
  )


def result_of(name):
  """Returns one element of the dot by a backend."""
  return jp.block_scaled_dot(*operands(), implementation=name)[0, 0]


def decide(target=None):
  (dot,) = jp.explain(jp.block_scaled_dot, *operands(), target=target)
  return dot.decision


class RegistryTestCase(parameterized.TestCase):
  """Starts with an empty registry and an empty folder of distributions."""

  def setUp(self):
    super().setUp()
    own = registry._State(own=backends.NAMES)
    self.enter_context(mock.patch.object(registry, "_state", own))
    self.folder = folders.new(self)
    found = [str(self.folder), *sys.path]
    self.enter_context(mock.patch.object(sys, "path", found))
    self.setenv()
    self.addCleanup(registry._enter_key)
    registry._enter_key()

  def setenv(self, **variables):
    names = ("JAXPLUGIN_BACKENDS", "JAXPLUGIN_BACKENDS_FIRST")
    given = {k: v for k, v in os.environ.items() if k not in names}
    self.enter_context(
      mock.patch.dict(os.environ, given | variables, clear=True)
    )

  def install(self, distribution, version="1.2", **modules):
    """Writes a distribution; each entry point is a module's BACKEND.

    Args:
      distribution: its name.
      version: its version.
      **modules: sources by the name of the entry point; None for an absent
        module.
    """
    root = self.folder
    info = root / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
      f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    lines = ["[jaxplugin.backends]"]
    for name, text in modules.items():
      module = f"third_party_{next(MODULE_NUMBERS)}"
      lines.append(f"{name} = {module}:BACKEND")
      if text is not None:
        (root / f"{module}.py").write_text(text)
      self.addCleanup(sys.modules.pop, module, None)
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    importlib.invalidate_caches()

  def statuses(self):
    """All of them by name, and the warnings of finding them."""
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      statuses = jp.backends.statuses()
    texts = [
      str(w.message)
      for w in caught
      if issubclass(w.category, jp.backends.BackendWarning)
    ]
    return {s.name: s for s in statuses}, texts


class EntryPointTest(RegistryTestCase):
  def test_one_that_is_installed_serves_by_its_name_and_only_so(self):
    self.install("acme-dot", acme=source())
    by_name = jp.block_scaled_dot(*operands(), implementation="acme")
    np.testing.assert_array_equal(by_name, np.full((3, 1), 7, np.float32))
    decision = decide()
    self.assertNotEqual(decision.implementation, "acme")
    reasons = {r.implementation: r.reason for r in decision.refusals}
    self.assertEqual(
      reasons["acme"], "supported, but used only if requested [acme-dot 1.2]"
    )

  def test_those_of_several_distributions_come_in_order_of_names(self):
    self.install("zeta", bee=source("bee"))
    self.install("alpha", cat=source("cat"), ant=source("ant"))
    statuses, texts = self.statuses()
    self.assertEqual(list(statuses), ["ant", "bee", "cat"])
    self.assertEqual(texts, [])
    self.assertEqual(
      list(backends.table()), [*backends.NAMES, "ant", "bee", "cat"]
    )

  def test_tuning_table_that_names_it_decides_for_its_version_alone(self):
    self.install("acme-dot", acme=source(platforms=("cuda",)))
    problem = dot_tables.problem(
      *(3, 1, 64, jp.MXFP8, jp.MXFP8), out_dtype=contract.F32
    )
    ways = (("xla", 20.0), ("acme", 10.0))
    table = dot_tables.table(dot_tables.row(problem, *ways))
    with jp.tuning(table):
      self.assertEqual(decide(dot_tables.H200).implementation, "acme")
    libraries = dict(dict(table.header.sources)["acme"].toolchain)
    self.assertEqual(libraries["acme-dot"], "1.2")
    older = tuple((libraries | {"acme-dot": "1.1"}).items())
    older = dataclasses.replace(
      table,
      header=dataclasses.replace(
        table.header, **dot_tables.source_of(table, "acme", toolchain=older)
      ),
    )
    with jp.tuning(older):
      decision = decide(dot_tables.H200)
    self.assertNotEqual(decision.implementation, "acme")
    words = "it was measured with acme-dot 1.1, and 1.2 is installed"
    self.assertIn(words, " ".join(decision.notes))

  @parameterized.named_parameters(
    ("import_error", "import not_there", Refusal.IMPORT_FAILED,
     "ModuleNotFoundError: No module named 'not_there'"),
    ("no_module", None, Refusal.IMPORT_FAILED, "ModuleNotFoundError"),
    ("no_attribute", "X = 1", Refusal.IMPORT_FAILED, "AttributeError"),
    ("exit", "raise SystemExit(3)", Refusal.IMPORT_FAILED, "SystemExit: 3"),
    ("panic", "class Panic(BaseException): ...\nraise Panic('x')",
     Refusal.IMPORT_FAILED, "Panic: x"),
    ("lazy_proxy", LAZY_PROXY, Refusal.IMPORT_FAILED, "RuntimeError: unbound"),
    ("wrong_field", "import jaxplugin as jp\nBACKEND = jp.Backend(speed=1)",
     Refusal.IMPORT_FAILED, "TypeError: .*speed"),
    ("wrong_type", "BACKEND = 'acme'", Refusal.WRONG_TYPE, "is a str"),
    ("older", source(version=0), Refusal.WRONG_API_VERSION,
     "written for version 0 of jaxplugin.backends, and this jaxplugin has"
     " version 1; update it"),
    ("newer", source(version=2), Refusal.WRONG_API_VERSION,
     "version 2 .* update jaxplugin"),
    ("other_name", source("acne"), Refusal.WRONG_NAME, "is named 'acne'"),
  )  # fmt: skip
  @pytest.mark.sample(6)
  def test_one_that_fails_is_warned_about_once_and_the_others_serve(
    self, text, refusal, reason
  ):
    self.install("acme-dot", acme=text)
    self.install("good-dot", good=source("good"))
    statuses, texts = self.statuses()
    self.assertEqual(statuses["acme"].refusal, refusal)
    self.assertRegex(statuses["acme"].reason, reason)
    self.assertIsNone(statuses["good"].refusal)
    (text,) = texts
    self.assertRegex(
      text, f"^backend acme, of acme-dot 1.2: not used: .*{reason}"
    )
    self.assertEqual(self.statuses()[1], [])
    with self.assertRaisesRegex(
      ValueError,
      "implementation='acme' cannot be used: acme, of acme-dot 1.2: .*"
      + reason,
    ):
      result_of("acme")
    self.assertEqual(result_of("good"), 7)
    self.assertRegex(jp.info(), f"acme, of acme-dot 1.2: not used: .*{reason}")

  def test_jaxplugins_own_names_are_never_taken(self):
    self.install("evil", xla=source("xla"), cpu=source("cpu"))
    statuses, texts = self.statuses()
    for name in ("xla", "cpu"):
      self.assertEqual(statuses[name].refusal, Refusal.NAME_TAKEN)
      self.assertIn("by jaxplugin itself", statuses[name].reason)
    self.assertLen(texts, 2)
    self.assertEqual(backends.table()["xla"].origin, "")

  def test_name_of_two_distributions_is_neithers(self):
    self.install("acme-dot", acme=source())
    self.install("bcme-dot", acme=source(result=8.0))
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      statuses = jp.backends.statuses()
    for status, other in zip(statuses, ("bcme-dot", "acme-dot"), strict=True):
      self.assertEqual(status.refusal, Refusal.NAME_TAKEN)
      self.assertEqual(
        status.reason, f"its name is taken: by {other} 1.2 too; uninstall one"
      )
    self.assertNotIn("acme", backends.table())

  def test_broken_metadata_of_one_distribution_stops_no_other(self):
    self.install("beta", bee=source("bee"), cat="raise ValueError('bad')")
    metadata = self.folder / "beta-1.2.dist-info" / "METADATA"
    metadata.write_bytes(b"\xff")
    self.install("alpha", ant=source("ant"))
    statuses, texts = self.statuses()
    origins = {name: status.origin for name, status in statuses.items()}
    unknown = "an unknown distribution"
    self.assertEqual(
      origins, {"ant": "alpha 1.2", "bee": unknown, "cat": unknown}
    )
    self.assertRegex(texts[0], f"cat, of {unknown}: .* its import failed")
    self.assertIn("bee", backends.table())

  def test_broken_metadata_is_told_and_stops_nothing(self):
    error = ValueError("no metadata")
    with mock.patch.object(registry, "installed", side_effect=error):
      statuses, texts = self.statuses()
    self.assertEqual(statuses, {})
    self.assertRegex(
      texts[0],
      "cannot look for backends of other packages: ValueError: no metadata",
    )
    x, w = operands()
    self.assertEqual(jp.block_scaled_dot(x, w).shape, (3, 1))


class EnvironmentTest(RegistryTestCase):
  def setUp(self):
    super().setUp()
    self.install("alpha", ant=source("ant"), bee="raise ValueError('bad')")
    self.install("beta", cat=source("cat"))

  def refusals(self, value):
    self.setenv(JAXPLUGIN_BACKENDS=value)
    statuses, self.texts = self.statuses()
    return {name: status.refusal for name, status in statuses.items()}

  @parameterized.parameters("off", " off ", "off,")
  def test_off_loads_none(self, value):
    self.assertEqual({*self.refusals(value).values()}, {Refusal.NOT_ALLOWED})
    self.assertEqual(self.texts, [])
    self.assertIn(
      "ant, of alpha 1.2: not used: JAXPLUGIN_BACKENDS leaves it out", jp.info()
    )

  @parameterized.parameters("", "all", " ,")
  def test_empty_and_all_are_as_not_set(self, value):
    self.assertEqual(
      self.refusals(value),
      {"ant": None, "cat": None, "bee": Refusal.IMPORT_FAILED},
    )

  def test_list_allows_what_it_names_and_imports_nothing_else(self):
    before = set(sys.modules)
    self.assertEqual(
      self.refusals("cat"),
      {"ant": Refusal.NOT_ALLOWED, "bee": Refusal.NOT_ALLOWED, "cat": None},
    )
    self.assertEqual(self.texts, [])
    new = {n for n in set(sys.modules) - before if n.startswith("third_party")}
    self.assertLen(new, 1)

  @parameterized.parameters("JAXPLUGIN_BACKENDS", "JAXPLUGIN_BACKENDS_FIRST")
  def test_unknown_name_in_a_list_is_told_with_the_known_ones(self, variable):
    self.setenv(**{"JAXPLUGIN_BACKENDS": "cat", variable: "cat,dog"})
    _, texts = self.statuses()
    self.assertEqual(
      texts,
      [
        f"{variable} names dog, which no installed distribution provides; known"
        " backends: ant (of alpha 1.2), bee (of alpha 1.2), cat (of beta 1.2)"
      ],
    )

  def test_first_ones_come_before_jaxplugins_own_in_their_order(self):
    self.setenv(
      JAXPLUGIN_BACKENDS="ant,cat", JAXPLUGIN_BACKENDS_FIRST="cat,ant"
    )
    decision = decide()
    self.assertEqual(decision.implementation, "cat")
    self.assertRegex(decision.reason, r"first of cat, ant, .*\[beta 1.2\]")
    gpu = jp.named_target("b200", cudnn="9.13")
    self.assertEqual(decide(gpu).implementation, "cudnn")

  def test_reason_of_a_backend_that_is_first_names_the_variable(self):
    reason = "lowering_error=lambda target: 'no compiler', emit="
    self.install("gamma", dog=source("dog").replace("emit=", reason))
    self.setenv(JAXPLUGIN_BACKENDS="dog", JAXPLUGIN_BACKENDS_FIRST="dog")
    text = "no compiler; or take it out of JAXPLUGIN_BACKENDS_FIRST, or pass"
    with self.assertRaisesRegex(NotImplementedError, text):
      result_of("dog")


class CodeTest(RegistryTestCase):
  def call(self, **options):
    return jax.jit(lambda x, w: jp.block_scaled_dot(x, w, **options))

  def test_what_was_traced_before_is_traced_again(self):
    x, w = operands()
    function = self.call()
    before = np.asarray(function(x, w))
    self.assertNotIn(7, before)
    jp.register_backend(backend(), first=True)
    np.testing.assert_array_equal(function(x, w), np.full((3, 1), 7))
    np.testing.assert_array_equal(jp.block_scaled_dot(x, w), [[7]] * 3)
    jp.backends.unregister_backend("acme")
    np.testing.assert_array_equal(function(x, w), before)
    np.testing.assert_array_equal(jp.block_scaled_dot(x, w), before)

  def test_another_one_of_the_same_name_is_not_taken_for_the_first(self):
    x, w = operands()
    function = self.call(implementation="acme")
    for result in (1.0, 2.0):
      jp.register_backend(backend(result=result))
      self.assertEqual(function(x, w)[0, 0], result)
      jp.backends.unregister_backend("acme")
    with self.assertRaisesRegex(ValueError, "None or one of .*, got 'acme'"):
      function(x, w)

  def test_registering_compiles_nothing_again_once_it_is_undone(self):
    x, w = operands()
    traces = []

    @jax.jit
    def function(x, w):
      traces.append(0)
      return jp.block_scaled_dot(x, w)

    function(x, w)
    jp.register_backend(backend())
    function(x, w)
    jp.backends.unregister_backend("acme")
    function(x, w)
    self.assertLen(traces, 2)

  def test_other_threads_see_it_too(self):
    x, w = operands()
    function = self.call()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      pool.submit(function, x, w).result()
      jp.register_backend(backend(), first=True)
      self.assertEqual(pool.submit(function, x, w).result()[0, 0], 7)

  def test_what_is_no_backend_is_refused(self):
    with self.assertRaisesRegex(TypeError, "must be a jp.Backend, got 'acme'"):
      jp.register_backend("acme")
    with self.assertRaisesRegex(ValueError, "'acme': .* version 7 .* update"):
      jp.register_backend(backend(api_version=7))

  def test_taken_name_is_refused_and_says_whose_it_is(self):
    self.install("beta-dot", beta=source("beta"))
    jp.register_backend(backend())
    for name, whose in (
      ("xla", "jaxplugin itself"),
      ("acme", "a backend registered in code"),
    ):
      with self.assertRaisesRegex(ValueError, f"{name!r} is taken, by {whose}"):
        jp.register_backend(backend(name))
    jp.backends.statuses()
    with self.assertRaisesRegex(ValueError, "is taken, by beta-dot 1.2"):
      jp.register_backend(backend("beta"))

  def test_entry_point_whose_name_code_took_is_refused_and_told(self):
    self.install("acme-dot", acme=source())
    jp.register_backend(backend(result=3.0))
    with self.assertWarnsRegex(
      jp.backends.BackendWarning, "acme-dot 1.2: not used"
    ):
      used, refused = jp.backends.statuses()
    self.assertEqual((used.origin, used.refusal), ("registered in code", None))
    self.assertEqual(refused.refusal, Refusal.NAME_TAKEN)
    self.assertEqual(result_of("acme"), 3)

  def test_unknown_name_cannot_be_taken_out(self):
    jp.register_backend(backend())
    with self.assertRaisesRegex(ValueError, r"no backend 'b' .* \('acme',\)"):
      jp.backends.unregister_backend("b")


class ThreadTest(RegistryTestCase):
  def test_threads_that_decide_at_once_load_once_and_warn_once(self):
    self.install("acme-dot", acme=source(), bad="raise ValueError('bad')")
    barrier = threading.Barrier(8)

    def decide():
      barrier.wait()
      return tuple(backends.table().values())

    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      with concurrent.futures.ThreadPoolExecutor(8) as pool:
        tables = [pool.submit(decide) for _ in range(8)]
        tables = [future.result() for future in tables]
    self.assertLen({tuple(map(id, table)) for table in tables}, 1)
    self.assertLen(
      [w for w in caught if w.category is jp.backends.BackendWarning], 1
    )

  def test_registering_from_many_threads_loses_none(self):
    names = [f"acme_{i}" for i in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      list(pool.map(lambda name: jp.register_backend(backend(name)), names))
      self.assertContainsSubset(names, backends.table())
      list(pool.map(jp.backends.unregister_backend, names[::2]))
    self.assertCountEqual(
      names[1::2], set(backends.table()) - set(backends.NAMES)
    )

  def test_import_that_decides_a_dot_does_not_hang(self):
    text = """
      import numpy as np

      w = jp.quantize(np.ones((1, 32), np.float32), jp.MXFP8)
      assert jp.block_scaled_dot(w, w)[0, 0] == 32
    """
    self.install("acme-dot", acme=source() + textwrap.dedent(text))
    self.assertEqual(list(self.statuses()[0]), ["acme"])


class ProcessTest(RegistryTestCase):
  @pytest.mark.full
  def test_nothing_is_loaded_before_the_first_decision(self):
    self.install("acme-dot", acme=source())
    (module,) = self.folder.glob("third_party_*.py")
    program = f"""
      import sys
      import jaxplugin as jp
      import numpy as np

      loaded = lambda: {module.stem!r} in sys.modules
      assert not loaded()
      x = jp.quantize(np.ones((2, 32), np.float32), jp.MXFP8)
      assert loaded()
      print(jp.block_scaled_dot(x, x)[0, 0])
    """
    result = contract.run_program(program)
    self.assertEqual(result.stdout.strip(), "32.0", result.stderr)
