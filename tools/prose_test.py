# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Text for users is plain English: no phrase of `PHRASES` occurs in it.

Covers Markdown, messages, the help of commands, and public docstrings.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import sys
from typing import NamedTuple

from absl.testing import parameterized

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))

import site_pages

import jaxplugin as jp
from jaxplugin import __main__ as command_line

ROOT = site_pages.ROOT
FOLDERS = ("jaxplugin", "kernels", "hlo_tests", "tools", "examples")
MODULES = (
  *(jp, jp.backends, jp.checkpoints, jp.nn, jp.repro, jp.training),
  jp.training.checkpoint_policies,
)
# Phrase -> what to write instead. Each is searched for in a part of a sentence.
PHRASES = {
  re.compile(phrase): advice
  for phrase, advice in {
    r"^Of [a-z`]": "begin with the subject",
    r"\bas of (`|the |what)": "write 'like'",
    r"^What (is|are|has|was|can|cannot|comes|each|a|the|`)": "name the subject",
    r"\b(makes?|made|becomes?) of\b": "name what it consists of",
    r"(?<![Tt]here )\b(is|are|be) (no|none)\b(?! longer)": "negate the verb",
    r"\b(told|tells)\b": "write 'prints', 'returns' or 'is passed'",
    r"\b(not|is|are|be) here\b|\b(is|are) there\b": "say where, or 'exists'",
    r"\b(anew|likewise|for ever)\b": "write 'again', 'also' or 'forever'",
    r"\bof (its|their) own\b": "write 'separate', or leave it out",
    r"\bby (operations|bytes|rule|kernels)\b": "name who does it",
    r"\b(kept|said|taken|offered) so\b": "say how",
    r"\b(serves|cannot serve|can serve)\b": "write 'supports'",
    r", of which\b": "write a second sentence",
    r"\bNone where\b": "write 'None if'",
  }.items()
}
FENCE = re.compile(r"^ *(```|:::).*?^ *\1[^\S\n]*$|<!--.*?-->", re.M | re.S)
NEW_BLOCK = re.compile(r"\s*(\* |- |\d+\. |#|\||>|$)")
PART = re.compile(r"[^.:;?!|]+(?:[.:;?!|](?=\S)[^.:;?!|]*)*[.:;?!|]*")


class Hit(NamedTuple):
  line: int
  advice: str
  text: str


def blocks(text, line=1):
  """Yields (first line, lines) of each paragraph, item, row and heading."""
  found = []
  for number, row in enumerate(text.split("\n"), line):
    if NEW_BLOCK.match(row) and found:
      yield found[0][0], [row for _, row in found]
      found = []
    if row.strip():
      found.append((number, row))
  if found:
    yield found[0][0], [row for _, row in found]


def hits(text, line=1):
  """Returns where a phrase occurs in a text that begins at a line."""
  found = []
  for first, rows in blocks(text, line):
    joined = "\n".join(rows)
    for part in PART.finditer(joined):
      clause = re.sub(r"^[\s*#>-]+|\d+\. ", "", part[0])
      if clause.endswith("?"):
        continue
      clause = re.sub(r"\s+", " ", clause)
      for phrase, advice in PHRASES.items():
        if phrase.search(clause):
          number = first + joined[: part.start()].lstrip("\n").count("\n")
          found.append(Hit(number, advice, clause))
  return found


def without_code(text):
  """Returns Markdown with blank lines in place of code."""
  text = FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
  return re.sub(r"^(    |\t).*$", "", text, flags=re.M)


def strings(source):
  """Yields (line, text) of string literals that are not docstrings."""
  tree = ast.parse(source)
  skipped = set()
  for node in ast.walk(tree):
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
      first = node.body[0] if node.body else None
      if isinstance(first, ast.Expr):
        skipped.add(first.value)
    if isinstance(node, ast.JoinedStr):
      skipped.update(x for x in node.values if isinstance(x, ast.Constant))
  for node in ast.walk(tree):
    if isinstance(node, ast.JoinedStr):
      parts = (getattr(part, "value", "") for part in node.values)
      yield (
        node.lineno,
        "".join(x if isinstance(x, str) else "{}" for x in parts),
      )
    elif isinstance(node, ast.Constant) and node not in skipped:
      if isinstance(node.value, str) and " " in node.value:
        yield node.lineno, node.value


def sources():
  """Returns the Python files of the checkout that are not tests."""
  return sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.endswith("_test.py")
    and "tests" not in path.relative_to(ROOT).parts
  )


def public_objects():
  """Yields (name, object) of public names, and of their public members."""
  seen = set()
  for module in MODULES:
    for name in ("", *module.__all__):
      value = getattr(module, name) if name else module
      if id(value) in seen or inspect.ismodule(value) != (not name):
        continue
      if value.__doc__ is type(value).__doc__:
        continue  # an instance, described by its class
      seen.add(id(value))
      path = f"{module.__name__}.{name}" if name else module.__name__
      yield path, value
      if inspect.isclass(value):
        for member, item in vars(value).items():
          if not member.startswith("_") and getattr(item, "__doc__", None):
            yield f"{path}.{member}", item


def place(value):
  """Returns the file and line of a docstring; None if it is not in a file."""
  value = inspect.unwrap(getattr(value, "fget", None) or value)
  try:
    path = pathlib.Path(inspect.getsourcefile(value)).relative_to(ROOT)
    rows, start = inspect.getsourcelines(value)
  except (OSError, TypeError, ValueError):
    return None
  summary = inspect.getdoc(value).split("\n")[0]
  offsets = (i for i, row in enumerate(rows) if summary in row)
  return path, max(start, 1) + next(offsets, 0)


def lines_of(hits_, name):
  return [f"{name}:{hit.line}: {hit.text}  [{hit.advice}]" for hit in hits_]


class ProseTest(parameterized.TestCase):
  def assert_plain(self, found):
    self.assertEmpty(found, "\n" + "\n".join(found))

  @parameterized.named_parameters(
    (path.relative_to(ROOT).as_posix(), path) for path in site_pages.markdown()
  )
  def test_markdown(self, path):
    found = hits(without_code(path.read_text()))
    self.assert_plain(lines_of(found, path.relative_to(ROOT)))

  def test_messages(self):
    found = []
    for path in sources():
      for line, text in strings(path.read_text()):
        found += lines_of(hits(text, line), path.relative_to(ROOT))
    self.assert_plain(found)

  def test_help_of_commands(self):
    parser = command_line._parser()
    (commands,) = (x for x in parser._actions if x.dest == "command")
    found = lines_of(hits(parser.format_help()), "--help")
    for name, command in commands.choices.items():
      found += lines_of(hits(command.format_help()), f"{name} --help")
    self.assertLen(commands.choices, len(command_line.COMMANDS))
    self.assert_plain(found)

  def test_public_docstrings(self):
    found = []
    for name, value in public_objects():
      text = inspect.getdoc(value)
      if text and str(getattr(value, "__module__", "jaxplugin")).startswith(
        "jaxplugin"
      ):
        path, line = place(value) or (name, 1)
        found += lines_of(hits(text, line), path)
    self.assert_plain(found)


class PhrasesTest(parameterized.TestCase):
  @parameterized.parameters(
    "Sizes. Of each row the first is read.",
    "It is read as of `load`.",
    "What is kept is quantized.",
    "* a table is made of rows",
    "x is no array",
    "| a | the caller is told why |",
    "the file is there already",
    "it is sharded anew",
    "an array of its own",
    "chosen by rule",
    "it is taken so",
    "# A backend that serves",
    "two devices, of which one is idle",
    "a name; None where it has none",
  )
  def test_a_phrase_is_found(self, text):
    self.assertLen(hits(text), 1)

  @parameterized.parameters(
    "There is no such file.",
    "What is a block?",
    "A summary of the rows, as of 2026.",
    "It is no longer read.",
    "`jp.quantize` returns what the caller needs.",
  )
  def test_plain_english_passes(self, text):
    self.assertEmpty(hits(text))

  def test_a_phrase_over_two_lines_is_found_at_its_line(self):
    (hit,) = hits("One.\n\nTwo sizes\nand x is\nno array.", 10)
    self.assertEqual(hit.line, 12)
    self.assertEqual(hit.text, "Two sizes and x is no array.")

  def test_code_of_markdown_is_left_out(self):
    text = "a\n```\nx is no y\n```\n\n    x is no y\n"
    self.assertEmpty(hits(without_code(text)))

  def test_strings_are_read_without_docstrings(self):
    source = 'def f():\n  """x is no y"""\n  return f"{x} is no" " y"\n'
    self.assertEqual(list(strings(source)), [(3, "{} is no y")])

  def test_a_docstring_has_a_file_and_a_line(self):
    path, line = place(jp.ScaledArray.dequantize)
    row = (ROOT / path).read_text().splitlines()[line - 1]
    self.assertIn(inspect.getdoc(jp.ScaledArray.dequantize)[:20], row)

  def test_every_kind_of_source_is_seen(self):
    names = [name for name, _ in public_objects()]
    self.assertContainsSubset(
      ["jaxplugin.quantize", "jaxplugin.ScaledArray.dequantize"], names
    )
    self.assertIn(ROOT / "jaxplugin" / "dot" / "api.py", sources())
