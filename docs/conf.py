"""Sphinx settings. Build with: python -m sphinx -W -n -b html docs docs/_build/html"""

from __future__ import annotations

import pydoc
import tomllib
from pathlib import Path

from docutils.nodes import TextElement
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

project = "mixle"
author = "mixle contributors"
copyright = "2026, mixle contributors"
release = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "mixle"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1d4ed8", "color-brand-content": "#1d4ed8"},
    "dark_css_variables": {"color-brand-primary": "#93c5fd", "color-brand-content": "#93c5fd"},
}

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_use_rtype = False
nitpick_ignore = [("py:class", "torch.optim.optimizer.Optimizer")]  # not where torch says it is


def show_undocumented(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: TextElement) -> TextElement | None:
    """Show as plain text a name that exists but has no page: other libraries', type variables, private types."""
    target, module, owner = node["reftarget"], node.get("py:module"), node.get("py:class")
    places = ["", f"{module}."]
    if module and owner and (found := pydoc.locate(f"{module}.{owner}")) is not None:
        places.append(f"{getattr(found, '__module__', module)}.")
    return text if any(pydoc.locate(place + target) is not None for place in places) else None


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", show_undocumented)
