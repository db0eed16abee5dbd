# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The result of `explain`: plain values, a report of them, and JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from jaxplugin.core import decisions, targets
from jaxplugin.dot import backends, problems
from jaxplugin.explanation import estimates
from jaxplugin.jaxext import program
from jaxplugin.printing import console
from jaxplugin.quantization import problems as quantization
from jaxplugin.ragged import backends as ragged_backends
from jaxplugin.ragged import calls
from jaxplugin.rewriting import sites as sites_lib
from jaxplugin.tables import resolution

_FORWARD: Final = "forward"
# Columns of the table of matmuls. A column without any cell is omitted unless
# it is in `_ALWAYS`.
_HEADER: Final = (
  *("#", "layer", "operands", "batch", "m", "n", "k", "runs", "backend"),
  *("global scale", "at least"),
)
_ALWAYS: Final = ("#", "operands", "m", "n", "k", "runs", "backend")
_FIGURES: Final = ("batch", "m", "n", "k", "runs", "at least")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explained(program.Place):
  """One block-scaled dot of a function, or one call of a module.

  Attributes:
    problem: the problem that the dot solves; None for a call without a dot.
    target: the device of the decision.
    decision: the chosen backend; None if there is no dot, the forced backend
      does not support it, or the call cannot be lowered.
    error: the reason, if the dot is not supported or cannot be lowered.
    lowering_error: why this process cannot lower the decision; "" if it can.
    launched_by: the launcher of the kernels in XLA; "" if there is only one, or
      this process cannot lower it.
    call: for a module, the name of the call, such as "__op$quantize".
    description: for a module, the computation of the call in words.
    function: for a module, the function that `rewrite` calls instead; "" if the
      call stays.
    estimate: bytes, FLOPs and least time of one dot; None if not known.
  """

  problem: (
    problems.DotProblem
    | calls.RaggedDotProblem
    | calls.ContractionProblem
    | None
  )
  target: targets.Target
  decision: decisions.Decision | None
  error: str = ""
  lowering_error: str = ""
  launched_by: str = ""
  call: str = ""
  description: str = ""
  function: str = ""
  estimate: estimates.Estimate | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedQuantization(program.Place):
  """One quantization or dequantization of a function.

  Attributes:
    operation: "quantize", "dequantize" or "quantize_both".
    description: source and result in words.
    target: the device of the decision.
    implementation: "cpu", "triton" or "xla" (operations); for "quantize_both"
      one for each axis if they differ. "none" if `jp.export` refuses it.
    reason: why no kernel supports it; "" if one does.
    decisions: the decisions that lowering follows, with every refusal; one for
      each axis if no kernel supports both.
    problems: the problem of each decision.
    estimate: bytes and least time; None if not known.
  """

  operation: str
  description: str
  target: targets.Target
  implementation: str
  reason: str = ""
  decisions: tuple[decisions.Decision, ...] = ()
  problems: tuple[
    quantization.QuantizationProblem | quantization.DequantizationProblem, ...
  ] = ()
  estimate: estimates.Estimate | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotBlockScaled(program.Place):
  """A matmul of a function that is not block-scaled.

  Attributes:
    operation: JAX's name of it, such as "dot_general".
    description: dtypes and shapes.
    reason: why it is not block-scaled, and the call that changes it.
    operands: dtypes of the operands.
    sizes: (batch, m, n, k) of a dot; None if they are not known.
    estimate: bytes, FLOPs and least time of one dot; None if not known.
  """

  operation: str
  description: str
  reason: str
  operands: str = ""
  sizes: tuple[int, int, int, int] | None = None
  estimate: estimates.Estimate | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedSite(program.Place):
  """One matmul that `quantize_dots` saw.

  Trips of a loop do not count if the body of the loop takes a derivative.

  Attributes:
    description: dtypes and shapes.
    weight: the operand that is a parameter, "lhs" or "rhs"; "" for neither or
      both.
    parameter: path of the weight in the argument; "" if not known.
    is_taken: whether it is quantized.
    reason: why it stays unquantized; "" if it does not.
    note: why a gradient does not run it; "" if it does.
  """

  description: str
  weight: str
  parameter: str = ""
  is_taken: bool
  reason: str = ""
  note: str = ""

  @property
  def outcome(self) -> str:
    """One line: whether it is quantized, and why not."""
    if not self.is_taken:
      return f"left: {self.reason}"
    weight = f", {self.weight} is the weight" if self.weight else ""
    note = f"; but {self.note}" if self.note else ""
    return f"taken{weight}{note}"


@dataclasses.dataclass(frozen=True)
class Explanation(Sequence):
  """The block-scaled dots of a function, or the calls of a module, in order.

  It is a sequence of the dots. `str` is a table with a row for each matmul, and
  `details` has all reasons. `flops` and `add_flops` are for utilization meters
  (MFU).

  Attributes:
    dots: each dot, with its problem, target, decision and place.
    quantizations: each quantization and dequantization.
    others: matmuls that are not block-scaled, with the reason.
    assumptions: assumptions about the program, one sentence each.
    sites: matmuls that a `quantize_dots` in the function saw, in the order in
      which they are traced.
    chains: norms and activations before matmuls of `quantize_dots` and
      `accept_quantized`, and whether the matmul is fused with them.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x, w = jnp.ones((2, 64)), jp.quantize(jnp.ones((32, 64)), "mxfp8")
    >>> h100 = jp.named_target("h100")
    >>> explanation = jp.explain(jp.linear, x, w, target=h100)
    >>> print(len(explanation), explanation[0].decision.implementation)
    1 triton
    >>> explanation.flops == 2 * 2 * 32 * 64
    True
  """

  dots: tuple[Explained, ...]
  quantizations: tuple[ExplainedQuantization, ...] = ()
  others: tuple[NotBlockScaled, ...] = ()
  assumptions: tuple[str, ...] = ()
  sites: tuple[ExplainedSite, ...] = ()
  chains: tuple[sites_lib.Chain, ...] = ()

  def __len__(self) -> int:
    return len(self.dots)

  def __getitem__(self, index: Any) -> Any:
    return self.dots[index]

  def __repr__(self) -> str:
    return str(self)

  def __str__(self) -> str:
    """Returns the table."""
    return console.text(self.parts())

  def parts(self) -> Iterator[console.Part]:
    """Yields the parts of the report that `str` prints: a row for each matmul.

    A matmul that is not block-scaled has "-" as its number and backend.
    """
    yield from self._beginning()
    if self._is_empty:
      return
    rows = [_row(str(i), dot) for i, dot in enumerate(self.dots)]
    rows += [_row("-", other) for other in self.others]
    if rows:
      header = [
        title
        for title in _HEADER
        if title in _ALWAYS or any(row.get(title) for row in rows)
      ]
      yield console.table(
        header,
        [[row.get(title, "") for title in header] for row in rows],
        names=("layer", "operands"),
        figures=_FIGURES,
      )
    for i, dot in enumerate(self.dots):
      if dot.error:
        yield f"[{i}] error: {dot.error}"
    for site in self.sites:
      if not site.is_taken:
        yield f"left out: {_title(site, site.description)}: {site.reason}"
    if self.chains:
      fused = sum(chain.count for chain in self.chains if chain.is_fused)
      found = sum(chain.count for chain in self.chains)
      yield f"norms and activations before matmuls: {fused} of {found} fused"
    yield "Call details() for the reasons, or pass --verbose on a command line."

  def details(self) -> str:
    """Returns a report of every dot with all reasons.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxplugin as jp
      >>> w = jp.quantize(jnp.ones((64, 64)), "mxfp8")
      >>> h100 = jp.named_target("h100")
      >>> explanation = jp.explain(jp.linear, w, w, target=h100)
      >>> print(explanation.details().splitlines()[-2].strip())
      not cpu: needs a CPU, the target's platform is cuda
    """
    lines = [*self._beginning()]
    told: dict[tuple[str, ...], int] = {}
    for i, dot in enumerate(self.dots):
      what = f"{dot.call}: {dot.description}" if dot.call else str(dot.problem)
      details = tuple(_decision_lines(dot))
      first = told.setdefault(details, i)
      details = details if first == i else (f"as [{first}]",)
      lines += _section(f"[{i}]", dot, what, details)
    if self.quantizations:
      lines.append("quantizing and dequantizing:")
      for item in self.quantizations:
        what = f"{item.operation} {item.description}"
        lines += _section(" ", item, what, _quantization_lines(item))
    if self.others:
      lines.append("not block-scaled:")
      for other in self.others:
        what = f"{other.operation} {other.description}"
        lines += _section(" ", other, what, [other.reason])
    lines += self._site_lines()
    if self.chains:
      lines.append("norms and activations before matmuls:")
      for chain in self.chains:
        what = f"{chain.name} before {chain.dot}"
        lines += _section(" ", chain, what, [chain.outcome])
    return "\n".join(lines)

  def to_json(self) -> str:
    """Returns the report as JSON: an object with "summary", "dots" and others.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxplugin as jp
      >>> import json
      >>> explanation = jp.explain(lambda x: x @ x, jnp.ones((64, 64)))
      >>> json.loads(explanation.to_json())["summary"]["products"]
      1
    """
    return json.dumps(
      {
        "summary": self.summary(),
        "dots": [dataclasses.asdict(dot) for dot in self.dots],
        "quantizations": [dataclasses.asdict(x) for x in self.quantizations],
        "not_block_scaled": [dataclasses.asdict(x) for x in self.others],
        "assumptions": self.assumptions,
        "sites": [dataclasses.asdict(x) for x in self.sites],
        "chains": [dataclasses.asdict(x) for x in self.chains],
      },
      default=str,
      indent=2,
    )

  def summary(self) -> dict[str, Any]:
    """Returns counts and totals.

    Returns:
      A dict. "block_scaled" and "products" are numbers of matmuls in the
      program. "block_scaled_runs" and "product_runs" count how often they run;
      a `while_loop` counts once, and "while_loop_products" are in one.
      "implementations" and "quantizations" count by backend. "num_bytes",
      "flops" and "seconds" are estimates for all runs, or None if one matmul's
      is not known.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxplugin as jp
      >>> w = jp.quantize(jnp.ones((64, 64)), "mxfp8")
      >>> target = jp.named_target("h100")
      >>> summary = jp.explain(jp.linear, w, w, target=target).summary()
      >>> print(summary["block_scaled"], summary["implementations"])
      1 {'triton': 1}
    """
    products: list[Explained | NotBlockScaled] = [
      *self._products(),
      *self.others,
    ]
    every = [*products, *self.quantizations]

    def total(items: Sequence[Any], field: str) -> float | None:
      values = [getattr(item.estimate, field, None) for item in items]
      if not items or None in values:
        return None
      return sum(x.runs * v for x, v in zip(items, values, strict=True))

    return {
      "block_scaled": sum(dot.count for dot in self._products()),
      "products": sum(p.count for p in products),
      "block_scaled_runs": sum(dot.runs for dot in self._products()),
      "product_runs": sum(p.runs for p in products),
      "while_loop_products": sum(p.count for p in products if p.trips is None),
      "implementations": _counted(
        (dot.decision.implementation if dot.decision else "none", dot.count)
        for dot in self._products()
      ),
      "quantizations": _counted(
        (item.implementation, item.count) for item in self.quantizations
      ),
      "num_bytes": total(every, "num_bytes"),
      "flops": total(products, "flops"),
      "seconds": total(every, "seconds"),
    }

  @property
  def flops(self) -> float | None:
    """FLOPs of all matmuls in one run; None if those of one are not known.

    A multiplication and its addition count as two. Trips of a `scan` count,
    which XLA's `cost_analysis` leaves out. The body of a `while_loop` counts
    once.
    """
    return self.summary()["flops"]

  def add_flops(self, cost: Mapping[str, float]) -> dict[str, float]:
    """Returns XLA's cost analysis with the FLOPs of custom calls added.

    XLA counts -1 for a custom call, because it does not analyze it. The figure
    of a program with kernels is therefore too small::

      result["flops"] = max(cost["flops"], 0) + sum(2 * batch * m * n * k)

    The sum has the dots that are custom calls on the target: those of every
    backend except xla. As in XLA's figure, the body of a loop counts once;
    `flops` has a figure with trips. For the dots, the result equals the figure
    of the same program with plain f32 dots, up to 1 for each call.

    Args:
      cost: the result of `compiled.cost_analysis()`, of the explained function
        for the same target and arguments.

    Returns:
      A copy of `cost` with another "flops".

    Raises:
      ValueError: If `cost` has no "flops", as for GPUs that are not attached,
        or sizes of a dot are symbolic.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxplugin as jp
      >>> x, w = jnp.ones((2, 64)), jp.quantize(jnp.ones((32, 64)), "mxfp8")
      >>> h100 = jp.named_target("h100")
      >>> explanation = jp.explain(jp.linear, x, w, target=h100)
      >>> explanation.add_flops({"flops": -1.0})
      {'flops': 8192.0}
    """
    if "flops" not in cost:
      raise ValueError(
        'add_flops: cost must have "flops", got'
        f" {sorted(cost)}. Use Explanation.flops, which needs no cost."
      )
    added = 0.0
    for dot in self.dots:
      # XLA counts the operations of a portable backend.
      if (
        dot.decision is None
        or backend_of(dot.problem, dot.decision).is_portable
      ):
        continue
      if dot.estimate is None:
        raise ValueError(
          f"add_flops: sizes must be static, got {dot.problem}. Explain the"
          " function with the sizes of the compiled program."
        )
      added += dot.count * dot.estimate.flops
    return {**cost, "flops": max(cost["flops"], 0.0) + added}

  def _site_lines(self) -> Iterator[str]:
    if not self.sites:
      return
    taken = sum(site.count for site in self.sites if site.is_taken)
    total = sum(site.count for site in self.sites)
    yield f"quantize_dots took {taken} of {total} matmuls:"
    for site in self.sites:
      yield from _section(" ", site, site.description, [site.outcome])

  def _products(self) -> list[Explained]:
    return [dot for dot in self.dots if dot.problem is not None or not dot.call]

  @property
  def _is_empty(self) -> bool:
    return not (
      self.dots
      or self.quantizations
      or self.others
      or self.sites
      or self.assumptions
    )

  def _beginning(self) -> Iterator[str]:
    """Yields the lines before those of each matmul."""
    if self._is_empty:
      yield "no block-scaled dot"
      return
    found = [dot.target for dot in self.dots]
    found += [item.target for item in self.quantizations]
    found = list(dict.fromkeys(found))
    if found:
      yield f"target: {', '.join(map(str, found))}"
    yield from filter(None, map(missing_cudnn, found))
    for assumption in self.assumptions:
      yield f"assumed: {assumption}"
    figures = self.summary()
    if figures["products"] > 1:
      counted = (
        f"{figures['block_scaled']} of {figures['products']} matmuls are"
        " block-scaled"
      )
      if figures["product_runs"] != figures["products"]:
        counted += (
          f", in a run {figures['block_scaled_runs']} of"
          f" {figures['product_runs']}"
        )
      if figures["while_loop_products"]:
        counted += (
          f" ({figures['while_loop_products']} in while loops with unknown"
          " trip counts, counted once)"
        )
      chosen = figures["implementations"]
      yield counted + (f": {_listed(chosen)}" if chosen else "")
    if self.quantizations:
      number = sum(item.count for item in self.quantizations)
      yield (
        f"{number} quantize or dequantize: {_listed(figures['quantizations'])}"
      )
    sheets = {t.name: estimates.sheet_of(t) for t in found}
    if figures["seconds"] is not None:
      yield (
        "estimate of matmuls and quantizing, from published figures of"
        f" {', '.join(map(str, dict.fromkeys(sheets.values())))}: "
        + estimates.in_words(
          figures["num_bytes"], figures["flops"] or 0.0, figures["seconds"]
        )
      )
    elif figures["products"]:
      unknown = [
        t.name for t in found if estimates.is_gpu(t) and not sheets[t.name]
      ]
      if unknown:
        yield (
          "no estimate: jaxplugin has no published figures for"
          f" {', '.join(dict.fromkeys(unknown))}"
        )


def backend_of(
  problem: Any, decision: decisions.Decision
) -> decisions.BackendRecord[Any]:
  """Returns the backend that was chosen for a matmul."""
  operation: resolution.MeasuredOperation[Any] = backends.OPERATION
  if not isinstance(problem, problems.DotProblem):
    operation = ragged_backends.operation_of(problem)
  return operation.backends()[decision.implementation]


def _row(number: str, item: Explained | NotBlockScaled) -> dict[str, Any]:
  """Returns the cells of a matmul, or of another call of a module, by title."""
  where = item.layer or item.source.rpartition("/")[2]
  row: dict[str, Any] = {
    "#": number,
    "layer": where
    if item.phase == _FORWARD
    else ", ".join(filter(None, (where, item.phase))),
    "runs": "?" if item.trips is None else f"{item.runs}",
  }
  sizes: Sequence[int | None] = ()
  if isinstance(item, NotBlockScaled):
    row["operands"] = item.operands or item.description
    row["backend"] = "-"  # not "xla", which is a backend of block-scaled dots
    sizes = item.sizes or ()
  else:
    row |= _backend_cells(item)
    problem = item.problem
    row["operands"] = item.description
    if problem is not None:
      row["operands"] = f"{problem.lhs} x {problem.rhs}"
      batch = problem.batch if isinstance(problem, problems.DotProblem) else 1
      sizes = (batch, problem.m, problem.n, problem.k)
      if not isinstance(problem, problems.DotProblem):
        groups = "?" if problem.groups is None else problem.groups
        row["operands"] += f", {groups} groups"
  row["operands"] = row["operands"].replace("bfloat16", "bf16")
  row["operands"] = row["operands"].replace("float", "f")
  for title, size in zip(("batch", "m", "n", "k"), sizes, strict=False):
    row[title] = "?" if size is None else str(size)
  if row.get("batch") == "1":
    del row["batch"]
  if item.estimate is not None and item.estimate.seconds is not None:
    row["at least"] = estimates.time_in_words(item.estimate.seconds)
  return row


def _backend_cells(dot: Explained) -> dict[str, Any]:
  if dot.error:
    return {"backend": ("error", "bold red")}
  if dot.decision is None:
    return {}
  name, scale = dot.decision.implementation, dot.decision.global_scale
  return {
    "backend": (name, "green"),
    "global scale": "" if scale == "none" else scale,
  }


def missing_cudnn(target: targets.Target) -> str:
  """Returns the notice that no cuDNN is assumed; "" if none would help."""
  assumed = dataclasses.replace(
    target, cudnn_version=targets.MIN_BLOCK_SCALED_CUDNN
  )
  if (
    target.cudnn_version is not None
    or target.name not in targets.TARGET_NAMES
    or not assumed.has_block_scaled_cudnn
  ):
    return ""
  return (
    f"no cuDNN is assumed: {target.name} was named without cudnn=, as in"
    f' jp.named_target("{target.name}", cudnn="9.13")'
  )


def merged(items: Sequence[Any]) -> tuple[Any, ...]:
  """Merges items that only differ in their counts, and adds the counts."""
  counts: dict[Any, int] = {}
  for item in items:
    one = dataclasses.replace(item, count=1)
    counts[one] = counts.get(one, 0) + item.count
  return tuple(
    dataclasses.replace(item, count=count) for item, count in counts.items()
  )


def _title(place: program.Place, what: str) -> str:
  where = [place.layer] if place.layer else []
  if place.phase != _FORWARD:
    where.append(place.phase)
  text = f"{', '.join(where)}: {what}" if where else what
  times = []
  if place.count > 1:
    times.append(f"{place.count} times")
  if place.trips is None:
    times.append("in a while loop, trip count unknown")
  elif place.trips != 1:
    times.append(f"{place.trips} trips")
  if place.is_conditional:
    times.append("in a branch")
  return f"{text} ({', '.join(times)})" if times else text


def _section(
  number: str, place: program.Place, what: str, lines: Iterable[str]
) -> Iterator[str]:
  yield f"{number} {_title(place, what)}"
  if place.source:
    yield f"    at {place.source}"
  yield from (f"    {line}" for line in lines)


def _decision_lines(dot: Explained) -> Iterator[str]:
  if dot.error:
    yield f"error: {dot.error}"
    return
  if dot.call:
    becomes = f"becomes a call to @{dot.function}"
    yield becomes if dot.function else "needs no change"
  decision = dot.decision
  if decision is None:
    return
  yield f"{decision.implementation}: {decision.reason}"
  if decision.config:
    words = " ".join(f"{n}={str(v).lower()}" for n, v in decision.config)
    yield f"config ({decision.config_from}): {words}"
  if dot.lowering_error:
    yield f"this process cannot lower it: {dot.lowering_error}"
  if dot.launched_by:
    yield f"launched by {dot.launched_by}"
  if decision.global_scale != "none":
    yield f"global scale: {decision.global_scale}"
  if decision.padding:
    yield f"padding: {decision.padding}"
  for note in decision.notes:
    yield f"note: {note}"
  yield from _estimate_lines(dot.estimate)
  for refusal in decision.refusals:
    yield f"not {refusal.implementation}: {refusal.reason}"


def _quantization_lines(item: ExplainedQuantization) -> Iterator[str]:
  reason = f": {item.reason}" if item.reason else ""
  yield f"{item.implementation}{reason}"
  for decision in item.decisions:
    if decision.implementation_from != decisions.RULE:
      yield f"{decision.implementation}: {decision.reason}"
  for note in dict.fromkeys(n for d in item.decisions for n in d.notes):
    yield f"note: {note}"
  yield from _estimate_lines(item.estimate)


def _estimate_lines(estimate: estimates.Estimate | None) -> Iterator[str]:
  if estimate is not None and estimate.seconds is not None:
    words = estimates.in_words(
      estimate.num_bytes, estimate.flops, estimate.seconds
    )
    yield f"estimate: {words} ({estimate.bound})"


def _counted(items: Any) -> dict[str, int]:
  counter: collections.Counter[str] = collections.Counter()
  for name, count in items:
    counter[name] += count
  return dict(counter.most_common())


def _listed(counts: dict[str, int]) -> str:
  return ", ".join(
    f"{count} by {name}" + (" together" if " and " in name else "")
    for name, count in counts.items()
  )
