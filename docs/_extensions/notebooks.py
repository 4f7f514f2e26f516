"""The tutorials as notebooks to download: notebooks/NAME.ipynb of the site, linked from the top of each tutorial."""

import json
import re
from pathlib import Path
from typing import Any

_CELL = re.compile(r"^```\{code-cell\}.*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^]]+)\]\((?!\w+:)([^)\s]+)\)")


def notebook(page: str, name: str, address: str = "") -> dict[str, Any]:
    """The notebook of a tutorial in Markdown, without outputs.

    Links to other pages lead to the site at `address`. If it has no address, their text remains.
    """
    text = page.split("\n---\n", 1)[1]  # without the front matter
    pieces = _CELL.split(text)  # prose and code alternate
    cells = []
    for number, piece in enumerate(map(str.strip, pieces)):
        if not piece:
            continue
        cell: dict[str, Any] = {"id": f"{name}-{number}", "metadata": {}}
        if number % 2:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        else:
            cell["cell_type"] = "markdown"
            piece = _LINK.sub(lambda found: _linked(found[1], found[2], address), piece)
        cells.append(cell | {"source": piece.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _linked(text: str, target: str, address: str) -> str:
    """A link of a tutorial as it is in its notebook: tutorials are one folder below the pages."""
    if not address:
        return text
    path, hash_, heading = target.partition("#")
    path = path.removeprefix("../") if path.startswith("../") else f"tutorials/{path}"
    return f"[{text}]({address.rstrip('/')}/{path.removesuffix('.md')}.html{hash_}{heading})"


def _tutorials(app: Any) -> list[str]:
    return sorted(name for name in app.env.found_docs if name.startswith("tutorials/"))


def _link(app: Any, doctree: Any) -> None:
    """Put the link to a tutorial's notebook below its title."""
    from docutils import nodes

    name = app.env.docname
    if app.builder.format == "html" and name.startswith("tutorials/"):
        path = f"../notebooks/{Path(name).name}.ipynb"
        link = f'<p class="download"><a href="{path}" download>Download this page as a notebook</a></p>'
        title = next(iter(doctree.findall(nodes.title)))
        title.parent.insert(title.parent.index(title) + 1, nodes.raw("", link, format="html"))


def _write(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        folder = Path(app.outdir) / "notebooks"
        folder.mkdir(exist_ok=True)
        for page in _tutorials(app):
            name = Path(page).name
            made = notebook(Path(app.env.doc2path(page)).read_text("utf-8"), name, app.config.html_baseurl)
            (folder / f"{name}.ipynb").write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", "utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Link while pages are read, and write when all are."""
    app.connect("doctree-read", _link)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
