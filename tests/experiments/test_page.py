"""The page of reproductions says what the files beside it say."""

from pathlib import Path

from rookery.experiments import page

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_the_one_its_files_give(tmp_path: Path) -> None:
    """`make docs` was run after the last reproduction."""
    (tmp_path / "reproduction").symlink_to(DOCS / "reproduction")
    page.write(tmp_path / "reproduction", tmp_path / "reproduction.md")
    assert (tmp_path / "reproduction.md").read_text() == (DOCS / "reproduction.md").read_text()


def test_every_experiment_is_on_it() -> None:
    text = (DOCS / "reproduction.md").read_text()
    for folder in (DOCS / "reproduction").iterdir():
        assert f"## {folder.name}\n" in text
        assert (folder / f"{folder.name}.png").exists()
