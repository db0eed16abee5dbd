# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs `@triton.jit` kernels on NumPy arrays, with no GPU and no torch.

`launch` gives the very function that is compiled for GPUs to Triton's
interpreter, without `TRITON_INTERPRET` in the environment: the variable is read
when `triton.jit` decorates, and would turn every kernel of the process into an
interpreted one. Here a kernel, the jitted functions that it calls and those of
`triton.language` are rewritten on the side, so that one process can interpret
and compile the same kernel.

Each access is checked. The pointer must be aligned and point to an element of
an argument, which must not be read-only if it is written. No program may read
or write bytes that another program of the launch wrote.

Differences from Triton's own interpreter: casts to bf16 and FP8 round to
nearest even (it truncates), arithmetic and `tl.dot` work on bf16 values (it
takes their bits for integers), and a cast to FP8 saturates as `cvt.satfinite`
of PTX does.

`launch` replaces attributes of `triton.language` while it runs, under a lock:
no other thread may compile a kernel meanwhile.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import textwrap
import threading
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter, jit

from jaxplugin.kernels import descriptors
from jaxplugin.testing.interpreter import interpret_memory, interpret_ops

# Options of a launch that mean nothing here.
LAUNCH_OPTIONS: Final = frozenset(
  {"num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu"}
)

# Before it the interpreter's fma rounds twice, E8M0 byte 0 counts as 0, and
# loops do not take their bounds from arguments under NumPy 2.
MIN_TRITON: Final = (3, 9)

_JIT_TYPES: Final = (jit.JITFunction, interpreter.InterpretedFunction)
_BF16: Final = np.dtype(ml_dtypes.bfloat16)
_TL_DTYPES: Final = {
  np.dtype(np.bool_): tl.int1,
  np.dtype(np.int8): tl.int8,
  np.dtype(np.int16): tl.int16,
  np.dtype(np.int32): tl.int32,
  np.dtype(np.int64): tl.int64,
  np.dtype(np.uint8): tl.uint8,
  np.dtype(np.uint16): tl.uint16,
  np.dtype(np.uint32): tl.uint32,
  np.dtype(np.uint64): tl.uint64,
  np.dtype(np.float16): tl.float16,
  np.dtype(np.float32): tl.float32,
  np.dtype(np.float64): tl.float64,
  _BF16: tl.bfloat16,
  np.dtype(ml_dtypes.float8_e4m3fn): tl.float8e4nv,
  np.dtype(ml_dtypes.float8_e5m2): tl.float8e5,
}
_LOCK: Final = threading.RLock()


def unsupported() -> str | None:
  """Why the installed Triton cannot interpret here, if so."""
  version = tuple(map(int, triton.__version__.split(".")[:2]))
  if version >= MIN_TRITON:
    return None
  return (
    f"interpreting needs triton {'.'.join(map(str, MIN_TRITON))} or newer, got"
    f" {triton.__version__}"
  )


def skip_unless_supported() -> None:
  """Skips a module's tests if the installed Triton cannot interpret."""
  if (reason := unsupported()) is not None:
    raise unittest.SkipTest(reason)


class InterpretError(Exception):
  """A kernel did what no kernel may do; the text says which program and where.

  Any other exception of a kernel's body passes through with a note.
  """


def launch(
  kernel: Any,
  grid: int | Sequence[int],
  *args: Any,
  check_races: bool = True,
  programs: Sequence[tuple[int, int, int]] | None = None,
  **kwargs: Any,
) -> None:
  """Runs `kernel` once for each program of `grid`, one after another.

  Args:
    kernel: a `@triton.jit` function.
    grid: one to three sizes.
    *args: the kernel's arguments in order. Arrays are pointers to their first
      element, whatever their strides: f64, f32, f16, bf16, E4M3, E5M2 (the
      latter three of ml_dtypes), bool, or integers. Those of them that can be
      written are modified in place. A type without a Triton counterpart (E8M0,
      FP4) is given as its uint8 view. Numbers become int32, int64 or f32. A
      `descriptors.Described` array is given as its TMA descriptor.
    check_races: whether a program may not touch what another one of the launch
      wrote. Turn it off for kernels that synchronize by atomics.
    programs: which of the grid's run, in order; by default all of them.
    **kwargs: arguments by name, constexprs among them.

  Raises:
    TypeError: an argument that no kernel takes, or too few or too many.
    InterpretError: an access outside the arrays, a write to a read-only one, or
      a race; or a Triton that is too old.
  """
  if (reason := unsupported()) is not None:
    raise InterpretError(f"launch: {reason}")
  if not isinstance(kernel, _JIT_TYPES):
    raise TypeError(f"launch: kernel must be a @triton.jit function: {kernel}")
  grid = _canonical_grid(grid)
  bound = _bind(kernel, args, kwargs)
  constexprs = _constexpr_names(kernel.fn)
  memory = interpret_memory.Memory(
    {
      name: array
      for name, value in bound.items()
      if isinstance(array := _array(value), np.ndarray)
      and name not in constexprs
    },
    check_races=check_races,
  )
  for name, value in bound.items():
    if name not in constexprs:
      bound[name] = _tensor(name, value, memory)
  session = _Session()
  with _LOCK, _patched(session, memory), np.errstate(all="ignore"):
    function = session.see(kernel).fn
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(*grid)
    for index in _programs(grid) if programs is None else programs:
      builder.set_grid_idx(*index)
      memory.program = index
      try:
        function(**bound)
      except interpret_memory.AccessError as error:
        raise InterpretError(
          f"{kernel.__name__}, program {index} of {grid}: {error}"
        ) from error
      except Exception as error:
        error.add_note(f"in program {index} of {grid} of {kernel.__name__}")
        raise
  memory.copy_back()


def _programs(grid: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
  """All of a grid, the last index fastest."""
  x, y, z = map(range, grid)
  return itertools.product(x, y, z)


def _canonical_grid(grid: int | Sequence[int]) -> tuple[int, int, int]:
  sizes = tuple(grid) if isinstance(grid, Sequence) else (grid,)
  if not 1 <= len(sizes) <= 3 or any(
    not isinstance(size, int) or size < 1 for size in sizes
  ):
    raise TypeError(f"launch: grid must be 1 to 3 positive sizes, got {grid}")
  x, y, z = sizes + (1,) * (3 - len(sizes))
  return x, y, z


def _bind(kernel: Any, args: Any, kwargs: Any) -> dict[str, Any]:
  """Arguments by name, defaults applied."""
  signature = inspect.signature(kernel.fn)
  kwargs = {
    name: value
    for name, value in kwargs.items()
    if name in signature.parameters or name not in LAUNCH_OPTIONS
  }
  try:
    bound = signature.bind(*args, **kwargs)
  except TypeError as error:
    raise TypeError(f"launch: {kernel.__name__}: {error}") from None
  bound.apply_defaults()
  return dict(bound.arguments)


def _constexpr_names(fn: Callable[..., Any]) -> set[str]:
  return {
    name
    for name, annotation in inspect.get_annotations(fn).items()
    if "constexpr" in str(annotation)
  }


def _tensor(name: str, value: Any, memory: interpret_memory.Memory) -> Any:
  """Converts an argument that is not a constexpr for a kernel's body."""
  if value is None:
    return None
  if isinstance(value, descriptors.Described):
    return _descriptor(name, value, memory)
  if isinstance(value, np.ndarray):
    dtype = _TL_DTYPES.get(value.dtype)
    if dtype is None:
      raise TypeError(
        f"launch: {name} has dtype {value.dtype}, which no Triton pointer has;"
        " give a uint8 view of it"
      )
    pointer = np.array([memory.address(name)], np.uint64)
    return _scalar(pointer, tl.pointer_type(dtype))
  if isinstance(value, (bool, np.bool_)):
    return _scalar(np.array([value], np.bool_), tl.int1)
  if isinstance(value, (int, np.integer)):
    for dtype in (np.int32, np.int64, np.uint64):
      if np.iinfo(dtype).min <= int(value) <= np.iinfo(dtype).max:
        return _scalar(np.array([value], dtype), _TL_DTYPES[np.dtype(dtype)])
  if isinstance(value, (float, np.floating)):
    return _scalar(np.array([value], np.float32), tl.float32)
  raise TypeError(
    f"launch: {name} must be a NumPy array, a number or None, got {value!r}"
  )


def _array(value: Any) -> Any:
  return value.array if isinstance(value, descriptors.Described) else value


def _descriptor(
  name: str, value: descriptors.Described, memory: interpret_memory.Memory
) -> Any:
  """Triton's own, whose loads go through `memory` as any other."""
  array, descriptor = value
  if not isinstance(array, np.ndarray):
    raise TypeError(
      f"launch: {name} must describe a NumPy array, got {array!r}"
    )
  error = descriptors.descriptor_error(descriptor, array.itemsize)
  if error is not None:
    raise TypeError(f"launch: TMA descriptor of {name}: {error}")
  return interpreter.interpreter_semantic.make_tensor_descriptor(
    base=_tensor(name, array, memory),
    shape=list(descriptor.shape),
    strides=[tl.constexpr(stride) for stride in descriptor.strides],
    block_shape=[tl.constexpr(size) for size in descriptor.block_shape],
  )


def _scalar(data: np.ndarray, dtype: Any) -> Any:
  return tl.tensor(interpreter.TensorHandle(data, dtype), dtype)


class _Session:
  """Python versions of the jitted functions that one launch calls."""

  def __init__(self) -> None:
    self._functions: dict[int, tuple[Any, _DeviceFunction]] = {}
    self._scopes: dict[int, dict[str, Any]] = {}

  def see(self, value: Any) -> Any:
    """`value` of some namespace as interpreted code is to see it."""
    if isinstance(value, _JIT_TYPES):
      if id(value) not in self._functions:
        self._functions[id(value)] = (value, _DeviceFunction(value.fn, self))
      return self._functions[id(value)][1]
    if isinstance(value, tl.constexpr):
      return value.value
    if isinstance(value, types.ModuleType):
      is_triton = value.__name__.partition(".")[0] == "triton"
      return value if is_triton else _Module(value, self)
    return value

  def scope(self, fn: Callable[..., Any]) -> dict[str, Any]:
    """The globals of `fn`, and its closure's names, as seen here."""
    if fn.__closure__ is not None:
      nonlocals = inspect.getclosurevars(fn).nonlocals
      return self._see_all({**fn.__globals__, **nonlocals})
    key = id(fn.__globals__)
    if key not in self._scopes:
      self._scopes[key] = self._see_all(fn.__globals__)
    return self._scopes[key]

  def _see_all(self, names: dict[str, Any]) -> dict[str, Any]:
    return {name: self.see(value) for name, value in names.items()} | _RUNTIME


# Names that `ASTTransformer` puts into what it rewrites.
_RUNTIME: Final = {
  name: getattr(interpreter, name)
  for name in ("interpreter_semantic", "_InterpreterComparison")
  if hasattr(interpreter, name)
}


class _DeviceFunction:
  """A jitted function that Python runs."""

  def __init__(self, original: Callable[..., Any], session: _Session) -> None:
    self._original = original
    self._session = session

  @functools.cached_property
  def fn(self) -> Callable[..., Any]:
    """The rewritten function; Triton's reductions ask for it by this name."""
    made: dict[str, Any] = {}
    scope = self._session.scope(self._original)
    exec(_rewritten(self._original), scope, made)  # noqa: S102
    return made[self._original.__name__]

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self.fn(*args, **kwargs)


class _Module:
  """A module whose jitted functions are seen as Python's own."""

  def __init__(self, module: types.ModuleType, session: _Session) -> None:
    self._module = module
    self._session = session

  def __getattr__(self, name: str) -> Any:
    return self._session.see(getattr(self._module, name))


@functools.cache
def _rewritten(original: Callable[..., Any]) -> types.CodeType:
  """The definition of `original` with Triton's meaning of assignments."""
  tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
  definition = tree.body[0]
  assert isinstance(definition, ast.FunctionDef)
  definition.decorator_list = []
  tree = interpreter.ASTTransformer().visit(tree)
  ast.fix_missing_locations(tree)
  ast.increment_lineno(tree, original.__code__.co_firstlineno - 1)
  return compile(tree, original.__code__.co_filename, "exec")


@contextlib.contextmanager
def _patched(
  session: _Session, memory: interpret_memory.Memory
) -> Iterator[None]:
  """Makes `triton.language` compute on arrays for as long as it lasts."""
  builder = interpreter.interpreter_builder
  langs = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
  scope = interpreter._patch_lang(langs)
  try:
    for owner in (tl, tl.core, tl.standard, tl.math, tl.random):
      for name, value in list(vars(owner).items()):
        if isinstance(value, _JIT_TYPES):
          scope.set_attr(owner, name, session.see(value))
    for name, value in list(vars(tl.tensor).items()):
      if isinstance(value, _JIT_TYPES):
        scope.set_attr(tl.tensor, name, _method(session.see(value)))
    for name, method in interpret_ops.methods(builder, memory).items():
      scope.set_attr(builder, name, method)
    for name, function in interpret_ops.DOT_SCALED.items():
      scope.set_attr(interpreter, name, function)
    # Half of the time: Triton computes whether integers overflow, but ignores
    # the result without `debug`.
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    scope.set_attr(builder, "options", options)
    scope.set_attr(interpreter, "_get_np_dtype", _np_dtype)
    for cls, init in _constructors().items():
      scope.set_attr(cls, "__init__", init)
    yield
  finally:
    scope.restore()


def _constructors() -> dict[type, Callable[..., None]]:
  """Constructors of blocks' types and tensors, which take a third of the time.

  Triton computes the fields again for each object. Objects of one type share
  them here.
  """
  new_type, new_tensor = tl.block_type.__init__, tl.tensor.__init__
  types: dict[Any, dict[str, Any]] = {}
  tensors: dict[str, dict[str, Any]] = {}

  def init_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = (element_ty.name, *shape)
    if key not in types:
      new_type(self, element_ty, shape)
      types[key] = dict(self.__dict__)
    self.__dict__.update(types[key])

  def init_tensor(self: Any, handle: Any, type: Any) -> None:
    if type.name not in tensors:
      new_tensor(self, handle, type)
      tensors[type.name] = dict(self.__dict__)
    self.__dict__.update(tensors[type.name], handle=handle)

  return {tl.block_type: init_type, tl.tensor: init_tensor}


_scalar_dtype: Final = functools.cache(interpreter._get_np_dtype)


def _np_dtype(dtype: Any) -> np.dtype:
  """Does what Triton's function does, which builds a table in each call."""
  is_pointer = dtype.scalar.is_ptr()
  return np.dtype(np.uint64) if is_pointer else _scalar_dtype(dtype.scalar)


def _method(function: _DeviceFunction) -> Callable[..., Any]:
  """A plain function, which a class binds to its instances."""
  return lambda *args, **kwargs: function(*args, **kwargs)
