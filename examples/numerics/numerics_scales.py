# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
import functools

import matplotlib.pyplot as plt
import ml_dtypes
import numerics_baseline
import numerics_measure as measure
import numerics_products as products
import numerics_show as show
import numpy as np

import jaxplugin as jp

tracker = numerics_baseline.Tracker("scales")

E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
fp4 = functools.partial(measure.block_round_trip, values_dtype=E2M1)

# %% [markdown]
# # What does each choice of a scale buy, and where does it break?
#
# MXFP4 and NVFP4 store the same four-bit numbers. They differ in three choices:
# how a scale is rounded, how many values share it, and whether the tensor has a
# global scale too. This notebook changes one at a time; then it goes to the
# ends of the ranges.
#
# The NumPy quantizer of `numerics_measure` computes all combinations. Two of
# them are formats, for which it must agree with `jp.quantize`:

# %%
SHAPE = (256, 512)
DATA = {
  "Gaussian": measure.gaussian,
  "Laplace": measure.laplace,
  "Student t, 3 degrees": measure.student_t,
  "outlier channels": measure.outlier_channels,
}
data = {
  name: measure.octave_rows(make(SHAPE, seed))
  for seed, (name, make) in enumerate(DATA.items())
}
activations = measure.model_activations()
data["MiniLM, ffn in"] = activations["3 ffn in"]
data["MiniLM, ffn out"] = activations["3 ffn out"]
perturbation = {
  name: numerics_baseline.COMPUTED
  if name.startswith("MiniLM")
  else numerics_baseline.SEEDED
  for name in data
}

for x in data.values():
  ours = fp4(x, block_size=32, rule="e8m0_up")
  assert np.array_equal(ours, measure.round_trip(x, jp.MXFP4))
  ours = fp4(x, block_size=16, rule="e4m3", has_global_scale=True)
  theirs = measure.round_trip(x, jp.NVFP4)
  assert np.array_equal(ours.astype(np.float32), theirs)
print("the NumPy quantizer and jp.quantize agree on", len(data), "tensors")

# %% [markdown]
# ## Rounding a power-of-two scale: up or down
#
# The ideal scale puts the block's largest value on the largest number. E8M0 has
# powers of two only. Rounded up, the scale is up to twice too large, and the
# top of the number range is unused. "floor" is the rule of OCP MX v1.0: the
# scale comes out smaller, and what exceeds the largest number saturates.

# %%
offsets = np.arange(33) / 32
base = measure.gaussian((128, 512), 20)
curves = {name: [] for name in ("up", "floor", "exact", "nvfp4")}
saturated = []
for offset in offsets:
  x = base * np.float32(2**offset)
  trips = {
    "up": measure.round_trip(x, jp.MXFP4),
    "floor": measure.round_trip(x, jp.MXFP4, scale_rounding="floor"),
    "exact": fp4(x, block_size=32, rule="exact"),
    "nvfp4": measure.round_trip(x, jp.NVFP4),
  }
  for name, approximation in trips.items():
    curves[name].append(measure.sqnr_db(x, approximation))
  blocks = np.abs(x.reshape(-1, 32))
  scale = measure.block_scale(
    blocks.max(axis=1, keepdims=True), E2M1, "e8m0_floor"
  )
  saturated.append(float(np.mean(blocks > 6 * scale)))


figure, axes = show.figure(
  "A power-of-two scale costs MXFP4 a decibel or more, up or down;\n"
  "how much depends on the unit of the data",
  "standard deviation of Gaussian data (the picture repeats every octave)",
  "SQNR (dB)",
)
for name, label, color, shift in (
  ("nvfp4", "NVFP4", show.COLORS["nvfp4"], 0),
  ("exact", "MXFP4, but\nunrounded scale", show.NEUTRAL, 0),
  ("up", "MXFP4, up", show.COLORS["mxfp4"], -5),
  ("floor", "MXFP4, floor", show.COLORS["mxfp8_e5m2"], 5),
):
  show.line(axes, 2**offsets, curves[name], label, color, shift=shift)
axes.set_xscale("log", base=2)
axes.set_xticks([1, 2**0.5, 2], ["1", "√2", "2"])
axes.set_ylim(18, 21)
plt.show()

rows = [("SQNR over an octave (dB)", "lowest", "highest")]
for name, curve in curves.items():
  rows.append((name, min(curve), max(curve)))
  tracker.sqnr(f"octave {name}", min(curve))
print(show.table(rows, decimals=2))
print(f"floor saturates at most {100 * max(saturated):.1f} % of the values")
assert all(
  exact - max(up, floor) > 0.9
  for up, floor, exact in zip(
    curves["up"], curves["floor"], curves["exact"], strict=True
  )
)

# %%
rows = [("data (SQNR in dB)", "mxfp8 up", "floor", "mxfp4 up", "floor")]
for name, x in data.items():
  row = [name]
  for format in (jp.MXFP8, jp.MXFP4):
    for rounding in ("up", "floor"):
      value = measure.sqnr_db(
        x, measure.round_trip(x, format, scale_rounding=rounding)
      )
      tracker.sqnr(
        f"{rounding} {format.name} {name}",
        value,
        perturbation=perturbation[name],
      )
      row.append(value)
  rows.append(row)
  assert row[1] - row[2] > 1
print(show.table(rows))
floor_wins = {name: floor - up for name, *_, up, floor in rows[1:]}
assert floor_wins["Laplace"] > 0.3 and floor_wins["Student t, 3 degrees"] > 0.3
assert floor_wins["outlier channels"] < -0.3

# %% [markdown]
# For E4M3 rounding up is better on all of these data, by more than a decibel:
# its numbers are fine enough, so that the few values that saturate make most of
# the error. For E2M1 it is a draw: floor wins where tails are heavy, since it
# keeps more small values, and loses where the large values carry the signal.
#
# ## From MXFP4 to NVFP4, step by step

# %%
STEPS = {
  "MXFP4 (32, E8M0 up)": {"block_size": 32, "rule": "e8m0_up"},
  "+ blocks of 16": {"block_size": 16, "rule": "e8m0_up"},
  "+ E4M3 scale": {"block_size": 16, "rule": "e4m3"},
  "+ global scale = NVFP4": {
    "block_size": 16,
    "rule": "e4m3",
    "has_global_scale": True,
  },
  "ideal: unrounded scale": {"block_size": 16, "rule": "exact"},
}
steps = {
  name: [
    tracker.sqnr(
      f"step {step} {name}",
      measure.sqnr_db(x, fp4(x, **settings)),
      perturbation=perturbation[name],
    )
    for step, settings in STEPS.items()
  ]
  for name, x in data.items()
}
gains = {name: np.diff(values) for name, values in steps.items()}
rows = [("SQNR in dB", *STEPS)]
rows += [(name, *values) for name, values in steps.items()]
print(show.table(rows))
assert all(smaller < scale for smaller, scale, *_ in gains.values())
assert all(abs(globally) < 0.5 for _, _, globally, _ in gains.values())
assert all(ideal < 1 for *_, ideal in gains.values())

# %% [markdown]
# Is it the smaller block or the scale's mantissa? What a step gains depends on
# the one before it: an E8M0 scale, up to twice too large, spoils what a smaller
# block would bring. So both orders, the second one by way of an E4M3 scale for
# blocks of 32 values:

# %%
BY_MANTISSA = {"block_size": 32, "rule": "e4m3"}
orders = {}
for name, x in data.items():
  first, halved, both, *_ = steps[name]
  mantissa = tracker.sqnr(
    f"step blocks of 32, E4M3 scale {name}",
    measure.sqnr_db(x, fp4(x, **BY_MANTISSA)),
    perturbation=perturbation[name],
  )
  # Gains of (block, mantissa), whichever came first.
  orders[name] = {
    "block first": (halved - first, both - halved),
    "mantissa first": (both - mantissa, mantissa - first),
  }
rows = [("gain in dB", "block", "then mantissa", "mantissa", "then block")]
for name, gain in orders.items():
  block, mantissa = gain["block first"], gain["mantissa first"]
  rows.append((name, *block, *reversed(mantissa)))
print(show.table(rows, decimals=2))
gained = np.array([list(gain.values()) for gain in orders.values()])
shares = (gained / gained.sum(axis=-1, keepdims=True))[..., 1].ravel()
print(f"the mantissa's share is {min(shares):.0%} to {max(shares):.0%}")
assert min(shares) > 0.55
assert (gained[:, 1, 0] > gained[:, 0, 0]).all()  # the block's, both orders

# %%
figure, axes = show.figure(
  "In either order the scale's mantissa gains NVFP4 more than its block;\n"
  "the block's gain is larger once the scale has a mantissa",
  "gain over MXFP4 in SQNR (dB)",
  "",
  size=(7.2, 4.4),
)
names = list(orders)
colors = {"block": show.COLORS["mxfp8"], "mantissa": show.COLORS["nvfp4"]}
for position, name in enumerate(names):
  for offset, first in ((-0.2, "block"), (0.2, "mantissa")):
    gain = orders[name][f"{first} first"]
    parts = dict(zip(("block", "mantissa"), gain, strict=True))
    parts = dict(sorted(parts.items(), key=lambda part: part[0] != first))
    left = 0.0
    for part, width in parts.items():
      axes.barh(position + offset, width, 0.36, left=left, color=colors[part])
      left += width
    text = " + ".join(f"{width:.1f}" for width in parts.values())
    axes.text(left + 0.05, position + offset, text, va="center", fontsize=8.5)
axes.set_yticks(range(len(names)), names)
axes.set_ylim(len(names) - 0.5, -1.1)
axes.set_xlim(0, 7.5)
axes.text(0, -0.7, "blocks of 16", color=colors["block"], va="center")
axes.text(1.3, -0.7, "E4M3 scale", color=colors["mantissa"], va="center")
axes.grid(axis="y", visible=False)
plt.show()

# %% [markdown]
# The global scale changes nothing here, as these tensors' blocks fit the range
# of an E4M3 scale as they are; what it is for comes below. And E4M3's three
# mantissa bits are enough: a scale that is not rounded at all gains less than
# one decibel more.
#
# ## Block size
#
# A smaller block has fewer values to be spoiled by its largest one, and more
# bits a value: 4 + 8 / block size.

# %%
SIZES = (8, 16, 32, 64, 128, 256, 512)
E4M3_SCALE = {"rule": "e4m3", "has_global_scale": True}
E8M0_SCALE = {"rule": "e8m0_up"}
sweep = {}
for name in ("Gaussian", "MiniLM, ffn out"):
  x = data[name][:, :512]
  for scale, settings in (("E4M3", E4M3_SCALE), ("E8M0", E8M0_SCALE)):
    sweep[f"{name}, {scale} scale"] = [
      measure.sqnr_db(x, fp4(x, block_size=size, **settings)) for size in SIZES
    ]
  sweep[f"{name}, 8-bit E4M3 values"] = [
    measure.sqnr_db(
      x,
      measure.block_round_trip(
        x, values_dtype=E4M3, block_size=size, **E8M0_SCALE
      ),
    )
    for size in SIZES
  ]
for name, values in sweep.items():
  for size, value in zip(SIZES, values, strict=True):
    if size in (16, 32, 512):
      tracker.sqnr(
        f"block {size} {name}", value, perturbation=numerics_baseline.COMPUTED
      )
first, last = SIZES.index(16), SIZES.index(512)
bought = {name: values[first] - values[last] for name, values in sweep.items()}
figure, axes = show.figure(
  "Blocks of 16 instead of 512 buy"
  f" {bought['Gaussian, E4M3 scale']:.1f} dB on Gaussian data,\n"
  f"and {bought['MiniLM, ffn out, E4M3 scale']:.1f} dB on activations",
  "values that share a scale (log scale)",
  "SQNR (dB)",
)
for name, values in sweep.items():
  if "8-bit" in name:
    continue
  data_name, scale = name.rsplit(", ", 1)
  show.line(
    axes,
    SIZES,
    values,
    f"{data_name},\n{scale}",
    show.COLORS["nvfp4" if "E4M3" in scale else "mxfp4"],
    shift=6 if "E4M3" in scale else -6,
    linestyle="-" if data_name == "Gaussian" else "--",
    marker="o" if data_name == "Gaussian" else "s",
  )
axes.set_xscale("log", base=2)
axes.set_xticks(SIZES, [str(size) for size in SIZES])
axes.set_ylim(bottom=9.5)
plt.show()
print(
  show.table([("SQNR in dB", *SIZES), *([n, *v] for n, v in sweep.items())])
)
for name, values in sweep.items():
  if "8-bit" in name:
    assert max(values) - min(values) < 1
  else:
    assert values == sorted(values, reverse=True)

# %% [markdown]
# Eight-bit values hardly notice: their SQNR is set by the mantissa, and E4M3's
# own exponent does the rest.
#
# ## The global scale: range between tensors
#
# The same data in units from 2⁻⁴⁰ to 2⁴⁰, as gradients or unnormalized
# activations may have them.

# %%
exponents = np.arange(-40, 41)
base = measure.gaussian((16, 512), 20)
magnitudes = {"NVFP4": [], "NVFP4 with global scale 1": [], "MXFP4": []}
for exponent in exponents:
  x = base * np.float32(2.0**exponent)
  trips = (
    measure.round_trip(x, jp.NVFP4),
    measure.round_trip(x, jp.NVFP4, global_scale=1.0),
    measure.round_trip(x, jp.MXFP4),
  )
  for values, approximation in zip(magnitudes.values(), trips, strict=True):
    values.append(measure.sqnr_db(x, approximation))
alone = np.array(magnitudes["NVFP4 with global scale 1"])
served = exponents[alone > max(magnitudes["NVFP4"]) - 1]
figure, axes = show.figure(
  f"Without a global scale NVFP4 is accurate in {len(served)} octaves; with"
  " it, in any",
  "exponent of the data's unit: standard deviation 2^x",
  "SQNR (dB)",
)
show.line(
  axes, exponents, magnitudes["NVFP4"], "NVFP4", show.COLORS["nvfp4"], shift=3
)
show.line(
  axes, exponents, magnitudes["MXFP4"], "MXFP4", show.COLORS["mxfp4"], shift=-3
)
axes.plot(exponents, alone, color=show.ACCENT)
axes.text(12, 8, "NVFP4 with global scale 1", color=show.ACCENT)
axes.set_ylim(-0.5, 23)
plt.show()
print(f"within 1 dB of the best from 2^{served[0]} to 2^{served[-1]}")
assert np.ptp(magnitudes["NVFP4"]) < 0.1 and np.ptp(magnitudes["MXFP4"]) < 0.1
tracker.sqnr("global scale, lowest", min(magnitudes["NVFP4"]))
tracker.sqnr("without global scale at 2^0", float(alone[exponents == 0][0]))

# %% [markdown]
# ## The E4M3 scale: range within a tensor
#
# One global scale does not fit blocks of all magnitudes. E4M3 scales reach from
# 448 down to 2⁻⁶ with three mantissa bits, and as subnormal numbers with fewer
# bits down to 2⁻⁹, which every smaller block gets as well: its values then use
# E2M1's lower codes, and below a quarter of 2⁻⁹ they round to zero. E8M0 has
# 254 octaves.

# %%
ratios = np.arange(0, 25)
blocks = measure.gaussian((len(ratios), 4096), 21)
x = blocks * np.exp2(-ratios[:, None]).astype(np.float32)
ranges = {}
for format in (jp.MXFP4, jp.NVFP4):
  approximation = measure.round_trip(x, format)
  ranges[format.name] = [
    measure.sqnr_db(x[i], approximation[i]) for i in range(len(ratios))
  ]
subnormal_ratio = np.log2(448 / 2.0**-6)
least_ratio = np.log2(448 / 2.0**-9)
zero_ratio = least_ratio + np.log2(6 / 0.25)
figure, axes = show.figure(
  "NVFP4 loses rows of a tensor that are small beside its largest row",
  "row's standard deviation: 2^-x of the largest row's",
  "SQNR of the row (dB)",
)
for format in (jp.MXFP4, jp.NVFP4):
  label = format.name
  axes.plot(
    ratios, ranges[label], show.MARKERS[label] + "-", color=show.COLORS[label]
  )
axes.text(20, 16, "mxfp4", color=show.COLORS["mxfp4"])
axes.text(20, 2, "nvfp4", color=show.COLORS["nvfp4"])
for ratio, text, side in (
  (subnormal_ratio, "scale becomes\nsubnormal ", "right"),
  (least_ratio, " scale is\n clamped", "left"),
):
  axes.axvline(ratio, color=show.NEUTRAL, linestyle=":")
  axes.text(ratio, 9, text, color=show.NEUTRAL, ha=side)
axes.set_ylim(-0.5, 23)
plt.show()
print(
  f"subnormal from 2^-{subnormal_ratio:.1f}, clamped from 2^-{least_ratio:.1f},"
  f" zero from 2^-{zero_ratio:.1f}"
)
nvfp4 = np.array(ranges["nvfp4"])
assert (nvfp4[ratios < subnormal_ratio - 1] > 20).all()
assert nvfp4[19] > 10
assert (nvfp4[ratios > zero_ratio + 1] == 0).all()
assert min(ranges["mxfp4"]) > 18
tracker.sqnr("row at 2^-16, nvfp4", ranges["nvfp4"][16])
tracker.sqnr("row at 2^-24, mxfp4", ranges["mxfp4"][24])

# %% [markdown]
# ## The values' own range: an outlier in a block
#
# In each block one value is made `factor` standard deviations large. What
# becomes of the others?

# %%
factors = 2.0 ** np.arange(1, 36)
inner = {}
for format in measure.FORMATS:
  inner[format.name] = []
  for factor in factors:
    x = measure.gaussian((128, format.block_size), 22)
    x[:, 0] = np.copysign(factor, x[:, 0])
    approximation = measure.round_trip(x, format)
    inner[format.name].append(measure.sqnr_db(x[:, 1:], approximation[:, 1:]))
figure, axes = show.figure(
  "An outlier of 16 standard deviations takes half of FP4's decibels from its\n"
  "neighbours; E4M3 bears one of 10000",
  "outlier, in standard deviations of the other values (log scale)",
  "SQNR of the others (dB)",
)
for format in measure.FORMATS:
  label = format.name
  axes.plot(
    factors,
    inner[label],
    show.MARKERS[label] + "-",
    color=show.COLORS[label],
    markersize=3,
  )
for label, x, y in (
  ("mxfp8", 2e4, 29),
  ("mxfp8_e5m2", 2e7, 26.5),
  ("mxfp6_e2m3", 9, 27.8),
  ("mxfp6_e3m2", 800, 15),
  ("nvfp4", 1.5, 21.5),
  ("mxfp4", 1.2, 12.5),
):
  axes.text(x, y, label, color=show.COLORS[label])
axes.set_xscale("log")
plt.show()


def outlier_at(label, sqnr_db):
  """The smallest outlier with which the others fall below `sqnr_db`."""
  return factors[np.argmax(np.array(inner[label]) < sqnr_db)]


rows = [("format", "no outlier (dB)", "below 10 dB from", "max/min")]
for format in measure.FORMATS:
  levels = measure.positive_levels(format.values_dtype)
  limit = outlier_at(format.name, 10)
  reach = f"{levels[-1] / levels[1]:.3g}"
  row = (inner[format.name][0], f"{limit:.3g} sigma", reach)
  rows.append((format.name, *row))
  tracker.sqnr(f"beside outlier of 8, {format.name}", inner[format.name][2])
print(show.table(rows))
assert outlier_at("nvfp4", 10) == outlier_at("mxfp4", 10) == 16
assert min(inner["nvfp4"][0], inner["mxfp4"][0]) > 18
assert outlier_at("mxfp8", 30) > 10_000

# %% [markdown]
# Block size and scale do not help here: what counts is `max/min` of the values.
# Recipes for four-bit activations therefore deal with outliers first: they
# rotate the data, or move the outliers into the weights.
#
# ## The ends of f32's range
#
# Which value returns if all values of a tensor are the same power of two? It is
# decoded in f64, since XLA on CPUs flushes results below 2⁻¹²⁶ to zero. "Exact"
# leaves aside the rounding of NVFP4's global scale to f32.

# %%
powers = np.arange(-149, 128)
rows = [("format", "exact from", "to", "zero up to")]
for format in measure.FORMATS:
  errors = []
  for exponent in powers:
    x = np.full((1, 32), 2.0**exponent, np.float32)
    image = products.exact(products.quantize(x, format))
    errors.append(np.abs(image / x.astype(np.float64) - 1).max())
  errors = np.array(errors)
  lowest = powers[errors > 2.0**-22].max() + 1
  zero = powers[errors == 1].max()
  assert lowest <= -114 and zero < -127
  rows.append((format.name, f"2^{lowest}", f"2^{powers[-1]}", f"2^{zero}"))
print(show.table(rows))

# %% [markdown]
# NVFP4's global scale is never below 2⁻¹²⁶; its last octaves lose bits.

# %%
print(tracker.finish())
