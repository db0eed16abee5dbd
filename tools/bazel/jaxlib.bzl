# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""XLA's FFI headers from the jaxlib that `python3` imports."""

_FIND = """
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("jaxlib")
if spec is None:
  sys.exit(f"no jaxlib in {sys.executable}; tools/bazel.sh sets one up")
print(pathlib.Path(spec.origin).parent / "include")
"""

_BUILD = """
cc_library(
    name = "ffi",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
"""

def _jaxlib_headers_impl(repository_ctx):
    python = repository_ctx.which("python3")
    if python == None:
        fail("no python3 on PATH")
    found = repository_ctx.execute([python, "-c", _FIND])
    if found.return_code:
        fail(found.stderr)
    repository_ctx.symlink(found.stdout.strip(), "include")
    repository_ctx.file("BUILD.bazel", _BUILD)

jaxlib_headers = repository_rule(
    doc = "Library @NAME//:ffi of the headers in jax.ffi.include_dir().",
    implementation = _jaxlib_headers_impl,
    environ = ["PATH"],
    local = True,
)
