# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A problem becomes fields of a row, and nothing of it is forgotten."""

import dataclasses

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.dot import problems
from jaxplugin.dot.backends import problem_fields
from jaxplugin.tables import records
from jaxplugin.testing.measured import dot_tables


class FieldsTest(parameterized.TestCase):
  def problems(self):
    swizzled = problems.SideProblem(
      format=jp.NVFP4,
      dtype=formats.PACKED,
      contracting_is_minor=False,
      scale_layout="swizzled_128x4",
      scale_is_padded=True,
      is_interleaved=True,
    )
    yield dot_tables.problem()
    yield dot_tables.problem(
      lhs=jp.NVFP4, rhs=jp.NVFP4, batch=7, global_scale="scalar"
    )
    yield dot_tables.problem(global_scale="array", has_global_power=True)
    yield dot_tables.problem(
      has_bias=True, activation="silu", has_residual=True
    )
    yield dot_tables.problem(
      highest_precision=True, out_dtype=np.dtype(np.float16)
    )
    yield dot_tables.problem(
      num_contracting=2, blocked_k=64, blocks_pair_up=False
    )
    yield dot_tables.problem(lhs=jp.MXFP6_E2M3, rhs=jp.MXFP6_E3M2)
    for format in formats.NAMED:
      blocked = format.along(96).of_rows()
      yield dot_tables.problem(lhs=blocked, rhs=blocked)
    yield dataclasses.replace(dot_tables.problem(), lhs=swizzled)
    yield dataclasses.replace(dot_tables.problem(), rhs=swizzled)

  def test_a_problem_comes_back_from_its_fields(self):
    for each in self.problems():
      fields = problem_fields.fields_of(each)
      self.assertEqual(problem_fields.problem_of(fields), each)

  def test_problems_that_differ_have_other_fields(self):
    """Each field of a problem is compared, those of its operands too."""
    changes = {
      "batch": 2, "m": 65, "n": 8, "k": 32, "out_dtype": np.dtype(np.float32),
      "global_scale": "array", "has_global_power": True,
      "highest_precision": True, "fastest_precision": True, "has_bias": True,
      "activation": "relu", "has_residual": True, "num_contracting": 2,
      "blocked_k": 32, "blocks_pair_up": False,
    }  # fmt: skip
    of_side = {
      "format": jp.NVFP4, "dtype": formats.PACKED,
      "contracting_is_minor": False, "scale_layout": "swizzled_128x4",
      "scale_is_padded": True, "is_interleaved": True,
        "has_square_scale": True,
    }  # fmt: skip
    names = {field.name for field in dataclasses.fields(problems.DotProblem)}
    self.assertEqual({*changes, "lhs", "rhs"}, names)
    names = {f.name for f in dataclasses.fields(problems.SideProblem)}
    self.assertEqual({*of_side}, names)
    base = dot_tables.problem(lhs=jp.MXFP4)
    found = [base]
    found += [dataclasses.replace(base, **{n: v}) for n, v in changes.items()]
    for side in ("lhs", "rhs"):
      for name, value in of_side.items():
        other = dataclasses.replace(getattr(base, side), **{name: value})
        found.append(dataclasses.replace(base, **{side: other}))
    fields = [problem_fields.fields_of(each) for each in found]
    self.assertLen({*fields}, len(found))

  @parameterized.parameters(
    ({"m": None},), ({"k": 0},), ({"out_dtype": np.dtype(np.int32)},)
  )
  def test_no_row_is_about_what_has_no_size_or_name(self, changes):
    self.assertIsNone(problem_fields.fields_of(dot_tables.problem(**changes)))

  def test_no_row_is_about_a_format_of_ones_own(self):
    for changes in ({"block_size": 64}, {"name": "own"}):
      own = dataclasses.replace(jp.MXFP4, **changes)
      self.assertIsNone(problem_fields.fields_of(dot_tables.problem(rhs=own)))

  def test_a_row_with_a_scale_for_each_row_names_its_block_size(self):
    row = dot_tables.problem(rhs=jp.INT8_ROW.along(96))
    fields = dict(problem_fields.fields_of(row))
    self.assertEqual(fields.pop("rhs_block_size"), 96)
    with self.assertRaisesRegex(ValueError, "must have rhs_block_size"):
      problem_fields.problem_of(records.fields_of("problem", fields))

  @parameterized.parameters(
    ({"m": 0}, "m must be a positive number, got 0"),
    ({"m": "64"}, "m must be a positive number, got '64'"),
    ({"k": True}, "k must be a positive number, got True"),
    ({"lhs": "int4"}, "lhs must be one of .*mxfp4.*got 'int4'"),
    ({"lhs": 4}, "lhs must be one of .*got 4"),
    ({"rhs_dtype": "float32"}, "rhs_dtype must be one of .*uint8.*"),
    ({"lhs_dtype": "uint8"}, "a problem of the dot has no lhs_dtype"),
    ({"out": "int8"}, "out must be one of"),
    ({"has_bias": 1}, "has_bias must be true or false, got 1"),
    ({"activation": "tanh"}, "activation must be one of"),
    ({"global_scale": None}, "global_scale must be one of"),
    ({"rhs_scale_layout": "tiled"}, "rhs_scale_layout must be one of"),
    ({"warp": 8}, "a problem of the dot has no warp"),
  )
  def test_fields_of_no_problem_say_what_is_wrong(self, changes, message):
    fields = dict(problem_fields.fields_of(dot_tables.problem())) | changes
    with self.assertRaisesRegex(ValueError, message):
      problem_fields.problem_of(records.fields_of("problem", fields))

  def test_missing_size_is_said(self):
    with self.assertRaisesRegex(ValueError, "must have n, out"):
      problem_fields.problem_of(
        (("k", 32), ("lhs", "bfloat16"), ("m", 1), ("rhs", "mxfp4"))
      )


if __name__ == "__main__":
  absltest.main()
