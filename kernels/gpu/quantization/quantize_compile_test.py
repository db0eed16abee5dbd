# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Instructions of the quantize kernels for each value.

They are all instructions of the machine code (SASS) that ptxas assembles for
the default configs, divided by the values of a thread. Instructions that
compute addresses count too. This command prints the table:

  python kernels/gpu/quantization/quantize_compile_test.py --table
"""

import collections
import dataclasses
import functools
import sys

import pytest
from absl.testing import absltest, parameterized
from jaxplugin.kernels.gpu.quantization import quantize_config, quantize_plans

from jaxplugin.kernels import architectures, prologues
from jaxplugin.lab.inspection import machine_code
from jaxplugin.testing.kernels import executed, quantize_cases

pytestmark = pytest.mark.lab

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
DTYPES = ("bfloat16", "float32")
ROWS, K = 4096, 4096
# At most, of bfloat16: what Triton 3.9 made, and 5 % of that. From sm_100 on an
# instruction casts to FP4. f32 takes less than a tenth more to NVFP4.
MOST = {
  "nvfp4": {"sm_80": 22.2, "sm_90": 21.9, "sm_100": 12.5, "sm_120": 12.8},
  "mxfp4": {"sm_80": 14.2, "sm_90": 14, "sm_100": 5.7, "sm_120": 6.2},
  "mxfp8": {"sm_80": 19.5, "sm_90": 8.1, "sm_100": 7.7, "sm_120": 8.1},
}
MOST_OF_F32 = 1.1  # as many
# The same for a function of x, to MXFP8; its operands and halves.
MOST_OF_PROLOGUES = {
  ("silu_and_mul", (), "split"): {"sm_80": 53.8, "sm_90": 32.9, "sm_100": 24.9},
  ("gelu_and_mul", ("up",), None): {"sm_90": 36.8, "sm_100": 27.1},
  ("swigluoai", ("bias",), "interleaved"): {"sm_90": 41.4, "sm_100": 29.3},
  ("silu", (), None): {"sm_90": 30.0, "sm_100": 22.4},
  ("gelu", ("bias",), None): {"sm_90": 35.6, "sm_100": 24.9},
  ("relu", (), None): {"sm_90": 10.0, "sm_100": 9.7},
  ("rms_norm", ("weight",), None): {
    "sm_80": 34.7,
    "sm_90": 23.7,
    "sm_100": 21.3,
  },
  ("layer_norm", ("weight", "bias", "residual"), None): {"sm_90": 33.5},
}


@functools.cache
def kernel(
  format,
  architecture,
  dtype,
  computed=False,
  prologue=None,
  k=K,
  fp_fusion=False,
):
  """The compiled kernel, and the values that each thread has.

  Args:
    computed: whether it computes NVFP4's global scale, which else is given.
    prologue: (function, operands, halves), or None.
    k: size of a row.
    fp_fusion: whether the compiler may contract a * b + c.
  """
  global_scale = "none"
  if format == "nvfp4":
    global_scale = "computed" if computed else "given"
  if prologue is not None:
    function, operands, halves = prologue
    prologue = prologues.Prologue(
      function=function, operands=operands, halves=halves
    )
  rows = quantize_cases.rows_of(
    ROWS, k, format, global_scale=global_scale, prologue=prologue, dtype=dtype
  )
  target = architectures.by_name(architecture)
  launch = quantize_plans.plan(rows, target)[-1]
  launch = dataclasses.replace(launch, fp_fusion=fp_fusion)
  dtypes = dict.fromkeys(("x", "up", "residual"), dtype) | dict.fromkeys(
    ("global_scale", "weight", "bias"), "float32"
  )
  dtypes["maxima"] = "uint32"
  compiled = executed.compiled_quantize(
    architecture, launch, tuple(dtypes[name] for name in launch.inputs)
  )
  threads = launch.num_warps * target.warp_size * launch.grid
  return compiled, ROWS * k / threads


def instructions_a_value(*args, **options):
  values = kernel(*args, **options)[1]
  return sum(op != "NOP" for op in opcodes(*args, **options)) / values


def opcodes(*args, **options):
  code = machine_code.read_sass(kernel(*args, **options)[0].disassembly)
  kind = machine_code.MachineInstruction
  return [item.opcode for item in code if isinstance(item, kind)]


class OfFewTest(parameterized.TestCase):
  @parameterized.product(
    architecture=("sm_80", "sm_90", "sm_100"), dtype=("bfloat16", "float32")
  )
  def test_tiles_of_one_program_stay_in_registers(self, architecture, dtype):
    target = architectures.by_name(architecture)
    rows = quantize_cases.rows_of(16, 4096, global_scale="computed")
    launch, _ = quantize_plans.plan(rows, target)
    self.assertEqual(launch.kernel, "global_scale_of_few")
    compiled = executed.compiled_quantize(architecture, launch, (dtype,))
    self.assertEqual(compiled.spill_bytes, 0)
    # 1024 threads share 65536 registers.
    self.assertLessEqual(compiled.registers, 64)


class MaximaTest(parameterized.TestCase):
  @parameterized.product(
    architecture=("sm_80", "sm_90", "sm_100"), dtype=("bfloat16", "float32")
  )
  def test_tiles_of_many_rows_stay_in_registers(self, architecture, dtype):
    target = architectures.by_name(architecture)
    rows = quantize_cases.rows_of(8192, 8192)
    launch = quantize_plans.plan_maxima(rows, target)
    self.assertEqual(launch.num_warps, 16)
    dtypes = (dtype,) * len(launch.inputs)
    compiled = executed.compiled_quantize(architecture, launch, dtypes)
    self.assertEqual(compiled.spill_bytes, 0)
    self.assertEqual(compiled.global_load_bits.keys(), {128})

  @parameterized.parameters("sm_80", "sm_90", "sm_100", "sm_120")
  def test_computing_a_global_scale_takes_a_thread_few(self, architecture):
    compiled, values = kernel("nvfp4", architecture, "bfloat16", computed=True)
    self.assertEqual(compiled.spill_bytes, 0)
    more = instructions_a_value(
      "nvfp4", architecture, "bfloat16", computed=True
    ) - instructions_a_value("nvfp4", architecture, "bfloat16")
    # One less a value with E2M1's instruction, as x is of the size of its
    # steps: it is not clamped.
    self.assertLess(more * values, 35)


class InstructionsTest(parameterized.TestCase):
  @parameterized.parameters(
    *((f, a, "bfloat16") for f, most in MOST.items() for a in most),
    *(("nvfp4", a, "float32") for a in MOST["nvfp4"]),
  )
  def test_a_value_takes_few(self, format, architecture, dtype):
    compiled, _ = kernel(format, architecture, dtype)
    self.assertEqual(compiled.spill_bytes, 0)
    most = MOST[format][architecture]
    self.assertLessEqual(
      instructions_a_value(format, architecture, dtype),
      most if dtype == "bfloat16" else most * MOST_OF_F32,
    )

  @parameterized.product(
    format=list(MOST), architecture=("sm_80", "sm_90", "sm_100")
  )
  def test_matmuls_may_contract_products_and_sums(self, format, architecture):
    # Kernels of matmuls that quantize their result are compiled with it.
    plain, fused = (
      collections.Counter(
        op
        for op in opcodes(format, architecture, "float32", fp_fusion=fp_fusion)
        if op.startswith("F")
      )
      for fp_fusion in (False, True)
    )
    self.assertEqual(plain, fused)

  @parameterized.parameters(
    *((p, a) for p, most in MOST_OF_PROLOGUES.items() for a in most)
  )
  def test_a_value_of_a_prologue_takes_few(self, prologue, architecture):
    args = ("mxfp8", architecture, "bfloat16")
    compiled, _ = kernel(*args, prologue=prologue)
    self.assertEqual(compiled.spill_bytes, 0)
    self.assertIn(128, compiled.global_load_bits)
    self.assertLessEqual(
      instructions_a_value(*args, prologue=prologue),
      MOST_OF_PROLOGUES[prologue][architecture],
    )

  @parameterized.parameters("sm_80", "sm_90", "sm_100")
  def test_long_rows_of_a_norm_stay_in_registers(self, architecture):
    norm = ("layer_norm", ("weight", "bias", "residual"), None)
    compiled, values = kernel(
      "nvfp4", architecture, "float32", prologue=norm, k=16384
    )
    self.assertEqual((compiled.spill_bytes, values), (0, 32))

  @parameterized.product(
    architecture=("sm_80", "sm_90", "sm_100"),
    k=(4096, 16384, 20480),
    gradient=(None, "x"),
  )
  def test_norms_along_two_axes_stay_in_registers(
    self, architecture, k, gradient
  ):
    operands = ("weight", "residual", "cotangent" if gradient else "bias")
    prologue = prologues.Prologue(
      function="layer_norm",
      operands=tuple(n for n in prologues.OPERANDS if n in operands),
      gradient=gradient,
    )
    if gradient:
      prologue = prologue.with_statistics()
    matrices = quantize_config.Matrices(
      batch=1,
      rows=ROWS,
      columns=k,
      k=k,
      k_t=ROWS,
      is_transposed=True,
      format="nvfp4",
      global_scale="computed",
      prologue=prologue,
      dtype="bfloat16",
    )
    target = architectures.by_name(architecture)
    launches = quantize_plans.plan(matrices, target)
    names = [launch.kernel for launch in launches]
    first = [] if gradient else ["norm_statistics"]
    self.assertEqual(names, [*first, "finite_amax", "quantize_both"])
    of_x = ("x", "residual", "total", "cotangent")
    dtypes = dict.fromkeys(of_x, "bfloat16")
    dtypes |= dict.fromkeys(("weight", "bias", "statistics"), "float32")
    dtypes["maxima"] = "uint32"
    for launch in launches:
      compiled = executed.compiled_quantize(
        architecture, launch, tuple(dtypes[name] for name in launch.inputs)
      )
      with self.subTest(launch.name):
        self.assertEqual(compiled.spill_bytes, 0)
        self.assertIn(128, compiled.global_load_bits)

  @parameterized.parameters(("sm_90", 0), ("sm_100", 16), ("sm_120", 16))
  def test_hardware_casts_two_values_at_once(self, architecture, count):
    compiled, values = kernel("nvfp4", architecture, "bfloat16")
    self.assertEqual(values, 32)
    found = compiled.assembly.count("cvt.rn.satfinite.e2m1x2.f32")
    self.assertEqual(found, count)

  def test_a_thread_has_whole_blocks(self):
    # No value of another thread is needed for the largest of 16.
    for dtype in DTYPES:
      compiled, _ = kernel("nvfp4", "sm_100", dtype)
      self.assertNotIn("shfl.sync", compiled.assembly)
      self.assertContainsSubset({128}, compiled.global_load_bits)


def print_table():
  print(f"{'instructions a value':24}", *(f"{a:>7}" for a in ARCHITECTURES))
  for format in MOST:
    for dtype in DTYPES:
      counts = [instructions_a_value(format, a, dtype) for a in ARCHITECTURES]
      name = f"{dtype} to {format}"
      print(f"{name:24}", *(f"{count:7.2f}" for count in counts))
  for prologue in MOST_OF_PROLOGUES:
    counts = [
      instructions_a_value("mxfp8", a, DTYPES[0], prologue=prologue)
      for a in ARCHITECTURES
    ]
    print(f"{prologue[0]:24}", *(f"{count:7.2f}" for count in counts))


if __name__ == "__main__":
  if "--table" in sys.argv:
    print_table()
  else:
    absltest.main()
