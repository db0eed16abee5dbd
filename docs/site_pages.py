# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pages that the site copies from outside of docs/, and docstrings as reST.

Nothing here imports Sphinx, so tests use it without the extra `docs`.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
from collections.abc import Collection, Sequence
from typing import Final

DOCS: Final = pathlib.Path(__file__).resolve().parent
ROOT: Final = DOCS.parent
# Pages that autosummary writes, a public name each.
GENERATED: Final = DOCS / "reference/api/generated"
# Page of the site -> file of the checkout.
COPIED: Final = {
  "developer/architecture.md": "ARCHITECTURE.md",
  "developer/contributing.md": "CONTRIBUTING.md",
  "developer/cpu_kernels.md": "kernels/cpu/README.md",
  "developer/hlo_tests.md": "hlo_tests/README.md",
  "reference/changelog.md": "CHANGELOG.md",
  **{
    f"notebooks/{name}.ipynb": f"examples/numerics/{name}.ipynb"
    for name in (
      "numerics_contract",
      "numerics_formats",
      "numerics_scales",
      "numerics_training",
    )
  },
}
LINK: Final = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
_TEXT_LINK: Final = re.compile(
  r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(?:#[^)]*)?\)"
)
_CODE: Final = re.compile(r"(^```.*?^```\n)", re.M | re.S)
_LITERAL: Final = re.compile(r"(?<!`)`([^`\n]+)`(?!`)(?=(\w?))")
_SPECIAL: Final = re.compile(r"(\*|\|)")
_SECTION: Final = re.compile(
  r"(Args|Attributes|Examples?|Raises|Returns|See also|Warns|Yields):"
)
_BULLET: Final = re.compile(r"\s*(\*|-|\d+\.) ")


def markdown() -> list[pathlib.Path]:
  """Returns the Markdown files of the checkout, without generated ones."""
  folders = ["docs", "examples", "hlo_tests", "kernels", "jaxplugin", "tools"]
  found = [*ROOT.glob("*.md")]
  for folder in folders:
    found += (ROOT / folder).rglob("*.md")
  copied = {DOCS / page for page in COPIED}
  return sorted(
    path
    for path in found
    if path not in copied
    and not {"_build", ".pytest_cache"} & {*path.relative_to(ROOT).parts}
  )


def relinked(text: str, source: str, page: str) -> str:
  """Returns the Markdown of `source` with its links relative to `page`.

  A link to a file that is copied to a page becomes a link to that page.
  """
  pages = {file: name for name, file in COPIED.items()}
  here = os.path.dirname(page)

  def link(found: re.Match[str]) -> str:
    path = os.path.normpath(os.path.join(os.path.dirname(source), found[1]))
    if path in pages:
      return os.path.relpath(pages[path], here or ".")
    return os.path.relpath(ROOT / path, DOCS / here)

  parts = _CODE.split(text)
  parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
  return "".join(parts)


def without_outside_links(text: str, page: str) -> str:
  """Returns Markdown in which a link out of docs/ is the path of the file.

  Args:
    text: the source of a page.
    page: its path in docs/.
  """

  def link(found: re.Match[str]) -> str:
    path = (DOCS / page).parent / found[2]
    if DOCS in pathlib.Path(os.path.normpath(path)).parents:
      return found[0]
    return f"{found[1]} (`{os.path.relpath(os.path.normpath(path), ROOT)}`)"

  parts = _CODE.split(text)
  parts[::2] = [_TEXT_LINK.sub(link, part) for part in parts[::2]]
  return "".join(parts)


def copy_pages() -> None:
  """Writes the copied pages into docs/, where git ignores them."""
  shutil.rmtree(GENERATED, ignore_errors=True)
  for page, source in COPIED.items():
    path = DOCS / page
    if path.suffix == ".md":
      path.write_text(relinked((ROOT / source).read_text(), source, page))
    else:
      shutil.copyfile(ROOT / source, path)


def _prose(line: str, public: Collection[str]) -> str:
  """Returns a line of a docstring with its code marked as reST."""

  def literal(found: re.Match[str]) -> str:
    name, after = found[1].removeprefix("jp.").removesuffix("()"), found[2]
    escape = r"\ " if after else ""
    if name in public:
      return f":py:obj:`{found[1]} <jaxplugin.{name}>`{escape}"
    return f"``{found[1]}``{escape}"

  bullet = _BULLET.match(line)
  start = bullet.end() if bullet else 0
  parts = re.split(r"(``[^`]+``|`[^`\n]+`)", line[start:])
  # Asterisks and bars outside of backticks are plain text.
  parts[::2] = [_SPECIAL.sub(r"\\\1", part) for part in parts[::2]]
  return line[:start] + _LITERAL.sub(literal, "".join(parts))


def _indent(line: str) -> int:
  return len(line) - len(line.lstrip())


def _tidied(lines: Sequence[str]) -> list[str]:
  """Returns the lines with names and errors in the form napoleon expects."""
  result: list[str] = []
  section = ""
  for line in lines:
    if _SECTION.fullmatch(line):
      section = line.strip()
    elif line.strip() and not _indent(line):
      section = ""
    if section == "Raises:" and re.match(r"  \S", line):
      line = line.replace("  jp.", "  jaxplugin.", 1)
      if not re.match(r"  [\w.]+: ", line):
        line = "  " + line  # goes on with the error above
    if section in ("Args:", "Attributes:"):
      # Several names of one entry.
      names = re.match(r"  (\w+(?:, \w+)+):", line)
      if names:
        line = line.replace(", ", ",", names[1].count(", "))
    if result and result[-1].count("`") % 2 and line.strip():
      result[-1] += " " + line.strip()  # code that goes on in the next line
    else:
      result.append(line)
  return result


def restructured(lines: Sequence[str], public: Collection[str]) -> list[str]:
  """Returns the lines of a Google-style docstring as reST.

  A name in single backticks becomes code, or a link if it is public. An
  indented paragraph below an empty line or a colon becomes a literal block,
  except in a list. An example, from `>>>` to an empty line, stays as it is.

  Args:
    lines: of the docstring, without common indentation.
    public: names of `jaxplugin` that have a page.
  """
  lines = _tidied(lines)
  result: list[str] = []
  above = 0  # indentation of the last line outside of literal blocks
  is_example = is_literal = is_list = False
  section = ""
  for i, line in enumerate(lines):
    if not line.strip():
      is_example = False
      result.append(line)
      continue
    is_example = is_example or line.lstrip().startswith(">>> ")
    if is_example:
      result.append(line)
      continue
    indent = _indent(line)
    starts_paragraph = i > 0 and not lines[i - 1].strip()
    if is_literal and indent > above:
      result.append(line)
      continue
    if is_literal and not starts_paragraph:
      result.append("")  # the end of the literal block
    if not indent:
      section = line if _SECTION.fullmatch(line) else ""
    follows_colon = (
      not section and i > 0 and lines[i - 1].rstrip().endswith(":")
    )
    is_literal = (
      (starts_paragraph or follows_colon) and indent > above and not is_list
    )
    if is_literal:
      if follows_colon:
        result.append("")
      last = next(
        j for j in range(len(result) - 1, -1, -1) if result[j].strip()
      )
      if result[last].endswith(":"):
        result[last] = result[last].rstrip(":") + "::"
      else:
        result[last + 1 :] = ["", " " * above + "::", ""]
      result.append(line)
      continue
    if starts_paragraph or i == 0 or indent < above:
      is_list = bool(_BULLET.match(line))
    above = indent
    result.append(_prose(line, public))
  return result
