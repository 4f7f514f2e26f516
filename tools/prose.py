"""Find habits of phrasing that make a reader stop. Usage: python tools/prose.py FILE_OR_FOLDER...

It reads the comments and strings of Python files and the text of Markdown pages, and prints what to write instead.
"""

import ast
import re
import sys
import tokenize
from pathlib import Path

NAMES = "optax|JAX|NumPy|orbax|pandas|gRPC|XLA|Equinox|Flax|FLARE|Adam|FedNest|FedAvg|ASFBO|FedBiO"
COMPARATIVES = r"longer|less|more|worse|such|one|\w+er"
PATTERNS = {  # what to find, and what to write
    r"is not an? [\w ]+, at least": "WHAT must be …; got …",
    r"names? \w+ that there (is|are) not": "names a … that does not exist",
    r"more than a manner of speaking|something else in mind": "say it plainly",
    r"what there (is|was|are|were)\b": "name it: the data, the last good state",
    r"of which there (is|are)": "say how many, and of what",
    rf"(?<!one) of ({NAMES})'s(?= (own|kind|at|which|that|takes?|is|are|and|the)\b|[,.;:)]|$)": "an optax optimizer",
    r", as (?!they|it)[\w.]+(\([^()]*\))? (is|are)(?=[.,;:)]|$)": "e.g. …, such as …",
    r"\bbut for the\b": "except for the",
    r"(?<!here) (is|are) none\b(?! left)": "is not a …, is not one of …",
    rf"(?<!here) (is|are) no (?!({COMPARATIVES})\b)[a-z]+": "is not a …",
    r"\b[Tt]hose who\b": "the clients that, the sites that, people who",
    r"(^|[;.:#] )[Ww]ho (do|does|did|has|had|is|are|was|missed|replied)\b(?![^.]*\?)": "the clients that …",
    r"\b([Ww]hat|[Ww]ho)ever\b": "regardless of …, any …, anyone who …",
    r"\bin the place of\b": "instead of",
    r"=\{[^{}]*\} (is|are) (not|no|none)\b": "WHAT must be …; got …",
}


def passages(path: Path) -> list[tuple[int, str]]:
    """The line and text of every comment and string of a Python file, or of a Markdown page without its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blank = lambda match: "\n" * match[0].count("\n")
        text = re.sub(r"^(```+).*?^\1$", blank, text, flags=re.DOTALL | re.MULTILINE)
        return [(1, re.sub(r"`[^`\n]*`", "`…`", text))]
    with path.open("rb") as file:
        found = [(t.start[0], t.string) for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT]
    nodes, lines = list(ast.walk(ast.parse(text))), text.encode().splitlines(keepends=True)
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        if isinstance(node, ast.JoinedStr) or is_text:
            segment = lines[node.lineno - 1 : node.end_lineno]
            segment[-1] = segment[-1][: node.end_col_offset]
            segment[0] = segment[0][node.col_offset :]
            found.append((node.lineno, re.sub(r'"(\s*\n\s*)f?"', r"\1", b"".join(segment).decode())))
    return found


def findings(path: Path) -> list[str]:
    """A line for each habit in a file."""
    found = []
    for start, text in passages(path):
        for pattern, better in PATTERNS.items():
            for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.MULTILINE):
                line = start + text[: match.start()].count("\n")
                found.append(f"{path}:{line}: {' '.join(match[0].split())!r} → {better}")
    return found


def main(arguments: list[str]) -> int:
    """Print what was found in the files; 1 if anything was."""
    places = map(Path, arguments)
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*")))]
    found = [line for file in files if file.suffix in (".py", ".md") for line in findings(file)]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
