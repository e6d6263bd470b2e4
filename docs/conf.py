"""Settings of Sphinx: ``pip install ".[docs]" && sphinx-build -W docs docs/_build``."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the pages describe this checkout

import kvnumba

project = "kvnumba"
author = "The kvnumba authors"
copyright = "The kvnumba authors"
release = version = kvnumba.__version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
myst_heading_anchors = 3

# Pages are built without the packages of the extras too.
autodoc_mock_imports = [
    name for name in ("onnx", "onnxruntime", "rich", "torch", "transformers", "typer") if find_spec(name) is None
]
autodoc_member_order = "groupwise"
autodoc_typehints = "none"  # the docstrings say shapes and dtypes
numpydoc_show_class_members = False

html_theme = "pydata_sphinx_theme"
html_title = f"kvnumba {release}"
html_static_path = ["_static"]
html_css_files = ["kvnumba.css"]
html_sidebars = {"**": ["pages.html"]}
html_theme_options = {
    "navbar_center": [],  # all pages are at the left
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_show_sourcelink = False
