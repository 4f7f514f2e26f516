"""The command line: reads what is asked, hands it to the library, shows the answer; one clear line for bad input."""

from rookery.cli import (
    check,
    compare,
    demo,
    explain,
    federation,
    flare,
    listing,
    new,
    report,
    reproduce,
    run,
    serve,
    site,
    tune,
)  # each adds one
from rookery.cli.program import app, main

__all__ = [
    "app",
    "check",
    "compare",
    "demo",
    "explain",
    "federation",
    "flare",
    "listing",
    "main",
    "new",
    "report",
    "reproduce",
    "run",
    "serve",
    "site",
    "tune",
]
