"""Sphinx's settings for the site: `sphinx-build -W -n docs docs/_build/html`."""

from __future__ import annotations

from asynchooks import __version__

project = "asynchooks"
author = "The asynchooks developers"
release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
nitpicky = True

# Markdown: targets of all headings down to the third level can be linked to
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# a notebook's error is an error of the build
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 60

autodoc_member_order = "bysource"
autodoc_typehints = "signature"

html_theme = "furo"
html_title = "asynchooks"
