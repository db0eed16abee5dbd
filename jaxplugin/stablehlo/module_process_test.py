# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Malformed modules raise typed errors, and only crash the child process."""

import collections
import dataclasses
import os
import random
import signal
import threading
import time

import jax
import jax.export
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.jaxext import jax_private, jaxlib_private
from jaxplugin.stablehlo import module_process, modules
from jaxplugin.testing import contract, written_modules

CPU = jp.named_target("cpu")
dot_module = written_modules.dot_module
CASES = 400  # of each form
# A case takes a millisecond, but some cases loop forever or use all memory.
SMALL = module_process.ParsingLimits(
  cpu_s=1,
  wall_s=60.0,
  memory_bytes=256 << 20,
  stack_bytes=4 << 20,
  out_bytes=16 << 20,
)


def forms():
  """Returns the same module in each form."""
  source = modules.read(dot_module(), trusted=True)
  older = dataclasses.replace(source, version="1.10.0")
  hlo = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((3, 3)))
  return {
    "text": dot_module(),
    "hlo": hlo.compiler_ir("hlo").as_hlo_text(),
    "bytecode": source.serialize("bytecode"),
    "portable": source.serialize("portable"),
    "portable_1_10_0": older.serialize("portable"),
  }


def changed(data, rng):
  """Changes a byte, flips a bit, removes a piece, or removes the end."""
  i = rng.randrange(len(data))
  kind = rng.randrange(8)
  if kind == 0:
    return data[:i]
  if kind == 1:
    return data[:i] + data[i + rng.randrange(1, 8) :]
  byte = rng.randrange(256) if kind < 5 else data[i] ^ (1 << rng.randrange(8))
  return data[:i] + bytes([byte]) + data[i + 1 :]


@pytest.mark.full
class FuzzTest(parameterized.TestCase):
  @parameterized.parameters(*forms())
  def test_changed_modules_are_read_or_refused(self, form):
    given = forms()[form]
    is_text = isinstance(given, str)
    rng = random.Random(form)
    outcomes = collections.Counter()
    limits = absltest.mock.patch.object(
      module_process, "limits", lambda size: SMALL
    )
    with limits:
      for _ in range(CASES):
        data = changed(given.encode() if is_text else given, rng)
        try:
          source = modules.read(data, "m")
          source.location(source.module.operation)
          modules.verify(source.module, "m")
          outcomes["read"] += 1
        except modules.ModuleError as error:
          self.assertStartsWith(str(error), "m:")
          ended = "ended by" in str(error)
          outcomes["ended" if ended else "refused"] += 1
    self.assertGreater(outcomes["refused"], CASES // 4, outcomes)
    self.assertGreater(outcomes["read"], 0, outcomes)
    if form == "bytecode":  # the case that the child process is for
      self.assertGreater(outcomes["ended"], 0, outcomes)


class CheckedTest(parameterized.TestCase):
  def test_module_is_the_same_by_way_of_the_child(self):
    text = dot_module().replace("module @made", 'module @"\\01\\22 é\\FF"')
    text = text.replace(
      "    return",
      "    %c = stablehlo.constant dense<[0x7FC12345, 0x80000000, 1.1]>"
      ' : tensor<3xf32> loc(callsite(fused<1>["a.py":1:2, "b"] at'
      ' "c.py":3:4))\n    %d = stablehlo.constant dense<'
      f"{list(range(200))}> : tensor<200xi8>\n    return",
    )
    source = modules.read(text.replace("199]", "-1]"), trusted=True)
    for form in ("bytecode", "portable"):
      data = source.serialize(form)
      here, there = (modules.read(data, trusted=t) for t in (True, False))
      self.assertEqual(there.version, here.version)
      print_ = lambda x: x.module.operation.get_asm(enable_debug_info=True)
      self.assertEqual(print_(there), print_(here))
      self.assertEqual(there.serialize(form), data)

  def test_context_has_the_dialects_of_jax(self):
    names = [
      "stablehlo.add",
      "chlo.erf",
      "mhlo.dot",
      "sdy.mesh",
      "mpmd.assign",
      "vhlo.add_v1",
      "func.call",
      "arith.addi",
      "math.sin",
      "memref.load",
      "scf.for",
      "vector.load",
      "cf.br",
      "gpu.launch",
      "llvm.add",
      "tpu.load",
      "mosaic_gpu.arrive",
      "tt.dot",
    ]
    ours = jaxlib_private.make_ir_context()
    jaxs = jax_private.make_ir_context()
    known = [name for name in names if ours.is_registered_operation(name)]
    self.assertEqual(
      known, [name for name in names if jaxs.is_registered_operation(name)]
    )
    self.assertContainsSubset(names[:4], known)

  def test_trusted_modules_and_objects_need_no_child(self):
    module_process.stop()
    source = modules.read(dot_module(), trusted=True)
    data = source.serialize("bytecode")
    with absltest.mock.patch.object(
      module_process, "_start", side_effect=AssertionError
    ):
      jp.rewrite(data, CPU, trusted=True)
      jp.rewrite(source.module, CPU)
      jp.rewrite(jax.jit(jnp.sin).lower(1.0), CPU)
      with self.assertRaises(AssertionError):
        jp.rewrite(data, CPU)

  def test_exported_is_bytes_of_somebody(self):
    exported = jax.export.export(jax.jit(jnp.sin))(1.0)
    data = exported.mlir_module_serialized
    broken = dataclasses.replace(
      exported, mlir_module_serialized=data[: len(data) // 2]
    )
    with self.assertRaisesRegex(modules.ModuleError, "malformed or truncated"):
      jp.rewrite(broken, CPU)


class ChildTest(parameterized.TestCase):
  def test_child_that_was_ended_starts_anew(self):
    modules.read(dot_module())
    first = module_process._child.process
    os.kill(first.pid, signal.SIGKILL)
    modules.read(dot_module())
    second = module_process._child.process
    self.assertNotEqual(first.pid, second.pid)
    modules.read(dot_module())
    self.assertIs(module_process._child.process, second)

  def test_threads_share_it(self):
    errors = []

    def read(i):
      try:
        text = dot_module().replace("@made", f"@made{i}")
        data = modules.read(text, trusted=True).serialize("bytecode")
        self.assertIn(f"@made{i}", str(modules.read(data).module))
      except BaseException as error:
        errors.append(error)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual(errors, [])

  @parameterized.parameters(
    ("cpu_s", 1, "exceeded its CPU time"), ("wall_s", 0.5, "stopped after")
  )
  @pytest.mark.sample(1)
  def test_time_is_limited(self, limit, value, pattern):
    # Types are shared, so the text has 2^59 of them.
    lines = [f"!t{i} = tuple<!t{i - 1}, !t{i - 1}>" for i in range(1, 60)]
    text = "\n".join(["!t0 = tuple<f32>", *lines, ""])
    text += "module { func.func private @f(!t59) }"
    limits = dataclasses.replace(
      SMALL, memory_bytes=8 << 30, out_bytes=8 << 30, **{limit: value}
    )
    with (
      absltest.mock.patch.object(module_process, "limits", lambda size: limits),
      self.assertRaisesRegex(modules.ModuleError, f"^m: .*{pattern}"),
    ):
      modules.read(text, "m")

  @parameterized.parameters(
    ("", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)
  )
  @pytest.mark.full
  def test_child_ends_with_its_process(self, end, status):
    result = contract.run_program(
      f"""
      import os, signal
      from jaxplugin.stablehlo import module_process, modules
      modules.read("module {{}}")
      print(module_process._child.process.pid, flush=True)
      {end}
      """
    )
    self.assertEqual((result.returncode, result.stderr), (status, ""))
    self.assert_gone(int(result.stdout))

  def assert_gone(self, pid):
    for _ in range(100):
      try:
        with open(f"/proc/{pid}/stat") as file:
          if file.read().rpartition(")")[2].split()[0] == "Z":
            return
      except FileNotFoundError:
        return
      time.sleep(0.1)
    self.fail(f"process {pid} is still there")


class DeepTest(parameterized.TestCase):
  """Modules that are nested too deeply or take too long to read."""

  def nested(self, depth):
    start = '"stablehlo.if"(%p) ({\n'
    end = "}, {\nstablehlo.return\n}) : (tensor<i1>) -> ()\n"
    return (
      "module {\nfunc.func @main(%p: tensor<i1>) {\n"
      + start * depth
      + f"stablehlo.return\n{end}" * depth
      + "return\n}\n}\n"
    )

  def test_regions(self):
    self.assertEqual(jp.rewrite(self.nested(900), CPU), self.nested(900))
    with self.assertRaisesRegex(modules.ModuleError, "ended by SIGSEGV"):
      jp.rewrite(self.nested(100_000), CPU)

  @parameterized.parameters(("[", "]", ""), ("tuple<", ">", "f32"))
  def test_attributes_and_types(self, start, end, inner):
    nested = start * 100_000 + inner + end * 100_000
    with self.assertRaisesRegex(modules.ModuleError, "ended by SIGSEGV"):
      modules.read(f"module attributes {{m.a = {nested}}} {{}}")

  @parameterized.parameters(41, 20_001)
  @pytest.mark.sample(1)
  def test_chain_of_casts_before_a_call(self, count):
    # Reading 41 casts once took exponential time.
    value, lines = "%arg4", []
    types = ("tensor<bf16>", "tensor<f32>")
    for i in range(count - 1):
      before, after = types[i % 2], types[1 - i % 2]
      lines.append(
        f"%c{i} = stablehlo.convert {value} : ({before}) -> {after}\n"
      )
      value = f"%c{i}"
    text = dot_module().replace("16xf32>", "16xbf16>")
    text = text.replace(") -> (tensor", f", %arg4: {types[0]}) -> (tensor")
    text = text.replace("    %0", "".join(lines) + "    %0")
    text = text.replace("%arg3) :", f"%arg3, {value}) :")
    text = text.replace(
      "16x2xf8E8M0FNU>) -> t", f"16x2xf8E8M0FNU>, {types[0]}) -> t"
    )
    start = time.process_time()
    result = jp.rewrite(text, jp.named_target("b200", cudnn="9.13"))
    self.assertLess(time.process_time() - start, 20)
    self.assertEqual(result.count("stablehlo.convert"), count - 1)
    self.assertEqual(result.count("__op$block_scaled_dot"), 1)

  @parameterized.parameters(
    ("[" * 100_000, "maximum recursion depth"),
    ("{\\22a\\22:" * 5_000, "maximum recursion depth"),
    ("\\FF\\FE", "got '.*xff.*xfe'"),
  )
  def test_backend_config(self, config, pattern):
    text = dot_module(attributes=f'backend_config = "{config}"')
    with self.assertRaisesRegex(
      ValueError,
      f"block_scaled_dot.* at .*backend_config must be JSON, .*{pattern}",
    ) as caught:
      jp.rewrite(text, CPU, strict=True)
    self.assertLess(len(str(caught.exception)), 800)
    explanation = jp.explain(text, target=CPU)
    self.assertIn("backend_config must be JSON", explanation[0].error)

  def test_names_that_are_not_utf8(self):
    text = dot_module()
    other = text.replace("@__op$block_scaled_dot", '@"\\FF"')
    self.assertEqual(jp.rewrite(other, CPU), other)
    function = text.replace("@main", '@"\\FF"')
    self.assertIn('@"\\FF"', jp.rewrite(function, CPU))
    # jaxlib's bindings abort when Python reads such a file name.
    place = text.replace("return %0 : tensor<8x16xf32>", "RETURN")
    place = f'#l = loc("\\FF":1:1)\n{place}'.replace(
      "RETURN", "return %0 : tensor<8x16xf32> loc(#l)"
    )
    with self.assertRaisesRegex(modules.ModuleError, "ended by SIGABRT"):
      jp.rewrite(place, CPU)
