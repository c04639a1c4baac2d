"""``python3 -m snaporch``."""

from snaporch.cli.main import run

run()
