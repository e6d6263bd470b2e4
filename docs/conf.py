"""Settings of Sphinx: ``pip install ".[docs]" && sphinx-build -W docs docs/_build``."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sphinx.util import inspect

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
    name
    for name in ("nnef", "onnx", "onnx_ir", "onnxruntime", "onnxruntime_extensions", "torch", "transformers")
    if find_spec(name) is None
]
if autodoc_mock_imports:
    from sphinx.ext.autodoc.mock import _MockModule

    _MockModule.__version__ = "999.0"  # for those who ask a package for its version
autodoc_member_order = "groupwise"
autodoc_typehints = "none"  # the docstrings say shapes and dtypes
numpydoc_show_class_members = False
default_role = "py:obj"  # `name` in a docstring is a link where there is such a name

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


def signature_of_init(app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> Any:
    """The arguments of ``__init__`` for a class whose ``__new__`` takes any."""
    if what == "class" and issubclass(obj, kvnumba.KVCache):
        init = inspect.signature(obj.__init__, bound_method=True)
        if "args" not in init.parameters:
            return inspect.stringify_signature(init, show_annotation=False, show_return_annotation=False), returns
    return signature, returns


def results_of_asv(app: Any, error: Exception | None) -> None:
    """Put the pages that ``asv publish`` made beside these, under ``asv``; a line in their place if there are none."""
    if error is not None or app.builder.name != "html":
        return
    made, place = Path(__file__).resolve().parents[1] / ".asv" / "html", Path(app.outdir) / "asv"
    if (made / "index.html").exists():
        shutil.copytree(made, place, dirs_exist_ok=True)
    elif not (place / "index.html").exists():
        place.mkdir(exist_ok=True)
        (place / "index.html").write_text("Nothing was measured where these pages were built: asv run, asv publish.\n")


def setup(app: Any) -> None:
    app.connect("build-finished", results_of_asv)
    app.connect("autodoc-process-signature", signature_of_init)
