"""The matrix of faults knows each note of the journal."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from faults import matrix


def test_no_note_is_forgotten():
    assert not matrix.forgotten_notes()
