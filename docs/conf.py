"""Sphinx's settings for the site: `sphinx-build -W -n docs docs/_build/html`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow is imported for its reference
sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

from asynchooks import __version__

project = "asynchooks"
author = project_copyright = "The asynchooks developers"
release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "docstrings",
    "llms",
]
exclude_patterns = ["_build"]
nitpicky = True
# type variables, and what trackers call a run and a meter: a signature shows them, no page
# describes them
nitpick_ignore_regex = [
    (r"py:(class|obj)", r"(asynchooks\..*\.)?(T|R|F|Key|Made|Batched)"),
    (r"py:class", r"Run|Meter|Floats|np\.int64"),
    # what signatures of plans, of simulations and of the global step name, and no page describes
    (r"py:class", r"asynchooks\..*\.(Kind|Beyond|Evidence|Gate|EngineTask)"),
    (r"py:class", r"asynchooks\..*\.(Interval|Membership|Recording)"),
]

# Markdown: headings down to the third level can be linked to
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# a notebook's error is an error of the build
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 60
nb_merge_streams = True  # lines that were printed one by one stand together

# an overridden moment of a hook is not described once more
autodoc_inherit_docstrings = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
# what adapters are made for, and the site does not need
autodoc_mock_imports = ["ignite", "lightning", "pytorch_lightning", "transformers"]
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# inventories of a few names each, as the build has no network
HERE = Path(__file__).parent
intersphinx_mapping = {
    "python": (
        "https://docs.python.org/3/",
        str(HERE / "_inventories" / "python.txt"),
    ),
    "anyio": (
        "https://anyio.readthedocs.io/en/stable/",
        str(HERE / "_inventories" / "anyio.txt"),
    ),
    "numpy": (
        "https://numpy.org/doc/stable/",
        str(HERE / "_inventories" / "numpy.txt"),
    ),
    "tensorflow": (
        "https://www.tensorflow.org/",
        str(HERE / "_inventories" / "tensorflow.txt"),
    ),
    "matplotlib": (
        "https://matplotlib.org/stable/",
        str(HERE / "_inventories" / "matplotlib.txt"),
    ),
}

html_theme = "furo"
html_title = "asynchooks"
