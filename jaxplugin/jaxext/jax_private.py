# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything that the package uses of JAX's private modules, in one place.

But `jaxlib_private`, for a process without JAX, and `binding_private`, which
sees operations before JAX transforms them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import NamedTuple
from typing import Protocol

import jax
import jax.export
import numpy as np
from jax._src import core
from jax._src import dispatch
from jax._src import linear_util
from jax._src import source_info_util
from jax._src import util
from jax._src.export import _export
from jax._src.interpreters import mlir
from jax._src.interpreters import partial_eval
from jax._src.lib import xla_client
from jax.extend import core as extend_core

_PUBLISHED_TIMEOUT_MS: Final = 30_000  # for what is there already
# Their layers multiply on behalf of a model; whose line it is the model knows.
_LIBRARIES: Final = ("flax", "haiku", "equinox", "optax")


def require_devices_during_lowering(primitive: Any) -> None:
  """Makes JAX hand the device assignment to the primitive's lowering."""
  dispatch.prim_requires_devices_during_lowering.add(primitive)


def set_everywhere(context: Any, value: Any) -> None:
  """Sets what `jax.make_user_context` made, in all threads from now on.

  It is part of `jit`'s key, as inside of the context.
  """
  context.set_global(value)


def lower_with_sharding_in_types(ctx: Any, value: Any, aval: Any) -> Any:
  """Constrains a lowered value to the explicit sharding in its type."""
  return mlir.lower_with_sharding_in_types(ctx, value, aval)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """How the partitioner deals an array to devices.

  Attributes:
    counts: tiles along each dimension.
    device_numbers: i64[n], positions in `devices`: those of the first tile (one
      or more copies of it), then those of the next, in major to minor order.
    devices: all of the program's. Of an array inside of a `shard_map` over some
      axes numbers are those in a group, of devices that have the same place
      along these axes, and there are fewer of them.
  """

  counts: tuple[int, ...]
  device_numbers: np.ndarray
  devices: tuple[jax.Device, ...]


def partitioner_tiling(sharding: Any, ndim: int) -> Tiling | None:
  """Reads a sharding that `custom_partitioning` did not decode.

  Returns:
    None where nothing is known, or sums are not complete.
  """
  if sharding is None:
    return None
  hlo = sharding._hlo_sharding
  devices = tuple(sharding._device_assignment)
  if hlo.is_replicated():
    counts, numbers = (1,) * ndim, np.arange(len(devices))
  elif hlo.is_tiled() and all(
    kind == xla_client.OpSharding.Type.REPLICATED
    for kind in hlo.subgroup_types()
  ):
    counts = tuple(hlo.tile_assignment_dimensions())[:ndim]
    numbers = np.asarray(hlo.tile_assignment_devices(), np.int64)
  else:
    return None
  if len(devices) % len(numbers):
    return None
  return Tiling(counts=counts, device_numbers=numbers, devices=devices)


def varying_axes(x: Any) -> frozenset[str]:
  """The mesh axes of an enclosing `shard_map` over which `x` varies."""
  return frozenset(jax.typeof(x).mat.varying)


def varying_as(x: Any, like: Any) -> Any:
  """`x`, over which mesh axes `like` varies: a loop's first value, say."""
  axes = tuple(varying_axes(like) - varying_axes(x))
  return jax.lax.pcast(x, axes, to="varying") if axes else x


def register_pytree_serialization(
  nodetype: type,
  *,
  serialized_name: str,
  serialize_auxdata: Callable[[Any], bytes],
  deserialize_auxdata: Callable[[bytes], Any],
) -> None:
  """`jax.export.register_pytree_node_serialization`, also a second time.

  JAX refuses a name that it knows. A module that is imported again after it was
  deleted from `sys.modules` has a new class, which then is what the name means;
  objects of the old one are still written.
  """
  _export.deserialization_registry.pop(serialized_name, None)
  jax.export.register_pytree_node_serialization(
    nodetype,
    serialized_name=serialized_name,
    serialize_auxdata=serialize_auxdata,
    deserialize_auxdata=deserialize_auxdata,
  )


def cudnn_version_number() -> int | None:
  """The installed cuDNN's version, e.g. 91300; None without a CUDA plugin."""
  from jax._src.lib import cuda_versions  # loads a CUDA plugin's module

  return None if cuda_versions is None else cuda_versions.cudnn_get_version()


def first_published(key: str, value: str) -> str | None:
  """What the first process of a run published by a key: this one if first.

  Nobody waits for another. None where processes do not know of each other.
  """
  from jax._src import distributed

  client = distributed.global_state.client
  if client is None:
    return None
  try:
    client.key_value_set(key, value)
  except jax.errors.JaxRuntimeError as error:
    if "ALREADY_EXISTS" not in str(error):
      raise
    return client.blocking_key_value_get(key, _PUBLISHED_TIMEOUT_MS)
  return value


def make_ir_context() -> Any:
  """An `ir.Context` with the dialects that JAX lowers to."""
  return mlir.make_ir_context()


def optimized_hlo(compiled: jax.stages.Compiled) -> str:
  """Optimized HLO with operand shapes, without what varies between runs."""
  executable: Any = compiled.runtime_executable()
  return executable_hlo(
    executable,
    print_backend_config=False,
    print_operand_shape=True,
    include_layout_in_shapes=False,
  )


def executable_hlo(executable: Any, **options: bool) -> str:
  """Optimized HLO of an executable, without metadata.

  Args:
    executable: of a `Compiled`, or of `compile_for`.
    **options: of jaxlib's `HloPrintOptions`.
  """
  from jaxlib import _hlo

  print_options = _hlo.HloPrintOptions()
  print_options.print_metadata = False
  print_options.print_percent = False
  for name, value in options.items():
    setattr(print_options, name, value)
  modules = executable.hlo_modules()
  return "\n".join(module.to_string(print_options) for module in modules)


def compile_for(module: Any, devices: Sequence[Any]) -> Any:
  """Compiles a StableHLO module for devices that need not be there.

  Args:
    module: an `ir.Module`.
    devices: of a mesh over a topology, one for each partition.

  Returns:
    jaxlib's executable, which cannot be run.
  """
  from jax.extend import backend
  from jaxlib import _jax

  options = backend.get_compile_options(
    num_replicas=1, num_partitions=len(devices)
  )
  options.executable_build_options.use_spmd_partitioning = len(devices) > 1
  uses_shardy = any(op.operation.name == "sdy.mesh" for op in module.body)
  options.executable_build_options.use_shardy_partitioner = uses_shardy
  client: Any = devices[0].client
  return client.compile(module, _jax.DeviceList(tuple(devices)), options)


def compile_module(module: str | bytes, platform: str) -> Any:
  """Compiles a StableHLO module for the first local device of a platform.

  Returns:
    A function of the arrays that @main takes; it returns a list of arrays.
  """
  from jax.extend import backend
  from jaxlib import _jax

  client = backend.get_backend(platform)
  device = client.local_devices()[0]
  options = backend.get_compile_options(num_replicas=1, num_partitions=1)
  executable = client.compile_and_load(
    module, _jax.DeviceList((device,)), options
  )

  def call(*arrays):
    on_device = [jax.device_put(x, device) for x in arrays]
    results = executable.execute_sharded(on_device)
    shards = results.disassemble_into_single_device_arrays()
    return [shard[0] for shard in shards]

  return call


@functools.cache
def scaled_primitives() -> tuple[frozenset[Any], frozenset[Any]]:
  """JAX's own primitives: of `jax.nn.scaled_matmul`, of `jax.lax.scaled_dot`.

  `jax.nn.scaled_dot_general` multiplies by those of `scaled_matmul`.
  """
  from jax._src.cudnn import scaled_matmul_stablehlo
  from jax._src.lax.scaled_dot import scaled_dot_p  # a function has its name

  matmul = (
    scaled_matmul_stablehlo._scaled_matmul_p_wrapper,
    scaled_matmul_stablehlo._scaled_matmul_p,
  )
  return frozenset(matmul), frozenset((scaled_dot_p,))


class Interceptor(Protocol):
  """What `intercept` asks about every operation of a function.

  Both methods run where the operation would have: operations that they make go
  to whatever encloses the intercepted function.
  """

  def replace(
    self, primitive: Any, args: Sequence[Any], params: dict[str, Any]
  ) -> Any:
    """The results to use in place of the operation's, or None."""

  def rewrite(self, primitive: Any, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters to use, of an operation that is not replaced."""

  def note(
    self, primitive: Any, args: Sequence[Any], params: dict[str, Any], out: Any
  ) -> None:
    """Told the results of an operation that was not replaced."""

  def inside(
    self, primitive: Any, args: Sequence[Any], index: int
  ) -> MakeInterceptor:
    """Makes the interceptor of a function inside of an operation.

    That of `index` 0 takes `args`; others are its rules (`jvp`; `fwd`, `bwd`).
    """


# Makes the interceptor of one call, given the positional arguments.
MakeInterceptor = Callable[[Sequence[Any]], Interceptor]


class _InterceptingTrace(core.Trace):
  """Shows every operation to an interceptor, then hands it to its parent.

  It wraps no values, so a function sees through it what it would have seen
  without it, concrete arrays among them. Functions inside of an operation
  (those of `shard_map`, `custom_jvp` and `custom_vjp`, with their rules) are
  intercepted as well, whenever they run.
  """

  def __init__(self, parent: Any, interceptor: Interceptor):
    super().__init__()
    self.parent_trace = parent
    self.requires_low = parent.requires_low
    self.interceptor = interceptor

  def stage_value(self, val):
    return self.parent_trace.stage_value(val)

  def process_primitive(self, primitive, tracers, params, /):
    with core.set_current_trace(self.parent_trace):
      out = self.interceptor.replace(primitive, tracers, params)
      if out is not None:
        return out
      params = self.interceptor.rewrite(primitive, params)
    out = self.parent_trace.process_primitive(primitive, tracers, params)
    self.interceptor.note(primitive, tracers, params, out)
    return out

  def process_call(self, primitive, f, tracers, params, /):
    (f,) = self._inside(primitive, tracers, f)
    return self.parent_trace.process_call(primitive, f, tracers, params)

  def process_custom_jvp_call(self, primitive, fun, jvp, tracers, /, **params):
    functions = self._inside(primitive, tracers, fun, jvp)
    return self.parent_trace.process_custom_jvp_call(
      primitive, *functions, tracers, **params
    )

  def process_custom_vjp_call(
    self, primitive, fun, fwd, bwd, tracers, /, **params
  ):
    functions = self._inside(primitive, tracers, fun, fwd, bwd)
    return self.parent_trace.process_custom_vjp_call(
      primitive, *functions, tracers, **params
    )

  def process_shard_map(self, primitive, fun, args, /, **params):
    (fun,) = self._inside(primitive, args, fun)
    return self.parent_trace.process_shard_map(primitive, fun, args, **params)

  def _inside(self, primitive, args, *functions):
    if is_own_function(functions[0]):
      return functions
    return [
      _intercept_wrapped(f, self.interceptor.inside(primitive, args, i))
      for i, f in enumerate(functions)
    ]


def _call_intercepted(
  fn: Callable[..., Any],
  make: MakeInterceptor,
  *args: Any,
  **kwargs: Any,
) -> Any:
  parent = core.trace_ctx.trace
  with core.set_current_trace(_InterceptingTrace(parent, make(args))):
    return fn(*args, **kwargs)


_intercept_transformation = linear_util.transformation2(_call_intercepted)


def _intercept_wrapped(fun: Any, make: MakeInterceptor) -> Any:
  """`intercept` of what JAX passes on as a function."""
  if isinstance(fun, linear_util.WrappedFun):
    return _intercept_transformation(fun, make)
  return functools.partial(_call_intercepted, fun, make)


def intercept(
  fn: Callable[..., Any], make: MakeInterceptor
) -> Callable[..., Any]:
  """`fn`, with an interceptor asked about each of its operations.

  Args:
    fn: any callable.
    make: makes the interceptor of one call.
  """

  @functools.wraps(fn)
  def intercepted(*args, **kwargs):
    return _call_intercepted(fn, make, *args, **kwargs)

  return intercepted


def intercept_jaxpr(
  jaxpr: Any,
  make: MakeInterceptor,
  extra: Sequence[tuple[int, Any]] = (),
  results: Callable[[Sequence[Any]], Sequence[Any]] = lambda extra: (),
) -> tuple[Any, list[Any]]:
  """Traces a (closed) jaxpr once more, with an interceptor.

  Lines of source, name scopes, effects and the names of arguments are kept.

  Args:
    jaxpr: which it is.
    make: makes the interceptor, given first the extra arguments, then those of
      `jaxpr`.
    extra: of each argument more: before which one of `jaxpr` it comes, and its
      type. In order.
    results: of the extra arguments, what is returned before all else.

  Returns:
    A jaxpr, closed if the other one was. Else values that it takes before all
    other arguments: what an interceptor made of no argument.
  """
  is_closed = isinstance(jaxpr, extend_core.ClosedJaxpr)
  closed = jaxpr if is_closed else extend_core.ClosedJaxpr(jaxpr, ())
  evaluate = core.jaxpr_as_fun(closed)
  avals = list(getattr(closed, "in_aval_qdds", closed.in_avals))
  debug_info = closed.jaxpr.debug_info
  names = list(debug_info.arg_names or [""] * len(avals))
  places = [before + i for i, (before, _) in enumerate(extra)]
  for place, (_, aval) in zip(places, extra, strict=True):
    avals.insert(place, aval)
    names.insert(place, "")

  def call(*args):
    more = [args[i] for i in places]
    own = [x for i, x in enumerate(args) if i not in places]
    parent = core.trace_ctx.trace
    interceptor = make((*more, *own))
    with core.set_current_trace(_InterceptingTrace(parent, interceptor)):
      out = evaluate(*own)
    return [*results(more), *out]

  if extra:
    debug_info = debug_info._replace(arg_names=tuple(names), result_paths=None)
  function = linear_util.wrap_init(call, debug_info=debug_info)
  traced, _, consts = partial_eval.trace_to_jaxpr_dynamic(function, avals)
  if is_closed:
    return extend_core.ClosedJaxpr(traced, consts), []
  if consts:
    traced = partial_eval.convert_constvars_jaxpr(traced)
  return traced, list(consts)


def without_unused(jaxpr: Any) -> Any:
  """A jaxpr without operations whose results nothing uses, as XLA has it."""
  used, _ = partial_eval.dce_jaxpr(
    jaxpr, [True] * len(jaxpr.outvars), instantiate=True
  )
  return used


def cache_by_jaxpr(function: Callable[..., Any]) -> Callable[..., Any]:
  """Caches by the identity of the first argument, which is not kept alive.

  The context of tracing (meshes, `use_target`, ...) is part of the key.
  """
  return util.weakref_lru_cache(function)


class Name(NamedTuple):
  """One entry of JAX's name stack.

  Attributes:
    text: the name of a `jax.named_scope`, or of a transformation, "transpose".
    is_transform: which of both.
  """

  text: str
  is_transform: bool


def scopes(source_info: Any = None) -> tuple[Name, ...]:
  """The name stack of an equation, outermost first, inside of its jaxpr.

  Args:
    source_info: that of an equation; None for an operation being made now.
  """
  if source_info is None:
    stack = source_info_util.current_name_stack().stack
  else:
    stack = source_info.name_stack.stack
  return tuple(
    Name(entry.name, isinstance(entry, source_info_util.Transform))
    for entry in stack
  )


def user_frame(source_info: Any = None) -> str:
  """File, line and function that made an operation; empty if not known.

  It is the innermost frame outside of JAX, of this package and of packages
  that models are written with; where there is none, outside of the former.

  Args:
    source_info: that of an equation; None for an operation being made now.
  """
  traceback = (source_info or source_info_util.current()).traceback
  frames = [
    frame
    for frame in (traceback.frames if traceback is not None else ())
    if frame.file_name not in _own_files()
    and not frame.file_name.startswith(_jax_directory())
  ]
  libraries = _library_directories()
  for frame in frames:
    if not frame.file_name.startswith(libraries):
      return _describe(frame)
  return _describe(frames[0]) if frames else ""


def _describe(frame: Any) -> str:
  return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"


@functools.cache
def _jax_directory() -> str:
  return f"{pathlib.Path(jax.__file__).parent}{os.sep}"


def _library_directories() -> tuple[str, ...]:
  """Directories of those libraries that are imported."""
  found = (
    getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES
  )
  return tuple(f"{pathlib.Path(file).parent}{os.sep}" for file in found if file)


@functools.cache
def _own_files() -> frozenset[str]:
  directory = pathlib.Path(__file__).parents[1]
  return frozenset(
    str(path)
    for path in directory.rglob("*.py")
    if not path.name.endswith("_test.py")
  )


def is_own(jaxpr: Any) -> bool:
  """Whether a closed jaxpr is of a function of this package."""
  filename = jaxpr.jaxpr.debug_info.func_filename
  return filename is not None and filename in _own_files()


def is_of_jax(jaxpr: Any) -> bool:
  """Whether a closed jaxpr is of one of JAX's functions, `jnp.matmul` say."""
  filename = jaxpr.jaxpr.debug_info.func_filename
  return filename is not None and filename.startswith(_jax_directory())


def is_own_function(fun: Any) -> bool:
  """Whether what JAX passes on as a function is one of this package."""
  debug_info = getattr(fun, "debug_info", None)
  filename = getattr(debug_info, "func_filename", None)
  return filename is not None and filename in _own_files()


def name_scope() -> str:
  """Names of the enclosing `jax.named_scope`s, "outer/inner", while tracing."""
  return str(source_info_util.current().name_stack)


def wait_for_effects() -> None:
  """`jax.effects_barrier`; what failed is raised once, and not again later.

  Raises:
    jax.errors.JaxRuntimeError: a computation failed.
    ExceptionGroup: several did, on several devices (newer JAX).
  """
  try:
    jax.effects_barrier()
  finally:
    dispatch.runtime_tokens.clear()
