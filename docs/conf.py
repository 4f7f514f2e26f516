"""The site: `make docs` builds it into docs/_build/html, and runs the tutorials while it does."""

import inspect
import re
from typing import Any

from docutils.nodes import SkipNode
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

import rookery

logger = logging.getLogger(__name__)

project = "Rookery"
author = copyright = "The Rookery developers"
release = rookery.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
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
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

linkcheck_timeout = 20

_FIELD = re.compile(r"^    (\w+): .*  # (.*)$", re.MULTILINE)
_SECTION = re.compile(r"(Arguments|Attributes|Examples?|Returns|Raises):$")
_MARKS = re.compile(r"(`[^`]*`)|([*|\\])|(?<=\w)_(?!\w)")


def _plain(line: str) -> str:
    """A line of a docstring whose asterisks, bars and underscores mean themselves."""
    return _MARKS.sub(lambda found: found[1] or "\\" + found[0], line)


def _fields(cls: type) -> list[str]:
    """The hyperparameters of a method, each with the comment beside it."""
    said: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        said.update(_FIELD.findall(inspect.getsource(base)))
    said = {name: text for name, text in said.items() if name in getattr(cls, "__dataclass_fields__", {})}
    lines = [f"- `{name}`: {_plain(text)}" for name, text in said.items()]
    return ["", "Hyperparameters:", "", *lines, ""] if lines else []


def _lines(text: list[str]) -> list[str]:
    """Indented lines outside of a section, such as a method's steps, keep their ends where a step ends."""
    done: list[str] = []
    section = inside = False
    for line in text:
        indented = line.startswith("    ")
        if line.strip() and not indented:
            section = bool(_SECTION.match(line))
        here = indented and not section
        if here != inside and line.strip():
            done.append("")
        starts = not inside or done[-1].endswith((",", ";", ".", ":"))
        done.append(("| " if starts else "  ") + line.strip() if here else line)
        inside = here or (inside and not line.strip())
    return done


def _docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """A docstring as plain text, but for its examples; of a method, with its hyperparameters."""
    example = False
    for i, line in enumerate(lines):
        example = line.lstrip().startswith((">>>", "...")) or (example and bool(line.strip()))
        lines[i] = line if example else _plain(line)
    lines[:] = _lines(lines)
    if what == "class" and hasattr(thing, "solves"):
        at = next((i for i, line in enumerate(lines) if line.startswith(("Example:", "Reference:"))), len(lines))
        lines[at:at] = _fields(thing)


def _math(block: bool) -> Any:
    def visit(translator: Any, node: Any) -> None:
        try:
            formula = tex2mathml(node.astext(), as_block=block)
        except MathError as error:
            logger.warning("formula: %s", error, location=node)
            formula = node.astext()
        translator.body.append(f'<div class="math">{formula}</div>' if block else formula)
        raise SkipNode

    return visit, None


def _skip(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """The fields of named tuples say nothing of themselves."""
    return True if (inspect.getdoc(thing) or "").startswith("Alias for field number") else None


def setup(app: Any) -> None:
    """Docstrings are changed before napoleon reads them; formulas are MathML, which needs no script and no network."""
    app.add_html_math_renderer("mathml", _math(block=False), _math(block=True))
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-docstring", _docstring, priority=400)
