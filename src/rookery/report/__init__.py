"""Tables, figures and files of runs."""

from rookery.base.drawing import (
    BLACK,
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    band,
    figure,
    label,
    legend,
    save,
    scale,
    style,
    styles,
)  # fmt: skip
from rookery.base.printing import bars, mean_and_error, number, plain, size, table, to_json
from rookery.report.files import labels, named_arrays, read_description, read_run, summary, write_description, write_run
from rookery.report.pictures import ACROSS, across, clients_picture, compared, cost, picture, weights_picture
from rookery.run.result import metrics_of as metrics

__all__ = [
    "ACROSS", "BLACK", "BLUE", "COLOURS", "GREEN", "GREY", "ORANGE", "PURPLE", "SKY", "VERMILION", "across", "band",
    "bars", "clients_picture", "compared", "cost", "figure", "label", "labels", "legend", "mean_and_error", "metrics",
    "named_arrays", "number", "picture", "plain", "read_description", "read_run", "save", "scale", "size", "style",
    "styles", "summary", "table", "to_json", "weights_picture", "write_description", "write_run",
]  # fmt: skip
