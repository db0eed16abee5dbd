# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Macros for Python targets, so that a test needs one line."""

_TEST_MAIN = "//tools/bazel:test_main.py"

def python_library(name, **kwargs):
    """py_library for Python 3."""
    native.py_library(name = name, srcs_version = "PY3", **kwargs)

def python_test(name, deps = [], srcs = [], timeout = "long", **kwargs):
    """py_test that runs pytest on NAME.py with the settings of conftest.py.

    Args:
      name: the path of the test file, without ".py".
      deps: libraries that the test imports.
      srcs: more files in the test's folder, which it imports by bare names.
      timeout: "long", because Triton's cache is empty and machines may be slow.
      **kwargs: other arguments of py_test: `size`, `shard_count`, `data`, `tags`.
    """
    native.py_test(
        name = name,
        srcs = [name + ".py", _TEST_MAIN] + srcs,
        main = _TEST_MAIN,
        args = ["$(rootpath " + name + ".py)"],
        timeout = timeout,
        deps = deps + ["//:conftest"],
        legacy_create_init = False,
        python_version = "PY3",
        srcs_version = "PY3",
        **kwargs
    )

def _staged_impl(ctx):
    copies = []
    for file in ctx.files.srcs:
        if not file.short_path.startswith(ctx.attr.strip_prefix):
            fail("%s is not in %s" % (file.short_path, ctx.attr.strip_prefix))
        name = file.short_path[len(ctx.attr.strip_prefix):]
        copy = ctx.actions.declare_file(name)
        ctx.actions.run_shell(
            inputs = [file],
            outputs = [copy],
            command = "cp \"$1\" \"$2\"",
            arguments = [file.path, copy.path],
            mnemonic = "Stage",
        )
        copies.append(copy)
    return [DefaultInfo(
        files = depset(copies),
        runfiles = ctx.runfiles(files = copies),
    )]

staged = rule(
    doc = "Copies files into this package, at the paths they have in a wheel.",
    implementation = _staged_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = True, mandatory = True),
        "strip_prefix": attr.string(mandatory = True),
    },
)
