"""Formulas in the ```` ```math ```` blocks of a page, as MathML: no script, no font and no picture comes with them.

GitHub shows the same blocks. `latex2mathml` makes the elements while the site is built; a command that it does not know
it hands on as text, which is an error here.
"""

from __future__ import annotations

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging


def mathml(formula: str, *, block: bool) -> str:
    """The element for one formula of LaTeX.

    Raises:
        ValueError: it has a command that would stay text.
    """
    found = convert(formula, display="block" if block else "inline")
    unknown = re.findall(r"\\(?:\w+|.)", found)
    if unknown:
        raise ValueError(f"formula, expected LaTeX that latex2mathml knows, got {unknown[0]} in {formula}")
    return found


def setup(app) -> None:
    """Make it the renderer `mathml` of Sphinx."""

    def visit(block: bool):
        def write(self, node) -> None:
            try:
                self.body.append(mathml(node.astext(), block=block))
            except ValueError as error:  # a warning, since an exception of a writer beside others is not told of
                logging.getLogger(__name__).warning(error, location=node)
            raise nodes.SkipNode

        return write

    app.add_html_math_renderer("mathml", (visit(False), None), (visit(True), None))
