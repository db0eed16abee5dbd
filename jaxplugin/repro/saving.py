# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`save`: writes a program with block-scaled calls to a file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from jax.sharding import NamedSharding
from jaxlib.mlir import ir

from jaxplugin.core import decisions, error_context, targets
from jaxplugin.exports import api as exports
from jaxplugin.jaxext import program
from jaxplugin.operation import alternatives, failures, repro_files
from jaxplugin.quantization import backends as quantization_backends
from jaxplugin.repro import tapping
from jaxplugin.runtime import lowering
from jaxplugin.stablehlo import modules


def save(
  path: str | os.PathLike[str],
  fn: Callable[..., Any],
  *args: Any,
  data: bool = False,
  names: bool = False,
  target: targets.Target | None = None,
  **kwargs: Any,
) -> None:
  """Writes a file that reproduces the block-scaled calls of `fn(*args)`.

  `python -m jaxplugin repro PATH` and `replay` compare each call with f64. The
  function is traced and exported, but not run.

  The file has the program twice, as StableHLO: with its kernels, and by XLA's
  operations. It also has shapes, dtypes, shardings, decisions, the target,
  versions and the digest of tuning tables. Instead of the arrays it has their
  statistics: minimum, maximum, mean, standard deviation, and counts of zeros,
  NaN, Inf and exponents. Arrays that `fn` closes over count as arguments.
  Names of mesh axes and numbers in the code are part of the program.

  docs/how_to/report_a_wrong_result.md is the guide.

  Args:
    path: file to write. An existing file is replaced.
    fn: a function, jitted or not.
    *args, **kwargs: its arguments: trees of arrays or `jax.ShapeDtypeStruct`s.
      A donated array counts as its type. Other leaves are passed unchanged.
    data: whether the arrays themselves are saved.
    names: whether source lines, scopes, and names of functions and arguments
      are saved.
    target: the device to decide for; by default the attached one.

  Raises:
    TypeError: If an argument has a wrong type.
    ValueError: If `fn` has no block-scaled call, or `data` needs an array.
    NotImplementedError: If `fn` has effects (it calls Python when it runs, or
      writes to a `jax.Ref`), has a call that is not found, or cannot be
      exported.
    OSError: If the file cannot be written.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w = jp.quantize(jnp.ones((32, 64)), "mxfp8")
    >>> jp.repro.save("dot.zip", jp.linear, jnp.ones((2, 64)), w)
    >>> print(jp.repro.replay("dot.zip").first_wrong)
    None
  """
  error_context.require_path("save", "path", path)
  error_context.require_function("save", fn)
  error_context.require_bool("save", "data", data)
  error_context.require_bool("save", "names", names)
  chosen: Any = contextlib.nullcontext()
  if target is not None:
    targets.require("save", target, "a jp.Target or None")
    chosen = targets.use_target(target)
  with chosen:
    repro = _repro(fn, args, kwargs, data=data, names=names, target=target)
  repro_files.write(pathlib.Path(path), repro)


def write_failure(reason: str, fn: Callable[..., Any], *args: Any) -> str:
  """Writes a program with a wrong result to the folder of failures.

  Returns:
    A line for an error's message, "" if failures are not written.
  """
  if not failures.is_on():
    return ""
  repro = _repro(fn, args, {}, data=False, names=False, target=None)
  repro = dataclasses.replace(repro, reason=reason)
  return failures.write_file(reason, repro.calls, lambda: repro)


def _repro(
  fn: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  *,
  data: bool,
  names: bool,
  target: targets.Target | None,
) -> repro_files.Repro:
  closed, arrays, paths = _traced(fn, args, kwargs)
  if closed.effects:
    raise NotImplementedError(
      "save: fn must not have effects, such as calls of Python when it runs,"
      f" got {', '.join(sorted(map(_name_of_type, closed.effects)))}. Remove"
      " jax.debug.print, callbacks, jp.debug_checks and references"
    )
  if data and not all(hasattr(x, "__array__") for x in arrays):
    raise ValueError(
      "save: data=True needs arrays as arguments, got a ShapeDtypeStruct or a"
      " donated array. Pass the arrays, or leave data out"
    )
  jaxpr = closed.jaxpr
  constants = tapping.constants(closed)

  def evaluated(flat: Sequence[Any], *, is_reference: bool) -> Any:
    given = {
      id(old): _as_given(x, old)
      for x, old in zip(flat, constants, strict=False)
    }
    evaluation = tapping.Evaluation(
      constants=given, is_reference=is_reference, target=target
    )
    return evaluation.run(closed, flat[len(constants) :])

  def as_written(*flat: Any) -> Any:
    return evaluated(flat, is_reference=False)[0]

  taps: list[tapping.Tap] = []

  def by_xla(*flat: Any) -> Any:
    results, found = evaluated(flat, is_reference=True)
    taps[:] = [tap.typed() for tap in found]
    return results, [tap.operands for tap in found]

  arrays = [*map(_data_of_key, constants), *arrays]
  paths = [*("constant",) * len(constants), *paths]
  types = [
    jax.ShapeDtypeStruct(
      x.shape,
      jax.dtypes.canonicalize_dtype(x.dtype),
      sharding=_sharding(x),
    )
    for x in arrays
  ]
  plain = types
  if not tapping.is_for_a_mesh(jaxpr):
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]
  exported = [
    exports.export(as_written, target=target)(*types),
    jax.export.export(jax.jit(by_xla), platforms=["cpu"])(*plain),
  ]
  if not taps:
    raise ValueError(
      "save: fn must have a block-scaled call, got none. Save a function that"
      " calls jp.quantize, jp.block_scaled_dot or another function of jaxplugin"
    )
  if not names:
    exported = list(map(_without_names, exported))
  program, reference = (bytes(x.serialize()) for x in exported)
  return repro_files.Repro(
    inputs=tuple(
      repro_files.input_of(
        x,
        sharding=_sharding_text(x),
        name=path if names else "",
      )
      for x, path in zip(arrays, paths, strict=True)
    ),
    calls=_records(jaxpr, taps, names=names, target=target),
    data=tuple(map(np.asarray, arrays)) if data else None,
    program=program,
    reference=reference,
    environment=repro_files.environment(target),
  )


def _name_of_type(x: Any) -> str:
  return type(x).__name__


def _traced(
  fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], list[str]]:
  """Returns the jaxpr, and its arguments with their paths."""
  found, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
  leaves = [_live(x) for _, x in found]
  places = [i for i, x in enumerate(leaves) if _is_array(x)]
  arrays = [_data_of_key(leaves[i]) for i in places]

  def flat(*values: Any) -> list[Any]:
    given = list(leaves)
    for i, x in zip(places, values, strict=True):
      given[i] = _as_given(x, leaves[i])
    args, kwargs = jax.tree.unflatten(tree, given)
    return [
      _data_of_key(x)
      for x in jax.tree.leaves(fn(*args, **kwargs))
      if _is_array(x)
    ]

  closed = jax.make_jaxpr(flat)(*arrays)
  types: list[Any] = closed.in_avals
  arrays = [
    x
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
    else np.asarray(x, aval.dtype)
    for aval, x in zip(types, arrays, strict=True)
  ]
  paths = [jax.tree_util.keystr(found[i][0]) for i in places]
  return closed, arrays, paths


def _live(x: Any) -> Any:
  """Returns the type of an array that was donated, or `x` itself."""
  if isinstance(x, jax.Array) and x.is_deleted():
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  return x


def _data_of_key(x: Any) -> Any:
  """Returns the data of a random key, or the array itself."""
  if not _is_key(x):
    return x
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.eval_shape(jax.random.key_data, x)
  return jax.random.key_data(x)


def _as_given(x: Any, given: Any) -> Any:
  """Undoes `_data_of_key` of `given`."""
  if not _is_key(given):
    return x
  kinds: list[Any] = []
  jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), given)
  return jax.random.wrap_key_data(x, impl=kinds[0])


def _is_array(x: Any) -> bool:
  return hasattr(x, "dtype")  # a Python number may be a static argument


def _is_key(x: Any) -> bool:
  dtype = getattr(x, "dtype", None)
  return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _sharding(x: Any) -> NamedSharding | None:
  sharding = getattr(x, "sharding", None)
  return sharding if isinstance(sharding, NamedSharding) else None


def _sharding_text(x: Any) -> str:
  sharding = _sharding(x)
  if sharding is None:
    return ""
  return f"{tuple(sharding.spec)} of {dict(sharding.mesh.shape)}"


def _records(
  jaxpr: Any,
  taps: Sequence[tapping.Tap],
  *,
  names: bool,
  target: targets.Target | None,
) -> tuple[repro_files.CallRecord, ...]:
  places = {id(x.eqn): x for x in program.operations(jaxpr)} if names else {}
  records, start = [], 0
  for tap in taps:
    description, decided = _decided(tap, target)
    place = places.get(id(tap.eqn))
    end = start + len(tap.operands)
    records.append(
      repro_files.record(
        tap.operation,
        tap.form,
        range(start, end),
        decided,
        description=description,
        loops=tap.loops,
        is_layer=tap.is_layer,
        name="" if place is None else f"{place.source} {place.layer}".strip(),
      )
    )
    start = end
  return tuple(records)


def _decided(
  tap: tapping.Tap, target: targets.Target | None
) -> tuple[str, Sequence[decisions.Decision]]:
  """Returns the problem of a call in words, and the decisions about it."""
  target = targets.resolved(tap.eqn.params["target"], target)
  form = tap.form
  if not hasattr(form, "filled"):
    module = lowering.Module(platforms=(target.platform,))
    overlay = tap.eqn.params["overlay"]
    found = quantization_backends.explained(form, module, target, overlay)
    return str(form), found.decisions
  types = [
    jax.ShapeDtypeStruct(x.shape[dims:], x.dtype)
    for x, dims in zip(tap.operands, tap.loops, strict=True)
  ]
  call: Any = form.filled(types)
  problem = call.problem()
  is_fused = isinstance(form, alternatives.FusedCall)
  description = f"{problem} with offset" if is_fused else str(problem)
  try:
    return description, [tapping.chosen(call, target)]
  except NotImplementedError:  # the program has XLA's operations
    return description, []


def _without_names(exported: jax.export.Exported) -> jax.export.Exported:
  """Returns the program without source lines, scopes and function names."""
  source = modules.read(exported)
  text = source.module.operation.get_asm(enable_debug_info=False)
  functions = re.findall(r"func\.func private @([\w.$-]+|\"[^\"]*\")", text)
  new = {name: f"f{i}" for i, name in enumerate(dict.fromkeys(functions))}
  text = re.sub(
    r"@([\w.$-]+|\"[^\"]*\")",
    lambda match: f"@{new.get(match[1], match[1])}",
    text,
  )
  text = re.sub(r"^module @[\w.$-]+", "module @program", text, flags=re.M)
  with source.module.context:
    source.module = ir.Module.parse(text)
  return dataclasses.replace(source.write(), fun_name="program")
