# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels for absent GPUs, and inspects the machine code.

Triton includes LLVM for AMD and ptxas for NVIDIA, so this needs neither a
toolkit nor a device. The result has the code of a launch on an architecture,
its registers, spills and memory, and the instructions of its main loop.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

import triton
from triton.backends import compiler as backends_compiler
from triton.compiler import compiler

from jaxplugin.kernels import architectures, launching
from jaxplugin.kernels.gpu import block_scaled_matmul, configs, matmul_plans
from jaxplugin.lab.inspection import machine_code, simulation

POINTER_ALIGNMENT_BYTES: Final = 16
REGISTER_GRANULE: Final = 8  # registers of a thread are rounded up to this
_RESERVED_SHARED_MEMORY_BYTES: Final = 1024


class CompileError(Exception):
  """A kernel does not compile for an architecture."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledKernel:
  """A kernel compiled for one architecture.

  Attributes:
    num_warps: number of warps (wavefronts) of a block, including those that the
      compiler adds for warp specialization.
    assembly: PTX, or AMDGCN on AMD.
    disassembly: the output of nvdisasm, or AMDGCN on AMD.
    binary: cubin or hsaco.
    registers: 32-bit vector registers of a thread.
    spill_bytes: local memory of a thread for spilled registers. On NVIDIA it
      is 0 if no instruction accesses local memory.
    shared_memory_bytes: shared memory of a block.
    tensor_memory_columns: columns that a block allocates.
    matrix_instructions: number of matrix instructions by name in the assembly.
    machine_instructions: number of matrix instructions by name in the machine
      code, for `machine_claims.broken`.
    main_loop: the loop with the most matrix instructions, on NVIDIA with
      ptxas's schedule; None if no loop has matrix instructions.
    global_load_bits: number of global loads by bits that a thread loads,
      without TMA copies.
  """

  name: str
  architecture: architectures.Architecture
  num_warps: int
  assembly: str = dataclasses.field(repr=False)
  disassembly: str = dataclasses.field(repr=False)
  binary: bytes = dataclasses.field(repr=False)
  registers: int
  spill_bytes: int
  shared_memory_bytes: int
  tensor_memory_columns: int
  matrix_instructions: Mapping[str, int]
  machine_instructions: Mapping[str, int]
  main_loop: machine_code.Loop | None = dataclasses.field(repr=False)
  global_load_bits: Mapping[int, int]

  @property
  def tensor_copies(self) -> int:
    """The number of TMA copies from global memory."""
    return machine_code.tensor_copies_of_ptx(self.assembly)

  @property
  def limit_error(self) -> str | None:
    """The limit of the architecture that the kernel exceeds, or None."""
    target = self.architecture
    for field, what in (
      ("shared_memory_bytes", "bytes of shared memory"),
      ("tensor_memory_columns", "columns of tensor memory"),
    ):
      needed, available = getattr(self, field), getattr(target, field)
      if needed > available:
        return (
          f"{self.name} needs {needed} {what}, {target.name} has {available}"
        )
    if self._block_registers > target.registers_per_core:
      return (
        f"{self.name} needs {self.registers} registers for each of"
        f" {self.num_warps * target.warp_size} threads, a core of"
        f" {target.name} has {target.registers_per_core}"
      )
    return None

  @property
  def _block_registers(self) -> int:
    allocated = -(-self.registers // REGISTER_GRANULE) * REGISTER_GRANULE
    return allocated * self.num_warps * self.architecture.warp_size

  @property
  def resident_blocks(self) -> int:
    """The number of blocks that fit on an SM or CU at once.

    Counts registers, shared memory and tensor memory, but not threads.
    """
    target = self.architecture
    limits = [target.registers_per_core // self._block_registers]
    # CUDA reserves 1 KiB of shared memory for each block (CUDA programming
    # guide, "Compute capabilities").
    reserved = _RESERVED_SHARED_MEMORY_BYTES if target.is_nvidia else 0
    if block_bytes := self.shared_memory_bytes + reserved:
      limits.append((target.shared_memory_bytes + reserved) // block_bytes)
    if self.tensor_memory_columns:
      # An allocation is a power of two (PTX ISA, "tcgen05.alloc").
      columns = 1 << (self.tensor_memory_columns - 1).bit_length()
      limits.append(target.tensor_memory_columns // columns)
    return min(limits)

  @functools.cached_property
  def simulated(self) -> simulation.Simulation | None:
    """The modelled cycles of the main loop, with all resident blocks.

    None if `simulation.CORES` does not have the architecture (AMD and GPUs
    with tensor memory, among others), if the kernel has no main loop or uses
    TMA, or if the number of warps is not a multiple of four.
    """
    core = simulation.CORES.get(self.architecture.name)
    if (
      core is None
      or self.main_loop is None
      or self.num_warps % simulation.QUARTERS
      or self.tensor_copies
    ):
      return None
    return simulation.simulate(
      self.main_loop.body,
      core,
      num_warps=self.num_warps,
      blocks=max(self.resident_blocks, 1),
    )

  def write(self, directory: str | pathlib.Path) -> list[pathlib.Path]:
    """Writes assembly, machine code and binary; returns the files' paths."""
    files = {"amdgcn": self.assembly.encode(), "hsaco": self.binary}
    if self.architecture.is_nvidia:
      files = {
        "ptx": self.assembly.encode(),
        "sass": self.disassembly.encode(),
        "cubin": self.binary,
      }
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, content in files.items():
      path = directory / f"{self.name}.{self.architecture.name}.{suffix}"
      path.write_bytes(content)
      paths.append(path)
    return paths


def compile_kernel(
  kernel: Any,
  signature: Mapping[str, str],
  constexprs: Mapping[str, Any],
  target: str | architectures.Architecture,
  *,
  num_warps: int = 4,
  num_stages: int = 3,
  fp_fusion: bool = True,
  divisible_by_16: Sequence[str] | None = None,
) -> CompiledKernel:
  """Compiles `kernel` for `target`.

  Args:
    kernel: a `@triton.jit` function.
    signature: type of each argument that is not a constexpr, by name: "*bf16",
      "*u8", "*fp8e4nv", "i32", "i64", "fp32", ... A TMA descriptor from the
      host is "tensordesc<u8[1,128,64]>", with the shape of its loads.
    constexprs: value of each constexpr, by name. None is an absent pointer.
    target: an architecture or its name, such as "sm_90" or "gfx950".
    num_warps, num_stages: options of Triton.
    fp_fusion: whether the compiler may fuse `a * b + c` into one fma, as
      jax-triton does by default.
    divisible_by_16: names of integers that are multiples of 16, and of pointers
      that are aligned to 16 bytes. The default is all pointers, because XLA
      aligns arrays.

  Raises:
    TypeError: If signature and constexprs do not match the kernel's arguments.
    ValueError: If the architecture is unknown.
    CompileError: If Triton or ptxas cannot compile, or Triton's nvdisasm
      does not support the architecture (3.6: neither sm_103 nor sm_121).
  """
  if isinstance(target, str):
    target = architectures.by_name(target)
  _check_arguments(kernel, signature, constexprs)
  types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
  if divisible_by_16 is None:
    divisible_by_16 = [name for name, type in types.items() if type[0] == "*"]
  source = compiler.ASTSource(
    fn=kernel,
    signature=types,
    constexprs=dict(constexprs),
    attrs={
      (kernel.arg_names.index(name),): [
        ["tt.divisibility", POINTER_ALIGNMENT_BYTES]
      ]
      for name in divisible_by_16
    },
  )
  options = {
    "num_warps": num_warps,
    "num_stages": num_stages,
    "enable_fp_fusion": fp_fusion,
  }
  gpu = backends_compiler.GPUTarget(
    target.backend, target.triton_arch, target.warp_size
  )
  cache = triton.knobs.cache
  # jax-triton 0.3.1 sets TRITON_CACHE_DIR to "", which makes Triton fail.
  directory = cache.dir or cache.get_triton_dir("cache")
  with cache.scope():
    cache.dir = directory
    try:
      compiled = triton.compile(source, target=gpu, options=options)
    except Exception as error:
      raise CompileError(
        f"{kernel.__name__} does not compile for {target.name} with"
        f" {dict(constexprs)}, {options}: {error}"
      ) from error
  read = _read_nvidia if target.is_nvidia else _read_amd
  return CompiledKernel(
    name=kernel.__name__,
    architecture=target,
    num_warps=compiled.metadata.num_warps,
    shared_memory_bytes=compiled.metadata.shared,
    **read(compiled),
  )


def compile_launch(
  kernel: Any,
  launch: launching.Launch,
  signature: Mapping[str, str],
  target: str | architectures.Architecture,
) -> CompiledKernel:
  """Compiles the kernel of a planned launch; see `compile_kernel`."""
  return compile_kernel(
    kernel,
    signature,
    dict(launch.constexprs),
    target,
    num_warps=launch.num_warps,
    num_stages=launch.num_stages,
    fp_fusion=launch.fp_fusion,
  )


def compile_matmul(
  launch: launching.Launch,
  shape: configs.MatmulShape,
  target: str | architectures.Architecture,
  **dtypes: str,
) -> CompiledKernel:
  """Compiles the kernel of a launch that `matmul_plans` or `plans` planned.

  `dtypes` are those of `matmul_plans.signature`.
  """
  signature = matmul_plans.signature(launch, shape, **dtypes)
  kernel = block_scaled_matmul.KERNELS[launch.kernel]
  return compile_launch(kernel, launch, signature, target)


def _check_arguments(
  kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any]
) -> None:
  given = [*signature, *constexprs]
  unknown = [name for name in given if name not in kernel.arg_names]
  missing = [name for name in kernel.arg_names if name not in given]
  twice = [name for name in signature if name in constexprs]
  if unknown or missing or twice:
    raise TypeError(
      f"compile_kernel: {kernel.__name__} takes {kernel.arg_names};"
      f" missing: {missing}, unknown: {unknown}, both in signature and"
      f" constexprs: {twice}"
    )


def _read_nvidia(compiled: Any) -> dict[str, Any]:
  ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory) / "kernel.cubin"
    path.write_bytes(cubin)
    tools = triton.knobs.nvidia
    with_words = _run(tools.nvdisasm.path, "-c", "-hex", str(path))
    usage = _run(tools.cuobjdump.path, "-res-usage", str(path))
  registers, stack, local = map(
    int,
    _search(
      rf"Function {compiled.metadata.name}:\s+REG:(\d+) STACK:(\d+)"
      r" SHARED:\d+ LOCAL:(\d+)",
      usage,
    ).groups(),
  )
  items = [*machine_code.read_sass(with_words)]
  spills = any(
    not isinstance(item, str) and item.base in ("LDL", "STL") for item in items
  )
  return {
    "assembly": ptx,
    "disassembly": machine_code.without_words(with_words),
    "binary": cubin,
    "registers": registers,
    "spill_bytes": stack + local if spills else 0,
    "tensor_memory_columns": compiled.metadata.tmem_size or 0,
    "matrix_instructions": machine_code.matrix_instructions_of_ptx(ptx),
    "machine_instructions": machine_code.matrix_instructions(items),
    "main_loop": machine_code.main_loop(items),
    "global_load_bits": machine_code.global_load_bits_of_ptx(ptx),
  }


def _read_amd(compiled: Any) -> dict[str, Any]:
  text = compiled.asm["amdgcn"]
  items = [*machine_code.read_amdgcn(text)]
  instructions = machine_code.matrix_instructions(items)

  def number(key: str) -> int:
    return int(_search(rf"^\s*\.{key}:\s+(\d+)", text)[1])

  return {
    "assembly": text,
    "disassembly": text,
    "binary": compiled.asm["hsaco"],
    "registers": number("vgpr_count"),
    "spill_bytes": number("private_segment_fixed_size"),
    "tensor_memory_columns": 0,
    "matrix_instructions": instructions,
    "machine_instructions": instructions,
    "main_loop": machine_code.main_loop(items),
    "global_load_bits": machine_code.global_load_bits_of_amdgcn(text),
  }


def _search(pattern: str, text: str) -> re.Match[str]:
  match = re.search(pattern, text, re.MULTILINE)
  if match is None:
    raise CompileError(f"no {pattern!r} in what a tool of Triton printed")
  return match


def _run(*command: str) -> str:
  """Returns a tool's stdout, or raises CompileError with its stderr."""
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode != 0:
    raise CompileError(
      f"{' '.join(command)} failed: {done.stderr.strip()} (tools of triton"
      f" {triton.__version__}; a newer one knows more architectures)"
    )
  return done.stdout
