# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A block-scaled dot described on a command line.

Golden files describe a dot with these options:

  --target b200 --cudnn 9.12        the device; without --cudnn it has no cuDNN
  --lhs 128x512xnvfp4               shape and format, or a float dtype
  --rhs 256x512xnvfp4:swizzled      options of an operand after a colon, with
                                    commas between them: packed, swizzled,
                                    global, scale=AxB (the scale's padded shape)
  --dims mk,kn                      letters of the dimensions, default mk,nk or
                                    bmk,bnk: letters in both operands contract,
                                    except b, which is batch
  --out bfloat16 --global-scale scalar --bias --activation gelu --residual
  --precision highest --implementation xla
  --mesh 4 --lhs-shard m --rhs-shard n --out-shard n [--shard-map]
                                    a mesh with axis x (or x and y, 2x4), and
                                    the sharded letters: m, or m:x,k:y
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxplugin as jp
from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.core import formats, targets
from jaxplugin.dot import backends, problems
from jaxplugin.lab.compilation import deviceless

FLOATS: Final = tuple(dtype.name for dtype in formats.FLOAT_DTYPES)
FORMATS: Final = tuple(format.name for format in formats.FORMATS)
_BATCH: Final = "b"
_MESH_AXES: Final = ("x", "y")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
  """One operand.

  Attributes:
    shape: logical shape.
    format: block format; None for an unquantized operand.
    dtype: dtype of an unquantized operand.
    packed: whether FP4 values are stored two a byte along the last dimension.
    swizzled: whether the scale is in the 128x4 layout.
    has_global: whether the operand has a global scale.
    scale: shape of the padded scale; None if the scale is not padded.
  """

  shape: tuple[int, ...]
  format: formats.BlockFormat | None
  dtype: np.dtype
  packed: bool = False
  swizzled: bool = False
  has_global: bool = False
  scale: tuple[int, ...] | None = None


def sizes(text: str) -> tuple[int, ...]:
  """Parses "2x4" to (2, 4)."""
  if not re.fullmatch(r"\d+(x\d+)*", text):
    raise argparse.ArgumentTypeError(
      f"a shape must have the form 2x4, got {text!r}"
    )
  return tuple(map(int, text.split("x")))


def operand(text: str) -> Operand:
  """Parses an operand such as "128x512xnvfp4:swizzled"."""
  match = re.fullmatch(r"(\d+(?:x\d+)*)x([a-z]\w*)(?::([\w=,]+))?", text)
  if match is None or match[2] not in FORMATS + FLOATS:
    raise argparse.ArgumentTypeError(
      "an operand must have the form 128x512xnvfp4, with one of"
      f" {', '.join(FORMATS + FLOATS)}, got {text!r}"
    )
  changes: dict[str, Any] = {}
  for option in match[3].split(",") if match[3] else ():
    if option.startswith("scale="):
      changes["scale"] = sizes(option.removeprefix("scale="))
    elif option in ("packed", "swizzled"):
      changes[option] = True
    elif option == "global":
      changes["has_global"] = True
    else:
      raise argparse.ArgumentTypeError(
        f"{text!r}: options must be packed, swizzled, global or scale=AxB, got"
        f" {option!r}"
      )
  is_float = match[2] in FLOATS
  format = None if is_float else formats.by_name(match[2])
  if format is None and changes:
    raise argparse.ArgumentTypeError(f"{text!r}: floats must have no option")
  return Operand(
    shape=sizes(match[1]),
    format=format,
    dtype=jnp.dtype(match[2]) if format is None else format.values_dtype,
    **changes,
  )


def shards(text: str) -> dict[str, str]:
  """Parses "m" or "m:x,k:y" to the mesh axis of each letter."""
  pairs = [part.partition(":") for part in text.split(",")]
  if not all(re.fullmatch(r"[a-z]", letter) for letter, _, _ in pairs):
    raise argparse.ArgumentTypeError(
      f"a sharding must have the form m or m:x,k:y, got {text!r}"
    )
  return {letter: axis or _MESH_AXES[0] for letter, _, axis in pairs}


def add_target(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--target", required=True, choices=targets.TARGET_NAMES, metavar="NAME"
  )
  parser.add_argument("--cudnn", metavar="VERSION")


def add_dot(parser: argparse.ArgumentParser) -> None:
  """Adds the options that describe a dot."""
  for side in ("lhs", "rhs"):
    parser.add_argument(f"--{side}", type=operand, metavar="OPERAND")
  parser.add_argument("--dims", metavar="LETTERS,LETTERS")
  parser.add_argument("--out", choices=FLOATS, default="bfloat16")
  parser.add_argument("--global-scale", choices=("scalar", "array"))
  parser.add_argument("--bias", action="store_true")
  parser.add_argument("--activation", choices=problems.ACTIVATIONS)
  parser.add_argument("--residual", action="store_true")
  parser.add_argument("--precision", choices=("highest",))
  parser.add_argument("--implementation", choices=backends.NAMES)


def add_mesh(parser: argparse.ArgumentParser) -> None:
  """Adds the options for the mesh and the shardings of a dot."""
  parser.add_argument("--mesh", type=sizes)
  for name in ("lhs", "rhs", "out"):
    parser.add_argument(
      f"--{name}-shard", type=shards, default={}, metavar="LETTERS"
    )
  parser.add_argument("--shard-map", action="store_true")


def target(args: argparse.Namespace) -> targets.Target:
  return targets.named_target(args.target, cudnn=args.cudnn)


class Dot:
  """The dot that parsed arguments describe.

  Attributes:
    lhs_dims, rhs_dims, out_dims: a letter for each dimension.
    arguments: specs of the dot's arrays by name, without shardings.
  """

  def __init__(self, args: argparse.Namespace) -> None:
    if args.lhs is None or args.rhs is None:
      raise ValueError("--lhs and --rhs are needed")
    self._args = args
    lhs, rhs = args.lhs.shape, args.rhs.shape
    dims = args.dims or ("mk,nk" if len(lhs) == 2 else "bmk,bnk")
    self.lhs_dims, _, self.rhs_dims = dims.partition(",")
    if (len(self.lhs_dims), len(self.rhs_dims)) != (len(lhs), len(rhs)):
      raise ValueError(f"--dims {dims} must have a letter for each dimension")
    shared = [d for d in self.lhs_dims if d in self.rhs_dims]
    self._batch = [d for d in shared if d == _BATCH]
    self.contracting = [d for d in shared if d != _BATCH]
    self.out_dims = "".join(
      [
        *self._batch,
        *(d for d in self.lhs_dims if d not in shared),
        *(d for d in self.rhs_dims if d not in shared),
      ]
    )
    self.arguments = self._arguments()

  def _arguments(self) -> dict[str, Any]:
    args = self._args
    spec = jax.ShapeDtypeStruct
    lengths = dict(zip(self.lhs_dims, args.lhs.shape, strict=True))
    lengths |= dict(zip(self.rhs_dims, args.rhs.shape, strict=True))
    shape = tuple(lengths[d] for d in self.out_dims)
    global_shape = {"scalar": (), "array": (*shape[:-1], 1), None: None}
    global_shape = global_shape[args.global_scale]
    has_global = global_shape is not None
    lhs, lhs_scale, lhs_global = _specs(args.lhs, self._axis(self.lhs_dims))
    rhs, rhs_scale, rhs_global = _specs(args.rhs, self._axis(self.rhs_dims))
    found = {
      "lhs": lhs,
      "rhs": rhs,
      "lhs_scale": lhs_scale,
      "rhs_scale": rhs_scale,
      "lhs_global": lhs_global,
      "rhs_global": rhs_global,
      "global_scale": spec(global_shape, jnp.float32) if has_global else None,
      "bias": spec(shape[-1:], jnp.float32) if args.bias else None,
      "residual": spec(shape, jnp.dtype(args.out)) if args.residual else None,
    }
    return {name: x for name, x in found.items() if x is not None}

  def _axis(self, dims: str) -> int:
    """Returns the blocked dimension, which is the last contracting one."""
    return max(i for i, d in enumerate(dims) if d in self.contracting)

  def apply(self, *arrays: jax.Array) -> jax.Array:
    """Computes the dot of arrays that have the specs of `arguments`."""
    args = self._args
    given = dict(zip(self.arguments, arrays, strict=True))
    lhs, lhs_scale = _passed("lhs", args.lhs, given)
    rhs, rhs_scale = _passed("rhs", args.rhs, given)
    padded = [o for o in (args.lhs, args.rhs) if o.scale is not None]
    position = lambda dims, letters: tuple(dims.index(d) for d in letters)
    return jp.block_scaled_dot(
      lhs,
      rhs,
      lhs_scale,
      rhs_scale,
      given.get("global_scale"),
      dimension_numbers=(
        (
          position(self.lhs_dims, self.contracting),
          position(self.rhs_dims, self.contracting),
        ),
        (
          position(self.lhs_dims, self._batch),
          position(self.rhs_dims, self._batch),
        ),
      ),
      preferred_element_type=jnp.dtype(args.out),
      precision=args.precision,
      block_size=padded[0].format.block_size if padded else None,
      bias=given.get("bias"),
      activation=args.activation,
      residual=given.get("residual"),
      implementation=args.implementation,
    )

  def function(self) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    """Returns a function of the call's arrays, and their specs by name."""
    return _with_parameters(self.apply, self.arguments), self.arguments

  def sharded(
    self, mesh: jax.sharding.Mesh
  ) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    """Returns the function and specs over a mesh, or inside `shard_map`."""
    args = self._args
    function, specs = self.function()
    shard = {"lhs": args.lhs_shard, "rhs": args.rhs_shard}
    dims = {"lhs": self.lhs_dims, "rhs": self.rhs_dims}
    partitions = {}
    for name in specs:
      side = name.removesuffix("_scale")
      partitions[name] = _partition(dims.get(side, ""), shard.get(side))
    out = _partition(self.out_dims, args.out_shard)
    if args.shard_map:
      local = function
      reduced = [args.lhs_shard.get(d) for d in self.contracting]
      axes = tuple(axis for axis in reduced if axis is not None)
      mapped = jax.shard_map(
        lambda *arrays: lax.psum(local(*arrays), axes),
        mesh=mesh,
        in_specs=tuple(partitions.values()),
        out_specs=out,
      )
      function = _with_parameters(mapped, specs)
    elif args.out_shard:
      function = jax.jit(function, out_shardings=NamedSharding(mesh, out))
    specs = {
      name: jax.ShapeDtypeStruct(
        spec.shape,
        spec.dtype,
        sharding=NamedSharding(mesh, partitions[name]),
      )
      for name, spec in specs.items()
    }
    return function, specs


def _with_parameters(
  function: Callable[..., jax.Array], names: Iterable[str]
) -> Callable[..., jax.Array]:
  """Gives the parameters of `function` names, which HLO text contains."""

  def block_scaled_dot(*arrays):
    return function(*arrays)

  kind = inspect.Parameter.POSITIONAL_ONLY
  parameters = [inspect.Parameter(name, kind) for name in names]
  block_scaled_dot.__signature__ = inspect.Signature(parameters)
  return block_scaled_dot


def _partition(dims: str, shard: dict[str, str] | None) -> PartitionSpec:
  return PartitionSpec(*((shard or {}).get(d) for d in dims))


def _specs(operand: Operand, axis: int) -> tuple[Any, Any, Any]:
  """Returns specs of values, scale and global scale."""
  spec = jax.ShapeDtypeStruct
  if operand.format is None:
    return spec(operand.shape, operand.dtype), None, None
  format = operand.format
  shape = list(operand.shape)
  shape[axis] = -(-shape[axis] // format.block_size)
  scale = operand.scale or tuple(shape)
  if operand.swizzled:
    scale = layouts.swizzled_shape(scale)
  values, dtype = list(operand.shape), operand.dtype
  if operand.packed:
    values[axis] //= 2
    dtype = formats.PACKED
  return (
    spec(tuple(values), dtype),
    spec(scale, format.scale_dtype),
    spec((), jnp.float32) if operand.has_global else None,
  )


def _passed(
  side: str, operand: Operand, given: dict[str, Any]
) -> tuple[Any, Any]:
  """Returns the operand and the scale as arguments of `block_scaled_dot`."""
  values, scale = given[side], given.get(f"{side}_scale")
  if not (operand.swizzled or operand.has_global):
    return values, scale
  layout = layouts.SWIZZLED if operand.swizzled else layouts.LINEAR
  array = scaled_array.ScaledArray(
    values,
    scale,
    given.get(f"{side}_global"),
    operand.format,
    scale_layout=layout,
  )
  return array, None


def emit(args: argparse.Namespace) -> str:
  """Returns the StableHLO text that the primitive lowers to."""
  where = target(args)
  function, specs = Dot(args).function()
  with targets.use_target(where):
    traced = jax.jit(function).trace(*specs.values())
    lowered = traced.lower(lowering_platforms=(where.platform,))
  return lowered.as_text(debug_info=False)


def compile(args: argparse.Namespace) -> Any:
  """Compiles the dot with XLA's GPU compiler, without a GPU."""
  where = target(args)
  dot = Dot(args)
  if args.mesh is None:
    function, specs = dot.function()
    return deviceless.compile(function, *specs.values(), target=where)
  mesh = deviceless.mesh(where, args.mesh, _MESH_AXES[: len(args.mesh)])
  function, specs = dot.sharded(mesh)
  return deviceless.compile(function, *specs.values(), target=where, mesh=mesh)


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments of a dot, with its mesh."""
  parser = argparse.ArgumentParser()
  add_target(parser)
  add_dot(parser)
  add_mesh(parser)
  return parser.parse_args(argv)
