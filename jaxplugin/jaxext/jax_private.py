# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that use JAX's private modules.

Other modules named `_private` do so too. `partitioner_private` splits functions
over devices. In `tracing`, `binding_private` sees operations before JAX
transforms them, and `interception_private` sees them after. `exports_private`
helps `jp.export`. `jaxlib_private` does not import JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

import jax
import jax.export
import numpy as np
from jax._src import (
  checkify,
  config,
  core,
  dispatch,
  dtypes,
  source_info_util,
  util,
)
from jax._src.export import _export
from jax._src.interpreters import mlir, partial_eval
from jax._src.lib import xla_client

_PUBLISHED_TIMEOUT_MS: Final = 30_000  # the value exists already
# Contexts of devices and meshes. The callbacks set them for the function of one
# device.
_DEVICE_CONTEXTS: Final = (
  "mesh_context_manager",
  "abstract_mesh_context_manager",
  "axis_env_state",
  "jax_default_device",
  # An enclosing `shard_map` sets it. Types of one device's parts do not vary.
  "check_vma",
)

_own_contexts: Final[list[Any]] = []
_Tree = TypeVar("_Tree")

Phase = Literal["forward", "backward", "dgrad", "wgrad", "recomputed"]
# Scopes that describe the computation and not the layer. The backward pass
# opens "dgrad" and "wgrad". `jax.checkpoint` opens "rematted_computation".
_PHASE_SCOPES: Final[dict[str, Phase]] = {
  "dgrad": "dgrad",
  "wgrad": "wgrad",
  "rematted_computation": "recomputed",
}
_NO_LAYERS: Final = frozenset({*_PHASE_SCOPES, "checkpoint", "while", "body"})
# Layers of these libraries call matmuls. The model's line is reported instead.
_LIBRARIES: Final = ("flax", "haiku", "equinox", "optax")


def refuse_operand(cls: type, refuse: Callable[[Any], Any]) -> None:
  """Makes JAX call `refuse`, which raises TypeError, for operands of a class.

  The error is the cause of JAX's error, which names the operation.
  """
  dtypes.register_canonicalize_value_handler(cls, refuse)
  core.pytype_aval_mappings[cls] = refuse


def uncached() -> contextlib.AbstractContextManager[None]:
  """Returns a context in which JAX stores no program in its compilation cache.

  JAX cannot load a program for a device that is not attached. Each time that it
  finds one in the cache, it warns and compiles again.
  """
  return config.persistent_cache_min_compile_time_secs(math.inf)


def require_devices_during_lowering(primitive: Any) -> None:
  """Makes JAX pass the device assignment to the primitive's lowering."""
  dispatch.prim_requires_devices_during_lowering.add(primitive)


def check_nans(primitive: Any) -> None:
  """Makes `checkify.nan_checks` find NaNs in the primitive's results."""
  checkify.error_checks[primitive] = functools.partial(
    checkify.nan_error_check, primitive
  )


def set_everywhere(context: Any, value: Any) -> None:
  """Sets the value of a `jax.make_user_context` in all threads.

  The value is part of `jit`'s cache key, as it is inside the context.
  """
  context.set_global(value)


def lower_with_sharding_in_types(ctx: Any, value: Any, aval: Any) -> Any:
  """Constrains a lowered value to the explicit sharding in its type."""
  return mlir.lower_with_sharding_in_types(ctx, value, aval)


def module_name(ctx: Any) -> str:
  """Returns the name of the module of a lowering, like "jit_step"."""
  attributes = ctx.module_context.module.operation.attributes
  return attributes["sym_name"].value if "sym_name" in attributes else ""


def mapped_mesh_axes() -> frozenset[str]:
  """Returns the explicit mesh axes that enclosing `vmap`s map over."""
  return frozenset(core.get_axis_env().explicit_mesh_axis_names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTiling:
  """How the partitioner assigns the tiles of an array to devices.

  Attributes:
    counts: tiles along each dimension.
    device_numbers: i64[n], positions in `devices`, tile by tile in major to
      minor order. A tile may be on several devices, which are adjacent.
    devices: all devices of the program. Inside a `shard_map` over some axes,
      `device_numbers` are positions in a group: the devices with the same
      position along these axes.
  """

  counts: tuple[int, ...]
  device_numbers: np.ndarray
  devices: tuple[jax.Device, ...]


def partitioner_tiling(sharding: Any, ndim: int) -> DeviceTiling | None:
  """Reads a sharding that `custom_partitioning` did not decode.

  Returns:
    The tiling. None if the sharding is unknown or has unreduced axes.
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
  return DeviceTiling(counts=counts, device_numbers=numbers, devices=devices)


def varying_axes(*arrays: Any) -> frozenset[str]:
  """Returns the axes of an enclosing `shard_map` over which arrays vary."""
  return frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))


def varying_as(x: Any, *others: Any) -> Any:
  """Casts `x` to vary also over the mesh axes that others vary over.

  The initial value of a loop needs this cast, for example.
  """
  return _varying_over(varying_axes(*others), x)


def vary_alike(tree: _Tree) -> _Tree:
  """Casts all arrays of a tree to vary over the same axes of a `shard_map`."""
  axes = varying_axes(*jax.tree.leaves(tree))
  return jax.tree.map(functools.partial(_varying_over, axes), tree)


def _varying_over(axes: frozenset[str], x: Any) -> Any:
  missing = tuple(axes - varying_axes(x))
  return jax.lax.pcast(x, missing, to="varying") if missing else x


def register_pytree_serialization(
  nodetype: type,
  *,
  serialized_name: str,
  serialize_auxdata: Callable[[Any], bytes],
  deserialize_auxdata: Callable[[bytes], Any],
) -> None:
  """Calls `jax.export.register_pytree_node_serialization`, also repeatedly.

  JAX refuses a name that is registered already. A module that is imported again
  after its removal from `sys.modules` has a new class. The name then means the
  new class. Objects of the old class can still be serialized.
  """
  _export.deserialization_registry.pop(serialized_name, None)
  jax.export.register_pytree_node_serialization(
    nodetype,
    serialized_name=serialized_name,
    serialize_auxdata=serialize_auxdata,
    deserialize_auxdata=deserialize_auxdata,
  )


def cudnn_version_number() -> int | None:
  """Returns cuDNN's version, such as 91300; None without a CUDA plugin."""
  from jax._src.lib import cuda_versions  # loads a CUDA plugin's module

  return None if cuda_versions is None else cuda_versions.cudnn_get_version()


def first_published(key: str, value: str) -> str | None:
  """Publishes a value, unless another process of the run has published one.

  Returns:
    The published value; None if the run has no distributed client. It does not
    wait for other processes.
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
  """Returns an `ir.Context` with the dialects that JAX lowers to."""
  return mlir.make_ir_context()


def optimized_hlo(compiled: jax.stages.Compiled) -> str:
  """Returns optimized HLO with operand shapes, but no backend config."""
  executable: Any = compiled.runtime_executable()
  return executable_hlo(
    executable,
    print_backend_config=False,
    print_operand_shape=True,
    include_layout_in_shapes=False,
  )


def executable_hlo(executable: Any, **options: bool) -> str:
  """Returns the optimized HLO of an executable, without metadata.

  Args:
    executable: executable of a `Compiled`, or the result of `compile_for`.
    **options: fields of jaxlib's `HloPrintOptions`.
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
  """Compiles a StableHLO module for devices that need not be attached.

  Args:
    module: an `ir.Module`.
    devices: devices of a mesh over a topology, one for each partition.

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
    A function of the arguments of @main that returns a list of arrays.
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
  """Returns JAX's primitives for block-scaled products.

  The first set has the primitives of `jax.nn.scaled_matmul`, which
  `jax.nn.scaled_dot_general` also uses. The second set has the primitive of
  `jax.lax.scaled_dot`.
  """
  from jax._src.cudnn import scaled_matmul_stablehlo
  from jax._src.lax.scaled_dot import scaled_dot_p  # not the function

  matmul = (
    scaled_matmul_stablehlo._scaled_matmul_p_wrapper,
    scaled_matmul_stablehlo._scaled_matmul_p,
  )
  return frozenset(matmul), frozenset((scaled_dot_p,))


def without_unused(jaxpr: Any) -> Any:
  """Returns a jaxpr without unused operations, which XLA also removes."""
  used, _ = partial_eval.dce_jaxpr(
    jaxpr, [True] * len(jaxpr.outvars), instantiate=True
  )
  return used


def cache_by_jaxpr(function: Callable[..., Any]) -> Callable[..., Any]:
  """Caches by the identity of the first argument, and does not keep it alive.

  The context of tracing (meshes, `use_target`, ...) is part of the key.
  """
  return util.weakref_lru_cache(function)


def wait_for_effects() -> None:
  """Calls `jax.effects_barrier`, which raises each failure only once.

  Raises:
    jax.errors.JaxRuntimeError: If a computation failed.
    ExceptionGroup: If computations failed on several devices (newer JAX).
  """
  try:
    jax.effects_barrier()
  finally:
    dispatch.runtime_tokens.clear()


# Contexts of tracing. One device's part of a call is traced while XLA compiles.
# The contexts in which the call was lowered may have ended by then. They are
# restored for the trace, so they can be part of the call's name.


def make_context(default: Any) -> Any:
  """Calls `jax.make_user_context`; a `Snapshot` includes the new context."""
  context = jax.make_user_context(default_value=default)
  _own_contexts.append(context)
  return context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
  """Contexts under which a function is traced.

  Attributes:
    everything: (name, value) of contexts in `jit`'s cache key. `snapshot` may
      leave out those of devices and meshes. A name may occur several times.
    own: values of the contexts that `make` made, in order.
  """

  everything: tuple[tuple[str, Any], ...]
  own: tuple[Any, ...]

  @contextlib.contextmanager
  def restored(self) -> Iterator[None]:
    """Restores in this thread the contexts at the time of the snapshot."""
    with contextlib.ExitStack() as stack:
      for context, value in zip(_own_contexts, self.own, strict=False):
        stack.enter_context(context(value))
      for name, value in self.everything:
        state = config.config_states.get(name)
        if state is None:
          state = getattr(config, name, getattr(core, name, None))
        if state is not None and state.value != value:
          stack.enter_context(_set_option(state, value))
      yield


def snapshot(*, with_devices: bool = False) -> Snapshot:
  """Returns the contexts in which this thread would trace a function now.

  Args:
    with_devices: whether to include contexts of devices and meshes.
  """
  named = zip(config.trace_context_names(), config.trace_context(), strict=True)
  left_out = () if with_devices else _DEVICE_CONTEXTS
  return Snapshot(
    everything=tuple((n, v) for n, v in named if n not in left_out),
    own=tuple(context.value for context in _own_contexts),
  )


@contextlib.contextmanager
def _set_option(state: Any, value: Any) -> Iterator[None]:
  """Sets an option of JAX to a value that is parsed already."""
  hook = getattr(state, "_update_thread_local_hook", None)
  before = state.swap_local(value)
  if hook:
    hook(value)
  try:
    yield
  finally:
    state.set_local(before)
    if hook:
      hook(None if before is config.config_ext.unset else before)


# Source lines, scopes and packages of operations.


class ScopeName(NamedTuple):
  """One entry of JAX's name stack.

  Attributes:
    text: name of a `jax.named_scope` or of a transformation, "transpose".
    is_transform: whether it is a transformation.
  """

  text: str
  is_transform: bool


def scopes(source_info: Any = None) -> tuple[ScopeName, ...]:
  """Returns the name stack of an equation in its jaxpr, outermost first.

  Args:
    source_info: source info of an equation; None for the operation that is
      being traced.
  """
  if source_info is None:
    stack = source_info_util.current_name_stack().stack
  else:
    stack = source_info.name_stack.stack
  return tuple(
    ScopeName(entry.name, isinstance(entry, source_info_util.Transform))
    for entry in stack
  )


def outside_scopes() -> contextlib.AbstractContextManager[None]:
  """Returns a context without the scopes around the current trace."""
  stack = source_info_util.current_name_stack().stack
  kept = (e for e in stack if isinstance(e, source_info_util.Transform))
  return source_info_util.set_name_stack(
    source_info_util.NameStack(tuple(kept))
  )


def layer_and_phase(
  names: Sequence[ScopeName],
) -> tuple[str, Phase]:
  """Returns the layer that scopes name, and the pass that they belong to."""
  layers: list[str] = []
  phase: Phase = "forward"
  after_transform = False
  for name in names:
    if name.is_transform:
      after_transform = True
      if name.text == "transpose":
        phase = "backward"
      continue
    phase = _PHASE_SCOPES.get(name.text, phase)
    # A transformation repeats the name of the enclosing scope.
    is_again = after_transform and layers[-1:] == [name.text]
    if name.text not in _NO_LAYERS and not is_again:
      layers.append(name.text)
    after_transform = False
  return "/".join(layers), phase


def user_frame(source_info: Any = None) -> str:
  """Returns file, line and function that called an operation; "" if unknown.

  This is the innermost frame outside of JAX, this package and libraries of
  layers. If no frame is outside of these libraries, it is the innermost frame
  in them.

  Args:
    source_info: source info of an equation; None for the operation that is
      being traced.
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
      return _described(frame)
  return _described(frames[0]) if frames else ""


def _described(frame: Any) -> str:
  return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"


@functools.cache
def _jax_directory() -> str:
  return f"{pathlib.Path(jax.__file__).parent}{os.sep}"


def _library_directories() -> tuple[str, ...]:
  """Returns the directories of imported libraries."""
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


# These functions accept a jaxpr, closed or not, and a function in an operation.


def is_own(function: Any) -> bool:
  """Returns whether this package defines a function."""
  return _file_of(function) in _own_files()


def is_of_jax(function: Any) -> bool:
  """Returns whether JAX defines a function, like `jnp.matmul`."""
  return _file_of(function).startswith(_jax_directory())


def is_relu(function: Any) -> bool:
  """Returns whether a function is `jax.nn.relu`."""
  debug_info = getattr(function, "jaxpr", function).debug_info
  return is_of_jax(function) and debug_info.func_name == "relu"


def _file_of(function: Any) -> str:
  """Returns the file that defines a function; "" if unknown."""
  debug_info = getattr(getattr(function, "jaxpr", function), "debug_info", None)
  return getattr(debug_info, "func_filename", None) or ""


def name_scope() -> str:
  """Returns the enclosing scopes of the current trace, as "outer/inner"."""
  return str(source_info_util.current().name_stack)
