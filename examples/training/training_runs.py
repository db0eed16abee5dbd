# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a task with a variant and a seed, and stores the runs in a file.

The seed determines the initial parameters, the order of the data and the keys
of stochastic rounding. So two runs of one seed differ only in the variant, and
their difference does not contain the spread between seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np
import optax
import training_data
import training_tasks
import training_variants

import jaxplugin as jp

# A run keeps so many means of its losses in training, and as many validations.
POINTS: Final = 30
VALIDATIONS: Final = 6
WARMUP_SHARE: Final = 0.1
LAST_LEARNING_RATE: Final = 0.1  # of the highest
_DECIMALS: Final = 5

# (parameters, batch, key) -> mean loss, and the share that is guessed right
Loss = Callable[
  [training_tasks.Params, training_data.Batch, jax.Array | None],
  tuple[jax.Array, jax.Array],
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A training run and its results.

  Attributes:
    variant, seed: they and the task determine the run.
    training: mean losses of `POINTS` equal parts of the steps.
    validation: losses on the validation data after each of `VALIDATIONS` equal
      parts of the steps, the products being the variant's; the last one is the
      final loss.
    accuracy: the share of them guessed right at last.
    seconds: of the whole run, compilation included.
  """

  variant: str
  seed: int
  training: list[float]
  validation: list[float]
  accuracy: float
  seconds: float

  @property
  def final(self) -> float:
    return self.validation[-1]


def optimizer_of(
  task: training_tasks.Task, steps: int
) -> optax.GradientTransformation:
  """Returns Adam with a learning rate that rises and then falls."""
  learning_rate = task.learning_rate
  warmup = max(1, int(WARMUP_SHARE * steps))
  return optax.adam(
    optax.warmup_cosine_decay_schedule(
      init_value=learning_rate / warmup,  # not 0, which would waste a step
      peak_value=learning_rate,
      warmup_steps=warmup,
      decay_steps=steps,
      end_value=LAST_LEARNING_RATE * learning_rate,
    )
  )


def loss_and_hits(
  task: training_tasks.Task,
  dot_general: training_variants.DotGeneral,
  params: training_tasks.Params,
  batch: training_data.Batch,
  key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Mean cross entropy in nats, and the share that is guessed right."""
  logits = task.logits(params, batch.inputs, dot_general, key)
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, batch.targets
  )
  return losses.mean(), (logits.argmax(-1) == batch.targets).mean()


def one_line_loss(
  task: training_tasks.Task,
  recipe: jp.training.Recipe,
  *,
  fuse_activations: bool = False,
) -> Loss:
  """Returns the loss and hits of the f32 model under a recipe.

  The model's code does not mention matmuls, recipes or keys. One line adds
  them.
  """

  def loss(
    params: training_tasks.Params, batch: training_data.Batch
  ) -> tuple[jax.Array, jax.Array]:
    return loss_and_hits(task, training_variants.f32, params, batch, None)

  def quantized(
    params: training_tasks.Params,
    batch: training_data.Batch,
    key: jax.Array | None,
  ) -> tuple[jax.Array, jax.Array]:
    return jp.quantize_dots(
      loss, recipe, key=key, fuse_activations=fuse_activations
    )(params, batch)

  return quantized


def loss_of(
  task: training_tasks.Task, variant: str, *, is_one_line: bool = False
) -> Loss:
  """Loss and hits of a variant.

  Args:
    is_one_line: whether a variant that is a recipe is `jp.quantize_dots` of the
      model in f32; else each layer is handed its product and its key.
  """
  if is_one_line and variant in training_variants.RECIPES:
    return one_line_loss(task, training_variants.RECIPES[variant])
  dot_general = training_variants.VARIANTS[variant]
  return functools.partial(loss_and_hits, task, dot_general)


def step_of(
  loss_fn: Loss, optimizer: optax.GradientTransformation
) -> Callable[[Any, Any, training_data.Batch, jax.Array], Any]:
  """Returns (parameters, state, batch, key) -> (parameters, state, loss)."""

  @jax.jit
  def step(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
    (loss, _), grads = jax.value_and_grad(
      lambda params: loss_fn(params, batch, key), has_aux=True
    )(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  return step


def train(
  task: training_tasks.Task,
  variant: str,
  seed: int,
  steps: int,
  on_step: Callable[[int, float], None] = lambda step, loss: None,
  *,
  is_one_line: bool = False,
) -> tuple[Run, training_tasks.Params]:
  """Trains from `seed` for `steps`; `on_step(step, loss)` after each one."""
  start = time.perf_counter()
  loss_fn = loss_of(task, variant, is_one_line=is_one_line)
  optimizer = optimizer_of(task, steps)
  run_step = step_of(loss_fn, optimizer)

  @jax.jit
  def validate(params: Any) -> Any:
    return loss_fn(params, task.validation, None)

  init_key, step_key = jax.random.split(jax.random.key(seed))
  params = task.init(init_key)
  state = optimizer.init(params)
  losses, validation = [], []
  validated_after = {
    steps * (part + 1) // VALIDATIONS for part in range(VALIDATIONS)
  }
  for step, batch in enumerate(task.batches(seed)):
    key = jax.random.fold_in(step_key, step)
    params, state, loss = run_step(params, state, batch, key)
    losses.append(float(loss))
    on_step(step, losses[-1])
    if step + 1 in validated_after:
      loss, accuracy = validate(params)
      validation.append(float(loss))
  run = Run(
    variant=variant,
    seed=seed,
    training=_rounded(
      np.mean(part) for part in np.array_split(losses, min(POINTS, steps))
    ),
    validation=_rounded(validation),
    accuracy=round(float(accuracy), _DECIMALS),
    seconds=round(time.perf_counter() - start, 1),
  )
  return run, params


def _rounded(values: Any) -> list[float]:
  return [round(float(value), _DECIMALS) for value in values]


class SettingsError(Exception):
  """A file's runs were made otherwise than those that are asked for."""


class Results:
  """The runs of one task, kept in a file from which a later call goes on.

  Args:
    path: a JSON file; it need not be there.
    task, preset: what the runs are of. A file made with others is refused.
    is_one_line: whether recipes are `jp.quantize_dots` of the model, which has
      other keys.

  Raises:
    SettingsError: the file's runs are of other settings or data.
  """

  def __init__(
    self,
    path: pathlib.Path,
    task: training_tasks.Task,
    preset: training_tasks.Preset,
    *,
    is_one_line: bool = False,
  ) -> None:
    self.path = path
    self.settings = {
      "task": task.name,
      "data": task.data,
      # How many seeds there are is for the runs to tell.
      **{k: v for k, v in dataclasses.asdict(preset).items() if k != "seeds"},
      "learning_rate": task.learning_rate,
    }
    if is_one_line:
      self.settings["by"] = "quantize_dots"
    self.runs: list[Run] = []
    self.versions = {
      "jaxplugin": jp.__version__,
      "jax": jax.__version__,
      "python": platform.python_version(),
    }
    if path.exists():
      self._read()

  def _read(self) -> None:
    kept = json.loads(self.path.read_text("utf-8"))
    differing = {
      name: (kept["settings"].get(name), value)
      for name, value in (
        dict.fromkeys(kept["settings"]) | self.settings
      ).items()
      if kept["settings"].get(name) != value
    }
    if differing:
      raise SettingsError(
        f"{self.path.name}: made with other settings, (there, here):"
        f" {differing}; remove it, or choose another folder by --results"
      )
    self.versions = kept["versions"]
    self.runs = [Run(**run) for run in kept["runs"]]

  def has(self, variant: str, seed: int) -> bool:
    return any((r.variant, r.seed) == (variant, seed) for r in self.runs)

  def add(self, run: Run) -> None:
    """Takes a run up and writes the file, at once or not at all."""
    if self.has(run.variant, run.seed):
      raise ValueError(
        f"Results: {run.variant}, seed {run.seed} is already stored"
      )
    self.runs.append(run)
    order = list(training_variants.VARIANTS)
    self.runs.sort(key=lambda r: (order.index(r.variant), r.seed))
    runs = ",\n".join(
      "    " + json.dumps(dataclasses.asdict(run)) for run in self.runs
    )
    text = (
      f'{{\n  "settings": {json.dumps(self.settings)},\n'
      f'  "versions": {json.dumps(self.versions)},\n'
      f'  "runs": [\n{runs}\n  ]\n}}\n'
    )
    self.path.parent.mkdir(parents=True, exist_ok=True)
    written = self.path.with_suffix(".part")
    written.write_text(text, "utf-8")
    written.replace(self.path)
