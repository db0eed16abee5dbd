# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random calls of the public API, checked against the numerical contract.

  python tools/fuzz.py                        a minute, from a fresh seed
  python tools/fuzz.py --seconds 3600         before a release
  python tools/fuzz.py --seed 7 --only dot --case 12    repeats one case

Results are compared with NumPy in f64. They must be equal if all products and
sums are exact, and otherwise within the contract's bound. The areas are:

  dot        formats, shapes, dimension numbers, storage; eager, jit, vmap and
             scan; the xla and cpu backends, each instruction set
  gradient   gradient with respect to the unquantized side of a dot
  quantize   all bits, under jit and vmap, along any axis
  sharding   a dot over a mesh of 8 devices, under random shardings
  target     a dot lowered for a named device that is not attached: the module
             calls the chosen backend
  module     a module with a block-scaled call: rewritten for the CPU and run;
             a second rewrite changes nothing; changed bytes raise typed errors

Each failure prints the command that repeats it. The status is then 1.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before JAX is imported
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import argparse
import contextlib
import functools
import itertools
import secrets
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxplugin as jp
from jaxplugin.core import formats, targets
from jaxplugin.runtime import cpu_library
from jaxplugin.stablehlo import modules
from jaxplugin.testing import contract, written_modules
from jaxplugin.testing.dot_suite import dot_cases
from jaxplugin.testing.oracles import (
  quantization_oracle as quantization_reference,
)

# Numbers of instruction sets in kernels/cpu/kernels.h; 0 chooses one.
_ISAS: Final = range(5)
_CASES_A_CACHE: Final = 50
_MOST_SHOWN: Final = 2000  # characters of one failure


def _check_dot(
  rng: np.random.Generator, run: Callable[..., Any], **options: Any
) -> None:
  """Makes a random call and checks the results of `run`."""
  _check_case(
    dot_cases.random_case(int(rng.integers(2**40))), rng, run, **options
  )


def _check_case(
  case: dot_cases.DotCase,
  rng: np.random.Generator,
  run: Callable[..., Any],
  **options: Any,
) -> None:
  """Checks the results of `run` for a given call."""
  integers = bool(rng.random() < 0.5)
  lhs = contract.make_operand(rng, case.lhs, integers=integers)
  rhs = contract.make_operand(rng, case.rhs, integers=integers)
  exact, magnitude = contract.dot(lhs.exact, rhs.exact, case.dimension_numbers)
  dtype = case.dtype
  if not integers and dtype == contract.F16:
    dtype = contract.BF16  # values may exceed the range of f16

  def call(lhs_arrays: Any, rhs_arrays: Any) -> Any:
    return jp.block_scaled_dot(
      lhs_arrays[0],
      rhs_arrays[0],
      lhs_arrays[1],
      rhs_arrays[1],
      dimension_numbers=case.dimension_numbers,
      block_size=case.block_size,
      preferred_element_type=dtype,
      **options,
    )

  results = run(call, (lhs.operand, lhs.scale), (rhs.operand, rhs.scale))
  for actual in results:
    try:
      if integers:
        contract.assert_exact(actual, exact, dtype)
      else:
        bound = contract.DOT_BOUND * magnitude
        contract.assert_within(actual, exact, bound, dtype)
    except AssertionError as error:
      raise AssertionError(f"{case} {options}: {error}") from None


def _stacked(arrays: Any) -> Any:
  return jax.tree.map(lambda x: jnp.stack([x, x]), arrays)


def _eager(call: Any, lhs: Any, rhs: Any) -> Any:
  return [call(lhs, rhs)]


def _jit(call: Any, lhs: Any, rhs: Any) -> Any:
  return [jax.jit(call)(lhs, rhs)]


def _vmap_both(call: Any, lhs: Any, rhs: Any) -> Any:
  return jax.jit(jax.vmap(call))(_stacked(lhs), _stacked(rhs))


def _vmap_lhs(call: Any, lhs: Any, rhs: Any) -> Any:
  return jax.jit(jax.vmap(call, in_axes=(0, None)))(_stacked(lhs), rhs)


def _vmap_rhs(call: Any, lhs: Any, rhs: Any) -> Any:
  return jax.jit(jax.vmap(call, in_axes=(None, 0)))(lhs, _stacked(rhs))


def _scan(call: Any, lhs: Any, rhs: Any) -> Any:
  def scanned(lhs: Any, many: Any) -> Any:
    return jax.lax.scan(lambda _, rhs: (None, call(lhs, rhs)), None, many)[1]

  return jax.jit(scanned)(lhs, _stacked(rhs))


_TRANSFORMATIONS: Final = (
  _eager,
  _jit,
  _vmap_both,
  _vmap_lhs,
  _vmap_rhs,
  _scan,
)


@functools.cache
def _available_isas() -> tuple[int, ...]:
  """Returns the instruction sets of this machine; () without C++ library."""

  def serves(isa: int) -> bool:
    x = jp.quantize(jnp.ones((1, 32)), jp.MXFP8)
    call = lambda x: jp.block_scaled_dot(x, x, implementation="cpu")
    try:
      with mock.patch.object(cpu_library, "BEST_ISA", isa):
        jax.jit(call)(x).block_until_ready()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
      return False
    return True

  return tuple(isa for isa in _ISAS if serves(isa))


def dot(rng: np.random.Generator) -> None:
  """Checks a dot of the xla, cpu or chosen backend."""
  isas = _available_isas()
  implementation = rng.choice([None, "xla", *(["cpu"] * 3 if isas else [])])
  run = _TRANSFORMATIONS[rng.integers(len(_TRANSFORMATIONS))]
  if implementation != "cpu":
    return _check_dot(rng, run, implementation=implementation)
  isa = int(rng.choice(isas))
  run = _jit if run is _eager else run  # eager calls are compiled once
  try:
    with mock.patch.object(cpu_library, "BEST_ISA", isa):
      return _check_dot(rng, run, implementation=implementation)
  except AssertionError as error:
    raise AssertionError(f"instruction set {isa}: {error}") from None


def gradient(rng: np.random.Generator) -> None:
  """Checks the gradient of sum(c * dot) for the unquantized side, in f32."""
  m, n, blocks = (int(x) for x in rng.integers(1, 10, 3))
  format = formats.FORMATS[rng.integers(len(formats.FORMATS))]
  k = blocks * format.block_size
  plain = rng.integers(-8, 9, (m, k)).astype(np.float32)
  cotangent = rng.integers(-8, 9, (m, n)).astype(np.float32)
  case = contract.OperandCase(
    format=format, dtype=format.values_dtype, shape=(n, k), axis=1
  )
  quantized = contract.make_operand(rng, case, integers=True)
  is_lhs = bool(rng.random() < 0.5)

  def loss(plain: Any, values: Any, scale: Any, cotangent: Any) -> Any:
    if is_lhs:
      y = jp.block_scaled_dot(plain, values, None, scale)
    else:
      y = jp.block_scaled_dot(values, plain, scale, None).T
    return jnp.sum(y * cotangent)

  actual = jax.jit(jax.grad(loss))(
    plain, quantized.operand, quantized.scale, cotangent
  )
  exact = cotangent.astype(np.float64) @ quantized.exact
  contract.assert_exact(actual, exact, contract.F32)


def quantize(rng: np.random.Generator) -> None:
  """Compares all bits of the codes and scales of `quantize`."""
  format = formats.FORMATS[rng.integers(len(formats.FORMATS))]
  rows, blocks = (int(x) for x in rng.integers(1, 8, 2))
  shape = (rows, blocks * format.block_size)
  # Values stay in the range of f16.
  x = rng.normal(size=shape) * np.exp2(rng.integers(-12, 12, (rows, 1)))
  x = x * (rng.random(shape) > 0.1)
  dtype = (jnp.float32, jnp.bfloat16, jnp.float16)[rng.integers(3)]
  x = x.astype(dtype)
  has_global = format.has_global_scale
  rounding = "up" if has_global else str(rng.choice(["up", "floor"]))
  wide = x.astype(np.float32)
  if has_global:
    expected = quantization_reference.reference_nvfp4(wide)
  else:
    expected = quantization_reference.reference_mx(wide, format, rounding)
  axis = int(rng.integers(2))
  options = {} if has_global else {"scale_rounding": rounding}
  call = lambda x: jp.dequantize(
    jp.quantize(x, format, axis=axis, **options), jnp.float32
  )
  actual = np.asarray(jax.jit(call)(jnp.asarray(x if axis else x.T)))
  codes, scale = expected[:2]
  values = codes.view(format.values_dtype).astype(np.float64)
  scale = scale.view(format.scale_dtype).astype(np.float64)
  exact = values * np.repeat(scale, format.block_size, 1)
  if has_global:
    exact = exact * np.float64(expected[2])
  # Dequantizing rounds once, or twice with a global scale.
  rounding_error = 2.0**-23 * np.abs(exact)
  contract.assert_within(
    actual if axis else actual.T, exact, rounding_error, contract.F32
  )


def sharding(rng: np.random.Generator) -> None:
  """Checks a dot of operands with random shardings over a mesh."""
  axes = ("x", "y")
  shape = (4, 2) if rng.random() < 0.5 else (2, 4)
  mesh = jax.make_mesh(
    shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
  )
  sizes = dict(zip(axes, shape, strict=True))

  def place(x: Any) -> Any:
    spec: list[Any] = [None] * x.ndim
    for axis in axes:
      fits = [d for d in range(x.ndim) if x.shape[d] % sizes[axis] == 0]
      if fits and rng.random() < 0.7:
        d = int(rng.choice(fits))
        spec[d] = axis if spec[d] is None else spec[d]
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.device_put(x, placed)

  def run(call: Any, lhs: Any, rhs: Any) -> Any:
    return [jax.jit(call)(*jax.tree.map(place, (lhs, rhs)))]

  implementation = rng.choice([None, "xla"])
  if rng.random() < 0.5:
    return _check_dot(rng, run, implementation=implementation)
  # Every mesh axis divides the sizes of values and scales, so k is often split.
  format = formats.FORMATS[rng.integers(len(formats.FORMATS))]
  m, n, blocks = (int(x) for x in 4 * rng.integers(1, 4, 3))
  operands = [
    contract.OperandCase(
      format=format,
      dtype=format.values_dtype,
      shape=(rows, blocks * format.block_size),
      axis=1,
    )
    for rows in (m, n)
  ]
  case = dot_cases.DotCase(
    lhs=operands[0],
    rhs=operands[1],
    dimension_numbers=None,
    block_size=None,
    dtype=contract.F32,
  )
  _check_case(case, rng, run, implementation=implementation)


def target(rng: np.random.Generator) -> None:
  """Checks that the chosen backend lowers the call, or refuses it."""
  name = str(rng.choice(targets.TARGET_NAMES))
  is_cuda = jp.named_target(name).platform == "cuda"
  cudnn = str(rng.choice(["9.9", "9.10", "9.12", "9.13"])) if is_cuda else None
  device = jp.named_target(name, cudnn=cudnn)
  case = dot_cases.random_case(int(rng.integers(2**40)))
  lhs = contract.make_operand(rng, case.lhs, integers=True)
  rhs = contract.make_operand(rng, case.rhs, integers=True)

  def call(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> Any:
    return jp.block_scaled_dot(
      lhs,
      rhs,
      lhs_scale,
      rhs_scale,
      dimension_numbers=case.dimension_numbers,
      block_size=case.block_size,
      preferred_element_type=case.dtype,
    )

  arguments = (lhs.operand, rhs.operand, lhs.scale, rhs.scale)
  explanation = jp.explain(call, *arguments, target=device)
  chosen = explanation[0].decision.implementation
  with jp.use_target(device):
    traced = jax.jit(call).trace(*arguments)
    text = traced.lower(lowering_platforms=(device.platform,)).as_text()
  for implementation, names in (
    ("cudnn", ("__op$block_scaled_dot", "__cudnn$blockScaledDot")),
    ("triton", ("triton_kernel_call",)),
  ):
    is_called = any(name in text for name in names)
    if is_called != (implementation == chosen):
      raise AssertionError(
        f"{case} on {device}: {chosen} is chosen, and the call of"
        f" {implementation} is {'' if is_called else 'not '}there"
      )


def module(rng: np.random.Generator) -> None:
  """Rewrites a module with one call twice, runs it, and damages its bytes."""
  format = formats.FORMATS[rng.integers(len(formats.FORMATS))]
  m, n, blocks = (int(x) for x in rng.integers(1, 10, 3))
  k = blocks * format.block_size
  made = [
    contract.make_operand(
      rng,
      contract.OperandCase(
        format=format, dtype=format.values_dtype, shape=(rows, k), axis=1
      ),
      integers=True,
    )
    for rows in (m, n)
  ]
  arrays = [made[0].operand, made[1].operand, made[0].scale, made[1].scale]
  result = written_modules.array((m, n), np.float32)
  text = written_modules.call_module("__op$block_scaled_dot", arrays, [result])
  here = jp.named_target("cpu")
  rewritten = jp.rewrite(text, here, strict=True)
  (actual,) = written_modules.run(rewritten, *arrays)
  exact, _ = contract.dot(made[0].exact, made[1].exact)
  contract.assert_exact(actual, exact, contract.F32)
  names = [n for n in targets.TARGET_NAMES if n not in ("mi300x", "mi355x")]
  device = jp.named_target(str(rng.choice(names)))
  once = jp.rewrite(text, device, strict=True)
  if jp.rewrite(once, device) != once:
    raise AssertionError(f"rewriting for {device} again changes:\n{once}")
  data = bytearray(modules.read(text, trusted=True).serialize("bytecode"))
  data[rng.integers(len(data))] = rng.integers(256)
  # The errors must be typed, and the process must not crash.
  with contextlib.suppress(TypeError, ValueError, NotImplementedError):
    jp.rewrite(bytes(data), here, strict=True)


AREAS: Final[dict[str, Callable[[np.random.Generator], None]]] = {
  "dot": dot,
  "gradient": gradient,
  "quantize": quantize,
  "sharding": sharding,
  "target": target,
  "module": module,
}


def run_case(area: str, seed: int, case: int) -> str:
  """Runs one case; returns its failure, or ""."""
  rng = np.random.default_rng([seed, zlib.crc32(area.encode()), case])
  try:
    AREAS[area](rng)
  except Exception as error:
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(last.filename)}:{last.lineno}"
    return f"{type(error).__name__} at {place}: {error}"
  return ""


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="fuzz.py",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--seconds", type=float, default=60.0, help="how long; default: 60"
  )
  parser.add_argument("--seed", type=int, help="default: a fresh one")
  parser.add_argument(
    "--only",
    action="append",
    choices=list(AREAS),
    help="an area; more than one may be given; default: all",
  )
  parser.add_argument("--case", type=int, help="run only this case of --only")
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns 1 if a case failed."""
  parser = _parser()
  args = parser.parse_args(argv)
  seed = secrets.randbelow(10**9) if args.seed is None else args.seed
  areas = args.only or list(AREAS)
  if args.case is not None and len(areas) != 1:
    parser.error("--case needs one --only")
  # Arrays of random codes have no global scale.
  warnings.filterwarnings("ignore", message="ScaledArray: .*without global")
  print(f"seed {seed}", flush=True)
  end = time.monotonic() + args.seconds
  counts = dict.fromkeys(areas, 0)
  failures = 0
  cases = itertools.count() if args.case is None else (args.case,)
  for case, area in ((case, area) for case in cases for area in areas):
    if args.case is None and time.monotonic() > end:
      break
    counts[area] += 1
    message = run_case(area, seed, case)
    if message:
      failures += 1
      print(
        f"FAILED: python tools/fuzz.py --seed {seed} --only {area} --case"
        f" {case}\n  {message[:_MOST_SHOWN]}",
        flush=True,
      )
    if case % _CASES_A_CACHE == 0:
      jax.clear_caches()  # programs of earlier cases are not used again
  cases = ", ".join(f"{count} of {area}" for area, count in counts.items())
  print(f"seed {seed}: {failures} failures in cases: {cases}")
  return 1 if failures else 0


if __name__ == "__main__":
  sys.exit(main())
