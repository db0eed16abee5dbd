# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
import functools

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numerics_baseline
import numerics_measure as measure
import numerics_products as products
import numerics_show as show
import numpy as np

import jaxplugin as jp

tracker = numerics_baseline.Tracker("contract")

# %% [markdown]
# # How exact are the products?
#
# Quantization causes errors of a few percent. The matmul after it should add
# almost none: `block_scaled_dot` promises that each implementation's result,
# before the final cast, is within
#
#     16 * 2^-24 * sum |a * b|
#
# of the exact product of the dequantized operands, and equal to it in all bits
# where products and sums are exact. This notebook measures how much of the 16
# is used, against NumPy in f64, with every implementation that runs here.

# %%
reasons = products.available(jp.MXFP8)
running = [name for name, reason in reasons.items() if reason is None]
for name, reason in reasons.items():
  print(reason or f"{name}: runs")
if "cpu" not in running:
  tracker.absent("cpu ", reasons["cpu"])


def track(name, implementation, value):
  """Records an error; the baseline is about CPUs."""
  if implementation in ("cpu", "xla"):
    tracker.error(f"{implementation} {name}", value)
  return value


def worst(lhs, rhs, format, implementation):
  """The largest error of a product, in units of 2^-24 * sum |a * b|."""
  lhs, rhs = (products.quantize(x, format) for x in (lhs, rhs))
  result = products.product(lhs, rhs, implementation)
  errors = products.error_units(
    result, products.exact(lhs), products.exact(rhs)
  )
  return float(errors.max())


# %% [markdown]
# ## Over k and data
#
# Random signs make sums small beside sum |a b|, and rounding errors with them;
# positive data are the harder case.

# %%
ROWS = 32
DEPTHS = (256, 2048, 16384)


def positive(shape, seed):
  return np.abs(measure.gaussian(shape, seed))


DATA = {
  "Gaussian": measure.gaussian,
  "Student t": measure.student_t,
  "positive": positive,
  "outlier channels": measure.outlier_channels,
}
FORMATS = (jp.MXFP8, jp.NVFP4)
measured = {}
for depth in DEPTHS:
  for name, make in DATA.items():
    operands = make((ROWS, depth), 1), make((ROWS, depth), 2)
    for format in FORMATS:
      for implementation in running:
        value = worst(*operands, format, implementation)
        case = f"{format.name} {name} k={depth}"
        measured[format.name, name, implementation, depth] = track(
          case, implementation, value
        )
rows = [("largest error, units", "data", *(f"k={k}" for k in DEPTHS))]
for format in FORMATS:
  for implementation in running:
    for name in DATA:
      values = [measured[format.name, name, implementation, k] for k in DEPTHS]
      rows.append((f"{format.name}, {implementation}", name, *values))
print(show.table(rows, decimals=2))
largest = max(
  value for case, value in measured.items() if case[1] != "outlier channels"
)
print(f"largest but for outlier channels: {largest:.1f}")
assert largest < products.BOUND_UNITS

# %%
STYLES = {"cpu": ("-", "o"), "xla": ("--", "s")}
figure, axes = show.figure(
  f"On such data the error stays below {largest:.1f} of the 16 units allowed",
  "k, products added up (log scale)",
  "largest error / (2^-24 sum|ab|), log scale",
)
for name, color in (
  ("positive", show.COLORS["mxfp4"]),
  ("Gaussian", show.COLORS["mxfp8"]),
):
  for implementation in running:
    style, marker = STYLES.get(implementation, (":", "^"))
    values = [measured["mxfp8", name, implementation, k] for k in DEPTHS]
    show.line(
      axes,
      DEPTHS,
      values,
      f"{name}, {implementation}",
      color,
      shift=4 if implementation == "cpu" else -4,
      linestyle=style,
      marker=marker,
    )
axes.axhline(products.BOUND_UNITS, color=show.NEUTRAL, linestyle=":")
axes.text(DEPTHS[0], 18, "the contract's bound", color=show.NEUTRAL)
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xticks(DEPTHS, [str(k) for k in DEPTHS])
axes.set_ylim(top=40)
plt.show()

# %% [markdown]
# Outlier channels use up much more of the bound than data without. There a few
# products are thousands of times as large as the others; the next section takes
# that to the end.
#
# ## Where f32 accumulation itself ends
#
# Let one product be about a million times as large as each of the others, and
# all be positive. Once it is in the sum, each further addition rounds at the
# *sum's* last place, and an accumulator that gets it early rounds thousands of
# times. The order of adding decides, and with it the number of accumulators.
# Here is that in NumPy, with the same numbers (MXFP8, dequantized):

# %%
DEPTH = 4096
POSITIONS = {"first": 0, "middle": DEPTH // 2, "last": DEPTH - 1}
LANES = (1, 8, 64, 512)
table = [("big product", *(f"{n} accum." for n in LANES), *running)]
dominated = {}
for position, column in POSITIONS.items():
  operands = [products.dominated((ROWS, DEPTH), s, column) for s in (1, 2)]
  quantized = [products.quantize(x, jp.MXFP8) for x in operands]
  exact = [products.exact(x) for x in quantized]
  terms = np.sort(exact[0][0] * exact[1][0])
  assert terms[-1] > 1e6 * np.median(terms) and terms[0] >= 0
  for lanes in LANES:
    result = products.lanes_dot(*(x.astype(np.float32) for x in exact), lanes)
    dominated[position, lanes] = float(
      products.error_units(result, *exact).max()
    )
  for implementation in running:
    dominated[position, implementation] = track(
      f"dominated, {position}",
      implementation,
      worst(*operands, jp.MXFP8, implementation),
    )
  row = [dominated[position, column] for column in (*LANES, *running)]
  table.append((position, *row))
print("largest error in units of 2^-24 sum|ab|")
print(show.table(table))

assert dominated["first", 1] > products.BOUND_UNITS > dominated["first", 512]
assert dominated["last", 1] < products.BOUND_UNITS
above = [
  f"{implementation} ({dominated['first', implementation]:.0f})"
  for implementation in running
  if dominated["first", implementation] > products.BOUND_UNITS
]
print("beyond the bound here:", ", ".join(above) or "none")

# %%
figure, axes = show.figure(
  "One product that outweighs all others breaks the bound, unless it comes\n"
  "late or the accumulators are many",
  "largest error / (2^-24 sum|ab|), log scale",
  "",
  size=(7.2, 3.2),
)
names = [*(f"NumPy, accumulators: {lanes}" for lanes in LANES), *running]
for position, marker, color in (
  ("first", "o", show.COLORS["mxfp4"]),
  ("middle", "D", show.COLORS["nvfp4"]),
  ("last", "s", show.COLORS["mxfp8"]),
):
  values = [dominated[position, column] for column in (*LANES, *running)]
  axes.plot(values, range(len(names)), marker, color=color)
  axes.annotate(
    position,
    (values[0], 0),
    xytext=(0, 8),
    textcoords="offset points",
    color=color,
    ha="center",
  )
axes.axvline(products.BOUND_UNITS, color=show.NEUTRAL, linestyle=":")
axes.text(17, len(names) - 0.6, "bound", color=show.NEUTRAL)
axes.set_xscale("log")
axes.set_yticks(range(len(names)), names)
axes.set_ylim(len(names) - 0.4, -0.9)
plt.show()

# %% [markdown]
# These errors are still far below those of quantization, and below those of a
# bf16 result:

# %%
worst_units = max(dominated.values())
relative = worst_units * products.UNIT
print(f"{worst_units:.0f} units are {relative:.1e} of the sum")
assert relative < 2.0**-8 / 100  # bf16 rounds by up to 2^-8

# %% [markdown]
# ## Exact where it can be
#
# Small integers with power-of-two scales: all sums are exact, so all
# implementations must give the same bits as f64.

# %%
random = np.random.RandomState(3)
for format in FORMATS:
  # Multiples of 6 (or 448) over powers of two: the largest value gives every
  # block a scale of one, and E2M1 holds the rest.
  values = random.choice([0, 0.5, 1, 2, 3, 4, 6], size=(2, ROWS, 512))
  values *= random.choice([-1, 1], size=values.shape)
  values[:, :, ::16] = 6
  if format == jp.MXFP8:
    values[:, :, ::32] = 448
  quantize = functools.partial(jp.quantize, format=format)
  if format.has_global_scale:
    quantize = functools.partial(quantize, global_scale=1.0)
  lhs, rhs = (quantize(jnp.asarray(v, jnp.float32)) for v in values)
  assert np.array_equal(products.exact(lhs), values[0])
  for implementation in running:
    result = products.product(lhs, rhs, implementation)
    assert np.array_equal(result, values[0] @ values[1].T)
    print(f"{format.name}, {implementation}: equal in all bits")

# %% [markdown]
# ## Again, and in bf16
#
# The same call gives the same bits again. And a 16-bit result costs one
# rounding, which is all that one then sees.

# %%
operands = measure.gaussian((ROWS, 4096), 1), measure.gaussian((ROWS, 4096), 2)
lhs, rhs = (products.quantize(x, jp.NVFP4) for x in operands)
expected = products.exact(lhs) @ products.exact(rhs).T
rows = [("largest relative error", "f32", "bf16", "bf16's rounding: 2^-8")]
for implementation in running:
  first = products.product(lhs, rhs, implementation)
  again = products.product(lhs, rhs, implementation)
  assert np.array_equal(first, again)
  rounded = products.product(lhs, rhs, implementation, jnp.bfloat16)
  errors = [
    np.max(np.abs(result.astype(np.float64) - expected) / np.abs(expected))
    for result in (first, rounded)
  ]
  assert errors[1] < 2.0**-8 * 1.01
  rows.append(
    (implementation, *(f"{error:.1e}" for error in errors), f"{2.0**-8:.1e}")
  )
print(show.table(rows))

# %%
print(tracker.finish())
