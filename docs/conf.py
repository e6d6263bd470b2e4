"""Settings of Sphinx: ``pip install ".[docs]" && sphinx-build docs docs/_build``."""

from importlib.metadata import version as installed

project = "kvnumba"
author = "The kvnumba authors"
release = version = installed("kvnumba")

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "pydata_sphinx_theme"
numpydoc_show_class_members = False
