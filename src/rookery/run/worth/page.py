"""The page of a comparison: HTML with the picture inside, which opens offline."""

from base64 import b64encode
from html import escape
from typing import Any

from rookery.run.worth.judging import LEVEL, metrics_in
from rookery.run.worth.methods import ABOUT, ABOUT_TIMES
from rookery.run.worth.metrics import number, spoken

_CLASSES = (
    "Higher is better, except for the Brier score, the mean squared error of the probabilities, and the calibration "
    "error, the distance of the mean probability from the share of positive rows. A dash: the test rows have one "
    "class. Coloured: the interval of the difference from the hospital's own model excludes zero."
)
_TIMES = (
    "The C-index is the share of comparable pairs of test rows in which the patient with the higher risk had the event "
    "first; equal risks count half, and .5 is chance. A dash: no two test rows can be compared."
)
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { max-width: 1080px; margin: 0 auto; padding: 22px 20px 40px; color: #1c2530; background: #fff;
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 30px 0 8px; }
.soft { color: #5b6673; font-size: 13.5px; }
.finding { border-left: 5px solid #0072b2; padding: 6px 14px; margin: 16px 0; font-weight: 600; background: #f5f7f9; }
img { display: block; width: 100%; min-width: 760px; height: auto; }
.picture { overflow-x: auto; margin: 16px 0; }
.scroll { overflow-x: auto; border: 1px solid #dde2e8; border-radius: 8px; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: 5px 10px; text-align: right; white-space: nowrap; border-top: 1px solid #dde2e8; }
th:first-child { text-align: left; font-weight: 500; position: sticky; left: 0; background: #fff; }
thead th, thead th:first-child, tr.group th { border-top: 0; background: #f5f7f9; font-weight: 600; }
tr.group th { border-top: 1px solid #dde2e8; }
li { margin: 4px 0; }
td.gains { color: #00684c; font-weight: 600; }
td.loses { color: #a34700; font-weight: 600; }
"""


def page(result: Any, picture: bytes) -> str:
    """Return the page of a `Worth`, with its picture as a PNG."""
    records = result.table.to_dict("records")
    verdicts = {(row["hospital"], row["method"]): row["verdict"] for row in records}
    about = result.settings
    survival = "time" in about
    predicted = f"{about['time']} to {about['event']}" if survival else about["label"]
    title = f"Would they gain from joining? {predicted} in {len(result.hospitals)} hospitals"
    metrics, texts = metrics_in(result.table), ABOUT_TIMES if survival else ABOUT
    gains = _table(
        [spoken(result.metric), *result.hospitals],
        [
            [method, *((result.cell(name, method), verdicts[name, method]) for name in result.hospitals)]
            for method in result.methods
        ],
    )
    each = _table(
        ["", *(spoken(metric) for metric in metrics)],
        [
            line
            for row in records
            for line in [
                *([[row["hospital"]]] if row["method"] == result.methods[0] else []),
                [row["method"], *((number(row[m]), row[f"{m}_verdict"]) for m in metrics)],
            ]
        ],
    )
    weights = _table(
        ["learns from", *map(str, result.weights.columns)],
        [[str(name), *((f"{value:.2f}", "") for value in row)] for name, row in result.weights.iterrows()],
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="soft">{escape(_counts(about))} {about["splits"]} repeated splits.</p>
<p class="finding">{escape(result.headline)}</p>
<ul>
{_items([*result.advice.values(), *([result.other_metrics] if result.other_metrics else [])])}
</ul>
<div class="picture">
<img alt="{escape(result.headline)}" src="data:image/png;base64,{b64encode(picture).decode()}">
</div>
<h2>What each method is worth</h2>
<p class="soft">Mean over the splits; in brackets the gain over the hospital's own model, ± half of its {LEVEL:.0%}
interval. A star marks an interval that excludes zero.</p>
{gains}
<h2>{"The C-index" if survival else "All metrics"}</h2>
<p class="soft">{escape(_TIMES if survival else _CLASSES)}</p>
{"" if survival else each}
<h2>Whom they learn from</h2>
<p class="soft">Mean learnt weights: each row is a hospital, and sums to one.</p>
{weights}
<h2>How this was computed</h2>
<ul>
{_items(result.notes)}
{_items([f"{method}: {text}" for method, text in texts.items() if method in result.methods])}
</ul>
</body>
</html>
"""


def _counts(about: dict[str, Any]) -> str:
    """Return each hospital's rows, with its events if there are times."""
    if "time" in about:
        rows = ", ".join(f"{name}: {count} ({about['events'][name]})" for name, count in about["rows"].items())
        return f"Rows (events): {rows}."
    rows = ", ".join(f"{name}: {count}" for name, count in about["rows"].items())
    return f"Rows: {rows}. Positive: {about['positive']}."


def _items(texts: list[str] | tuple[str, ...]) -> str:
    return "\n".join(f"<li>{escape(text)}</li>" for text in texts)


def _table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a table. A row is a heading and cells of (text, class); a heading alone begins a group of rows."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join(
        f"<tr><th>{escape(first)}</th>"
        + "".join(f'<td class="{kind}">{escape(text)}</td>' for text, kind in cells)
        + "</tr>"
        if cells
        else f'<tr class="group"><th colspan="{len(head)}">{escape(first)}</th></tr>'
        for first, *cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
