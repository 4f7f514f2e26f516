"""`tools/prose.py` finds the phrasings that it lists, and leaves good English alone."""

import runpy
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "prose.py"))
POOR = {
    "Raise ValueError for what is none.": "is none",
    "A loss that is no mean.": "is no mean",
    "Steps by an optimizer of optax's.": "of optax's",
    "The mean over those who replied.": "those who",
    "A round. Who missed it writes nothing.": "Who missed",
    "The same, whatever the engine.": "whatever",
    "An optimizer, as optax.adam(1e-3) is.": "as optax.adam(1e-3) is",
    "Return what there was before.": "what there was",
    "n=0 is not an integer, at least 1.": "at least",
}
GOOD = [
    "There is no file.",
    "It is no longer finite.",
    "A hash of JAX's random keys.",
    "Who is trusted?",
    "No wider than float32.",
]


def found(text: str, path: Path) -> str:
    path.write_text(text, encoding="utf-8")
    return "\n".join(TOOL["findings"](path))


@pytest.mark.parametrize("text", POOR)
@pytest.mark.parametrize(
    ("form", "line"), [('"""A header.\n\n{}\n"""\n', 3), ("x = 1  # {}\n", 1), ('x = f"{x}. {}"\n', 1)]
)
def test_a_poor_phrase_is_found_in_docstrings_comments_and_messages(
    text: str, form: str, line: int, tmp_path: Path
) -> None:
    path = tmp_path / "module.py"
    assert f"module.py:{line}: " in found(form.replace("{}", text), path)
    assert POOR[text] in found(form.replace("{}", text), path)


def test_pages_are_read_without_their_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert found("# A page\n\n```python\nwhatever = 1\n```\n\n`whatever`\n", page) == ""
    assert "page.md:7: 'is no page'" in found("# A page\n\n```text\n\n```\n\nThis is\nno page.\n", page)


def test_a_phrase_is_found_across_the_lines_of_a_message(tmp_path: Path) -> None:
    message = 'raise ValueError(\n    f"n={n} is "\n    f"not a number, and this is "\n    "no loss."\n)\n'
    assert [line.split("py:")[1][:1] for line in found(message, tmp_path / "module.py").splitlines()] == ["3", "2"]


@pytest.mark.parametrize("text", GOOD)
def test_good_english_is_left_alone(text: str, tmp_path: Path) -> None:
    assert found(f"# {text}\n", tmp_path / "module.py") == ""
