"""Faults at every step of every strategy; the cases are in ``faults/matrix.py``.

``FAULTS_SAMPLE`` chooses: ``SEED/SIZE``, ``all``, or words such as ``overlay,emulator-killed``.
Without it, 12 cases that change from day to day. Every case prints a line ``FAULT {...}``,
from which ``faults/run`` makes its report.
"""

import pytest
from faults import matrix
from faults.oracle import Scene
from faults.run_case import perform

CASES = matrix.sample(matrix.in_lab(), matrix.wanted(), 12)


@pytest.fixture(scope="module")
def scene():
    made = Scene()
    yield made
    made.wreck()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_is_lost_and_nothing_is_left(case, scene, report):
    try:
        report(perform(case, scene).line())
    except BaseException as error:
        report({"case": str(case), "failed": f"{type(error).__name__}: {error}"})
        scene.wreck()
        raise
    scene.sweep()
