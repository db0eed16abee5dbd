# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The module finds the same ptxas as XLA."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from jaxplugin.kernels import toolkits

HERE = pathlib.Path(__file__).parents[1]
PLUGIN = pathlib.Path("/site-packages/jax_plugins/xla_cuda13")
# Makes XLA print where it looks for ptxas. The compiled code does not matter:
# some of these assemblers only print their version.
COMPILE = """
import jax
import jax.numpy as jnp
from jaxplugin.core import targets
from jaxplugin.lab.compilation import deviceless
x = jax.ShapeDtypeStruct((64,), jnp.float32)
target = targets.named_target("h100")
try:
  deviceless.compile(jnp.sin, x, target=target)
except jax.errors.JaxRuntimeError as error:
  print(error)
"""


class Case(parameterized.TestCase):
  def temporary(self):
    return pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def folder(self, name, words, status=0):
    """Returns a folder with a ptxas that prints `words`."""
    folder = self.temporary() / name
    folder.mkdir()
    path = folder / "ptxas"
    path.write_text(f"#!/bin/sh\necho '{words}'\nexit {status}\n")
    path.chmod(0o755)
    return str(folder)


class ToolkitsTest(Case):
  def test_a_version_is_what_ptxas_says_after_the_letter(self):
    folder = self.folder("a", "Cuda compilation tools, release 13.2, V13.2.78")
    self.assertEqual(toolkits.ptxas_version(f"{folder}/ptxas"), (13, 2, 78))

  @parameterized.parameters(
    ("release 13.2", 0), ("V13.2", 0), ("", 0), ("V13.2.78", 1)
  )
  def test_what_says_no_version_is_no_ptxas(self, words, status):
    folder = self.folder("a", words, status)
    self.assertIsNone(toolkits.ptxas_version(f"{folder}/ptxas"))

  def test_what_does_not_run_is_no_ptxas(self):
    folder = self.temporary()
    self.assertIsNone(toolkits.ptxas_version(str(folder)))
    self.assertIsNone(toolkits.ptxas_version(str(folder / "ptxas")))
    (folder / "ptxas").write_text("#!/bin/sh\necho V13.2.78\n")
    self.assertIsNone(toolkits.ptxas_version(str(folder / "ptxas")))

  def test_the_first_of_path_counts_and_then_toolkits(self):
    found = toolkits.candidates(PLUGIN, {"PATH": "/a:/b"})
    self.assertSequenceEqual(
      [*found][:5],
      [
        "bin/ptxas",
        "/a/ptxas",
        "/b/ptxas",
        "/usr/local/cuda/bin/ptxas",
        "/opt/cuda/bin/ptxas",
      ],
    )

  @parameterized.parameters(
    (["V11.7.99", "V13.1.80"], (13, 1, 80)),
    (["V12.3.103", "V13.1.80"], (13, 1, 80)),
    (["V12.3.107", "V13.4.59"], (12, 3, 107)),
    (["none", "V13.4.59"], (13, 4, 59)),
    (["V11.7.99"], None),
    ([], None),
  )
  def test_what_xla_does_not_take_is_passed_over(self, words, expected):
    paths = [
      f"{self.folder(str(number), text)}/ptxas"
      for number, text in enumerate(words)
    ]
    found = toolkits.first(paths)
    self.assertEqual(None if found is None else found[0], expected)

  @parameterized.parameters(([],), ([PLUGIN, PLUGIN],))
  def test_without_one_plugin_it_is_not_known(self, plugins):
    folder = self.folder("a", "V13.2.78")
    self.enter_context(mock.patch.dict(os.environ, {"PATH": folder}))
    find = self.enter_context(mock.patch.object(toolkits, "_plugins"))
    find.return_value = plugins
    self.assertIsNone(toolkits.ptxas_of_launches())
    find.return_value = [PLUGIN]
    self.assertEqual(toolkits.ptxas_of_launches(), (13, 2, 78))


def places_of_xla(path):
  """Returns the paths where XLA looked, then the path and version it used."""
  environment = {
    **os.environ,
    "PATH": path,
    "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    "JAX_PLATFORMS": "cpu",
    # JAX makes XLA prefer this folder; kernel launches ignore it.
    "CUDA_ROOT": "/no/such/folder",
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_MAX_VLOG_LEVEL": "2",
  }
  done = subprocess.run(
    [sys.executable, "-c", COMPILE],
    env=environment,
    capture_output=True,
    text=True,
  )
  looked = re.findall(r"\] Looking for (\S*/ptxas)$", done.stderr, re.M)
  took = re.search(
    r"\] Using (\S+/ptxas) with version (\d+)\.(\d+)\.(\d+)", done.stderr
  )
  assert took is not None, done.stderr[-2000:]
  # XLA looks more than once.
  looked = looked[: looked.index(took[1]) + 1]
  return looked, took[1], tuple(map(int, took.groups()[1:]))


@absltest.skipIf(
  importlib.util.find_spec("jax_plugins") is None
  or len(toolkits._plugins()) != 1,
  "jaxlib's plugin for CUDA is not installed",
)
class XlaTest(Case):
  def assert_agrees(self, path):
    looked, *taken = places_of_xla(path)
    expected = [*toolkits.candidates(toolkits._plugins()[0], {"PATH": path})]
    found = toolkits.first(expected)
    self.assertIsNotNone(found)
    version, place = found
    same = lambda x: os.path.normpath(x)
    self.assertEqual([same(place), version], [same(taken[0]), taken[1]])
    # XLA also looked at all earlier paths. The first is the preferred folder.
    places = [same(x) for x in expected[1 : expected.index(place) + 1]]
    looked = [same(x) for x in looked if ".runfiles/" not in x]
    self.assertEqual(looked[1:], places)

  def test_the_first_that_xla_takes_of_path(self):
    words = ("V11.7.99", "V12.3.103", "nothing", "V13.3.27", "V13.4.59")
    folders = [self.folder(str(i), text) for i, text in enumerate(words)]
    self.assert_agrees(":".join(folders))

  def test_one_of_a_toolkit_where_path_has_none(self):
    self.assert_agrees("/usr/bin:/bin")
