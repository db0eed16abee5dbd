# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The configuration of Sphinx: `make docs` builds the site, offline."""

import os
import pathlib
import sys

# The build needs no device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["COLUMNS"] = "80"  # the width of --help

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import site_pages
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import jaxplugin as jp
from jaxplugin import __main__ as command_line

project = "jaxplugin"
author = "The jaxplugin Authors"
copyright = "2026, The jaxplugin Authors"
release = version = jp.__version__

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "README.md"]
templates_path = ["_templates"]
html_theme = "sphinx_book_theme"
html_title = "jaxplugin"
html_theme_options = {"show_toc_level": 2}
html_static_path = []

autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Notebooks have stored outputs; a test executes them.
nb_execution_mode = "off"

# Names of Python and JAX, which no offline inventory has.
nitpick_ignore_regex = [
  (r"py:(exc|class|obj)", r"[A-Z]\w*(Error|Warning)"),
  (r"py:.*", r"(jax|jnp|np|numpy|collections|pathlib|typing|ir)(\..*)?"),
  # A policy of JAX, whose docstring is its class's signature.
  (r"py:class", r"SaveOnlyTheseNames|saveable_names"),
  # Classes without a page, in the types of attributes.
  (r"py:.*", r"jaxplugin(\.\w+){2,}"),
]

# Pages of the API that are one module each.
MODULES = ("backends", "checkpoint_policies", "checkpoints", "nn", "training")


class CommandLineHelp(SphinxDirective):
  """The `--help` of the command line and of each command."""

  def run(self):
    parser = command_line._parser()
    (commands,) = (a for a in parser._actions if a.dest == "command")
    found = [("python -m jaxplugin", parser), *commands.choices.items()]
    sections = []
    for name, of_command in found:
      section = nodes.section(ids=[nodes.make_id(f"command-{name}")])
      section += nodes.title(text=name)
      section += nodes.literal_block(text=of_command.format_help())
      sections.append(section)
    return sections


def process_docstring(app, what, name, obj, options, lines):
  """Marks up a docstring, before napoleon reads it."""
  if what in ("property", "attribute") and lines:
    # Napoleon takes the words before a colon for a type.
    lines[0] = lines[0].replace(": ", ", ")
  lines[:] = site_pages.restructured(lines, jp.__all__)


def read_source(app, name, content):
  """Replaces links out of docs/, which the site does not have."""
  page = app.env.doc2path(name, base=False)
  if str(page).endswith(".md"):
    content[0] = site_pages.without_outside_links(content[0], str(page))


def setup(app):
  site_pages.copy_pages()
  app.add_directive("cli-help", CommandLineHelp)
  app.connect("source-read", read_source)
  app.connect("autodoc-process-docstring", process_docstring, priority=100)
