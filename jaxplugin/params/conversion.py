# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_params`: quantizes the weights of a whole tree once."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin import quantization
from jaxplugin.arrays import leaves as leaves_lib
from jaxplugin.arrays import placement, quantized_weight
from jaxplugin.core import error_context, formats, parameter_names
from jaxplugin.jaxext.tracing import binding_private, interception_private
from jaxplugin.params import recognition
from jaxplugin.printing import console
from jaxplugin.rewriting import acceptor as acceptor_lib
from jaxplugin.rewriting import facts, weights

WHO: Final = "quantize_params"
# 64 x 64. Smaller arrays have few bytes to save.
MIN_SIZE: Final = 4096

_FLOATS: Final = frozenset((*formats.FLOAT_DTYPES, np.dtype(np.float64)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Parameter:
  """One array of a tree, as `where` of `quantize_params` receives it.

  Attributes:
    path: its name, "params/block_0/mlp/kernel".
    array: the array, or its shape and dtype.
    contracting: contracting dimensions of its matmul; None if not known.
    reason: why the default leaves it unquantized; "" if it does not.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> found = []
    >>> params = {"dense": {"kernel": jnp.ones((64, 128))}}
    >>> params_q, report = jp.quantize_params(
    ...   params, "mxfp8", where=lambda p: found.append(p) or p.is_default)
    >>> print(found[0].path, found[0].shape, found[0].contracting)
    dense/kernel (64, 128) (0,)
  """

  path: str
  array: Any
  contracting: tuple[int, ...] | None
  reason: str

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of `array`."""
    return tuple(self.array.shape)

  @property
  def dtype(self) -> np.dtype:
    """The dtype of `array`."""
    return np.dtype(self.array.dtype)

  @property
  def is_default(self) -> bool:
    """Whether the default quantizes it."""
    return not self.reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayReport:
  """One array of a tree.

  Attributes:
    path: its name.
    shape: its shape in the model, whatever order it is stored in.
    dtype: name of its element type before quantization.
    format: its format; None if it stays unquantized.
    contracting: contracting dimensions of its matmul; empty if it stays
      unquantized.
    reason: why it stays unquantized; "" if it does not.
    bytes_before, bytes_after: size of the array.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
  format: formats.BlockFormat | None
  contracting: tuple[int, ...]
  reason: str
  bytes_before: int
  bytes_after: int


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
  """A report of all arrays of a tree, in its order; `print` shows a table.

  Attributes:
    entries: one for each array, with its path, shape, format, reason and bytes.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> dense = {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(128)}
    >>> params_q, report = jp.quantize_params({"dense": dense}, "mxfp8")
    >>> print(report.bytes_before, report.bytes_after)
    33280 8960
    >>> [entry.path for entry in report.quantized]
    ['dense/kernel']
  """

  entries: tuple[ArrayReport, ...]

  @property
  def quantized(self) -> tuple[ArrayReport, ...]:
    """The entries of quantized arrays."""
    return tuple(e for e in self.entries if e.format is not None)

  @property
  def left(self) -> tuple[ArrayReport, ...]:
    """The entries of arrays that stay unquantized."""
    return tuple(e for e in self.entries if e.format is None)

  @property
  def bytes_before(self) -> int:
    """The bytes of all arrays before quantization."""
    return sum(entry.bytes_before for entry in self.entries)

  @property
  def bytes_after(self) -> int:
    """The bytes of all arrays after quantization."""
    return sum(entry.bytes_after for entry in self.entries)

  def __str__(self) -> str:
    """Returns the table."""
    count = len(self.quantized)
    lines = [
      f"{count} of {len(self.entries)} arrays quantized:"
      f" {console.size(self.bytes_before)} before,"
      f" {console.size(self.bytes_after)} after"
    ]
    for name, entries in (("quantized", self.quantized), ("left", self.left)):
      if entries:
        lines += ["", f"{name}:", *_table(entries)]
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Choice:
  """How to quantize an array; it stays unquantized if there is a reason."""

  format: formats.BlockFormat
  dims: recognition.WeightDims | None = None
  reason: str = ""


def quantize_params(
  params: Any,
  format: formats.BlockFormat | str,
  *,
  where: Callable[[Parameter], Any] | None = None,
  call: Callable[[Any], Any] | None = None,
  min_size: int = MIN_SIZE,
) -> tuple[Any, QuantizationReport]:
  """Returns a tree with the weights of matmuls quantized, and a report.

  Blocks lie along the contracting dimensions. Names and shapes of flax,
  equinox, haiku and checkpoints determine these, or `call` does. Values are
  those of `jp.quantize`, with one global scale for each layer or expert.
  docs/how_to/quantize_model.md has the rules.

  By default these arrays stay unquantized, and the report has each reason:

  * embeddings, norms, biases, convolutions, routers, last layers and adapters,
    by their names;
  * arrays of rank 0 or 1, or with fewer than min_size values;
  * contracting sizes that are not multiples of the block size, or not known.

  Args:
    params: a tree of arrays, or of shapes and dtypes (`jax.eval_shape`): linen,
      `nnx.state(model)`, equinox, dicts, lists. Sharded arrays stay sharded.
    format: such as `jp.NVFP4` or "mxfp8".
    where: None, or a function of a `Parameter`. It returns True, False, a
      format, or the contracting axis (an int or a tuple). Dimensions before it
      are layers. `p.is_default` is the default answer.
    call: None, or a function of `params`. It is traced, not run, and its
      matmuls determine the contracting dimensions.
    min_size: least number of values that is quantized by default.

  Returns:
    The tree and a `QuantizationReport`. A weight (..., n, k) whose matmul
    contracts k becomes a `ScaledArray`, any other one a `QuantizedWeight`.

  Raises:
    TypeError: If an argument, or the result of `where`, has a wrong type.
    ValueError: If a format is unknown, or an array does not fit the answer of
      `where`.

  Warns:
    jp.NotQuantizedWarning: If nothing is quantized.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> dense = {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(128)}
    >>> params_q, report = jp.quantize_params({"dense": dense}, "nvfp4")
    >>> print(report)
    1 of 2 arrays quantized: 33.3 kB before, 5.1 kB after
    <BLANKLINE>
    quantized:
      dense/kernel    float32[64, 128]  nvfp4, contracts dimension 0
    <BLANKLINE>
    left:
      dense/bias    float32[128]  it has rank 1, as biases and norms have
  """
  format = formats.resolve(WHO, format)
  if where is not None and not callable(where):
    raise TypeError(
      f"{WHO}: where must be a function that takes a parameter, or None, got"
      f" {error_context.shown(where)}"
    )
  if call is not None and not callable(call):
    raise TypeError(
      f"{WHO}: call must be a function that takes the parameters, or None, got"
      f" {error_context.shown(call)}"
    )
  if not error_context.is_integer(min_size) or min_size < 0:
    raise TypeError(
      f"{WHO}: min_size must be a number of values, 0 or more, got"
      f" {error_context.shown(min_size)}"
    )
  leaves, structure = leaves_lib.of(params)
  contraction = recognition.Tree(leaves).contraction
  if call is not None:
    seen = uses(leaves, structure, _is_floats, call)
    contraction = lambda leaf: seen[leaf.path].contraction()
  # By identity, because a model may use an array under two names.
  tied = {
    id(leaf.array): leaf.path
    for leaf in leaves
    if parameter_names.reason_to_leave(leaf.path)
  }
  results, entries = [], []
  for leaf in leaves:
    choice = _choice(leaf, contraction, format, min_size, tied)
    if where is not None and _is_floats(leaf.array):
      choice = _decided(where, leaf, choice)
    result = leaf.array
    if not choice.reason:
      result, reason = _quantized(leaf.array, choice)
      choice = dataclasses.replace(choice, reason=reason)
    results.append(result)
    if hasattr(leaf.array, "shape"):
      entries.append(_entry(leaf, result, choice))
  report = QuantizationReport(tuple(entries))
  if not report.quantized:
    warnings.warn(
      f"{WHO}: none of {len(entries)} arrays was quantized; print(report)"
      " shows the reasons",
      error_context.NotQuantizedWarning,
      stacklevel=2,
    )
  return jax.tree.unflatten(structure, results), report


def _is_floats(x: Any) -> bool:
  dtype = getattr(x, "dtype", None)
  if leaves_lib.is_quantized(x) or not hasattr(x, "shape"):
    return False
  return dtype in _FLOATS


def _choice(
  leaf: leaves_lib.Leaf,
  contraction: Callable[[leaves_lib.Leaf], recognition.WeightDims],
  format: formats.BlockFormat,
  min_size: int,
  tied: dict[int, str],
) -> _Choice:
  """Returns the default choice."""

  def left(reason: str, dims: Any = None) -> _Choice:
    return _Choice(format=format, reason=reason, dims=dims)

  if leaves_lib.is_quantized(leaf.array):
    return left("it is quantized already")
  if not _is_floats(leaf.array):
    return left("it is not an array of floats")
  rank = len(leaf.shape)
  if rank < 2:
    return left(f"it has rank {rank}, as biases and norms have")
  reason = parameter_names.reason_to_leave(leaf.path)
  if not reason and id(leaf.array) in tied:
    reason = (
      f"it is the same array as {tied[id(leaf.array)]}, which is not quantized"
    )
  try:
    dims = contraction(leaf)
  except recognition.NotKnown as error:
    return left(reason or str(error))
  if reason:
    return left(reason, dims)
  k = math.prod(leaf.shape[d] for d in dims.contracting)
  if k == 0 or not format.fits(k):
    return left(_indivisible(k, format), dims)
  size = math.prod(leaf.shape)
  if size < min_size:
    return left(f"it has {size} values, fewer than min_size={min_size}", dims)
  return _Choice(format=format, dims=dims)


def _indivisible(k: int, format: formats.BlockFormat) -> str:
  return (
    f"the contracting size, {k}, is not a multiple of {format}'s block size,"
    f" {format.block_size}"
  )


def _decided(
  where: Callable[[Parameter], Any], leaf: leaves_lib.Leaf, choice: _Choice
) -> _Choice:
  """Returns the choice of `where`."""
  answer = where(
    Parameter(
      path=leaf.path,
      array=leaf.array,
      contracting=(choice.dims and choice.dims.contracting) or None,
      reason=choice.reason,
    )
  )
  if isinstance(answer, (bool, np.bool_)):
    if not answer:
      reason = choice.reason or "where returned False"
      return dataclasses.replace(choice, reason=reason)
    changes: dict[str, Any] = {}
  elif isinstance(answer, (str, formats.BlockFormat)):
    what = f"the result of where for {_name(leaf)}"
    changes = {"format": formats.resolve(WHO, answer, what)}
  elif isinstance(answer, (int, np.integer, tuple)):
    changes = {"dims": _axes(answer, leaf)}
  else:
    raise TypeError(
      f"{WHO}: where must return True, False, an axis, a tuple of axes or a"
      f" format, got {error_context.shown(answer)} for {_name(leaf)}"
    )
  why = choice.reason.partition(";")[0]
  why = f" ({why})" if why else ""
  choice = dataclasses.replace(choice, **changes, reason="")
  if choice.dims is None or not choice.dims.contracting:
    raise ValueError(
      f"{WHO}: where must return the contracting axis of {_name(leaf)} of"
      f" shape {leaf.shape}, got {error_context.shown(answer)}{why}; return the"
      " axis, or False to leave it unquantized, or pass call="
    )
  k = math.prod(leaf.shape[d] for d in choice.dims.contracting)
  if k == 0 or not choice.format.fits(k):
    raise ValueError(
      f"{WHO}: where must return False for {_name(leaf)} of shape {leaf.shape},"
      f" because {_indivisible(k, choice.format)}; return False, or pad the"
      " array"
    )
  return choice


def _name(leaf: leaves_lib.Leaf) -> str:
  return leaf.path or "the array"


def _axes(answer: Any, leaf: leaves_lib.Leaf) -> recognition.WeightDims:
  rank = len(leaf.shape)
  given = answer if isinstance(answer, tuple) else (answer,)
  try:
    indices = [error_context.as_integer(a) for a in given]
  except TypeError:
    raise TypeError(
      f"{WHO}: where must return integers as axes of {_name(leaf)}, got"
      f" {error_context.shown(answer)}; return an axis or a tuple of axes"
    ) from None
  axes = [a + rank if a < 0 else a for a in indices]
  in_range = rank >= 2 and all(0 <= a < rank for a in axes)
  if not axes or not in_range or len(set(axes)) == rank:
    raise ValueError(
      f"{WHO}: where must return axes of {_name(leaf)} of shape {leaf.shape},"
      f" from {-rank} to {rank - 1} and not all of them, got"
      f" {error_context.shown(answer)}; return False to leave it unquantized"
    )
  contracting = tuple(sorted(set(axes)))
  lead = min(contracting[0], max(rank - 1 - len(contracting), 0))
  return recognition.WeightDims(lead=lead, contracting=contracting)


def _quantized(x: Any, choice: _Choice) -> tuple[Any, str]:
  """Returns the quantized array, or the array itself and a reason."""
  # A matrix of a stack has a noncontracting dimension.
  assert choice.dims is not None
  lead = choice.dims.lead
  kernel_shape = tuple(x.shape[lead:])
  contracting = tuple(d - lead for d in choice.dims.contracting)
  free = [d for d in range(len(kernel_shape)) if d not in contracting]
  order = (*range(lead), *(lead + d for d in (*free, *contracting)))
  sizes = (
    math.prod(kernel_shape[d] for d in free),
    math.prod(kernel_shape[d] for d in contracting),
  )
  dtype = jnp.float32 if x.dtype == np.float64 else x.dtype

  def quantize(x: jax.Array) -> Any:
    if order != tuple(range(x.ndim)):
      x = jnp.transpose(x, order)
    array = quantization.quantize(
      x.reshape(*x.shape[:lead], *sizes), choice.format, batch_dims=lead
    )
    if contracting == (1,) and len(kernel_shape) == 2:
      return array
    return quantized_weight.QuantizedWeight(
      array, kernel_shape, contracting, dtype
    )

  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.eval_shape(quantize, x), ""
  sharding = getattr(x, "sharding", None)
  is_traced = isinstance(x, jax.core.Tracer)
  if is_traced or sharding is None or len(sharding.device_set) == 1:
    return quantize(jnp.asarray(x)), ""
  like = jax.eval_shape(quantize, x)
  try:
    shardings = placement.shardings(like, sharding)
  except (TypeError, NotImplementedError) as error:
    return x, f"its sharding would cut blocks: {error}"
  return jax.jit(quantize, out_shardings=shardings)(x), ""


def _entry(leaf: leaves_lib.Leaf, result: Any, choice: _Choice) -> ArrayReport:
  dims = None if choice.reason else choice.dims
  array = leaf.array
  return ArrayReport(
    path=leaf.path,
    shape=leaf.shape,
    dtype=str(array.dtype),
    format=choice.format if dims else None,
    contracting=dims.contracting if dims else (),
    reason=choice.reason,
    bytes_before=_nbytes(array),
    bytes_after=_nbytes(result),
  )


def _nbytes(x: Any) -> int:
  if leaves_lib.is_quantized(x):
    return x.nbytes
  # The dtype of a random key has no itemsize.
  return math.prod(x.shape) * getattr(x.dtype, "itemsize", 0)


def _table(entries: Sequence[ArrayReport]) -> list[str]:
  """Returns a line for each entry, merged over numbers of layers."""
  groups: dict[tuple[str, ...], list[str]] = {}
  for entry in entries:
    what = entry.reason
    if entry.format is not None:
      what = f"{entry.format}, contracts {_dims(entry.contracting)}"
    path = re.sub(r"\d+", "*", entry.path)
    shape = f"{entry.dtype}{list(entry.shape)}"
    groups.setdefault((path, shape, what), []).append(entry.path)
  rows = [
    (path, f"x {len(paths)}", shape, what)
    if len(paths) > 1
    else (paths[0], "", shape, what)
    for (path, shape, what), paths in groups.items()
  ]
  widths = [max(len(row[i]) for row in rows) for i in range(3)]
  return [
    "  "
    + "  ".join(
      text.ljust(width) for text, width in zip(row, widths, strict=False)
    )
    + f"  {row[3]}"
    for row in rows
  ]


def _dims(contracting: Sequence[int]) -> str:
  word = "dimension" if len(contracting) == 1 else "dimensions"
  return f"{word} {', '.join(map(str, contracting))}"


_Role = Literal["layers", "contracted", "kept"]


@dataclasses.dataclass(kw_only=True)
class Uses:
  """Uses of one parameter.

  Attributes:
    roles: roles of its dimensions in each matmul.
    others: its other uses, each an operation and a reason.
  """

  roles: set[tuple[_Role, ...]] = dataclasses.field(default_factory=set)
  others: list[str] = dataclasses.field(default_factory=list)

  def contraction(self) -> recognition.WeightDims:
    """Returns the dimensions that all matmuls contract.

    Raises:
      recognition.NotKnown: If no matmul uses the parameter, matmuls contract
        different dimensions, or other operations use it.
    """
    if self.others:
      raise recognition.NotKnown(f"call also uses it in {self.others[0]}")
    if len(self.roles) != 1:
      what = "contract different dimensions" if self.roles else "do not use it"
      raise recognition.NotKnown(f"the matmuls of call {what}")
    (roles,) = self.roles
    lead = next(
      (d for d, role in enumerate(roles) if role != "layers"), len(roles)
    )
    if "layers" in roles[lead:]:
      raise recognition.NotKnown(
        f"its dimension {roles.index('layers', lead)} counts layers or"
        " experts, and is not a leading one; store the array with that"
        " dimension first"
      )
    contracting = (d for d, role in enumerate(roles) if role == "contracted")
    return recognition.WeightDims(lead=lead, contracting=tuple(contracting))


def uses(
  leaves: Sequence[leaves_lib.Leaf],
  structure: Any,
  is_parameter: Callable[[Any], bool],
  call: Callable[[Any], Any],
) -> Mapping[str, Uses]:
  """Returns the uses of the parameters of a tree, by path.

  The function of the tree is traced, not run.
  """
  found = {leaf.path: Uses() for leaf in leaves if is_parameter(leaf.array)}

  def run(values: dict[str, jax.Array]) -> None:
    observer = _Observer(found)
    for path, value in values.items():
      observer.observe(path, value)
    tree = jax.tree.unflatten(
      structure, [values.get(leaf.path, leaf.array) for leaf in leaves]
    )
    interception_private.intercept(call, lambda _: observer)(tree)

  jax.eval_shape(
    run,
    {
      leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.array.dtype)
      for leaf in leaves
      if leaf.path in found
    },
  )
  return found


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("array", "layers"),
  meta_fields=("path", "is_part", "is_rows", "is_shard"),
)
class _Parameter(weights.Weight):
  """A weight that is not quantized."""

  def taken(self, dim: int, index: Any) -> _Parameter:
    raise facts.NotSupported("only a part of it is used")

  def gathered(self, dim: int, params: Mapping[str, Any]) -> _Parameter:
    array = lax.all_gather(
      self.selected(), params["axis_name"], axis=dim, tiled=True
    )
    return dataclasses.replace(self, array=array, layers=())

  def dequantized(self, dtype: Any) -> Any:
    return self.selected()


class _Observer(acceptor_lib.Acceptor):
  """An acceptor that replaces nothing, and records uses of parameters."""

  def __init__(self, found: Mapping[str, Uses]):
    super().__init__(
      acceptor_lib.AcceptOptions(activations=None, implementation=None)
    )
    self._found = found

  def observe(self, path: str, value: jax.Array) -> None:
    weight = _Parameter(path=path, array=value)  # type: ignore[arg-type]
    self._weights.put(value, weight)

  def _child(self, scopes: list[str]) -> _Observer:
    return _Observer(self._found)

  def warn(self, name: str, args: Sequence[Any], reason: str) -> None:
    for path in (path for x in args for path in self._names(x)):
      self._found[path].others.append(f"{name}: {reason}")

  def _dot(self, operation: binding_private.BoundOperation) -> None:
    contracting, batch = operation.params["dimension_numbers"]
    for i, x in enumerate(operation.args):
      self._note_product(operation.name, x, contracting[i], batch[i])

  def _ragged_dot(self, operation: binding_private.BoundOperation) -> None:
    numbers = operation.params["ragged_dot_dimension_numbers"]
    contracting, batch = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    name, (lhs, rhs, *_) = operation.name, operation.args
    self._note_product(name, lhs, contracting[0], batch[0])
    self._note_product(name, rhs, contracting[1], (*batch[1], *groups))

  def _note_product(
    self,
    name: str,
    x: Any,
    contracting: Sequence[int],
    batch: Sequence[int],
  ) -> None:
    """Records the roles of a parameter's dimensions, if x is a view of one."""
    if not self._names(x):
      return
    view = self.view(x)
    if view is None or not view.has_all_once():
      self.warn(name, [x], "only a part of it is used, or it is scaled first")
      return
    of = lambda dims: {atom for d in dims for atom in view.dims[d]}
    contracted, layers = of(contracting), of(batch)
    roles: list[_Role] = ["layers"] * len(view.weight.layers)
    for atoms in view.stored:
      role = _role(atoms, contracted, layers)
      if role is None:
        self.warn(name, [x], "a part of a dimension is contracted")
        return
      roles.append(role)
    self._found[view.weight.path].roles.add(tuple(roles))


def _role(
  atoms: facts.Atoms,
  contracted: set[facts.Atom],
  layers: set[facts.Atom],
) -> _Role | None:
  """Returns the role of a dimension; None if its parts have different roles."""
  roles: set[_Role] = {
    "contracted" if a in contracted else "layers" if a in layers else "kept"
    for a in atoms
  }
  if len(roles) > 1:
    return None
  return roles.pop() if roles else "kept"
