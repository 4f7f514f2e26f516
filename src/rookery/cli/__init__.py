"""The command line: reads what is asked, hands it to the library, shows the answer; one clear line for bad input."""

from rookery.cli import check, compare, demo, explain, listing, new, reproduce, run, tune  # each adds its command
from rookery.cli.program import app, main

__all__ = ["app", "check", "compare", "demo", "explain", "listing", "main", "new", "reproduce", "run", "tune"]
