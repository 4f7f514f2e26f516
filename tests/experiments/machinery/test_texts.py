"""The words of the experiments: what stands in `texts.md` is used, and what is used stands there."""

import pytest

from rookery.experiments import EXPERIMENTS
from rookery.experiments.machinery import texts

PAPERS = {name.split("-")[0] for name in EXPERIMENTS}
SMALL = """# Small

A paper
for tests.

## paper

Ours, {year}

## shared

- {limits} of two.

## small-fig1: a small one

{paper}, Fig. 1.

### Set-up

The step {STEP:g}; S = 3·ε^{-2},
T = {SIZES[rounds]:,}.

Two paragraphs.

### Differences

{shared}

- One seed.

### Not reproduced

- (set-up) *It is so, x* too.* With
  other data.
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Write the texts of a paper called small."""
    monkeypatch.setattr(texts, "FOLDER", tmp_path)
    texts.paper_texts.cache_clear()
    (tmp_path / "small").mkdir()
    yield (tmp_path / "small" / "texts.md").write_text
    texts.paper_texts.cache_clear()


NAMES = {"STEP": 1e-5, "SIZES": {"rounds": 1000}, "year": 2022, "limits": "Both"}


def test_values_and_passages_take_their_places(small):
    small(SMALL)
    assert texts.paper_texts("small")[:2] == ("Small", "A paper for tests.")
    found = texts.description("small-fig1", NAMES)
    assert (found["title"], found["paper"]) == ("a small one", "Ours, 2022, Fig. 1.")
    assert found["setup"] == "The step 1e-05; S = 3·ε^{-2}, T = 1,000.\n\nTwo paragraphs."
    assert found["differences"] == ("Both of two.", "One seed.")
    assert {claim: tuple(own) for claim, own in found["reasons"].items()} == {
        "It is so, x* too.": ("differs, ours", "With other data.", "set-up")
    }


def test_a_word_without_a_value_and_a_value_without_a_place_are_refused(small):
    small(SMALL)
    with pytest.raises(KeyError, match="limits"):
        texts.description("small-fig1", {name: value for name, value in NAMES.items() if name != "limits"})
    with pytest.raises(AssertionError, match=r"small-fig1 has no place for \['seeds'\]"):
        texts.description("small-fig1", NAMES, seeds=3)


@pytest.mark.parametrize(
    ("old", "new"),
    [("## small-fig1:", "## small-fig2:"), ("(set-up)", "(weather)"), ("*It is so", "It is so"), ("Set-up", "Setting")],
)
def test_a_section_a_verdict_or_a_heading_that_is_missing_is_refused(small, old, new):
    small(SMALL.replace(old, new))
    with pytest.raises((KeyError, ValueError)):
        texts.description("small-fig1", NAMES)


@pytest.mark.parametrize("paper", sorted(PAPERS))
def test_every_section_is_used(paper):
    sections = texts.paper_texts(paper).sections
    described = {heading for heading in sections if ": " in heading}
    assert {heading.split(": ")[0] for heading in described} == {n for n in EXPERIMENTS if n.split("-")[0] == paper}
    whole = "\n".join(sections.values())
    assert [passage for passage in sections.keys() - described if f"{{{passage}}}" not in whole] == []
    headings = {line for line in whole.splitlines() if line.startswith("#")}
    assert headings <= {"### Set-up", "### Differences", "### Not reproduced"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_reason_is_of_a_claim(name):
    assert EXPERIMENTS[name].reasons.keys() <= {claim.text for claim in EXPERIMENTS[name].claims}
