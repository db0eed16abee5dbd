# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`explain`: which backend is chosen for each dot, and why.

It also estimates matmuls, and gives reasons why some are plain.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Final

import jax
import numpy as np
from jaxlib.mlir.dialects import stablehlo

from jaxplugin.core import decisions, error_context, formats, targets
from jaxplugin.dot import offsets, primitive, problems
from jaxplugin.dot.backends import cpu
from jaxplugin.explanation import estimates, report
from jaxplugin.jaxext import jax_private, program, tangents
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.operation import alternatives, choice
from jaxplugin.quantization import backends as quantization_backends
from jaxplugin.quantization import (
  dequantization,
  quantize_primitive,
  quantized_results,
)
from jaxplugin.quantization import problems as quantization_problems
from jaxplugin.quantization.sharding import operation as quantization_split
from jaxplugin.ragged import calls as ragged_calls
from jaxplugin.ragged import primitive as ragged_primitive
from jaxplugin.rewriting import calls, sources
from jaxplugin.rewriting import sites as sites_lib
from jaxplugin.runtime import lowering
from jaxplugin.stablehlo import (
  module_calls,
  module_parsing,
  module_runs,
  modules,
  rewriter,
)
from jaxplugin.training import activation_gradients

_NUMBERS: Final = (bool, int, float, complex)
# Reasons of `program.FUNCTIONS`.
_BY_OPERATIONS: Final = {
  "quantize_by_operations": (
    "kernels support neither empty arrays nor, under jax.vmap, a global scale,"
    " a key or a norm's weight for each entry"
  ),
  "quantize_integers": "no kernel quantizes by the rules of these integers",
  program.DEQUANTIZE: "no kernel dequantizes with zero points or minima",
}
_MATMULS: Final = (primitive.block_scaled_dot_p, *ragged_primitive.PRIMITIVES)
# Reasons why a matmul is not block-scaled, by its primitive in JAX.
_REASONS: Final = {
  "dot_general": "a plain matmul; jp.dot_general would quantize its operands",
  "ragged_dot_general": (
    "a plain ragged matmul; jp.ragged_dot has block-scaled weights"
  ),
  "conv_general_dilated": "a convolution, which has no block-scaled kernel",
}
# Plain matmuls of modules, with their names in `_REASONS`.
_MODULE_NAMES: Final = {
  "stablehlo.dot": "dot_general",
  "stablehlo.dot_general": "dot_general",
  "stablehlo.convolution": "conv_general_dilated",
  "chlo.ragged_dot": "ragged_dot_general",
}
_OWN_BACKWARD: Final = (
  "jp.dot_general computes this matmul of the backward pass in high precision"
)
_SCALED: Final = (
  "JAX's own scaled dot, which JAX lowers; wrap the function in jp.accelerate"
)
_OFFSETS: Final = (
  "the second matmul of a block-scaled one; it adds the zero points or minima"
  " of an operand. On one CPU device the kernel of the first matmul computes it"
  " if rhs has them and is not batched"
)
# XLA:CPU passes whole arrays to custom calls.
_SCANNED: Final = (
  "rhs: a scan's slice of stacked weights, which is copied in each step; to"
  " avoid the copy, scan over the layers' numbers and call linear(layer=)"
)
_SCANNED_GROUPS: Final = (
  "rhs: a scan's slice of stacked weights, which is copied in each step; to"
  " avoid the copy, make layers and groups one dimension, and set the sizes of"
  " other layers' groups to 0"
)
_EMPTY: Final = "a size is 0, so the result is computed without a kernel"
_HALF: Final = (formats.BF16, np.dtype(np.float16))
# Custom calls that lowerings of this package emit.
_KERNEL_CALLS: Final = ("jaxplugin_", "triton_kernel_call")


def explain(
  fn: Callable[..., Any] | Any,
  *args: Any,
  target: targets.Target | None = None,
  for_export: bool = False,
  strict: bool | None = None,
  **kwargs: Any,
) -> report.Explanation:
  r"""Returns the backend of each block-scaled dot in `fn`, with the reasons.

  The result lists layer, pass, runs, backend, global scale and padding of each
  dot, and why other backends were refused. It also lists kernels that quantize,
  matmuls that are not block-scaled, and estimates of the least time.
  docs/concepts/dispatch.md is the guide.

  Nothing is compiled or run. Sizes are those of whole arrays, and of one device
  inside a `shard_map`. Not listed: unused operations; dequantization of empty
  arrays and, under `jax.vmap`, with the same values or scales for each entry.

  Args:
    fn: a function, which is traced; or a module in a form that `jp.rewrite`
      takes. A module has no trip counts of loops.
    *args, **kwargs: arguments of the function: trees of arrays or
      `jax.ShapeDtypeStruct`s. Other leaves, such as an activation function, are
      passed unchanged.
    target: the device; by default that of an enclosing `use_target`, or the
      attached one.
    for_export: True explains what `jp.export` writes. Sizes may then be
      symbolic, and measured configs of CPU kernels are ignored.
    strict: for a module, True raises the error of a call that cannot be
      lowered. By default the call's `error` has it.

  Returns:
    An `Explanation`, a sequence of the dots. `print` shows a table.

  Raises:
    TypeError: If an argument has a wrong type, a module has further arguments,
      or `strict` is given with a function.
    jp.ModuleError: If the module does not parse or is not valid.
    NotImplementedError: If `strict` and a call cannot be lowered; TypeError and
      ValueError are possible too.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16)
    >>> w = jp.quantize(jnp.ones((32, 64)), "nvfp4")
    >>> h200 = jp.named_target("h200", cudnn="9.13")
    >>> explanation = jp.explain(jp.linear, x, w, target=h200)
    >>> print("\n".join(str(explanation).splitlines()[2:4]))
    #  operands       m   n   k  runs  backend  global scale  at least
    0  bf16 x nvfp4  16  32  64     1  triton   fused         0.881 ns
  """
  if target is not None:
    targets.require("explain", target, "a jp.Target or None")
  if modules.is_module(fn):
    if args or kwargs:
      raise TypeError(
        "explain: args must be empty for a module, got"
        f" {len(args) + len(kwargs)} arguments; pass the function to explain"
        " it with arguments"
      )
    return explain_module(modules.read(fn), target, strict=bool(strict))
  error_context.require_function("explain", fn)
  if strict is not None:
    raise TypeError(
      "explain: strict must be left out for a function, got"
      f" strict={strict!r}. Bind an argument of that name with"
      " functools.partial."
    )
  # A forced implementation is checked for this target while tracing.
  chosen = (
    contextlib.nullcontext() if target is None else targets.use_target(target)
  )
  with chosen, sites_lib.recording() as record:
    jaxpr = _traced(fn, args, kwargs)
  leaves = jax.tree.leaves((args, kwargs))
  shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
  num_devices = max([1, *(getattr(s, "num_devices", 1) for s in shardings)])
  axis_sizes: dict[str, int] = {}
  for sharding in shardings:
    axis_sizes |= dict(getattr(getattr(sharding, "mesh", None), "shape", {}))
  explain_quantization = functools.partial(
    _explain_quantization,
    target=target,
    axis_sizes=axis_sizes,
    for_export=for_export,
  )
  # A gradient leaves operations unused, and so does `accept_quantized`.
  used = jax_private.without_unused(jaxpr.jaxpr)
  operations = program.operations(used, num_devices)
  computed = set()  # names of prologues
  dots, quantizations, others = [], [], []
  for operation in operations:
    if operation.eqn.primitive in _MATMULS:
      dots.append(_explain_matmul(operation, target, for_export))
    elif operation.eqn.primitive is quantize_primitive.quantize_p:
      problem = operation.eqn.params["problem"]
      if not problem.blockings:  # only sums of columns, by XLA
        continue
      computed.add(str(problem.prologue))
      is_fused, _ = _quantized_result(operation, target, for_export=for_export)
      if not is_fused:
        quantizations.append(explain_quantization(operation))
    elif operation.eqn.primitive is dequantization.dequantize_p:
      quantizations.append(explain_quantization(operation))
    elif program.called_function(operation.eqn) is not None:
      quantizations.append(_explain_function(operation, target))
    elif (other := _explain_other(operation, target)) is not None:
      others.append(other)
  return report.Explanation(
    dots=report.merged(dots),
    quantizations=report.merged(quantizations),
    others=report.merged(others),
    assumptions=_assumptions(operations),
    sites=report.merged([_explain_site(site) for site in record.sites]),
    chains=report.merged(
      [
        *(_explain_chain(x, used, computed) for x in record.chains),
        *_separate_gradients(used),
      ]
    ),
  )


def _traced(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
  """Returns the jaxpr of a function. Untraceable arguments are constants."""
  leaves, tree = jax.tree.flatten((args, kwargs))
  if all(_is_array(x) or isinstance(x, _NUMBERS) for x in leaves):
    return jax.make_jaxpr(fn)(*args, **kwargs)
  arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

  def function(*values: Any) -> Any:
    given = list(leaves)
    for i, value in zip(arrays, values, strict=True):
      given[i] = value
    args, kwargs = jax.tree.unflatten(tree, given)
    return [x for x in jax.tree.leaves(fn(*args, **kwargs)) if _is_array(x)]

  return jax.make_jaxpr(function)(*(leaves[i] for i in arrays))


def _is_array(x: Any) -> bool:
  return hasattr(x, "dtype") or hasattr(x, "__jax_array__")


def _explain_site(decided: sites_lib.DecidedSite) -> report.ExplainedSite:
  site = decided.site
  return report.ExplainedSite(
    **dataclasses.asdict(decided.flow),
    source=site.source,
    layer=site.name,
    description=site.description,
    weight=site.weight or "",
    parameter=site.parameter,
    is_taken=site.recipe is not None,
    reason=site.reason,
    note=decided.note,
  )


def _explain_chain(
  traced: sites_lib.TracedChain, used: Any, computed: Set[str]
) -> sites_lib.Chain:
  """Returns a norm or activation with its outcome in a jaxpr.

  Args:
    used: the jaxpr, without dead code.
    computed: names of the prologues in it.
  """
  chain = traced.chain
  note, is_fused = chain.note, chain.is_fused
  if note.startswith(sites_lib.NOT_IN_TRAINING) and chain.name not in computed:
    note, is_fused = note.removeprefix(sites_lib.NOT_IN_TRAINING), False
  readers = list(dict.fromkeys(_readers(traced.variable, used)))
  if is_fused and readers:
    also = f"XLA also computes it for {' and '.join(readers)}"
    note = f"{note}; {also}" if note else also
  flow = dataclasses.asdict(traced.flow)
  return dataclasses.replace(chain, **flow, is_fused=is_fused, note=note)


def _separate_gradients(
  jaxpr: Any,
  names: tuple[jax_private.ScopeName, ...] = (),
  flow: program.ControlFlow | None = None,
) -> Iterator[sites_lib.Chain]:
  """Yields gradients of activations that no matmul quantizes with a prologue.

  Args:
    jaxpr: a jaxpr without dead code.
  """
  flow = flow or program.ControlFlow()
  for eqn in jaxpr.eqns:
    inside = names + jax_private.scopes(eqn.source_info)
    name, note = activation_gradients.separate_gradient(eqn, jaxpr)
    if name:
      layer, phase = jax_private.layer_and_phase(inside)
      yield sites_lib.Chain(
        **dataclasses.asdict(flow),
        source=jax_private.user_frame(eqn.source_info),
        layer=layer,
        phase=phase,
        name=name,
        dot=f"a matmul of {_describe(eqn.outvars[0].aval)}",
        is_fused=False,
        note=note,
      )
      continue
    within = flow.inside(eqn.primitive.name, eqn.params)
    for inner in program.sub_jaxprs(eqn):
      yield from _separate_gradients(inner, inside, within)


_DOTS: Final = frozenset(matmul.name for matmul in _MATMULS)


def _readers(variable: Any, jaxpr: Any) -> Iterator[str]:
  """Yields operations that read the activations of a fused matmul.

  The matmul itself has them as an argument only for their gradient.
  """
  for eqn in jaxpr.eqns:
    is_read = any(variable is v for v in eqn.invars)
    if is_read and eqn.primitive.name == "custom_jvp_call":
      operation = binding_private.BoundOperation.of_equation(eqn)
      source = sources.source_of(operation, result=0)
      if source is not None and eqn.invars[source] is variable:
        yield from _readers(eqn.outvars[0], jaxpr)
        continue
    is_guard = eqn.primitive in tangents.GUARDS
    if is_read and not is_guard and not calls.any_contains(eqn, _DOTS):
      yield eqn.primitive.name
    for inner in program.sub_jaxprs(eqn):
      yield from _readers(variable, inner)
  if any(variable is v for v in jaxpr.outvars):
    yield "a result"


def explain_module(
  source: modules.ParsedModule,
  target: targets.Target | None = None,
  implementation: str | None = None,
  *,
  strict: bool = False,
) -> report.Explanation:
  """Explains the calls of a module. The module cannot be used afterwards.

  Args:
    target: the device to decide for; None is the current one.
    implementation: backend of all dots; None chooses one for each.
    strict: whether a call that cannot be lowered is an error.
  """
  target = target or targets.current_target()
  calls, others = [], []
  kernels: collections.Counter[str] = collections.Counter()
  with rewriter.readable(source):
    for operation, runs in module_runs.runs_of(source):
      name = module_parsing.custom_call(operation)
      kernels[name] += name.startswith(_KERNEL_CALLS)
      if module_calls.call_name(operation) is not None:
        calls.append(runs)
      elif (other := _explain_plain(operation, source, target)) is not None:
        others += [
          dataclasses.replace(other, count=count, **vars(run))
          for run, count in runs.items()
        ]
  done = rewriter.examine(source, target, implementation, strict=strict)
  explained: list[report.Explained] = []
  for item, runs in zip(done, calls, strict=True):
    one = _explain_call(item, target)
    # A call that never runs is rewritten as well.
    explained += [
      dataclasses.replace(one, count=count, **vars(run))
      for run, count in (runs or {program.ControlFlow(): 1}).items()
    ]
  return report.Explanation(
    dots=report.merged(explained),
    others=report.merged(others),
    assumptions=tuple(
      f"custom calls of {name} ({count} in the module) stay as they were"
      " chosen when it was lowered; explain the function to see why"
      for name, count in kernels.items()
      if count
    ),
  )


def _explain_call(
  item: rewriter.Rewritten, target: targets.Target
) -> report.Explained:
  """Explains one call of a module."""
  fields: dict[str, Any] = {"problem": None, "target": target, "decision": None}
  if item.decided is not None:
    results = [x.aval for x in item.dot.outvars]
    fields = _explain_decided(item.dot, item.decided, results)
  return report.Explained(
    **fields | {"error": item.error},
    source=item.source,
    call=item.call,
    description=item.description,
    function=item.function,
  )


def _assumptions(
  operations: Sequence[program.TracedOperation],
) -> tuple[str, ...]:
  most = max((operation.num_devices for operation in operations), default=1)
  if most == 1:
    return ()
  return (
    f"the module is partitioned over {most} devices; the compiled program"
    " decides each call again for the shard of one device",
  )


def _explain_matmul(
  operation: program.TracedOperation,
  target: targets.Target | None,
  for_export: bool,
) -> report.Explained:
  eqn = operation.eqn
  if _rows_are_rounded_with_offset(operation, target, for_export=for_export):
    call = eqn.params["call"].replace(fastest_precision=True)
    eqn = eqn.replace(params={**eqn.params, "call": call})
  decided: choice.DecidedCall
  if eqn.primitive is primitive.block_scaled_dot_p:
    decided = primitive.decide(eqn, target, for_export=for_export)
  else:
    decided = ragged_primitive.decide(
      eqn, target, operation.num_devices, for_export=for_export
    )
  error = _export_error(operation) if for_export else None
  if error is not None:
    decided = dataclasses.replace(decided, decision=None, error=error)
  is_fused, note = _quantized_result(operation, target, for_export=for_export)
  computed = operation.alternative if is_fused else eqn
  fields = _explain_decided(eqn, decided, [x.aval for x in computed.outvars])
  fields["decision"] = _with_notes(operation, fields["decision"], note)
  return report.Explained(**_place_of(operation), **fields)


def _export_error(operation: program.TracedOperation) -> str | None:
  """Returns why `jp.export` refuses an operation, or None."""
  if not operation.is_local and operation.num_devices == 1:
    return None
  return lowering.symbolic_error([x.aval for x in operation.eqn.invars])


def _explain_decided(
  eqn: Any, decided: choice.DecidedCall, results: Sequence[Any]
) -> dict[str, Any]:
  """Returns fields of a `report.Explained` that follow from a decision.

  Args:
    results: arrays that the matmul's kernel writes.
  """
  fields = dict(vars(decided))
  if decided.decision is not None:
    fields["estimate"] = _estimate(eqn, decided, results)
    if decided.problem.is_empty:
      fields["decision"] = dataclasses.replace(
        decided.decision, notes=(_EMPTY,)
      )
      return fields
    backend = report.backend_of(decided.problem, decided.decision)
    refusal = backend.lowering_refusal(decided.target)
    if refusal is None:
      fields["launched_by"] = backend.launched_by(decided.target)
    else:
      fields["lowering_error"] = refusal.reason
  return fields


def _explain_quantization(
  operation: program.TracedOperation,
  target: targets.Target | None,
  axis_sizes: Mapping[str, int],
  for_export: bool,
) -> report.ExplainedQuantization:
  eqn = operation.eqn
  target = targets.resolved(eqn.params["target"], target)
  is_partitioned = operation.num_devices > 1
  module = lowering.Module(
    platforms=(target.platform,),
    is_partitioned=is_partitioned,
    is_split=is_partitioned,
  )
  problem: quantization_backends.Problem = eqn.params["problem"]
  if isinstance(problem, quantization_problems.DequantizationProblem):
    name = "dequantize"
  else:
    is_single = len(problem.blockings) == 1
    name = "quantize" if is_single else "quantize_both"
  explained = functools.partial(
    report.ExplainedQuantization,
    **_place_of(operation),
    operation=name,
    description=str(problem),
    target=target,
  )
  passes = 2 if getattr(problem, "computes_global_scale", False) else 1
  read = [x.aval for x in eqn.invars] * passes
  written = [x.aval for x in eqn.outvars]
  error = _export_error(operation) if for_export else None
  if error is not None:
    return explained(
      implementation="none",
      reason=error,
      estimate=estimates.of_arrays(read, written, target),
    )
  found = quantization_split.explained(
    problem, module, target, eqn.params["overlay"], axis_sizes
  )
  notes = {note for decision in found.decisions for note in decision.notes}
  if quantization_backends.STATISTICS_FIRST in notes:
    read.append(eqn.invars[0].aval)
  return explained(
    **vars(found), estimate=estimates.of_arrays(read, written, target)
  )


def _explain_function(
  operation: program.TracedOperation, target: targets.Target | None
) -> report.ExplainedQuantization:
  """Explains a call of one of `program.FUNCTIONS`."""
  eqn = operation.eqn
  target = target or targets.current_target()
  x, *_ = read = [v.aval for v in eqn.invars]
  written = [v.aval for v in eqn.outvars]
  (sub,) = program.sub_jaxprs(eqn)
  name = jax_private.scopes(sub.eqns[0].source_info)[0].text
  before, _, result = name.removesuffix(" by xla").partition(" to ")
  producer = before.rpartition(" of ")[0]
  kind, description = "quantize", f"{_describe(x)} to {result}"
  if eqn.params["name"] == program.DEQUANTIZE:
    kind, description = "dequantize", f"{before} to {_describe(written[0])}"
  elif producer:
    description += f", after {producer}"
  return report.ExplainedQuantization(
    **_place_of(operation),
    operation=kind,
    description=description,
    target=target,
    implementation="xla",
    reason=_BY_OPERATIONS[eqn.params["name"]],
    # A global scale that is computed has fewer dimensions than x.
    estimate=estimates.of_arrays(
      read, written, target, reads=1 + any(y.ndim < x.ndim for y in written)
    ),
  )


def _place_of(operation: program.TracedOperation) -> dict[str, Any]:
  """Returns the fields of a `program.Place`."""
  fields = dataclasses.fields(program.Place)
  return {field.name: getattr(operation, field.name) for field in fields}


def _with_notes(
  operation: program.TracedOperation,
  decision: decisions.Decision | None,
  note: str,
) -> decisions.Decision | None:
  """Adds a note unless it is "", and one if a scan slices the weights."""
  if decision is None:
    return None
  notes = [*decision.notes, *([note] if note else [])]
  eqn = operation.eqn
  numbers = eqn.params["call"].named(range(len(eqn.invars)))
  if (
    decision.implementation == cpu.BACKEND.name
    and numbers["rhs"] in operation.scanned
  ):
    is_dot = eqn.primitive is primitive.block_scaled_dot_p
    notes.append(_SCANNED if is_dot else _SCANNED_GROUPS)
  return dataclasses.replace(decision, notes=tuple(notes))


def _rows_are_rounded_with_offset(
  operation: program.TracedOperation,
  target: targets.Target | None,
  *,
  for_export: bool,
) -> bool:
  """Whether the call of a kernel that adds an offset has precision="fastest".

  The traced operations, which add the offset themselves, never have it.
  """
  eqn = operation.alternative
  if eqn is None or for_export:
    return False
  forms, avals = eqn.params["forms"], [x.aval for x in eqn.invars]
  fused = None if forms is None else forms.fused(*avals)
  if fused is None or not fused[0].call.fastest_precision:
    return False
  target = targets.resolved(eqn.params["target"], target)
  module = _module_of(operation, target)
  return alternatives.kernel_of(eqn, module, target, avals) is not None


def _module_of(
  operation: program.TracedOperation, target: targets.Target
) -> lowering.Module:
  return lowering.Module(
    platforms=(target.platform,), is_partitioned=operation.num_devices > 1
  )


def _quantized_result(
  operation: program.TracedOperation,
  target: targets.Target | None,
  *,
  for_export: bool,
) -> tuple[bool, str]:
  """Explains the quantization of a matmul's result (`out_format`).

  Args:
    operation: the matmul, or its quantization.

  Returns:
    Whether the kernel of the matmul quantizes, and a note; (False, "") without
    `out_format`.
  """
  eqn = operation.alternative
  forms = None if eqn is None else eqn.params["forms"]
  if not isinstance(forms, quantized_results.QuantizedResult):
    return False, ""
  target = targets.resolved(eqn.params["target"], target)
  refusal = _module_of(operation, target).kernels_refusal()
  if for_export:
    reason = "jp.export writes kernels of one operation"
  elif refusal is not None:
    reason = refusal.reason
  else:
    _, reason = forms.decide([x.aval for x in eqn.invars], target)
  note = f"result: quantized to {forms.format}"
  if reason:
    return False, f"{note} separately, because {reason}"
  return True, f"{note} by the kernel of the matmul (fused)"


def _describe(aval: Any) -> str:
  return f"{aval.dtype.name}[{', '.join(map(str, aval.shape))}]"


def _estimate(
  eqn: Any, decided: choice.DecidedCall, results: Sequence[Any]
) -> estimates.Estimate | None:
  """Estimates a matmul; None if a size is symbolic.

  `results` are the arrays that its kernel writes.

  The number of groups with rows is unknown. The estimate of a ragged dot
  assumes the smaller of the number of rows and the number of groups. A
  contraction reads all rows and writes all groups.
  """
  problem = decided.problem
  if decided.decision is None or not problem.sizes_are_static:
    return None
  assert problem.m is not None and problem.n is not None
  assert problem.k is not None
  call = eqn.params["call"].filled(v.aval for v in eqn.invars)
  flops = 2 * problem.m * problem.n * problem.k
  grouped: tuple[str, ...] = ()
  used = 1.0
  if isinstance(problem, problems.DotProblem):
    assert problem.batch is not None
    # If an operand is a layer of a stack, only this layer is read.
    call = call.without_origins()
    flops *= problem.batch
  elif isinstance(problem, ragged_calls.RaggedDotProblem):
    assert problem.groups is not None
    grouped = ("rhs", "rhs_scale")
    used = min(problem.m, problem.groups) / max(problem.groups, 1)
  arrays = call.arrays()
  in_groups = estimates.bytes_of(arrays.pop(n) for n in grouped if n in arrays)
  others = estimates.bytes_of([*arrays.values(), *results])
  assert in_groups is not None and others is not None
  is_native = False
  if not isinstance(problem, ragged_calls.ContractionProblem):
    backend = report.backend_of(problem, decided.decision)
    is_native = backend.plan(problem, decided.target).is_native
  precision = estimates.precision_of(
    problem.lhs, problem.rhs, is_native=is_native
  )
  return estimates.estimate(
    in_groups * used + others, flops, precision, decided.target
  )


def _explain_other(
  operation: program.TracedOperation, target: targets.Target | None
) -> report.NotBlockScaled | None:
  """Explains a matmul that is not block-scaled; None for other operations."""
  eqn = operation.eqn
  matmuls, dots = jax_private.scaled_primitives()
  name, sides = f"lax.{eqn.primitive.name}", eqn.invars[:2]
  if eqn.primitive in matmuls:
    name, reason = "jax.nn.scaled_matmul", _SCALED
  elif eqn.primitive in dots:
    name, reason = "jax.lax.scaled_dot", _SCALED
  elif eqn.primitive.name in _REASONS:
    reason = _REASONS[eqn.primitive.name]
    if operation.phase in ("dgrad", "wgrad"):
      reason = _OWN_BACKWARD
    if offsets.SCOPE in operation.layer.split("/"):
      reason = _OFFSETS
  else:
    return None
  lhs, rhs, out = (v.aval for v in (*sides, eqn.outvars[0]))
  dimensions = None
  if eqn.primitive.name == "dot_general":
    (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
    dimensions = batch, contracting
  return report.NotBlockScaled(
    **_place_of(operation),
    operation=name,
    description=f"{_describe(lhs)} x {_describe(rhs)} -> {_describe(out)}",
    reason=reason,
    operands=f"{lhs.dtype.name} x {rhs.dtype.name}",
    **_figures((lhs, rhs, out), dimensions, target or targets.current_target()),
  )


def _figures(
  arrays: Sequence[Any],
  dimensions: tuple[Sequence[int], Sequence[int]] | None,
  target: targets.Target,
) -> dict[str, Any]:
  """Returns the fields `sizes` and `estimate` of a `report.NotBlockScaled`.

  Args:
    arrays: shapes and dtypes of lhs, rhs and the result; None if not known.
    dimensions: batch and contracting dimensions of lhs; None if the operation
      is not a dot.
  """
  lhs, rhs, out = arrays
  if dimensions is None or lhs is None or rhs is None:
    return {}
  static = (int, np.integer)
  if not all(isinstance(size, static) for size in (*lhs.shape, *rhs.shape)):
    return {}
  batch, k = (math.prod(lhs.shape[d] for d in dims) for dims in dimensions)
  both = max(batch * k, 1)
  m, n = math.prod(lhs.shape) // both, math.prod(rhs.shape) // both
  sizes = batch, m, n, k
  num_bytes = None if out is None else estimates.bytes_of((lhs, rhs, out))
  if num_bytes is None:
    return {"sizes": sizes}
  flops = 2 * math.prod(out.shape) * k
  is_half = lhs.dtype in _HALF and rhs.dtype in _HALF
  precision: estimates.Precision | None = "bf16" if is_half else None
  return {
    "sizes": sizes,
    "estimate": estimates.estimate(num_bytes, flops, precision, target),
  }


def _explain_plain(
  operation: Any, source: modules.ParsedModule, target: targets.Target
) -> report.NotBlockScaled | None:
  """Explains a plain matmul of a module; None for other operations."""
  name = _MODULE_NAMES.get(operation.name)
  if name is None:
    return None
  types = [x.type for x in (*operation.operands[:2], *operation.results)]
  arrays = [_array_type(x) for x in types]
  lhs, rhs, out = (
    str(ir_type) if array is None else _describe(array)
    for ir_type, array in zip(types, arrays, strict=True)
  )
  return report.NotBlockScaled(
    source=source.location(operation),
    operation=operation.name,
    description=f"{lhs} x {rhs} -> {out}",
    reason=_REASONS[name],
    operands=f"{lhs.partition('[')[0]} x {rhs.partition('[')[0]}",
    **_figures(arrays, _dimensions_of_module(operation, arrays[0]), target),
  )


def _array_type(ir_type: Any) -> Any:
  """Returns shape and dtype; None for f64 and for symbolic sizes."""
  try:
    return module_calls.array_type(ir_type)
  except (TypeError, NotImplementedError):
    return None


def _dimensions_of_module(
  operation: Any, lhs: Any
) -> tuple[Sequence[int], Sequence[int]] | None:
  """Returns the batch and contracting dimensions of lhs; None if not a dot."""
  if operation.name == "stablehlo.dot_general":
    numbers = stablehlo.DotDimensionNumbers(
      operation.attributes["dot_dimension_numbers"]
    )
    return numbers.lhs_batching_dimensions, numbers.lhs_contracting_dimensions
  if operation.name == "stablehlo.dot" and lhs is not None:
    return [], [len(lhs.shape) - 1]
  return None
