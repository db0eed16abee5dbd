# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools
import pathlib
import sys

import jax
import matplotlib.pyplot as plt
import numerics_baseline
import numerics_measure as measure
import numerics_show as show
import numpy as np

import jaxplugin as jp

sys.path.insert(
  0, str(pathlib.Path(numerics_baseline.__file__).parents[1] / "training")
)
import training_data
import training_runs
import training_tasks
import training_variants

tracker = numerics_baseline.Tracker("training")

# %% [markdown]
# # What do the parts of a training recipe do to the numbers?
#
# Recipes for training in four bits have three parts beside the format:
# stochastic rounding of gradients, a random Hadamard transform, and scales for
# squares of weights. This notebook looks at each by itself, and then at the
# gradients of a trained model. `examples/training` measures their effect on a
# loss.
#
# ## Stochastic rounding: no bias, and what it costs
#
# Numbers from 0 to 6 in a block whose largest number is 6, so that its scale is
# 1. The plot shows the E2M1 value of each, rounded to nearest and at random.

# %%
KEYS = 4096
grid = np.linspace(0, 6, 8 * 31, dtype=np.float32).reshape(8, 31)
blocks = np.concatenate([grid, np.full((8, 1), 6, np.float32)], axis=1)
keys = jax.random.split(jax.random.key(0), KEYS)


@jax.jit
@jax.vmap
def at_random(key):
  return jp.dequantize(jp.quantize(blocks, jp.MXFP4, key=key))


drawn = np.asarray(at_random(keys), np.float64)[:, :, :31].reshape(KEYS, -1)
nearest = measure.round_trip(blocks, jp.MXFP4)[:, :31].ravel()
x = grid.ravel().astype(np.float64)
levels = measure.positive_levels(jp.MXFP4.values_dtype)
low = levels[np.searchsorted(levels, x, side="right") - 1]
high = levels[np.searchsorted(levels, x, side="left")]
# Up with probability (x - low) / (high - low): mean x, and this variance.
expected_variance = (x - low) * (high - x)

figure, axes = show.figure(
  "Rounded at random, numbers of four bits are right on average",
  "number",
  "mean of what it becomes, less the number",
)
show.line(axes, x, nearest - x, "to nearest", show.COLORS["mxfp4"], shift=-5)
show.line(
  axes, x, drawn.mean(axis=0) - x, "at random", show.COLORS["nvfp4"], shift=8
)
axes.set_xticks(levels)
plt.show()

standard_error = np.sqrt(expected_variance / KEYS)
bias = np.abs(drawn.mean(axis=0) - x)
is_exact = expected_variance == 0
assert (drawn[:, is_exact] == x[is_exact]).all()
in_errors = (bias / np.where(is_exact, 1, standard_error))[~is_exact]
print(f"largest bias to nearest: {np.abs(nearest - x).max():.2f}")
print(f"at random, in standard errors of {KEYS} keys: {in_errors.max():.1f}")
# The largest of 240 normal numbers is beyond 4.5 once in 600 times.
assert in_errors.max() < 4.5
assert np.abs(nearest - x).max() > 0.95

# %%
figure, axes = show.figure(
  "Its variance is (x - low) (high - x), largest between two numbers",
  "number",
  "variance of what it becomes",
)
axes.plot(x, expected_variance, color=show.NEUTRAL, label="the formula")
axes.plot(
  x,
  drawn.var(axis=0),
  ".",
  color=show.COLORS["nvfp4"],
  label=f"over {KEYS} keys",
)
axes.set_xticks(levels)
axes.legend(loc="upper left")
plt.show()
# A variable has two values, the upper one with probability p. The variance of
# the sample's variance is v^2 ((1 - 2p)^2 / (p (1 - p))) / N. For p = 1/2 this
# is 0, and the next order is 2 v^2 / N^2.
p = ((x - low) / np.where(is_exact, 1, high - low))[~is_exact]
v = expected_variance[~is_exact]
deviation = v * np.sqrt((1 - 2 * p) ** 2 / (p * (1 - p)) / KEYS)
off = np.abs(drawn.var(axis=0)[~is_exact] - v)
# The sample's own mean takes up to 4.5^2 v / N.
assert (off < 4.5 * deviation + 4.5**2 * v / KEYS).all()

# %% [markdown]
# One rounding at random is worse than one to nearest: its squared error is
# step²/6 on average where the other's is step²/12, which is 3 dB.

# %%
SHAPE = (256, 512)
gaussian = measure.octave_rows(measure.gaussian(SHAPE, 0))


@functools.partial(jax.jit, static_argnames="format")
def stochastic(x, format, key):
  return jp.dequantize(jp.quantize(x, format, key=key))


rows = [("Gaussian data, SQNR in dB", "to nearest", "at random", "less")]
for format in measure.FORMATS:
  to_nearest = measure.sqnr_db(gaussian, measure.round_trip(gaussian, format))
  random = tracker.sqnr(
    f"at random {format.name}",
    measure.sqnr_db(gaussian, stochastic(gaussian, format, keys[0])),
  )
  rows.append((format.name, to_nearest, random, to_nearest - random))
print(show.table(rows, decimals=2))
assert all(2.3 < row[-1] < 3.3 for row in rows[1:])

# %% [markdown]
# What it is for is the same number again and again, as the gradient of a weight
# is that keeps its size from step to step. Rounded to nearest, it is wrong by
# the same error each time.

# %%
STEPS = 2 ** np.arange(9)
FEW = gaussian[:64]


def clipped(x, format):
  """`x` no larger than the largest numbers that its blocks have."""
  q = jp.quantize(x, format)
  step = np.asarray(q.scale, np.float64)
  if q.global_scale is not None:
    step = step * np.float64(np.asarray(q.global_scale).item())
  top = levels_of(format)[-1] * np.repeat(step, format.block_size, axis=-1)
  return np.clip(x, -top, top)


def levels_of(format):
  return measure.positive_levels(format.values_dtype)


figure, axes = show.figure(
  "Over two steps of one gradient both are level; from there on random wins,\n"
  "as far as a block's largest value does not saturate",
  "steps over which the same gradient is rounded (log scale)",
  "SQNR of their mean (dB)",
)
for format in (jp.MXFP8, jp.NVFP4):
  total, curve = np.zeros(FEW.shape), []
  for step in range(STEPS[-1]):
    total += np.asarray(stochastic(FEW, format, keys[step]))
    if step + 1 in STEPS:
      curve.append(measure.sqnr_db(FEW, total / (step + 1)))
  color = show.COLORS[format.name]
  level = measure.sqnr_db(FEW, measure.round_trip(FEW, format))
  limit = measure.sqnr_db(FEW, clipped(FEW, format))
  show.line(
    axes,
    STEPS,
    curve,
    f"{format.name}\nat random",
    color,
    shift=-9,
    marker="o",
  )
  show.line(
    axes, STEPS, [level] * len(STEPS), "to nearest", color, linestyle="--"
  )
  if np.isfinite(limit):
    show.line(
      axes,
      STEPS,
      [limit] * len(STEPS),
      "clipped",
      color,
      linestyle=":",
      shift=7,
    )
  tracker.sqnr(f"mean of {STEPS[-1]} at random {format.name}", curve[-1])
  print(
    f"{format.name}: {curve[-1]:.1f} dB after {STEPS[-1]} steps; of what is"
    f" clipped alone: {limit:.1f} dB"
  )
  # Errors of clipping stay, those of rounding are divided by the steps.
  noise = 10 ** (-curve[0] / 10) - 10 ** (-limit / 10)
  expected = -10 * np.log10(noise / STEPS + 10 ** (-limit / 10))
  # Sums over 32768 independent errors vary by 0.05 dB.
  assert np.abs(curve - expected).max() < 0.2
  assert abs(curve[1] - level) < 0.5 and curve[2] > level + 2
axes.set_xscale("log", base=2)
plt.show()

# %% [markdown]
# NVFP4 has a limit: its block scales are rounded to nearest, so every other one
# is too small for the block's largest value, which saturates at 6. That error
# is the same in each step. MX scales are rounded up, and have no limit; with
# `grad_scale_up=True` a recipe rounds NVFP4's scales of gradients up as well.
#
# A gradient that is another one in each step gains nothing of this: there the
# errors of rounding to nearest are as independent as the others', and smaller.
# Which of the two a training run is, measures nothing but the run.
#
# ## The Hadamard transform: what it does to outliers
#
# Groups of 16 or 32 numbers are multiplied by an orthogonal matrix of ±1/√n.
# Errors stay as large as they are, so SQNRs before and after can be compared.
# "Whole channels" has outliers as activations do: in `wgrad`, which contracts
# tokens, a block lies in one channel, so all of it is large or none.


# %%
def outlier_tokens(shape, seed):
  """Returns data with outliers along the tokens, which wgrad contracts."""
  return np.ascontiguousarray(measure.outlier_channels(shape[::-1], seed).T)


DATA = {
  "Gaussian": measure.gaussian,
  "Laplace": measure.laplace,
  "Student t, 3 degrees": measure.student_t,
  "outlier in each 128": measure.outlier_channels,
  "whole channels": outlier_tokens,
}
SIZES = {jp.NVFP4: 16, jp.MXFP4: 32, jp.MXFP8: 32}
made = {
  name: measure.octave_rows(make(SHAPE, seed))
  for seed, (name, make) in enumerate(DATA.items())
}
crests = [("mean largest / root mean square", "before", "after")]
effects = {}
for name, x in made.items():
  effects[name] = {}
  for format, size in SIZES.items():
    y = measure.hadamard(x, size)
    back = measure.unhadamard(measure.round_trip(y, format), size)
    before = measure.sqnr_db(x, measure.round_trip(x, format))
    after = tracker.sqnr(
      f"transformed {format.name} {name}", measure.sqnr_db(x, back)
    )
    effects[name][format.name] = (before, after)
  sixteen = [measure.crest_factor(z, 16) for z in (x, measure.hadamard(x, 16))]
  crests.append((name, *sixteen))
print(show.table(crests, decimals=2), "\n")
rows = [("SQNR in dB, before and after", *(f.name for f in SIZES))]
rows += [
  (name, *(f"{before:.1f} {after:.1f}" for before, after in found.values()))
  for name, found in effects.items()
]
print(show.table(rows))

# %%
figure, axes = show.figure(
  "The transform makes all data Gaussian: it lifts MXFP4 to what that has,\n"
  "and lowers NVFP4, whose scale did well by outliers",
  "SQNR after less before (dB)",
  "",
  size=(7.2, 3.6),
)
names = list(effects)
for offset, format in zip((-0.25, 0, 0.25), SIZES, strict=True):
  pairs = [effects[name][format.name] for name in names]
  change = [after - before for before, after in pairs]
  axes.barh(
    np.arange(len(names)) + offset,
    change,
    0.22,
    color=show.COLORS[format.name],
    label=format.name,
  )
axes.axvline(0, color=show.NEUTRAL, lw=0.8)
axes.set_yticks(range(len(names)), names)
axes.invert_yaxis()
axes.grid(axis="y", visible=False)
axes.legend(loc="lower left")
plt.show()
assert all(
  abs(after - before) < 0.2 for before, after in effects["Gaussian"].values()
)
heavy = ("Laplace", "Student t, 3 degrees", "outlier in each 128")
for name in heavy:
  before, after = effects[name]["mxfp4"]
  assert after > before + 1
  before, after = effects[name]["nvfp4"]
  assert after < before - 0.2

# %% [markdown]
# The SQNR of all numbers is that of the outliers, nearly, which hold most of
# the square sum. What becomes of the numbers beside them?

# %%
x = made["outlier in each 128"]
is_outlier = np.zeros(x.shape, bool)
is_outlier[:, 128 // 3 :: 128] = True
beside = is_outlier.reshape(len(x), -1, 32).any(axis=-1)  # groups of 32
beside = np.repeat(beside, 32, axis=1) & ~is_outlier
rows = [("SQNR in dB of numbers beside", "before", "after")]
for format, size in SIZES.items():
  y = measure.round_trip(measure.hadamard(x, size), format)
  back = measure.unhadamard(y, size)
  direct = measure.round_trip(x, format)
  before, after = (
    measure.sqnr_db(x[beside], z[beside]) for z in (direct, back)
  )
  tracker.sqnr(f"beside outliers, transformed {format.name}", after)
  rows.append((format.name, before, after))
  assert after < before
print(show.table(rows))

# %% [markdown]
# Their error grows in every format, because the transform spreads the outlier's
# error over them. The transform does not protect small numbers. It makes the
# error of all blocks equal. MXFP4's error becomes smaller, because its scale
# may be twice too large.
#
# ## Weights: one forward, another one backward
#
# The forward product contracts a weight's rows and `dgrad` its columns, so that
# blocks of one row make two different weights of one. Scales for squares make
# one. Both are seen through the product itself, with a unit matrix in place of
# activations, and of gradients.

# %%
NUMBERS = (((1,), (0,)), ((), ()))


@functools.partial(jax.jit, static_argnames=("format", "weight_2d"))
def both_weights(weight, format, weight_2d):
  """f32[k, n]: what the forward product has for a weight, and what dgrad."""
  recipe = jp.training.Recipe(
    activation_format=None,
    weight_format=format,
    grad_format=None,
    weight_2d=weight_2d,
  )
  dot = jp.dot_general(recipe=recipe, weight="rhs")
  (k, n), rows = weight.shape, max(weight.shape)
  forward, vjp = jax.vjp(
    lambda x: dot(x, weight, NUMBERS), np.eye(rows, k, dtype=np.float32)
  )
  (backward,) = vjp(np.eye(rows, n, dtype=np.float32))
  return forward[:k], backward[:n].T


of_model = measure.model_weights()["3 ffn_in"].T[: SHAPE[0], : SHAPE[1]]
weights = {"Gaussian": gaussian, "MiniLM": np.ascontiguousarray(of_model)}
rows = [("SQNR in dB", "in rows", "in squares", "rows: forward to dgrad")]
for format in (jp.NVFP4, jp.MXFP4, jp.MXFP8):
  for name, weight in weights.items():
    forward, backward = both_weights(weight, format, weight_2d=False)
    square, turned = both_weights(weight, format, weight_2d=True)
    # It is the product's own quantizing that is seen.
    by_rows = measure.round_trip(np.ascontiguousarray(weight.T), format).T
    assert np.array_equal(forward, by_rows)
    assert np.array_equal(square, turned)
    label = f"{format.name} {name}"
    one, two = (measure.sqnr_db(weight, z) for z in (forward, square))
    tracker.sqnr(
      f"in squares {label}", two, perturbation=numerics_baseline.COMPUTED
    )
    mismatch = measure.sqnr_db(forward, backward)
    rows.append((label, one, two, mismatch))
print(show.table(rows))
for label, one, two, mismatch in rows[1:]:
  if label.startswith("nvfp4"):
    # Two errors of one size, were they independent: 3 dB below one of them.
    assert one - 3.1 < mismatch < one - 2 and one - two > 1
  elif label.startswith("mxfp4"):
    assert mismatch > one + 2 and one - two > 1
  else:
    assert mismatch > 100 and one - two < 0.1

# %% [markdown]
# In NVFP4 the two weights differ by 3 dB more than either does from the true
# one: their errors are independent. Squares make both one, bitwise, and the
# forward product pays with 1.4 to 1.9 dB. MXFP4's scales are powers of two and
# often the same ones for rows and columns, so the two are nearer to each other
# than to the truth. MXFP8 has almost no mismatch: a number with an
# exponent is rounded the same way under any power of two, unless it is
# subnormal. So squares are a matter of NVFP4.
#
# ## Gradients of a trained model, layer by layer
#
# The transformer of `examples/training`, trained in f32 on the sentences of
# `examples/quickstart` (Python's documentation is another one in each version);
# then the gradients of its loss on one batch, beside those of f32. Errors of
# all layers, forward and backward, come together in each.

# %%
TRAINED_STEPS = 60
preset = dataclasses.replace(
  training_tasks.PRESETS["default"], steps=TRAINED_STEPS
)
codes = training_data.encode(measure.SENTENCES.read_text("utf-8"))
sizes = {"rows": preset.rows, "context": preset.context, "codes": codes}
task = dataclasses.replace(
  training_tasks.linen(preset),
  batches=functools.partial(
    training_data.text_batches, steps=TRAINED_STEPS, **sizes
  ),
)
_, params = training_runs.train(task, "f32", 0, TRAINED_STEPS)
batch = next(task.batches(1))


def gradients_of(variant):
  """A jitted function of a key: gradients of all kernels, by layer."""
  dot_general = training_variants.VARIANTS[variant]

  def loss(params, key):
    return training_runs.loss_and_hits(task, dot_general, params, batch, key)[0]

  @jax.jit
  def gradients(key):
    grads = jax.grad(loss)(params, key)
    return {
      f"{block} {layer}": grads[f"block_{block}"][layer]["kernel"]
      for block in range(preset.blocks)
      for layer in ("attention_in", "attention_out", "mlp_in", "mlp_out")
    }

  return gradients


exact = gradients_of("f32")(keys[0])
assert all(np.linalg.norm(gradient) > 0 for gradient in exact.values())
found = {}
for variant in ("mxfp8", "nvfp4-bare", "nvfp4"):
  gradients = gradients_of(variant)
  drawn = gradients(keys[0])
  found[variant] = {k: measure.sqnr_db(exact[k], drawn[k]) for k in exact}
# The mean over keys of the last variant removes the error of random rounding.
AVERAGED = 16
total = dict.fromkeys(exact, 0.0)
for key in keys[:AVERAGED]:
  for layer, gradient in gradients(key).items():
    total[layer] = total[layer] + np.asarray(gradient, np.float64) / AVERAGED
found[f"nvfp4, mean of {AVERAGED}"] = {
  k: measure.sqnr_db(exact[k], total[k]) for k in exact
}
layers = list(exact)
rows = [("gradient's SQNR in dB", *found)]
rows += [(layer, *(found[name][layer] for name in found)) for layer in layers]
print(show.table(rows))
for name, values in found.items():
  tracker.sqnr(
    f"gradient {name}, mean of layers",
    float(np.mean(list(values.values()))),
    perturbation=numerics_baseline.TRAINED,
  )
assert all(
  found["mxfp8"][k] > found["nvfp4"][k] + 5
  and found[f"nvfp4, mean of {AVERAGED}"][k] > found["nvfp4"][k]
  for k in layers
)

# %%
figure, axes = show.figure(
  "Gradients in MXFP8 keep more than twice the decibels of those in NVFP4",
  "linear layers, from the first one on",
  "SQNR beside the gradient in f32 (dB)",
)
places = range(len(layers))
for name, color, shift, style in (
  ("mxfp8", show.COLORS["mxfp8"], 0, "-"),
  ("nvfp4-bare", show.ACCENT, 8, "-"),
  ("nvfp4", show.COLORS["nvfp4"], -8, "-"),
  (f"nvfp4, mean of {AVERAGED}", show.COLORS["nvfp4"], 0, ":"),
):
  values = [found[name][layer] for layer in layers]
  show.line(
    axes, places, values, name, color, shift=shift, marker="o", linestyle=style
  )
axes.set_xticks(
  places,
  [layer.replace(" ", "\n").replace("_", "\n") for layer in layers],
  fontsize=8,
)
axes.set_ylim(bottom=0)
plt.show()

# %% [markdown]
# "nvfp4-bare" is NVFP4 without the three parts, and in this one step most of
# its gradients are the nearer ones: rounding at random and squares of weights
# both cost decibels, as above. The mean over keys is what rounding at random is
# for, and it gains little here: what is left is the error of the forward pass,
# and of activations and weights in the backward products, all rounded to
# nearest and the same for every key. So the parts of the recipe do not
# reduce the error of a step. They keep it from being the same error in all
# steps. That matters in long runs, which this notebook does not show.

# %%
print(tracker.finish())
