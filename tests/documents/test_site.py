"""The documentation site, without building it: tables of contents, links, tutorials, the reference."""

import ast
import contextlib
import importlib
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import rookery as rk
from rookery import algorithms

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts]
WRITTEN = [path for path in PAGES if path.name != "summary.md"]  # the summaries are made by experiments
FRONT = [*sorted(ROOT.glob("*.md")), *WRITTEN]
BLOCK = re.compile(r"^(`{3,})(.*?)\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, kind: str) -> list[str]:
    return [body for _, head, body in BLOCK.findall(path.read_text(encoding="utf-8")) if head.strip() == kind]


def listed(page: Path) -> set[Path]:
    """The pages in a page's tables of contents."""
    entries = [
        line for block in blocks(page, "{toctree}") for line in block.splitlines() if line and not line.startswith(":")
    ]
    return {path for entry in entries for path in page.parent.glob(f"{entry}.md")}


def slugs(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    if included := re.match(r"```\{include\} (\S+)", text):
        return slugs(page.parent / included[1])
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_page_is_in_a_table_of_contents() -> None:
    found, new = {DOCS / "index.md"}, {DOCS / "index.md"}
    while new:
        new = set().union(*map(listed, new)) - found
        found |= new
    assert sorted(map(relative, set(PAGES) - found)) == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_a_table_of_contents_names_pages_that_exist(page: Path) -> None:
    for block in blocks(page, "{toctree}"):
        for entry in block.splitlines():
            if entry and not entry.startswith(":"):
                assert list(page.parent.glob(f"{entry}.md")), entry


@pytest.mark.parametrize("page", FRONT, ids=relative)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"\w+:", target):
            continue
        path, _, heading = target.partition("#")
        to = (page.parent / path) if path else page
        assert to.exists(), target
        assert not heading or heading in slugs(to), target


@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")), ids=relative)
def test_tutorials_are_executed_and_their_cells_parse(page: Path) -> None:
    assert page.read_text(encoding="utf-8").startswith("---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n")
    cells = blocks(page, "{code-cell}")
    assert cells
    for cell in cells:
        ast.parse(cell)
    used = {name for cell in cells for name in re.findall(r"\brk\.(\w+)", cell)}
    assert used <= set(rk.__all__)


def test_the_reference_has_every_public_name_once() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
    named = re.findall(r"^\.\. auto\w+:: rookery\.(\w+)$", text, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(rk.__all__) <= set(named)
    assert set(named) - set(rk.__all__) == {"testing"}


def test_every_method_has_its_mathematics_on_the_page_of_its_problem() -> None:
    """In bold, where docs/_extensions/links.py finds it."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "mathematics").glob("*.md")}
    bold = {
        page: {name.replace("-", "").lower() for name in re.findall(r"\*\*([\w-]+)\*\*", texts[page])} for page in texts
    }
    kinds = {"WeightedNodes": "weighted-nodes", "SingleLevel": "single-level"}
    methods = {name: getattr(rk, name).solves[0].__name__ for name in algorithms.__all__} | {"SOBA": "Bilevel"}
    lost = [name for name, kind in methods.items() if name.lower() not in bold[kinds.get(kind, kind.lower())]]
    assert lost == [], "docs/mathematics must have these names in bold, e.g. **FedNest**, on the page of their problem"


@pytest.mark.parametrize("page", [*FRONT, *sorted((ROOT / "examples").rglob("*.md"))], ids=relative)
def test_pages_show_no_fingerprints(page: Path) -> None:
    """They change with the version of the code."""
    assert re.findall(r"\b[0-9a-f]{32,}\b", page.read_text(encoding="utf-8")) == []


def test_the_gallery_has_every_example_and_tutorial() -> None:
    """Each as a picture that exists, a link, and one sentence; `tools/gallery.py` draws those in its folder."""
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    cards = re.findall(r"^- \[!\[.+\]\((.+)\)\]\((.+)\)\n\n  \[.+\]\((.+)\): (.+)$", text, re.MULTILINE)
    assert len(cards) == text.count("[![") > 15
    for picture, target, again, sentence in cards:
        assert (DOCS / picture).exists(), picture
        assert target == again
        assert re.search(r"\.$", sentence), sentence
        assert not re.search(r"\. [A-Z]", sentence), sentence
    shown = text + (DOCS / "examples.md").read_text(encoding="utf-8")
    files = [*(ROOT / "examples").glob("*.py"), *(DOCS / "tutorials").glob("*.md")]
    assert [path.name for path in files if f"/{path.name}" not in shown] == []
    drawn = runpy.run_path(str(ROOT / "tools" / "gallery.py"))["PICTURES"]
    assert set(drawn) == {path.stem for path in (DOCS / "figures" / "gallery").iterdir()}


@pytest.mark.slow
def test_a_picture_of_the_gallery_is_drawn(tmp_path: Path) -> None:
    with jax.enable_x64(False):
        runpy.run_path(str(ROOT / "tools" / "gallery.py"))["main"](["phase_retrieval"], tmp_path)
    assert (tmp_path / "phase_retrieval.png").read_bytes().startswith(b"\x89PNG")


NOTEBOOKS = runpy.run_path(str(DOCS / "_extensions" / "notebooks.py"))


@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")), ids=relative)
def test_a_notebook_has_the_text_and_the_cells_of_its_tutorial(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    made = NOTEBOOKS["notebook"](text, page.stem)
    cells = [("".join(cell["source"]), cell["cell_type"]) for cell in made["cells"]]
    assert [source for source, kind in cells if kind == "code"] == [
        cell.strip() for cell in blocks(page, "{code-cell}")
    ]
    prose = "\n\n".join(source for source, kind in cells if kind == "markdown")
    assert re.findall(r"^#+ .*$", prose, re.MULTILINE) == re.findall(r"^#+ .*$", BLOCK.sub("", text), re.MULTILINE)
    assert [target for target in LINK.findall(prose) if not target.startswith("https:")] == []
    assert len({cell["id"] for cell in made["cells"]}) == len(cells)


def test_the_links_of_a_notebook_lead_to_the_site() -> None:
    page = "---\nfile_format: mystnb\n---\n\n# A\n\n[b](../b.md#c), [d](d.md), [e](https://e.org), [f](../g/f.md)\n"
    (cell,) = NOTEBOOKS["notebook"](page, "a", "https://example.org/0.1/")["cells"]
    home = "https://example.org/0.1"
    links = [f"{home}/b.html#c", f"{home}/tutorials/d.html", "https://e.org", f"{home}/g/f.html"]
    assert LINK.findall("".join(cell["source"])) == links


@pytest.mark.slow
def test_a_notebook_runs_where_there_is_no_repository(tmp_path: Path) -> None:
    """`make docs` runs all tutorials; `make browser` runs one as it is downloaded."""
    page = DOCS / "tutorials" / "your-own-algorithm.md"
    made = NOTEBOOKS["notebook"](page.read_text(encoding="utf-8"), page.stem)
    (tmp_path / "notebook.ipynb").write_text(json.dumps(made), encoding="utf-8")
    run = (
        "import json; names = {'__name__': '__main__'}\n"
        "for cell in json.load(open('notebook.ipynb'))['cells']:\n"
        "    if cell['cell_type'] == 'code': exec(''.join(cell['source']), names)"
    )
    done = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "Federation" in done.stdout


def test_versions_are_listed_with_the_newest_first(tmp_path: Path) -> None:
    for name in ("0.9", "0.10.1", "0.10", "latest", "empty"):
        (tmp_path / name).mkdir()
        if name != "empty":
            (tmp_path / name / "objects.inv").touch()
    found = runpy.run_path(str(ROOT / "tools" / "versions.py"))["versions"](tmp_path)
    assert [entry["version"] for entry in found] == ["latest", "0.10.1", "0.10", "0.9"]
    assert {entry["path"] for entry in found} == {"latest/", "0.10.1/", "0.10/", "0.9/"}


def test_the_version_is_the_same_everywhere() -> None:
    assert f'version = "{rk.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {rk.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """What `make test-oldest` installs is what pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", text).groups() for text in needed)  # type: ignore[union-attr]
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert oldest.pop("jaxlib") == oldest["jax"]
    oldest.pop("click")  # typer's
    assert {name: re.sub(r"(\.0)*$", "", version) for name, version in oldest.items()} == {
        name: re.sub(r"(\.0)*$", "", bounds[name]) for name in oldest
    }
    assert {re.match(r"[\w-]+", text)[0] for text in project["dependencies"]} <= oldest.keys()  # type: ignore[index]


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            found: object = importlib.import_module(".".join(parts[:count]))
            for attribute in parts[count:]:
                if not hasattr(found, attribute):
                    return False
                found = getattr(found, attribute)
            return True
    return False


def test_the_names_on_the_pages_exist() -> None:
    """Of `rk.solve`, `rookery.engines.engine` and the like; rookery.toml is a file."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in FRONT if path.parent.name != "reproduction")
    names = {re.sub(r"^rk\b", "rookery", name) for name in re.findall(r"\b(?:rk|rookery)(?:\.\w+)+", text)}
    assert [name for name in sorted(names - {"rookery.toml"}) if not resolves(name)] == []
