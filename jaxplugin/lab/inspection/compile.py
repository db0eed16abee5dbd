# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels for GPUs that are not there, and reads the result.

Triton brings LLVM for AMD and ptxas for NVIDIA, so that no toolkit and no
device is needed. What comes out is what a launch on that architecture would
run: registers, spills, memory, and the instructions of the main loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import triton
from triton.backends import compiler as backends_compiler
from triton.compiler import compiler

from jaxplugin.kernels import architectures
from jaxplugin.lab.inspection import machine_code
from jaxplugin.lab.inspection import scheduling
from jaxplugin.lab.inspection import simulation

POINTER_ALIGNMENT_BYTES: Final = 16
REGISTER_GRANULE: Final = 8  # registers are given to a thread by eights
_RESERVED_SHARED_MEMORY_BYTES: Final = 1024


class CompileError(Exception):
  """A kernel does not compile for an architecture; the text says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledKernel:
  """A kernel compiled for one architecture.

  Attributes:
    name: of the kernel.
    architecture: what it was compiled for.
    num_warps: warps (wavefronts) of a block, those that the compiler added to
      specialize some among them.
    assembly: PTX, or AMDGCN on AMD.
    disassembly: SASS as nvdisasm prints it, or AMDGCN once more.
    binary: cubin or hsaco.
    registers: 32-bit vector registers a thread.
    spill_bytes: local memory a thread, where instructions access it: registers
      that spilled. (The frame of a call, as of a division's slow path, is not
      counted.)
    shared_memory_bytes: a block.
    tensor_memory_columns: that it allocates.
    matrix_instructions: how many of each the whole kernel has, as the assembly
      names them.
    machine_instructions: how many of each it has, as the machine code names
      them, for `machine_claims.broken`.
    main_loop: the innermost loop with the most matrix instructions, as the
      machine code names them; None where no loop has any.
    global_load_bits: how many loads there are of each width, bits a thread;
      `machine_code.TENSOR_COPY` stands for copies of whole tiles.
    schedule: the main loop as ptxas scheduled it; None on AMD as well.
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
  main_loop: machine_code.Loop | None
  global_load_bits: Mapping[int, int]
  schedule: Sequence[scheduling.Scheduled] | None = dataclasses.field(
    repr=False
  )

  @property
  def limit_error(self) -> str | None:
    """Why the kernel cannot be launched on its architecture, if so."""
    target = self.architecture
    if self.shared_memory_bytes > target.shared_memory_bytes:
      return (
        f"{self.name} needs {self.shared_memory_bytes} bytes of shared memory,"
        f" {target.name} has {target.shared_memory_bytes}"
      )
    if self.tensor_memory_columns > target.tensor_memory_columns:
      return (
        f"{self.name} needs {self.tensor_memory_columns} columns of tensor"
        f" memory, {target.name} has {target.tensor_memory_columns}"
      )
    threads = self.num_warps * target.warp_size
    allocated = -(-self.registers // REGISTER_GRANULE) * REGISTER_GRANULE
    if allocated * threads > target.registers_per_core:
      return (
        f"{self.name} needs {self.registers} registers for each of"
        f" {threads} threads, a core of {target.name} has"
        f" {target.registers_per_core}"
      )
    return None

  @property
  def resident_blocks(self) -> int:
    """Blocks that an SM or CU holds at once, as far as their memory goes.

    That is registers, shared memory and tensor memory; 0 where not one fits.
    """
    target = self.architecture
    threads = self.num_warps * target.warp_size
    allocated = -(-self.registers // REGISTER_GRANULE) * REGISTER_GRANULE
    limits = [target.registers_per_core // (allocated * threads)]
    # NVIDIA's driver has 1 KiB of each block's, and a block cannot have all of
    # the SM's (CUDA programming guide, "Compute capabilities").
    reserved = _RESERVED_SHARED_MEMORY_BYTES if target.is_nvidia else 0
    if self.shared_memory_bytes + reserved:
      limits.append(
        (target.shared_memory_bytes + reserved)
        // (self.shared_memory_bytes + reserved)
      )
    if self.tensor_memory_columns:
      # Given by powers of two (PTX ISA, "tcgen05.alloc").
      columns = 1 << (self.tensor_memory_columns - 1).bit_length()
      limits.append(target.tensor_memory_columns // columns)
    return min(limits)

  @functools.cached_property
  def simulated(self) -> simulation.Simulation | None:
    """What the model says of the main loop, with all resident blocks.

    None without one, and where there is no model: on AMD, with tensor memory,
    with copies by TMA and where fewer than four warps are a block.
    """
    core = simulation.CORES.get(self.architecture.name)
    if (
      core is None
      or self.schedule is None
      or self.num_warps % simulation.QUARTERS
      or machine_code.TENSOR_COPY in self.global_load_bits
    ):
      return None
    return simulation.simulate(
      self.schedule,
      core,
      num_warps=self.num_warps,
      blocks=max(self.resident_blocks, 1),
    )

  def write(self, directory: str | pathlib.Path) -> list[pathlib.Path]:
    """Writes assembly, machine code and binary; returns the files' paths."""
    stem = f"{self.name}.{self.architecture.name}"
    files: dict[str, str | bytes] = {"amdgcn": self.assembly}
    files["hsaco"] = self.binary
    if self.architecture.is_nvidia:
      files = {"ptx": self.assembly, "sass": self.disassembly}
      files["cubin"] = self.binary
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, content in files.items():
      path = directory / f"{stem}.{suffix}"
      if isinstance(content, str):
        path.write_text(content)
      else:
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
  num_ctas: int = 1,
  max_registers: int | None = None,
  waves_per_eu: int | None = None,
  fp_fusion: bool = True,
  divisible_by_16: Sequence[str] | None = None,
  cache_directory: str | pathlib.Path | None = None,
) -> CompiledKernel:
  """Compiles `kernel` for `target`.

  Args:
    kernel: a `@triton.jit` function.
    signature: type of each argument that is no constexpr, by name: "*bf16",
      "*u8", "*fp8e4nv", "i32", "i64", "fp32", ...; of a TMA descriptor that the
      host makes "tensordesc<u8[1,128,64]>", with the shape of its loads.
    constexprs: value of each constexpr, by name; None stands for an absent
      pointer as well.
    target: an architecture or its name, e.g. "sm_90", "gfx950".
    num_warps: of a block.
    num_stages: of software pipelining.
    num_ctas: blocks of a cluster.
    max_registers: limit a thread, on NVIDIA.
    waves_per_eu: occupancy to aim at, on AMD.
    fp_fusion: whether `a * b + c` may be rounded once, as JAX-Triton's default.
    divisible_by_16: arguments that are multiples of 16, in bytes where they are
      pointers. None: all pointers, which is what arrays of XLA are.
    cache_directory: where Triton keeps what it compiled, by default
      ~/.triton/cache.

  Raises:
    TypeError: signature and constexprs together are not the kernel's arguments.
    ValueError: unknown architecture.
    CompileError: Triton or ptxas refuses the kernel, or Triton's nvdisasm does
      not know the architecture (that of 3.6: neither sm_103 nor sm_121).
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
    "num_ctas": num_ctas,
    "enable_fp_fusion": fp_fusion,
    **({} if max_registers is None else {"maxnreg": max_registers}),
    **({} if waves_per_eu is None else {"waves_per_eu": waves_per_eu}),
  }
  with _cache(cache_directory):
    try:
      compiled = triton.compile(
        source,
        target=backends_compiler.GPUTarget(
          target.backend, target.triton_arch, target.warp_size
        ),
        options=options,
      )
    except Exception as error:
      raise CompileError(
        f"{kernel.__name__} does not compile for {target.name} with"
        f" {dict(constexprs)}, {options}: {error}"
      ) from error
  read = _read_nvidia if target.is_nvidia else _read_amd
  return read(kernel.__name__, target, compiled)


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


@contextlib.contextmanager
def _cache(directory: str | pathlib.Path | None) -> Iterator[None]:
  cache = triton.knobs.cache
  # jax-triton 0.3.1 empties TRITON_CACHE_DIR, with which Triton does not start.
  default = cache.dir or cache.get_triton_dir("cache")
  with cache.scope():
    cache.dir = default if directory is None else str(directory)
    yield


def _read_nvidia(
  name: str, target: architectures.Architecture, compiled: Any
) -> CompiledKernel:
  ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory) / f"{name}.cubin"
    path.write_bytes(cubin)
    nvdisasm = triton.knobs.nvidia.nvdisasm.path
    with_words = _run(nvdisasm, "-c", "-hex", str(path))
    usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path))
  registers, stack, local = map(
    int,
    _search(
      rf"Function {compiled.metadata.name}:\s+REG:(\d+) STACK:(\d+)"
      r" SHARED:\d+ LOCAL:(\d+)",
      usage,
    ).groups(),
  )
  sass = scheduling.without_words(with_words)
  return CompiledKernel(
    name=name,
    architecture=target,
    num_warps=compiled.metadata.num_warps,
    assembly=ptx,
    disassembly=sass,
    binary=cubin,
    registers=registers,
    spill_bytes=stack + local if machine_code.spills_in_sass(sass) else 0,
    shared_memory_bytes=compiled.metadata.shared,
    tensor_memory_columns=compiled.metadata.tmem_size or 0,
    matrix_instructions=machine_code.matrix_instructions_of_ptx(ptx),
    machine_instructions=machine_code.matrix_instructions_of_sass(sass),
    main_loop=machine_code.main_loop_of_sass(sass),
    global_load_bits=machine_code.global_load_bits_of_ptx(ptx),
    schedule=scheduling.main_loop(with_words),
  )


def _read_amd(
  name: str, target: architectures.Architecture, compiled: Any
) -> CompiledKernel:
  text = compiled.asm["amdgcn"]
  instructions = machine_code.matrix_instructions_of_amdgcn(text)

  def number(key: str) -> int:
    return int(_search(rf"^\s*\.{key}:\s+(\d+)", text)[1])

  return CompiledKernel(
    name=name,
    architecture=target,
    num_warps=compiled.metadata.num_warps,
    assembly=text,
    disassembly=text,
    binary=compiled.asm["hsaco"],
    registers=number("vgpr_count"),
    spill_bytes=number("private_segment_fixed_size"),
    shared_memory_bytes=compiled.metadata.shared,
    tensor_memory_columns=0,
    matrix_instructions=instructions,
    machine_instructions=instructions,
    main_loop=machine_code.main_loop_of_amdgcn(text),
    global_load_bits=machine_code.global_load_bits_of_amdgcn(text),
    schedule=None,
  )


def _search(pattern: str, text: str) -> re.Match[str]:
  match = re.search(pattern, text, re.MULTILINE)
  if match is None:
    raise CompileError(f"no {pattern!r} in what a tool of Triton printed")
  return match


def _run(*command: str) -> str:
  """Output of a tool; its words are in the error where it fails."""
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode != 0:
    raise CompileError(
      f"{' '.join(command)} failed: {done.stderr.strip()} (tools of triton"
      f" {triton.__version__}; a newer one knows more architectures)"
    )
  return done.stdout
