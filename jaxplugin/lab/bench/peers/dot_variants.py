# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The variants of a dot: our backends and their peers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin import dot, quantization
from jaxplugin.arrays import interleaving, layouts, preparation, scaled_array
from jaxplugin.core import formats, targets
from jaxplugin.dot import arguments, backends, problems, reference
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import operand_sets, variants, verification

LAST: Final = (((1,), (1,)), ((), ()))
MATMUL: Final = (((1,), (0,)), ((), ()))

# Peers that multiply values and scales.
_SCALED: Final = ("lax.scaled_dot", "nn.scaled_matmul")
PEERS: Final = ("f32", "bf16", *_SCALED)
# Layouts of prepared weights that a backend may read, by their names in
# `BackendRecord.reads`.
_LAYOUTS: Final = {
  "interleaved": interleaving.INTERLEAVED,
  "swizzled": layouts.SWIZZLED,
}
# Bound of precision="fastest", in units of sum(|a * b|). It only finds wrong
# results: half a step of 8 bits is 1/254 of a block's largest value, which is
# about 3 times the mean of normally distributed values. Sums of FP8 matrix
# instructions are within 132 * 2^-13 (numerics.md), which is a little more.
_FASTEST_BOUND: Final = 1 / 60
# XLA:CPU multiplies this many rows by a faster routine than fewer rows. A user
# can pad rows, so padding is a form of the peers.
_PADDED_ROWS: Final = 8


class Form(NamedTuple):
  """A way to write a dot of lhs (m, k) and rhs (n, k).

  Attributes:
    name: the layout of weights, and what else differs between forms.
    function: computes the dot.
    store: converts weights (n, k) to the layout, before timing.
    ready: dtype of dequantized operands; "" if operands are quantized.
  """

  name: str
  function: Callable[[Any, Any], Any]
  store: Callable[[Any], Any]
  ready: str = ""


def _both_layouts(
  product: Callable[..., jax.Array], ready: str = ""
) -> list[Form]:
  """Returns the forms of `product` with rhs as (n, k), and as (k, n)."""
  return [
    Form("w (n, k)", functools.partial(product, LAST), unpacked, ready),
    Form("w (k, n)", functools.partial(product, MATMUL), transposed, ready),
  ]


class DotVariants:
  """The variants of one dot on one device."""

  def __init__(
    self,
    row: workloads.BenchRow,
    pair: workloads.Pair,
    out_dtype: np.dtype,
    target: targets.Target,
    *,
    beside_libraries: bool = False,
  ):
    """Creates the variants.

    If libraries are peers, the chosen backend also has what users would write
    in place of a library's call: prepared weights, and f32 activations that the
    call quantizes.
    """
    self.beside_libraries = beside_libraries
    self.row = row
    self.pair = pair
    self.out_dtype = out_dtype
    self.target = target
    self.data = operand_sets.DotOperands(row, pair)
    self._expected = functools.lru_cache(maxsize=4)(
      lambda i, ready: verification.expected_dot(*self.data.operands(i, ready))
    )

  def ours(self, names: Sequence[str] | None) -> list[variants.AnyVariant]:
    """Returns variants of backends. None is all that support the row."""
    decided = variants.decided(
      functools.partial(self._ours, None), self.data.operands(0), self.target
    )
    (one,) = decided
    make = functools.partial(self._of_backend, one.problem)
    return variants.ours(names, decided, backends.OPERATION, make)

  def _of_backend(
    self,
    problem: problems.DotProblem,
    backend: backends.Backend,
    is_chosen: bool,
  ) -> Iterator[variants.Variant]:
    """Yields the variants of a backend that supports the problem."""
    name, target, format = backend.name, self.target, self.pair.lhs
    plan = backend.plan(problem, target)
    plain = self._variant(
      name,
      "ours",
      functools.partial(self._ours, name),
      bound=verification.OURS_BOUND,
      relative=plan.relative_error,
      is_chosen=is_chosen,
    )
    prepared = dataclasses.replace(
      plain,
      name=f"{name} prepared",
      operands=lambda i: self._prepared(*self.data.operands(i)),
      is_chosen=False,
    )
    fastest = self._variant(
      f"{name} fastest",
      "ours",
      functools.partial(self._ours, name, precision=arguments.FASTEST),
      bound=_FASTEST_BOUND,
      arrange=self._prepared,
    )
    yield plain
    layout = self._prepared_layout()
    if layout and backend.reads(layout, problem, target):
      yield prepared
    if self.beside_libraries and is_chosen:
      yield prepared
      if format is not None and self.pair.rhs is not None:
        yield dataclasses.replace(
          prepared,
          name=f"{name} with quantize",
          function=lambda lhs, rhs: self._ours(
            name, quantization.quantize(lhs, format), rhs
          ),
          operands=lambda i: (self.data.floats(i)[0], prepared.operands(i)[1]),
        )
      elif self.pair.rhs is not None:
        yield fastest
    rounding = dataclasses.replace(problem, fastest_precision=True)
    if target.platform != "cpu" and backend.plan(rounding, target) != plan:
      yield fastest
    for word, asking in backend.experiments:
      asked = asking(target)
      refusal = backend.lowering_refusal(asked)
      if (refusal or backend.supports(problem, asked)) is None:
        yield dataclasses.replace(
          plain,
          name=f"{name} {word}",
          function=functools.partial(self._ours, name, target=asked),
          is_chosen=False,
        )

  def _ours(
    self,
    implementation: str | None,
    lhs: Any,
    rhs: Any,
    precision: str | None = None,
    target: targets.Target | None = None,
  ) -> jax.Array:
    use = targets.use_target(target) if target else contextlib.nullcontext()
    with use:
      return dot.block_scaled_dot(
        lhs,
        rhs,
        preferred_element_type=self.out_dtype,
        precision=precision,
        implementation=implementation,
      )

  def _prepared_layout(self) -> str:
    """Returns the layout of a prepared rhs on this target; "" if none."""
    _, rhs = self.data.operands(0)
    if not isinstance(rhs, scaled_array.ScaledArray):
      return ""
    return _LAYOUTS.get(preparation.preparation(rhs, self.target), "")

  def _prepared(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    return lhs, preparation.prepare_weights(rhs, self.target)

  def _variant(
    self,
    name: str,
    role: variants.Role,
    function: Callable[..., Any],
    *,
    bound: float,
    relative: float = 0,
    ready: str = "",
    arrange: Callable[..., tuple[Any, ...]] | None = None,
    **fields: Any,
  ) -> variants.Variant:
    """Returns a variant of quantized operands, or of floats of dtype `ready`.

    `arrange` converts lhs and rhs to the arguments of `function`.
    """

    def operands(i: int) -> Any:
      return self.data.operands(i, ready)

    def arranged(i: int) -> Any:
      return arrange(*operands(i)) if arrange else operands(i)

    def check(i: int, result: Any) -> Any:
      return verification.check_dot(
        result, self._expected(i, ready), bound=bound, relative=relative
      )

    def relative_error(i: int, result: Any) -> float:
      lhs, _ = self.data.floats(i)
      return verification.relative_error(result, lhs, operands(i)[1])

    row = self.row
    result_bytes = row.m * row.n * self.out_dtype.itemsize
    return variants.Variant(
      name=name,
      role=role,
      function=function,
      operands=arranged,
      check=check,
      relative_error=relative_error,
      num_bytes=operand_sets.num_bytes(*operands(0)) + result_bytes,
      flops=2 * row.m * row.n * row.k,
      arithmetic=variants.arithmetic_of(
        role, ready == "float32", self.pair.is_fp4
      ),
      **fields,
    )

  def peers(self, names: Sequence[str]) -> list[variants.AnyVariant]:
    """Returns `names` of `PEERS`, in every form that could be the fastest."""
    return [self._peer(name) for name in names]

  def _peer(self, name: str) -> variants.AnyVariant:
    reason = lacks(name, self.pair)
    if name not in PEERS:
      reason = "is run on CPUs only"
    if reason:
      return variants.Unavailable(name=name, reason=reason)
    few_rows = self.row.m < _PADDED_ROWS
    if name == "nn.scaled_matmul":
      forms = [Form("", self._scaled_matmul, unpacked)]
    elif name == "lax.scaled_dot":
      nk, kn = scaled_dot_forms(self.out_dtype)
      turned = Form(
        "w.T of (n, k)",
        lambda x, w: kn.function(x, jax.tree.map(lambda part: part.T, w)),
        unpacked,
      )
      forms = [nk, turned, kn]
      forms += [_padded(form) for form in forms if few_rows]
    else:
      forms = plain_forms(name, self.row.m, self.out_dtype)
      forms += [_padded(form) for form in forms[:2] if few_rows]
    return tuple(
      self._variant(
        name,
        "peer",
        form.function,
        bound=peer_bound(name, self.pair),
        ready=form.ready,
        arrange=functools.partial(_stored, form),
        form=form.name,
        same_as=form.ready,
      )
      for form in forms
    )

  def _scaled_matmul(self, lhs: Any, rhs: Any) -> jax.Array:
    return _times_globals(
      lambda dtype: jax.nn.scaled_matmul(
        lhs.values[None],
        rhs.values[None],
        lhs.scale[None],
        rhs.scale[None],
        preferred_element_type=dtype,
      )[0],
      lhs,
      rhs,
      self.out_dtype,
    )


def plain_forms(name: str, m: int, out_dtype: np.dtype) -> list[Form]:
  """Returns the ways to multiply m rows of floats, "f32" or "bf16"."""
  is_f32 = name == "f32"

  def product(numbers: Any, lhs: Any, rhs: Any) -> jax.Array:
    return lax.dot_general(
      lhs,
      rhs,
      numbers,
      # Without HIGHEST, a GPU multiplies in TF32.
      precision=lax.Precision.HIGHEST if is_f32 else None,
      preferred_element_type=np.float32 if is_f32 else out_dtype,
    ).astype(out_dtype)

  def sum_of_products(x: Any, w: Any) -> jax.Array:
    # XLA's fused loop may be faster than its dot.
    products = x.astype(np.float32) * w.astype(np.float32)
    return products.sum(axis=1)[None].astype(out_dtype)

  ready = workloads.PLAIN_DTYPES[name].name
  forms = _both_layouts(product, ready)
  if m == 1:
    forms.append(Form("sum of products", sum_of_products, unpacked, ready))
  return forms


def scaled_dot_forms(out_dtype: np.dtype) -> list[Form]:
  """Returns the ways to call `lax.scaled_dot` with unpacked operands."""

  def product(numbers: Any, lhs: Any, rhs: Any) -> jax.Array:
    return _times_globals(
      lambda dtype: lax.scaled_dot(
        *(getattr(x, "values", x) for x in (lhs, rhs)),
        lhs_scale=getattr(lhs, "scale", None),
        rhs_scale=getattr(rhs, "scale", None),
        dimension_numbers=numbers,
        preferred_element_type=dtype,
      ),
      lhs,
      rhs,
      out_dtype,
    )

  return _both_layouts(product)


def peer_bound(name: str, pair: workloads.Pair) -> float:
  """Returns the error bound of a peer.

  XLA rounds an unquantized operand of `lax.scaled_dot` to bf16.
  """
  is_plain = None in (pair.lhs, pair.rhs) and pair.plain != formats.BF16
  is_plain = is_plain and name == "lax.scaled_dot"
  cast = reference.rounding_error(formats.BF16) if is_plain else 0
  return verification.PEER_BOUND + cast


def lacks(name: str, pair: workloads.Pair) -> str:
  """Returns why a peer does not support these formats; "" if it does."""
  given = [format for format in (pair.lhs, pair.rhs) if format is not None]
  if name == "nn.scaled_matmul" and len(given) < 2:
    return "takes two quantized operands"
  for format in given if name in _SCALED else ():
    if format.is_fp6:
      return f"XLA has no {format.values_dtype.name}"
    if not format.is_known:
      return f"does not multiply {format}"
  return ""


def _padded(form: Form) -> Form:
  """Returns a form that pads the rows of lhs to `_PADDED_ROWS` first."""

  def pad(x: jax.Array) -> jax.Array:
    rows = jnp.ones((_PADDED_ROWS - x.shape[0], *x.shape[1:]), x.dtype)
    return jnp.concatenate([x, rows])

  def function(lhs: Any, rhs: Any) -> jax.Array:
    rows = lhs.shape[0]
    if isinstance(lhs, scaled_array.ScaledArray):
      lhs = with_parts(lhs, pad(lhs.values), pad(lhs.scale))
    else:
      lhs = pad(lhs)
    return form.function(lhs, rhs)[:rows]

  return form._replace(
    name=f"{form.name}, {_PADDED_ROWS} rows", function=function
  )


def _stored(form: Form, lhs: Any, rhs: Any) -> tuple[Any, Any]:
  """Returns the operands of a peer in a form's layout. Runs before timing."""
  return unpacked(lhs), form.store(rhs)


def transposed(w: Any) -> Any:
  """Returns a copy (..., k, n) of weights (..., n, k), with unpacked FP4."""
  return jax.tree.map(lambda x: jnp.copy(jnp.swapaxes(x, -1, -2)), unpacked(w))


def with_parts(
  x: scaled_array.ScaledArray, values: jax.Array, scale: jax.Array
) -> scaled_array.ScaledArray:
  """Returns `x` with other values and scales."""
  return x.tree_unflatten(
    (x.format, x.scale_layout), (values, scale, x.global_scale)
  )


def unpacked(x: Any) -> Any:
  return x.unpack() if isinstance(x, scaled_array.ScaledArray) else x


def _times_globals(
  multiply: Callable[[np.dtype], jax.Array],
  lhs: Any,
  rhs: Any,
  out_dtype: np.dtype,
) -> jax.Array:
  """Returns `multiply(dtype)` times the global scales of both operands.

  The dtype is f32 if an operand has a global scale, so that the result is
  rounded only once, after the multiplication.
  """
  found = [getattr(x, "global_scale", None) for x in (lhs, rhs)]
  scales = [scale for scale in found if scale is not None]
  result = multiply(np.dtype(np.float32) if scales else out_dtype)
  for scale in scales:
    result = result * scale
  return result.astype(out_dtype)
