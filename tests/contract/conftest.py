"""Where the real parts are found; those that need the lab are marked so, never skipped."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "lab"), str(TESTS / "contract")]
