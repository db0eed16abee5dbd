# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is told of programs that XLA's GPU compiler compiles with no GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

import jaxplugin as jp
from jaxplugin.cli import command_functions
from jaxplugin.cli import main as command_line
from jaxplugin.explanation import optimized
from jaxplugin.stablehlo import modules
from jaxplugin.testing import written_modules

B200 = jp.named_target("b200", cudnn="9.13")
needs_compiler = absltest.skipIf(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  "jax-cuda13-plugin is not installed",
)
# Written to a directory that the command line finds modules in.
MODEL = """
import jax
import jaxplugin as jp

def mlp(x, w):
  return jax.nn.relu(jp.block_scaled_dot(jp.quantize(x, jp.MXFP8), w))

class Model:
  def __call__(self): return jax.numpy.zeros(3)

model = Model()
number = 3
"""


def dot_module():
  array = written_modules.array
  operands = [
    array((128, 256), jnp.float8_e4m3fn),
    array((384, 256), jnp.float8_e4m3fn),
    array((128, 8), jnp.float8_e8m0fnu),
    array((384, 8), jnp.float8_e8m0fnu),
  ]
  result = array((128, 384), np.float32)
  return written_modules.call_module(
    "__op$block_scaled_dot", operands, [result]
  )


def of_text(text, target=B200):
  return optimized.of_module(modules.read(text, "m", trusted=True), target)


@needs_compiler
class OfModuleTest(parameterized.TestCase):
  def test_call_that_cudnn_serves_is_one_call_with_its_scales_moved(self):
    found = of_text(dot_module())
    self.assertEqual(found.custom_calls, {"__cudnn$blockScaledDot": 1})
    # Both scales are brought into the layout of the kernel.
    self.assertEqual(sum(found.fusions.values()), 2)
    self.assertEqual(found.kernels, 3)
    values, scales = (128 + 384) * 256, (128 + 384) * 8
    self.assertEqual(found.argument_bytes, values + scales)
    self.assertEqual(found.output_bytes, 128 * 384 * 4)
    self.assertGreaterEqual(found.temp_bytes, scales)

  def test_older_cudnn_has_no_such_call(self):
    found = of_text(dot_module(), jp.named_target("b200", cudnn="9.9"))
    self.assertNotIn("__cudnn$blockScaledDot", found.custom_calls)

  def test_each_instruction_of_a_loop_counts_once(self):
    def looped(x, w):
      return jax.lax.fori_loop(0, 7, lambda _, x: jnp.tanh(x @ w), x)

    spec = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    found = of_text(jax.jit(looped).lower(spec, spec).as_text())
    # The product is a Triton fusion or cuBLAS's; the counter is a fusion too.
    products = found.fusions.get("kCustom", 0) + sum(
      found.custom_calls.values()
    )
    self.assertEqual(products, 1, found)
    self.assertGreaterEqual(found.fusions["kLoop"], 2)

  def test_partitions_of_the_module_are_devices(self):
    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = [
      jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes))
      )
      for shape, axes in (((64, 256), (None, "x")), ((256, 128), ("x",)))
    ]
    lowered = (
      jax.jit(jnp.matmul).trace(*specs).lower(lowering_platforms=("cuda",))
    )
    found = of_text(lowered.as_text())
    self.assertEqual(found.collectives, {"all-reduce": 1})
    self.assertEqual(found.argument_bytes, (64 + 128) * 256 * 4 // 4)

  def test_elided_hlo_has_no_backend_config(self):
    found = of_text(dot_module())
    self.assertIn("backend_config=", found.hlo())
    self.assertNotIn("backend_config=", found.hlo(elide=True))
    self.assertIn('custom_call_target="__cudnn$', found.hlo(elide=True))


class ArgumentTest(parameterized.TestCase):
  @parameterized.parameters(
    ("bfloat16[16,4096]", (16, 4096), jnp.bfloat16),
    ("f32[]", (), jnp.float32),
    ("s32[7]", (7,), jnp.int32),
    ("f8e4m3fn[2,3]", (2, 3), jnp.float8_e4m3fn),
  )
  def test_arrays(self, text, shape, dtype):
    spec = command_functions.argument(text)
    self.assertEqual((spec.shape, spec.dtype), (shape, dtype))

  def test_format_is_what_quantize_makes(self):
    made = command_functions.argument("nvfp4[8,64]")
    self.assertIsInstance(made, jp.ScaledArray)
    x_q = jp.quantize(jnp.ones((8, 64)), jp.NVFP4)
    expected = [(x.shape, x.dtype) for x in jax.tree.leaves(x_q)]
    found = [(x.shape, x.dtype) for x in jax.tree.leaves(made)]
    self.assertEqual(found, expected)

  @parameterized.parameters(
    ("bfloat17[3]", "'bfloat17.3.' is no array; write it as"),
    ("float32", "write it as bfloat16.16,4096., or with a format"),
    ("float32[3,]", "write it as"),
    ("float32[-3]", "write it as"),
    ("nvfp4[8,60]", "multiple of 16.*60"),
  )
  def test_what_is_none_is_refused(self, text, pattern):
    with self.assertRaisesRegex(
      command_line.argparse.ArgumentTypeError, pattern
    ):
      command_functions.argument(text)


class CommandTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    directory = self.enter_context(tempfile.TemporaryDirectory())
    self.directory = pathlib.Path(directory)
    (self.directory / "model_of_test.py").write_text(MODEL)
    (self.directory / "m.mlir").write_text(dot_module())
    self.enter_context(
      absltest.mock.patch.object(sys, "path", [directory, *sys.path])
    )

  def run_command(self, *arguments):
    with (
      contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())) as out,
      contextlib.redirect_stderr(io.StringIO()) as err,
    ):
      try:
        status = command_line.main(arguments)
      except SystemExit as stop:
        status = stop.code
      out.flush()
    return status, out.buffer.getvalue().decode(), err.getvalue()

  def compile(self, source, *options):
    target = ("--target", "b200", "--cudnn", "9.13")
    return self.run_command("compile", source, *target, *options)

  @needs_compiler
  def test_function_is_compiled_for_the_target(self):
    args = ("--arg", "bf16[16,256]", "--arg", "mxfp8[128,256]")
    status, out, err = self.compile("model_of_test:mlp", *args)
    self.assertEqual((status, err), (0, ""))
    self.assertStartsWith(
      out, "model_of_test:mlp on b200 (cuda, sm_100, cuDNN 9.13.0)\nkernels: "
    )
    self.assertIn("1 __cudnn$blockScaledDot", out)
    self.assertRegex(out, r"bytes: \d+ arguments, 8192 results, \d+ temporary")

  @needs_compiler
  def test_hlo_is_written_and_figures_are_json(self):
    path = self.directory / "out.hlo"
    status, out, _ = self.compile(
      str(self.directory / "m.mlir"), "-o", str(path), "--json"
    )
    self.assertEqual(status, 0)
    figures = json.loads(out)
    self.assertEqual(figures["custom_calls"], {"__cudnn$blockScaledDot": 1})
    self.assertEqual(figures["kernels"], 3)
    self.assertStartsWith(path.read_text(), "HloModule ")
    status, _, err = self.compile(
      str(self.directory / "m.mlir"), "-o", str(path)
    )
    self.assertEqual(status, 2)
    self.assertIn("exists", err)

  @needs_compiler
  def test_hlo_on_standard_output_has_it_alone(self):
    status, out, err = self.compile("model_of_test:model", "-o", "-")
    self.assertEqual(status, 0)
    self.assertStartsWith(out, "HloModule ")
    self.assertNotIn("kernels:", out)
    self.assertStartsWith(err, "model_of_test:model on b200")

  @needs_compiler
  def test_module_is_rewritten_on_request(self):
    path = str(self.directory / "m.mlir")
    arguments = ("compile", path, "--target", "b200", "--cudnn", "9.9")
    _, as_it_is, _ = self.run_command(*arguments)
    _, rewritten, _ = self.run_command(*arguments, "--rewrite")
    self.assertNotIn("triton_kernel_call", as_it_is)
    self.assertIn("custom calls: 1 triton_kernel_call", rewritten)

  @parameterized.parameters(
    ("no_such_module:f", (), "there is no module no_such_module"),
    ("model_of_test:none", (), "has no none"),
    ("model_of_test:number", (), "is no function, got int"),
    ("model_of_test:mlp", ("--rewrite",), "--rewrite is for modules"),
    ("m.mlir", ("--arg", "f32[3]"), "--arg is for functions"),
    ("none.mlir", (), "No such file"),
    ("m.mlir", ("--arg", "f33[3]"), "is no array"),
    ("m.mlir", ("--target", "mi300x"), "mi300x is not an NVIDIA GPU"),
  )
  def test_bad_arguments_are_one_message(self, source, options, pattern):
    status, out, err = self.compile(source, *options)
    self.assertEqual((status, out), (2, ""))
    self.assertIn(pattern, err)

  def test_elided_text_tells_the_length_of_a_kernel(self):
    config = "x" * 300
    text = written_modules.call_module(
      "mine",
      [written_modules.array((3,), np.float32)],
      [written_modules.array((3,), np.float32)],
      f'backend_config = "{config}"',
    )
    path = self.directory / "long.mlir"
    path.write_text(text)
    arguments = ("rewrite", str(path), "--target", "cpu")
    _, out, _ = self.run_command(*arguments)
    self.assertIn(config, out)
    _, out, _ = self.run_command(*arguments, "--elide")
    self.assertNotIn("xxx", out)
    self.assertIn('backend_config = "<300 bytes>"', out)
    status, _, err = self.run_command(
      *arguments, "--elide", "--format", "bytecode"
    )
    self.assertEqual(status, 2)
    self.assertIn("--elide is for text", err)

  def test_info_prints_no_traceback_without_a_gpu(self):
    if command_line._has_nvidia_gpu():
      self.skipTest("there is an NVIDIA GPU")
    environment = dict(os.environ)
    for name in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
      environment.pop(name, None)
    result = subprocess.run(
      [sys.executable, "-m", "jaxplugin", "info"],
      env=environment,
      capture_output=True,
      text=True,
      check=True,
    )
    self.assertNotIn("Traceback", result.stderr)


if __name__ == "__main__":
  absltest.main()
