"""What Sphinx is told about the site, which `make docs` stages and builds (tools/build_docs.py)."""

from __future__ import annotations

import importlib.metadata

project, release = "opensora-accel", importlib.metadata.version("opensora-accel")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]

myst_heading_anchors = 3  # links to headings, as a repository's viewer has them
autodoc_member_order = "bysource"
autodoc_mock_imports = ["colossalai"]
napoleon_numpy_docstring = False
default_role = "code"  # what docstrings have between single backticks
