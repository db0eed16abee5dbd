# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Links, paths, public names and variables in the documentation exist.

The test needs no Sphinx. `make docs` builds the site.
"""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))

import site_pages

import jaxplugin as jp
from jaxplugin import __main__ as command_line
from jaxplugin import cutile
from jaxplugin.dot.backends import cudnn
from jaxplugin.runtime import cpu_library, triton_calls
from jaxplugin.stablehlo import module_calls

ROOT = site_pages.ROOT
DOCS = site_pages.DOCS
API = DOCS / "reference" / "api"
FENCE = re.compile(r"^(```|:::).*?^\1[^\S\n]*$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
VARIABLE = re.compile(r"\"(JAXPLUGIN_[A-Z_]+[A-Z])\"")
# Variables of tests, which users do not set.
OF_TESTS = {"JAXPLUGIN_IMPORT_TEST", "JAXPLUGIN_OTHER"}
MESSAGES_OF_OTHERS = (
  *("NOT_FOUND", "Unable to load cuDNN", "Unsupported .version"),
  *("needs flatbuffers", "Cannot serialize PyTreeDef"),
)
MODULES = (
  *("backends", "checkpoint_policies", "checkpoints", "nn", "repro"),
  "training",
)


def slug(heading):
  """Returns the anchor that GitHub and MyST give a heading."""
  return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(path, text, files=None):
  """Returns the relative links of a page that lead nowhere."""
  broken = []
  for target in LINK.findall(FENCE.sub("", text)):
    if re.match(r"[a-z]+:", target):
      continue
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    in_site = DOCS in path.parents and DOCS in file.parents
    page = file.relative_to(DOCS).as_posix() if in_site else ""
    if page in site_pages.COPIED:
      file = ROOT / site_pages.COPIED[page]
    if not file.exists():
      broken.append(target)
    elif anchor and file.suffix == ".md":
      headings = HEADING.findall(FENCE.sub("", file.read_text()))
      if anchor not in map(slug, headings):
        broken.append(target)
  return broken


def broken_paths(text):
  """Returns the paths in backticks that do not exist in the checkout."""
  folders = "|".join(
    sorted(
      path.name
      for path in ROOT.iterdir()
      if path.is_dir() and not path.name.startswith((".", "build", "dist"))
    )
  )
  broken = []
  for code in CODE.findall(FENCE.sub("", text)):
    if not re.fullmatch(rf"({folders})/[\w./*{{}},-]*", code):
      continue
    code = code.rstrip("/")
    options = re.search(r"\{([^}]*)\}", code)
    names = options[1].split(",") if options else [""]
    for name in names:
      path = re.sub(r"\{[^}]*\}", name, code)
      if not any(ROOT.glob(path)):
        broken.append(path)
  return broken


def messages():
  """Returns the package's string literals, one per line, without values."""
  found = []
  for folder in ("jaxplugin", "kernels"):
    for path in (ROOT / folder).rglob("*.py"):
      parts = path.relative_to(ROOT).parts
      if path.name.endswith("_test.py") or "testing" in parts:
        continue
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
          parts = (getattr(part, "value", "") for part in node.values)
          found.append(
            "".join(x if isinstance(x, str) else "{}" for x in parts)
          )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
          found.append(node.value)
        elif isinstance(node, ast.ClassDef):
          found.append(node.name)
  return "\n".join(found)


def documented(page):
  """Returns the names in an API page's autosummary and data directives."""
  text = (API / f"{page}.rst").read_text()
  listed = re.findall(r"^   (\w+)$", text, re.M)
  return listed + re.findall(r"^\.\. data:: (\w+)$", text, re.M)


def groups():
  """Returns the pages of `jaxplugin` itself in the order of index.rst."""
  pages_of_api = re.findall(
    r"^   (\w+)$", (API / "index.rst").read_text(), re.M
  )
  return [page for page in pages_of_api if page not in MODULES]


class LinksTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (path.relative_to(ROOT).as_posix(), path) for path in site_pages.markdown()
  )
  def test_links_and_paths_of_a_page_exist(self, path):
    text = path.read_text()
    self.assertEmpty(broken_links(path, text))
    self.assertEmpty(broken_paths(text))

  def test_a_broken_link_or_path_is_found(self):
    page = DOCS / "index.md"
    text = "[a](no.md) [b](index.md) [c](#no) [d](https://x) `docs/no.md`"
    self.assertEqual(broken_links(page, text), ["no.md", "#no"])
    self.assertEqual(broken_paths(text + " `docs/*.md`"), ["docs/no.md"])

  def test_every_page_is_in_the_table_of_contents(self):
    contents = "".join(
      (DOCS / page).read_text()
      for page in ("index.md", "notebooks/index.md", "reference/api/index.rst")
    )
    for path in sorted(DOCS.rglob("*.md")):
      page = path.relative_to(DOCS).with_suffix("").as_posix()
      if "_build" in page or page in ("index", "README"):
        continue
      self.assertIn(f"\n{page}\n", contents, page)
    for page in site_pages.COPIED:
      stem = pathlib.PurePath(page).with_suffix("").as_posix()
      self.assertIn(f"\n{stem.removeprefix('notebooks/')}\n", contents)


class ApiTest(parameterized.TestCase):
  def test_every_public_name_has_one_entry(self):
    found = [name for page in groups() for name in documented(page)]
    self.assertCountEqual(found, set(jp.__all__) - set(MODULES))
    self.assertContainsSubset(MODULES, jp.__all__)

  @parameterized.parameters(*MODULES)
  def test_names_of_a_module_exist(self, name):
    module = getattr(jp, name)
    names = documented(name)
    self.assertNotEmpty(names)
    for attribute in names:
      self.assertTrue(hasattr(module, attribute), attribute)
    for attribute in getattr(module, "__all__", ()):
      if not hasattr(jp, attribute):
        self.assertIn(attribute, names)


class ReferenceTest(absltest.TestCase):
  def test_every_environment_variable_is_listed(self):
    page = (DOCS / "reference" / "environment.md").read_text()
    found = set()
    for folder in ("jaxplugin", "kernels"):
      for suffix in ("*.py", "*.cc", "*.h"):
        for path in (ROOT / folder).rglob(suffix):
          if "test" not in path.name:
            found |= set(VARIABLE.findall(path.read_text()))
    self.assertIn("JAXPLUGIN_TUNING", found)
    for name in found - OF_TESTS:
      self.assertIn(f"| `{name}` |", page)

  def test_headings_of_troubleshooting_are_in_messages(self):
    text = (DOCS / "reference" / "troubleshooting.md").read_text()
    corpus = messages()
    for heading in HEADING.findall(text)[1:]:
      if heading.startswith(MESSAGES_OF_OTHERS):
        continue
      # Names and numbers in an example heading are values of the message.
      parts = re.split(r"'[^']*'|\w+\.so|\b\d[\d.]*|\.{3}|^\w+: ", heading)
      longest = max(parts, key=len).strip()
      self.assertTrue(
        longest in corpus, f"{heading}: no message has {longest!r}"
      )

  def test_every_custom_call_is_listed(self):
    page = (DOCS / "reference" / "custom_calls.md").read_text()
    for name in (
      *(module_calls.QUANTIZE, module_calls.DEQUANTIZE),
      *(module_calls.SCALED_DOT, cudnn.DOT_TARGET, cudnn.SWIZZLED_DOT_TARGET),
      *(
        cutile.CALL_TARGET,
        *triton_calls.NAMES,
        *cpu_library.library.HANDLERS,
      ),
    ):
      self.assertIn(f"`{name}`", page)

  def test_command_line_is_printed_from_its_parser(self):
    self.assertIn(
      "```{cli-help}\n```", (DOCS / "reference" / "cli.md").read_text()
    )
    page = (DOCS / "getting_started" / "which_function.md").read_text()
    for name in command_line.COMMANDS:
      self.assertIn(f"`python -m jaxplugin {name}", page)

  def test_every_page_has_the_same_gpu_status(self):
    status = (DOCS / "reference" / "gpu_status.md").read_text().split("\n\n")[1]
    self.assertStartsWith(status, "> **GPU status:")
    pages = {
      path for path in DOCS.rglob("*.md") if "**GPU status:" in path.read_text()
    }
    required = {DOCS / "index.md", DOCS / "reference" / "compatibility.md"}
    for path in pages | required | {ROOT / "README.md"}:
      self.assertIn(f"\n{status}\n\n", path.read_text(), path)

  def test_pages_install_from_a_checkout_before_the_first_release(self):
    self.assertIn("not on PyPI yet", (ROOT / "README.md").read_text())
    command = re.compile(r"pip install [^\n`#]*\bjaxplugin\b")
    for path in site_pages.markdown():
      self.assertNotRegex(path.read_text(), command, path)


class CopiedPagesTest(absltest.TestCase):
  def test_links_are_relative_to_the_page(self):
    text = (
      "[a](docs/concepts/numerics.md#b) [b](CONTRIBUTING.md) ![c](tools/x.svg)"
      " [d](https://x.org/y)\n```\n[e](f.md)\n```\n"
    )
    self.assertEqual(
      site_pages.relinked(text, "ARCHITECTURE.md", "developer/a.md"),
      "[a](../concepts/numerics.md#b) [b](contributing.md)"
      " ![c](../../tools/x.svg) [d](https://x.org/y)\n```\n[e](f.md)\n```\n",
    )

  def test_a_link_out_of_the_site_becomes_a_path(self):
    text = "[a](../index.md) [b](../../tools/x.py) ![c](../../x.svg)"
    self.assertEqual(
      site_pages.without_outside_links(text, "concepts/a.md"),
      "[a](../index.md) b (`tools/x.py`) ![c](../../x.svg)",
    )

  def test_sources_exist_and_git_ignores_the_copies(self):
    ignored = (ROOT / ".gitignore").read_text()
    for page, source in site_pages.COPIED.items():
      self.assertTrue((ROOT / source).exists(), source)
      self.assertTrue(
        f"/docs/{page}\n" in ignored or page.startswith("notebooks/"), page
      )
    self.assertIn("/docs/notebooks/*.ipynb\n", ignored)


EXAMPLE = "Example:\n  >>> f(`x`, *y)\n  'a|b`'"
# Each row: text of a docstring, and its reStructuredText.
RESTRUCTURED = {
  "names become code or links": (
    "Takes `x`s, as `jp.quantize`; see ``y``.",
    "Takes ``x``\\ s, as :py:obj:`jp.quantize <jaxplugin.quantize>`; see"
    " ``y``.",
  ),
  "code over two lines is joined": ("a `b\nc` d", "a ``b c`` d"),
  "asterisks and bars are not markup": (
    "* sum|a * b| of `a * b`",
    r"* sum\|a \* b\| of ``a * b``",
  ),
  "indented paragraphs are literal": (
    "Formula:\n\n  a * b\n\n  c\n\nEnd.",
    "Formula::\n\n  a * b\n\n  c\n\nEnd.",
  ),
  "colons are added": ("A.\n\n  b", "A.\n\n::\n\n  b"),
  "colons are kept": ("A::\n\n  b", "A::\n\n  b"),
  "lines without a gap": ("F:\n  a * b\nEnd.", "F::\n\n  a * b\n\nEnd."),
  "paragraphs of a list": ("* One.\n\n  Two.", "* One.\n\n  Two."),
  "sections have an entry a line": (
    "Args:\n  a, b: sizes.\nRaises:\n  jp.X: no.\n  Others.",
    "Args:\n  a,b: sizes.\nRaises:\n  jaxplugin.X: no.\n    Others.",
  ),
  "examples are unchanged": (
    f"{EXAMPLE}\n\nSee also:\n  `jp.quantize`: x.",
    f"{EXAMPLE}\n\nSee also:\n  :py:obj:`jp.quantize <jaxplugin.quantize>`: x.",
  ),
}


class DocstringTest(absltest.TestCase):
  def test_docstrings_become_restructured_text(self):
    for name, (text, expected) in RESTRUCTURED.items():
      with self.subTest(name):
        lines = site_pages.restructured(text.split("\n"), {"quantize"})
        self.assertEqual("\n".join(lines), expected)


class BuildTest(absltest.TestCase):
  def test_site_is_built_by_make_ci_and_read_the_docs_alike(self):
    makefile = (ROOT / "Makefile").read_text()
    self.assertIn("sphinx -n -W --keep-going", makefile)
    self.assertIn("make docs", (ROOT / ".ci" / "run").read_text())
    settings = (ROOT / ".readthedocs.yaml").read_text()
    self.assertIn("configuration: docs/conf.py", settings)
    self.assertIn("- docs", settings)

  def test_importing_the_pages_needs_no_sphinx(self):
    code = "import sys, site_pages; sys.exit('sphinx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=DOCS, check=True)
