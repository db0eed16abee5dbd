# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""lit's configuration: `lit hlo_tests` runs every golden file.

All files of a worker share one process. `lit --param shell=1 hlo_tests` runs
each RUN line as a shell command, which takes seconds for each line.
"""

import os
import pathlib
import sys
import tempfile

import lit.formats

folder = pathlib.Path(__file__).parent
sys.path.insert(0, str(folder))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no GPU is needed

import golden  # noqa: E402
import golden_lit  # noqa: E402

config = config  # noqa: F821 (lit defines it)
config.name = "hlo_tests"
config.suffixes = golden.SUFFIXES
config.test_source_root = str(folder)
results = pathlib.Path(tempfile.gettempdir(), "jaxplugin_hlo_tests")
results.mkdir(exist_ok=True)
config.test_exec_root = str(results)
if lit_config.params.get("shell"):  # noqa: F821
  config.test_format = lit.formats.ShTest(execute_external=False)
  config.substitutions.append(("%tool", f"{sys.executable} {folder}/tool.py"))
  binaries = os.path.dirname(sys.executable)  # the folder of filecheck
  path = os.pathsep.join((binaries, config.environment["PATH"]))
  config.environment["PATH"] = path
  config.environment["JAX_PLATFORMS"] = os.environ["JAX_PLATFORMS"]
else:
  config.test_format = golden_lit.InProcess()
