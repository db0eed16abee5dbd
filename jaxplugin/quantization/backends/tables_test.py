# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of measured choices decide what quantizes and dequantizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import blocking, formats, targets
from jaxplugin.quantization import backends, problems, prologues
from jaxplugin.tables import records
from jaxplugin.testing import contract
from jaxplugin.testing.measured import operation_tables

F32 = np.dtype(np.float32)
M, K = 48, 64
QUANTIZE = backends.QUANTIZE_OPERATION
DEQUANTIZE = backends.DEQUANTIZE_OPERATION


def along(*axes, shape=(M, K), format=jp.MXFP4, **fields):
  return problems.QuantizationProblem(
    shape=shape,
    dtype=F32,
    format=format,
    blockings=tuple(
      blocking.Blocking.along(axis, len(shape), format.block_size)
      for axis in axes
    ),
    **fields,
  )


def dequantizing(**changes):
  given = dict(
    shape=(M, K), dtype=jp.MXFP4.array_dtype, format=jp.MXFP4, axis=1,
    out_dtype=F32,
  )  # fmt: skip
  return problems.DequantizationProblem(**{**given, **changes})


PLAIN = problems.NO_OPTIONS
STOCHASTIC = problems.RecipeOptions(is_stochastic=True, key_impl="threefry2x32")
# Each differs from the others in one thing that may count.
NORM = prologues.Prologue(function="rms_norm", operands=("weight",))
GATED = prologues.Prologue(function="swigluoai", halves="interleaved")
QUANTIZED = (
  along(1),
  along(0),
  along(1, 0),
  along(0, 1),
  along(1, shape=(M, 2 * K)),
  along(1, shape=(2 * M, K)),
  along(1, format=jp.MXFP8),
  along(1, format=jp.NVFP4),
  along(1, format=jp.NVFP4, has_global_scale=True),
  along(1, scale_rounding="floor"),
  along(1, packed=True),
  along(1, packed=True, for_products=True),
  along(1, scale_layout="swizzled_128x4"),
  dataclasses.replace(along(1), dtype=formats.BF16),
  along(1, options=(problems.RecipeOptions(hadamard=16),)),
  along(1, options=(problems.RecipeOptions(square=(0,)),)),
  along(1, options=(problems.RecipeOptions(four_over_six=True),)),
  along(1, options=(problems.RecipeOptions(scale_up=True),)),
  along(1, options=(STOCHASTIC,)),
  along(1, options=(dataclasses.replace(STOCHASTIC, is_partitionable=False),)),
  along(1, 0, options=(PLAIN, problems.RecipeOptions(square=(1,)))),
  along(1, 0, options=(STOCHASTIC,) * 2),
  along(1, prologue=prologues.Prologue(function="rms_norm")),
  along(1, prologue=NORM),
  along(1, prologue=dataclasses.replace(NORM, operands=("weight", "residual"))),
  along(0, prologue=NORM),
  along(1, prologue=GATED),
  along(1, prologue=dataclasses.replace(GATED, halves="split")),
  along(1, prologue=prologues.Prologue(function="relu", operands=("bias",))),
)
DEQUANTIZED = (
  dequantizing(),
  dequantizing(shape=(M, 2 * K)),
  dequantizing(shape=(2 * M, K)),
  dequantizing(shape=(K, M), axis=0),
  dequantizing(shape=(M, K // 2), dtype=formats.PACKED),
  dequantizing(format=jp.NVFP4),
  dequantizing(format=jp.NVFP4, global_shape=()),
  dequantizing(out_dtype=formats.BF16),
)


class FieldsTest(parameterized.TestCase):
  @parameterized.parameters((QUANTIZE, QUANTIZED), (DEQUANTIZE, DEQUANTIZED))
  def test_problems_come_back_and_differ(self, operation, known):
    fields = [operation.fields_of(problem) for problem in known]
    for problem, each in zip(known, fields, strict=True):
      self.assertEqual(operation.problem_of(each), problem)
    self.assertLen({*fields}, len(known))

  def test_every_part_of_a_problem_is_compared(self):
    names = {f.name for f in dataclasses.fields(problems.RecipeOptions)}
    # No row is about a device's part of an array.
    of_parts = {"strides"}
    self.assertEqual(of_parts | {*problems._OPTIONS}, names)
    names = {f.name for f in dataclasses.fields(problems.QuantizationProblem)}
    told = {"shape", "dtype", "format", "blockings", "options"}
    told |= {"pads_values"}  # part of a product, which no row is about
    told |= {"num_maxima"}  # as if a global scale were given
    told |= {"prologue"}
    # The time hardly depends on these.
    told |= {"returns_amax", "column_sums"}
    self.assertEqual(told | {*problems._QUANTIZE}, names)
    names = {f.name for f in dataclasses.fields(prologues.Prologue)}
    numbers = {"epsilon", "alpha", "limit"}  # The time does not depend on them.
    told = {"function", "operands", "halves", "gradient"}
    self.assertEqual(told | numbers, names)
    names = {f.name for f in dataclasses.fields(problems.DequantizationProblem)}
    self.assertEqual(
      {"shape", "dtype", "format", "axis", "out_dtype", "global_shape"}, names
    )

  def test_rows_of_any_shape_are_rows(self):
    self.assertEqual(
      QUANTIZE.fields_of(along(2, shape=(6, 8, K))),
      QUANTIZE.fields_of(along(1)),
    )
    self.assertEqual(
      DEQUANTIZE.fields_of(dequantizing(shape=(6, 8, K), axis=2)),
      DEQUANTIZE.fields_of(dequantizing()),
    )

  @parameterized.parameters(
    along(1, shape=(4, 32, 8)),
    along(2, 0, shape=(32, 4, 32)),
    along(1, shape=(0, K)),
    dataclasses.replace(along(1), dtype=np.dtype(np.int8)),
    dataclasses.replace(
      along(1),
      blockings=(blocking.Blocking(dims=(0, 1), lead=(), multiple=32),),
    ),
    along(1, options=(dataclasses.replace(STOCHASTIC, key_impl="rbg"),)),
    along(0, shape=(K, 2, M), prologue=NORM),
    along(1, options=(dataclasses.replace(STOCHASTIC, strides=(64, 1)),)),
    dequantizing(shape=(4, 32, 8)),
    dequantizing(out_dtype=np.dtype(np.float64)),
    dequantizing(global_shape=(M, 1)),
  )
  def test_tables_have_no_rows_for(self, problem):
    is_quantize = isinstance(problem, problems.QuantizationProblem)
    operation = QUANTIZE if is_quantize else DEQUANTIZE
    self.assertIsNone(operation.fields_of(problem))

  @parameterized.parameters(
    (QUANTIZE, {"along": "middle"}, "along must be one of"),
    (QUANTIZE, {"key_impl": "rbg"}, "key_impl must be one of"),
    (QUANTIZE, {"hadamard": 0}, "hadamard must be a positive number, got 0"),
    (QUANTIZE, {"second_scale_up": True}, "quantize has no second_scale_up"),
    (DEQUANTIZE, {"out": "int8"}, "out must be one of"),
    (DEQUANTIZE, {"axis": 1}, "a problem of dequantize has no axis"),
  )
  def test_fields_of_no_problem_say_what_is_wrong(
    self, operation, changes, message
  ):
    problem = along(1) if operation is QUANTIZE else dequantizing()
    fields = dict(operation.fields_of(problem)) | changes
    with self.assertRaisesRegex(ValueError, message):
      operation.problem_of(records.fields_of("problem", fields))


class DecidedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.target = targets.detect_target("cpu")
    if self.target.cpu_kernels is None:
      self.skipTest(self.target.missing(targets.CPU_KERNELS))

  def table(self, operation, *known, **changes):
    made = operation_tables.with_xla_first(operation, self.target, *known)
    header = dataclasses.replace(made.header, **changes)
    return records.table_of(header, made.rows)

  def test_a_row_decides_what_is_lowered_and_no_bit_changes(self):
    x = jax.device_put(np.random.default_rng(0).normal(size=(M, K)))
    f = jax.jit(functools.partial(jp.quantize, format=jp.MXFP4))
    kernel = f.lower(x).as_text()
    self.assertIn("jaxplugin_quantize", kernel)
    expected = jax.device_get(f(x))
    with jp.tuning(self.table(QUANTIZE, along(1, packed=True))):
      self.assertNotIn("jaxplugin_quantize", f.lower(x).as_text())
      found = jax.device_get(f(x))
      explanation = jp.explain(f, x)
    self.assertIn("jaxplugin_quantize", f.lower(x).as_text())
    contract.assert_same_bits(found, expected)
    (told,) = explanation.quantizations
    self.assertEqual(told.implementation, "xla")
    self.assertEqual(told.decisions[0].implementation_from, "overlay")
    self.assertEqual(told.problems, (along(1, packed=True),))
    self.assertIn(
      "(overlay: 10 us, the rule's cpu 20 us)", explanation.details()
    )

  def test_a_row_of_a_prologue_decides_both_steps(self):
    module = backends.lowering.Module(platforms=("cpu",), is_partitioned=False)
    problem = along(1, format=jp.MXFP8, prologue=NORM)
    decided = functools.partial(backends.decide, problem, module, self.target)
    (fused,) = decided()
    self.assertEqual(
      (fused.decision.implementation, fused.problem.prologue), ("cpu", NORM)
    )
    with jp.tuning(self.table(QUANTIZE, problem)):
      (part,) = decided(backends.resolution.overlay())
    self.assertEqual(part.decision.implementation, "xla")
    self.assertEqual(part.problem, problem)
    self.assertEqual(part.decision.notes, ())

  def test_refused_prologue_is_separate_from_the_best_backend(self):
    module = backends.lowering.Module(platforms=("cpu",), is_partitioned=False)
    options = (problems.RecipeOptions(scale_up=True),)
    problem = along(1, format=jp.NVFP4, prologue=NORM, options=options)
    (part,) = backends.decide(problem, module, self.target)
    self.assertEqual(part.problem, problem.without_prologue())
    self.assertEqual(part.decision.implementation, "cpu")
    (note,) = part.decision.notes
    self.assertStartsWith(
      note, "the prologue is a separate XLA operation, because cpu: kernels do"
    )
    told = backends.explained(problem, module, self.target)
    self.assertEqual((told.implementation, told.reason), ("cpu", ""))

  def test_a_row_decides_what_dequantizes(self):
    x = jp.quantize(jnp.ones((M, K)), jp.MXFP8)
    problem = dequantizing(format=jp.MXFP8, dtype=jp.MXFP8.array_dtype)
    f = jax.jit(jp.dequantize)
    self.assertIn("jaxplugin_dequantize", f.lower(x).as_text())
    with jp.tuning(self.table(DEQUANTIZE, problem)):
      self.assertNotIn("jaxplugin_dequantize", f.lower(x).as_text())
      (told,) = jp.explain(f, x).quantizations
    self.assertEqual(told.decisions[0].implementation_from, "overlay")

  def test_each_of_two_blockings_is_decided_by_its_own_row(self):
    module = backends.lowering.Module(platforms=("cpu",), is_partitioned=False)
    made = self.table(QUANTIZE, along(0))
    with jp.tuning(made):
      overlay = backends.resolution.overlay()
    parts = backends.decide(along(1, 0), module, self.target, overlay)
    self.assertEqual([p.decision.implementation for p in parts], ["cpu", "xla"])
    self.assertEqual(
      [p.decision.implementation_from for p in parts], ["rule", "overlay"]
    )

  def test_a_table_of_older_kernels_is_told_and_not_followed(self):
    made = self.table(QUANTIZE, along(1, packed=True))
    sources = dict(made.header.sources)
    sources["cpu"] = dataclasses.replace(sources["cpu"], kernels="0" * 64)
    old = self.table(
      QUANTIZE, along(1, packed=True), sources=tuple(sources.items())
    )
    x = jax.ShapeDtypeStruct((M, K), F32)
    with jp.tuning(old):
      explanation = jp.explain(
        functools.partial(jp.quantize, format=jp.MXFP4), x
      )
    (told,) = explanation.quantizations
    self.assertEqual(told.implementation, "cpu")
    self.assertEqual(told.decisions[0].implementation_from, "rule")
    self.assertRegex(
      explanation.details(),
      "note: overlay is not used: implementation cpu: its kernels changed",
    )

  def test_table_of_the_trace_decides_a_later_lowering(self):
    x = jax.ShapeDtypeStruct((M, K), F32)
    f = jax.jit(functools.partial(jp.quantize, format=jp.MXFP4))
    with jp.tuning(self.table(QUANTIZE, along(1, packed=True))):
      traced = f.trace(x)
    self.assertNotIn("jaxplugin_quantize", traced.lower().as_text())
