"""Sphinx settings. Build with: python -m sphinx -W -n -b html docs docs/_build/html"""

from __future__ import annotations

import tomllib
from pathlib import Path

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
napoleon_use_rtype = False

# Types of other libraries: their documentation is not linked, so that building needs no network.
nitpick_ignore_regex = [
    (r"py:.*", r"(np|numpy|torch|collections|typing|pathlib|types|abc|concurrent)\..*"),
]
