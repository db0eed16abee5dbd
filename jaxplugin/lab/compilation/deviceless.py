# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs XLA's GPU compiler for a GPU that is not attached.

  target = jp.named_target("b200", cudnn="9.13")
  hlo = deviceless.compile(f, x_spec, w_spec, target=target).as_text()

The compiler is part of jax-cuda13-plugin. It needs jax-cuda13-pjrt and
nvidia-cuda-nvcc, but neither a GPU nor cuDNN. The compiled program can be read,
but not run. XLA does not autotune, because that needs the device.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxplugin.core import targets
from jaxplugin.jaxext import jax_private

_ACCELERATED_FEATURES_SINCE: Final = (9, 0)  # sm_90a, sm_100a, ...
# H200 figures that XLA's cost models read and `Target` does not contain.
_CLOCK_RATE_GHZ: Final = 1.98
_DEVICE_MEMORY_BYTES: Final = 141 * 10**9
_SHARED_MEMORY_BYTES: Final = 48 << 10  # per block, default limit
_RESERVED_SHARED_MEMORY_BYTES: Final = 1 << 10  # per block, reserved by CUDA
_REGISTERS: Final = 65536


class DevicelessError(RuntimeError):
  """XLA's GPU compiler is missing or does not start."""


def mesh(
  target: targets.Target,
  shape: Sequence[int] = (1,),
  axis_names: Sequence[str] = ("x",),
  *,
  hosts: int = 1,
) -> Mesh:
  """Returns a mesh of absent GPUs.

  Args:
    target: an NVIDIA GPU from `named_target`, or one with the same fields. If
      its cuDNN version is None, XLA compiles without cuDNN.
    shape: sizes of the axes.
    axis_names: names of the axes.
    hosts: number of hosts. Each host has the same number of GPUs, and
      consecutive GPUs of the mesh share a host.

  Raises:
    TypeError: If `target` is not a `Target`.
    ValueError: If `target` is not an NVIDIA GPU or lacks a figure, or `hosts`
      does not divide the number of GPUs. JAX raises for other axes that it
      cannot make.
    DevicelessError: If the compiler is not installed or does not start.
  """
  count = math.prod(shape)
  if hosts < 1 or count % hosts:
    raise ValueError(
      f"deviceless: hosts must divide the {count} GPUs of shape"
      f" {tuple(shape)}, got {hosts}"
    )
  topology = _topology(target, hosts, count // hosts)
  return topologies.make_mesh(topology, tuple(shape), tuple(axis_names))


def _topology(target: targets.Target, hosts: int, count: int) -> Any:
  config = gpu_target_config(target)
  if not jax.config.jax_platforms:  # type: ignore[attr-defined]
    # On a machine without a GPU, the CUDA plugin starts only with this setting.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  try:
    return topologies.get_topology_desc(
      platform="cuda",
      topology_name=f"deviceless {target.name}",
      topology=f"{hosts}x1x{count}",
      target_config=config,
    )
  except NotImplementedError as error:
    raise DevicelessError(
      "deviceless: JAX has no CUDA compiler. Install jaxplugin[deviceless]"
      " (jax-cuda13-plugin, jax-cuda13-pjrt and nvidia-cuda-nvcc) and, before"
      " the process first uses JAX, set JAX_PLATFORMS=cpu or"
      " JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 in its environment"
    ) from error


def gpu_target_config(target: targets.Target) -> str:
  """Returns XLA's `GpuTargetConfigProto` of a target in text format.

  Raises:
    TypeError: If `target` is not a `Target`.
    ValueError: If `target` is not an NVIDIA GPU or lacks a figure.
  """
  targets.require("deviceless", target)
  if target.platform != "cuda":
    raise ValueError(
      "deviceless: target must be an NVIDIA GPU, got"
      f" {target}; see jp.named_target"
    )
  for field in (
    "compute_capability",
    "core_count",
    "shared_memory_bytes",
    "l2_bytes",
    "memory_bandwidth",
  ):
    if getattr(target, field) is None:
      raise ValueError(
        f"deviceless: target {target} must have {field}; start from one of"
        " jp.named_target"
      )
  assert target.compute_capability is not None
  assert target.shared_memory_bytes is not None
  assert target.memory_bandwidth is not None
  major, minor = target.compute_capability
  features = ""
  if target.compute_capability >= _ACCELERATED_FEATURES_SINCE:
    features = "feature_extension: ACCELERATED_FEATURES"
  dnn_major, dnn_minor, dnn_patch = target.cudnn_version or (0, 0, 0)
  per_core = target.shared_memory_bytes + _RESERVED_SHARED_MEMORY_BYTES
  return f"""
    gpu_device_info {{
      name: "{target.name}"
      device_vendor: "NVIDIA Corporation"
      cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
      core_count: {target.core_count}
      fpus_per_core: 128
      threads_per_block_limit: 1024
      threads_per_warp: 32
      threads_per_core_limit: 2048
      shared_memory_per_block: {_SHARED_MEMORY_BYTES}
      shared_memory_per_block_optin: {target.shared_memory_bytes}
      shared_memory_per_core: {per_core}
      registers_per_core_limit: {_REGISTERS}
      registers_per_block_limit: {_REGISTERS}
      block_dim_limit_x: 2147483647
      block_dim_limit_y: 65535
      block_dim_limit_z: 65535
      thread_dim_limit_x: 1024
      thread_dim_limit_y: 1024
      thread_dim_limit_z: 64
      memory_bandwidth: {int(target.memory_bandwidth)}
      l2_cache_size: {target.l2_bytes}
      clock_rate_ghz: {_CLOCK_RATE_GHZ}
      device_memory_size: {_DEVICE_MEMORY_BYTES}
      device_address_bits: 64
      driver_version: "13.0.0"
      runtime_version: "13.0.0"
      platform_version: "13000"
      dnn_version: "{dnn_major}.{dnn_minor}.{dnn_patch}"
    }}
    platform_name: "CUDA"
    dnn_version_info {{
      major: {dnn_major} minor: {dnn_minor} patch: {dnn_patch}
    }}
    device_description_str: "{target.name}"
  """


def compile(
  fn: Callable[..., Any],
  *args: Any,
  target: targets.Target,
  mesh: Mesh | None = None,
) -> jax.stages.Compiled:
  """Compiles `fn` for absent GPUs.

  Backends and configs of block-scaled dots are chosen for `target`, as under
  `use_target`.

  Args:
    fn: a function, jitted or not.
    *args: arrays or `ShapeDtypeStruct`s, in any pytrees. An array keeps its
      `NamedSharding` if its mesh is `mesh`. Other arrays are replicated.
    target: the GPU.
    mesh: a mesh from `deviceless.mesh`. The default is one GPU.

  Returns:
    The result of `jax.jit(fn).lower(*args).compile()`, which cannot be called.
    Its `as_text()` is the optimized HLO.

  Raises:
    TypeError, ValueError, DevicelessError: See `deviceless.mesh`.
  """
  if mesh is None:
    mesh = _one_gpu(target)
  replicated = NamedSharding(mesh, PartitionSpec())

  def on_mesh(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
      sharding = replicated
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=sharding)

  specs = jax.tree_util.tree_map(on_mesh, args)
  with targets.use_target(target), jax_private.uncached():
    return jax.jit(fn).lower(*specs).compile()


def _one_gpu(target: targets.Target) -> Mesh:
  return mesh(target)


def compile_module(
  module: Any, *, target: targets.Target, num_partitions: int = 1
) -> Any:
  """Compiles a StableHLO module for absent GPUs.

  Args:
    module: an `ir.Module`. XLA compiles its custom calls as they are. To
      rewrite them, pass the result of `jp.rewrite`.
    target: the GPU.
    num_partitions: the module's attribute mhlo.num_partitions.

  Returns:
    jaxlib's executable. Its `hlo_modules()` returns the optimized HLO.

  Raises:
    TypeError, ValueError, DevicelessError: See `deviceless.mesh`.
    jax.errors.JaxRuntimeError: If XLA cannot compile the module.
  """
  devices = mesh(target, (num_partitions,)).devices
  return jax_private.compile_for(module, list(devices.flat))
