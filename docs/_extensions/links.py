"""Links that nobody has to write: from `rk.solve` to its reference, and between a method's reference and mathematics.

A method's mathematics stands where a page of docs/mathematics has its name in bold, with or without hyphens, for the
first time.
"""

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

from rookery import algorithms

_NAME = re.compile(r"(?:(rk|rookery)\.)?([A-Za-z_][\w.]*)(?:\(.*\))?", re.DOTALL)


_METHODS = {name.lower(): name for name in (*algorithms.__all__, "SOBA")}


def method(text: str) -> str | None:
    """The method that a text names, such as FedGDA-GT or pFedMe."""
    return _METHODS.get(text.replace("-", "").lower())


def _mathematics(env: Any) -> dict[str, dict[str, str]]:
    """Method → page → the place on it."""
    if not hasattr(env, "rookery_mathematics"):
        env.rookery_mathematics = {}
    return env.rookery_mathematics  # type: ignore[no-any-return]


def _purge(app: Any, env: Any, docname: str) -> None:
    for pages in _mathematics(env).values():
        pages.pop(docname, None)


def _collect(app: Any, doctree: Any) -> None:
    """Note where the mathematics of each method stands."""
    docname = app.env.docname
    if docname.startswith("mathematics/"):
        for node in doctree.findall(nodes.strong):
            name = method(node.astext())
            if name and docname not in _mathematics(app.env).setdefault(name, {}):
                node["ids"].append(f"method-{name.lower()}")
                _mathematics(app.env)[name][docname] = node["ids"][-1]


class Links(SphinxPostTransform):
    """Turn names into links to the reference, and add a method's mathematics to its reference."""

    default_priority = 500

    def run(self, **kwargs: Any) -> None:
        if self.app.builder.format != "html":
            return
        docname = self.env.docname
        for literal in list(self.document.findall(nodes.literal)):
            self._link(literal, *self._target(literal))
        for strong in list(self.document.findall(nodes.strong)):
            if docname.startswith("mathematics/") and (name := method(strong.astext())):
                self._link(strong, *self._entry(f"rookery.{name}"))
        for described in self.document.findall(addnodes.desc):
            self._add_mathematics(described)

    def _entry(self, name: str) -> tuple[str, str]:
        """The page and the place of a name's reference."""
        entry = self.env.get_domain("py").objects.get(name)  # type: ignore[attr-defined]
        return (entry.docname, entry.node_id) if entry else ("", "")

    def _target(self, literal: Any) -> tuple[str, str]:
        """Where a literal such as `rk.solve(..., cohort=4)`, `FedNest` or `Run.memory` leads."""
        found = _NAME.fullmatch(literal.astext())
        if not found or not (found[1] or found[2][0].isupper()):
            return "", ""
        names = [found[2]] if found[1] else [found[2], found[2].split(".")[0]]
        return next((entry for name in names if (entry := self._entry(f"rookery.{name}"))[0]), ("", ""))

    def _link(self, node: Any, page: str, place: str) -> None:
        if page and not any(self._is_apart(parent, page, place) for parent in _parents(node)):
            link = make_refnode(self.app.builder, self.env.docname, page, place, node.deepcopy())
            node.parent.replace(node, link)  # replace_self would also give the link the node's ids

    def _is_apart(self, parent: Any, page: str, place: str) -> bool:
        """Whether what is inside stays as it is: links, titles, and a name in its own reference."""
        if isinstance(parent, nodes.reference | nodes.title | addnodes.desc_signature):
            return True
        own = isinstance(parent, addnodes.desc) and any(
            place in sign["ids"] for sign in parent.findall(addnodes.desc_signature)
        )
        return own and page == self.env.docname

    def _add_mathematics(self, described: Any) -> None:
        names = [sign.get("fullname", "") for sign in described.findall(addnodes.desc_signature)]
        pages = _mathematics(self.env).get(names[0], {}) if names else {}
        if not pages:
            return
        line = nodes.paragraph("", "Mathematics: ", classes=["mathematics"])
        for number, (page, place) in enumerate(sorted(pages.items())):
            title = nodes.Text(self.env.titles[page].astext().lower())
            link = make_refnode(self.app.builder, self.env.docname, page, place, title)
            line += [nodes.Text(", "), link] if number else [link]
        described.next_node(addnodes.desc_content).append(line)


def _parents(node: Any) -> Iterator[Any]:
    while node.parent is not None:
        node = node.parent
        yield node


def setup(app: Any) -> dict[str, bool]:
    app.connect("env-purge-doc", _purge)
    app.connect("doctree-read", _collect)
    app.add_post_transform(Links)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
