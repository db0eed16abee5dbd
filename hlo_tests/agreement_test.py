# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`choose` predicts whether XLA's GPU compiler accepts a cuDNN call.

A point of the grid is a dot, a GPU and a cuDNN version, written as on the
command line of `tool.py` (dots.py). `choose` decides each point. XLA's GPU
compiler then compiles it without a GPU, in one of two forms:

  call: a handwritten `__op$block_scaled_dot` without this package, so that
    XLA's own rewriter decides;
  emit: the lowering of this package, for problems that the package changes
    first. It transposes operands to the call's dimension order, slices scales,
    and keeps a global scale out of the call for precision.

The test counts the operands of `__cudnn$blockScaledDot` in the optimized HLO; 0
means that the HLO has no such call. This number must agree with `choose`. A
compile error of XLA counts as 0.
"""

from __future__ import annotations

import functools
import itertools
import json
import shlex
from typing import Any, NamedTuple
from unittest import mock

import dots
import jax
import pytest
import tool
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.dot import backends, problems
from jaxplugin.dot.backends import cudnn
from jaxplugin.jaxext import jax_private
from jaxplugin.lab.compilation import deviceless

pytestmark = pytest.mark.full

BLACKWELL = ("b200", "b300", "rtx5090", "gb10")
BEFORE = ("a100", "l40s", "h100", "h200")
VERSIONS = (None, "9.8", "9.9", "9.10", "9.12", "9.13", "9.28")
FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")
DTYPES = ("float32", "bfloat16", "float16")
BLOCK_SIZES = {"mxfp8": 32, "mxfp8_e5m2": 32, "mxfp4": 32, "nvfp4": 16}
XLA_CALL = "__op$block_scaled_dot"
CUDNN_CALL = "__cudnn$blockScaledDot"


class Point(NamedTuple):
  """A point of the grid.

  Attributes:
    form: the form to compile, "call" or "emit".
    words: the dot, as arguments of `tool.py optimize`.
  """

  form: str
  words: str

  def __str__(self) -> str:
    return f"{self.form}: {self.words}"


def _point(
  form: str,
  target: str,
  version: str | None,
  lhs: str,
  rhs: str,
  *options: str,
) -> Point:
  words = ["--target", target]
  words += ["--cudnn", version] if version is not None else []
  words += ["--lhs", lhs, "--rhs", rhs, *options]
  return Point(form, " ".join(words))


def _gates() -> list[Point]:
  """Returns GPUs and versions just below and above each gate, and patches."""
  cases = [(t, v) for t in BEFORE for v in ("9.9", "9.10", "9.28")]
  cases += [(t, v) for t in BLACKWELL for v in VERSIONS]
  patches = ("9.9.9", "9.10.1", "9.12.9", "9.13.1", "10")
  operands = ("128x256xmxfp8", "128x256xmxfp8")
  points = [_point("call", t, v, *operands) for t, v in cases]
  cases = [(t, v) for t in BLACKWELL for v in VERSIONS[2:]]
  cases += [("h200", "9.28"), ("b200", None)]
  operands = ("128x256xnvfp4", "128x256xnvfp4", "--global-scale", "scalar")
  points += [
    _point("call", t, v, *operands)
    for t, v in [*cases, *(("b200", patch) for patch in patches)]
  ]
  return points


def _pairs() -> list[Point]:
  """Returns every pair of formats, and pairs with an unquantized side."""
  pairs = [*itertools.product(FORMATS, FORMATS)]
  pairs += [(format, "bfloat16") for format in FORMATS]
  cases = [("b200", "9.28", lhs, rhs) for lhs, rhs in pairs]
  cases += [
    ("rtx5090", "9.10", "mxfp8", "mxfp8_e5m2"),
    ("rtx5090", "9.10", "mxfp8_e5m2", "mxfp8"),
    ("rtx5090", "9.10", "mxfp8_e5m2", "mxfp8_e5m2"),
    ("rtx5090", "9.10", "mxfp4", "mxfp4"),
  ]
  return [
    _point("call", target, version, f"128x256x{lhs}", f"128x256x{rhs}")
    for target, version, lhs, rhs in cases
  ]


def _results() -> list[Point]:
  """Returns result dtypes, with and without a global scale."""
  points = []
  for dtype, formats, version, scale in itertools.product(
    DTYPES,
    (("mxfp8", "mxfp8"), ("mxfp8_e5m2", "mxfp8"), ("nvfp4", "nvfp4")),
    ("9.12", "9.13"),
    (False, True),
  ):
    # This package keeps an f16 global scale out of the call.
    form = "emit" if scale and dtype == "float16" else "call"
    options = ("--global-scale", "scalar") if scale else ()
    lhs, rhs = (f"128x256x{format}" for format in formats)
    points.append(
      _point(form, "b300", version, lhs, rhs, "--out", dtype, *options)
    )
  return points


def _shapes() -> list[Point]:
  """Returns sizes: odd, 1, large, empty, batched, and k of half a block."""
  shapes = [
    ((1, 256), (128, 256)),
    ((128, 256), (1, 256)),
    ((5, 32), (7, 32)),
    ((129, 96), (257, 96)),
    ((128, 32 * 1001), (128, 32 * 1001)),
    ((4096, 4096), (8192, 4096)),
    ((3, 128, 256), (3, 128, 256)),
    ((1, 5, 96), (1, 7, 96)),
    ((64, 1, 64), (64, 3, 64)),
    ((0, 256), (128, 256)),
    ((128, 256), (0, 256)),
    ((0, 128, 256), (0, 128, 256)),
    ((128, 0), (128, 0)),
    ((128, 264), (128, 264)),
  ]
  return [
    _point("call", "b200", "9.13", *(_operand(s, format) for s in pair))
    for pair in shapes
    for format in ("mxfp8", "nvfp4")
  ]


def _operand(shape: tuple[int, ...], format: str, option: str = "") -> str:
  return "x".join(map(str, shape)) + f"x{format}{option}"


def _scales() -> list[Point]:
  """Returns padded scales, and scales that are larger or swizzled."""
  points = []
  for format, version in itertools.product(
    ("mxfp8", "nvfp4"), ("9.10", "9.12", "9.13")
  ):
    columns = 96 // BLOCK_SIZES[format]
    tile = -(-columns // 4) * 4
    for option, form in (
      (f":scale=128x{tile}", "call"),
      (f":scale=200x{tile + 3}", "emit"),
      (":swizzled", "emit"),
    ):
      lhs = _operand((100, 96), format, option)
      rhs = _operand((70, 96), format, option)
      options = ("--global-scale", "scalar")
      points.append(_point(form, "b200", version, lhs, rhs, *options))
  below = _point("call", "b200", "9.9", *2 * ("100x96xmxfp8:scale=128x4",))
  emitted = _point("emit", "b200", "9.9", *2 * ("100x96xmxfp8:swizzled",))
  return [*points, below, emitted]


def _layouts() -> list[Point]:
  """Returns dimension orders that the package transposes for the call."""
  points = []
  for format, version in (("mxfp8", "9.10"), ("nvfp4", "9.28")):
    for dims, lhs, rhs in (
      ("mk,kn", (128, 256), (256, 96)),
      ("km,nk", (256, 128), (96, 256)),
      ("km,kn", (256, 128), (256, 96)),
      ("mbk,nbk", (128, 2, 256), (96, 2, 256)),
      ("amk,nk", (2, 64, 256), (96, 256)),
      ("bmk,bkn", (2, 128, 256), (2, 256, 96)),
      ("mjk,njk", (128, 2, 128), (96, 2, 128)),
    ):
      operands = (_operand(lhs, format), _operand(rhs, format))
      points.append(_point("emit", "gb10", version, *operands, "--dims", dims))
  return points


def _epilogues() -> list[Point]:
  """Returns epilogues in f32, and global scales that differ in the result."""
  cases = ("--bias", "--activation silu", "--residual", "--precision highest")
  return [
    _point(
      "emit",
      "b200",
      version,
      *("128x256xnvfp4", "128x256xnvfp4", "--global-scale", scale),
      *case.split(),
    )
    for version in ("9.12", "9.13")
    for scale in ("scalar", "array")
    for case in cases
  ]


GRIDS = {
  "gates": _gates(),
  "pairs": _pairs(),
  "results": _results(),
  "shapes": _shapes(),
  "scales": _scales(),
  "layouts": _layouts(),
  "epilogues": _epilogues(),
}
POINTS = tuple(dict.fromkeys(p for grid in GRIDS.values() for p in grid))


@functools.cache
def _problem(point: Point) -> problems.DotProblem | None:
  """Returns the problem of `choose`; None for a call refused while tracing."""
  args = dots.parse(shlex.split(point.words))
  function, specs = dots.Dot(args).function()
  try:
    explained = jp.explain(function, *specs.values(), target=dots.target(args))
  except TypeError:
    return None
  return explained[0].problem


def said(point: Point) -> int:
  """Returns the number of operands that `choose` implies for cuDNN's call."""
  problem = _problem(point)
  target = dots.target(dots.parse(shlex.split(point.words)))
  if problem is None or cudnn.supports(problem, target) is not None:
    return 0
  decision = backends.choose(problem, target, cudnn.BACKEND.name)
  return 5 if decision.global_scale == "fused" else 4


@functools.cache
def done(point: Point) -> int:
  """Returns the number of operands of cuDNN's call that XLA makes, or 0."""
  args = dots.parse(shlex.split(point.words))
  if point.form == "emit":
    compiled = dots.compile(args)
  else:
    try:
      compiled = _compile_by_hand(args)
    except jax.errors.JaxRuntimeError:  # XLA refuses it
      return 0
  lines = jax_private.optimized_hlo(compiled).splitlines()
  calls = [line for line in lines if f'"{CUDNN_CALL}"' in line]
  if len(calls) > 1:
    raise AssertionError(f"{point}: {len(calls)} calls")
  if not calls:
    return 0
  operands = calls[0].partition("custom-call(")[2].partition(")")[0]
  return len(operands.split(", "))


def _compile_by_hand(args: Any) -> jax.stages.Compiled:
  """Compiles a `__op$block_scaled_dot` of the unchanged operands."""
  arrays = dots.Dot(args).arguments
  shape = (*arrays["lhs"].shape[:-1], arrays["rhs"].shape[-2])
  result = jax.ShapeDtypeStruct(shape, args.out)
  config = None
  if args.lhs.scale is not None:
    block = {"block_size": BLOCK_SIZES[args.lhs.format.name]}
    config = json.dumps({"block_scaled_dot_backend_config": block})
  names = ("lhs", "rhs", "lhs_scale", "rhs_scale")
  operands = [arrays[name] for name in names if name in arrays]
  if "global_scale" in arrays:
    operands.append(jax.ShapeDtypeStruct((), args.out))
  call = jax.ffi.ffi_call(
    XLA_CALL,
    result,
    custom_call_api_version=1,
    legacy_backend_config=config,
  )
  return deviceless.compile(call, *operands, target=dots.target(args))


def disagreements(points) -> list[str]:
  """Returns a line for each point where XLA does not do what `choose` says."""
  found = []
  for point in points:
    ours, theirs = said(point), done(point)
    if ours != theirs:
      found.append(f"{point}: choose implies {ours} operands, XLA has {theirs}")
  return found


class AgreementTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    missing = tool.missing_compiler()
    if missing:
      self.skipTest(missing)

  @parameterized.parameters(*GRIDS)
  def test_choose_agrees_with_xla(self, grid):
    found = disagreements(GRIDS[grid])
    self.assertEmpty(found, "\n" + "\n".join(found))

  def test_cudnn_is_chosen_wherever_it_serves(self):
    for point in POINTS:
      problem = _problem(point)
      target = dots.target(dots.parse(shlex.split(point.words)))
      if problem is not None:
        chosen = backends.choose(problem, target).implementation
        self.assertEqual(
          chosen == cudnn.BACKEND.name, said(point) > 0, str(point)
        )

  def test_grid_has_every_answer(self):
    answers = {done(point) for point in GRIDS["gates"]}
    self.assertEqual(answers, {0, 4, 5})

  @parameterized.parameters(
    ("MIN_VERSION", (9, 9, 0), "--cudnn 9.9 "),
    ("MIN_VERSION", (9, 10, 1), "--cudnn 9.10 "),
    ("MIN_VERSION_GLOBAL_SCALE", (9, 12, 0), "--cudnn 9.12 "),
    ("MIN_VERSION_GLOBAL_SCALE", (9, 13, 1), "--cudnn 9.13 "),
    ("MIN_COMPUTE_CAPABILITY", (9, 0), "--target h200 "),
    ("MIN_COMPUTE_CAPABILITY", (10, 1), "--target b200 "),
  )
  def test_a_gate_moved_by_one_is_a_disagreement(self, gate, value, words):
    with mock.patch.object(cudnn, gate, value):
      found = disagreements(GRIDS["gates"])
    self.assertNotEmpty(found)
    self.assertIn(words, "\n".join(found))
    self.assertIn("call: --target", found[0])
