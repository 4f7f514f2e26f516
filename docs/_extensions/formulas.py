"""Formulas as MathML, which needs no script and no network."""

from typing import Any

from docutils.nodes import SkipNode
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)


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


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", _math(block=False), _math(block=True))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
