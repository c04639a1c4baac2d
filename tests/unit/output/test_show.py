"""The description of one snapshot, as ``snaporch show`` prints it."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from snaporch.model import BundleState, VerificationResult, VerifyDepth, VerifyStep
from snaporch.output.show import print_description
from snaporch.show import describe


def printed(story, world, capsys, **changes):
    shown = describe(world.context, story.record)
    shown = replace(shown, record=replace(story.record, **changes), by_hand=())
    print_description(shown)
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (BundleState.MISSING, "with another copy of it: `snaporch restore --bundle DIR`"),
        (BundleState.NONE, "it has no bundle, only the ZFS snapshots above"),
        (BundleState.INCOMPLETE, "a part has the wrong size; see `snaporch restore --cold`"),
        (BundleState.DAMAGED, "a ZFS snapshot is another; see `snaporch restore --cold`"),
    ],
)
def test_the_cause_of_no_commands_is_the_state_of_the_bundle(story, world, capsys, state, reason):
    assert printed(story, world, capsys, state=state).endswith(reason)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (VerifyStep.CHECKSUMS, "a backing file has changed; see `snaporch restore --cold`"),
        (VerifyStep.DISKS, "could not be read; a restore brings back what is there"),
        (VerifyStep.CLONE, "a clone of it could not run; see `snaporch restore --cold`"),
        (
            VerifyStep.SCRIPT,
            "its test script failed in a clone; `snaporch restore` restores it as it is",
        ),
    ],
)
def test_the_cause_of_no_commands_is_the_failed_step_of_a_whole_snapshot(
    story, world, capsys, step, reason
):
    failed = VerificationResult(datetime.now(UTC), False, VerifyDepth.RESUMED, failed_steps=(step,))
    assert printed(story, world, capsys, verified=failed).endswith(reason)
