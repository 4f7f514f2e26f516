"""The site: `make docs` builds it into docs/_build/html, and runs the tutorials while it does."""

import os
import sys
from pathlib import Path

import rookery

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "Rookery"
author = copyright = "The Rookery developers"
release = rookery.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
extensions += ["docstrings", "formulas", "links", "notebooks"]
exclude_patterns = ["_build", "jupyter_execute", ".jupyter_cache"]

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_typehints = "none"
autodoc_member_order = "bysource"
default_role = "literal"  # docstrings are plain text with `names` in it
napoleon_attr_annotations = False

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "Rookery"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")  # the address of this version, if it has one
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

linkcheck_timeout = 20
