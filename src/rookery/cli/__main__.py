"""`python -m rookery.cli`."""

from rookery.cli import main

main()
