import json
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime, timedelta, timezone

import pytest

from snaporch.model import (
    BundleState,
    Dataset,
    DatasetKind,
    Disk,
    Domain,
    DomainState,
    Level,
    PauseParts,
    PoolSnapshot,
    SnapshotRecord,
    VerificationResult,
    VerifyDepth,
    VerifyStep,
    iso,
    moment_at,
)

VDA = Disk("vda", "/tank/web/a.img", "file", "disk", "raw", readonly=False)


def domain(**changes):
    values = {
        "name": "web",
        "uuid": "u",
        "state": DomainState.OFF,
        "disks": (VDA,),
        "live_xml": None,
        "inactive_xml": "<domain/>",
        "nvram": None,
        "tpm_state": None,
        "machine": "pc",
        "managed_save": False,
        "emulator_owner": None,
        "boot": "",
    }
    return Domain(**(values | changes))


def test_the_pool_is_the_first_part_of_a_dataset():
    assert Dataset("tank/a/b", DatasetKind.FILESYSTEM).pool == "tank"
    assert Dataset("tank", DatasetKind.FILESYSTEM).pool == "tank"


def test_a_pool_snapshot_is_called_dataset_at_name():
    found = PoolSnapshot("tank/a", "s", 1, 2, datetime.now(UTC))
    assert found.full_name == "tank/a@s"


def test_a_domain_with_an_emulator_is_active():
    assert domain(live_xml="<domain/>").active
    assert not domain().active


def test_a_disk_is_found_by_its_target():
    assert domain().disk("vda") is VDA
    assert domain().disk("vdb") is None


def test_the_data_is_immutable():
    with pytest.raises(FrozenInstanceError):
        VDA.target = "vdb"


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2025, 1, 2, 3, 4, 5, 999_999, tzinfo=UTC),
        datetime(2025, 1, 2, 5, 4, 5, tzinfo=timezone(timedelta(hours=2))),
    ],
)
def test_times_are_utc_to_the_second(moment):
    assert iso(moment) == "2025-01-02T03:04:05Z"


def test_a_record_as_json_has_exactly_the_documented_keys():
    record = SnapshotRecord(
        domain="Bär",
        uuid="u",
        snapshot="s",
        run="r",
        level=Level.RAM,
        datasets=("tank/a", "tank/b"),
        created=datetime(2025, 1, 2, tzinfo=UTC),
        ram_bytes=None,
        stored_bytes=5,
        pause_ms=1.5,
        bundle=None,
        state=BundleState.COMPLETE,
        policy="hourly",
        group="pair",
        pause_parts=PauseParts(1.0, 0.5),
    )
    assert json.loads(json.dumps(record.as_json())) == {
        "domain": "Bär",
        "uuid": "u",
        "snapshot": "s",
        "run": "r",
        "level": "ram",
        "datasets": ["tank/a", "tank/b"],
        "created": "2025-01-02T00:00:00Z",
        "ram_bytes": None,
        "stored_bytes": 5,
        "pause_ms": 1.5,
        "pause_parts": {
            "downtime_ms": 1.0,
            "switch_ms": 0.5,
            "snapshot_ms": None,
            "resume_ms": None,
        },
        "bundle": None,
        "state": "complete",
        "verified": None,
        "policy": "hourly",
        "group": "pair",
        "group_run": None,
        "replicated": [],
        "apart": [],
        "unchanged": None,
        "kept": None,
        "note": None,
    }


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("disks", [True, False])
@pytest.mark.parametrize("command", [True, False])
@pytest.mark.parametrize("reached", list(VerifyDepth))
@pytest.mark.parametrize("steps", [(), (VerifyStep.DISKS,), (VerifyStep.CLONE, VerifyStep.SCRIPT)])
def test_a_verification_result_is_parsed_as_written(passed, disks, command, reached, steps):
    at = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
    verdict = VerificationResult(at, passed, reached, disks, steps, command=command)
    assert VerificationResult.parse(verdict.as_text()) == verdict
    assert verdict.as_json() == {
        "at": "2025-01-02T03:04:05Z",
        "passed": passed,
        "reached": reached.value,
        "reached_at": "2025-01-02T03:04:05Z",
        "disks_read": disks,
        "disks_read_at": "2025-01-02T03:04:05Z" if disks else None,
        "command_passed": command,
        "command_passed_at": "2025-01-02T03:04:05Z" if command else None,
        "failed_steps": [step.value for step in steps],
    }


MONDAY, TUESDAY, FRIDAY = (datetime(2025, 6, day, tzinfo=UTC) for day in (2, 3, 6))


def test_a_lesser_verification_keeps_what_an_earlier_one_has_proved():
    whole = VerificationResult(MONDAY, True, VerifyDepth.RESUMED)
    read = VerificationResult(TUESDAY, True, VerifyDepth.CHECKED, disks=True).after(whole)
    assert (read.at, read.reached, read.reached_at) == (TUESDAY, VerifyDepth.RESUMED, MONDAY)
    found = VerificationResult(FRIDAY, True, VerifyDepth.BOOTED).after(read)
    text = "2025-06-06T00:00:00Z passed resumed@2025-06-02T00:00:00Z disks@2025-06-03T00:00:00Z"
    assert found.as_text() == text
    assert VerificationResult.parse(text) == found
    document = found.as_json()
    assert document["reached_at"] == "2025-06-02T00:00:00Z"
    assert document["disks_read_at"] == "2025-06-03T00:00:00Z"
    again = VerificationResult(FRIDAY, True, VerifyDepth.RESUMED, disks=True)
    assert again.after(read) == again
    assert again.after(None) == again


def test_a_command_that_passed_is_kept_with_its_time():
    before = VerificationResult(MONDAY, True, VerifyDepth.BOOTED, disks=True, command=True)
    found = VerificationResult(TUESDAY, True, VerifyDepth.CHECKED).after(before)
    text = "2025-06-03T00:00:00Z passed booted@{0} disks@{0} command@{0}"
    assert found.as_text() == text.format("2025-06-02T00:00:00Z")
    assert VerificationResult.parse(found.as_text()) == found
    assert found.as_json()["command_passed_at"] == "2025-06-02T00:00:00Z"
    again = VerificationResult(FRIDAY, True, VerifyDepth.BOOTED, command=True)
    assert again.after(found).command_at == FRIDAY


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (False, False)])
def test_a_failed_verification_proves_nothing_and_keeps_nothing(first, second):
    before = VerificationResult(MONDAY, first, VerifyDepth.RESUMED, disks=True, command=True)
    after = VerificationResult(TUESDAY, second, VerifyDepth.CHECKED)
    assert after.after(before) == after


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "-",
        "yes",
        "2025-01-02T03:04:05Z passed best",
        "2025-01-02T03:04:05 passed resumed",
        "2025-01-02T03:04:05Z perhaps resumed",
        "yesterday passed resumed",
        "2025-01-02T03:04:05Z passed resumed twice",
        "2025-01-02T03:04:05Z passed resumed disks disks",
        "2025-01-02T03:04:05Z passed resumed@",
        "2025-01-02T03:04:05Z passed resumed@monday",
        "2025-01-02T03:04:05Z passed resumed disks@",
        "2025-01-02T03:04:05Z passed resumed command@",
        "2025-01-02T03:04:05Z passed resumed command command",
        "2025-01-02T03:04:05Z passed resumed command disks",
        "2025-01-02T03:04:05Z failed resumed steps:luck",
        "2025-01-02T03:04:05Z failed resumed steps:",
        "2025-01-02T03:04:05Z failed resumed steps:script disks",
    ],
)
def test_other_text_is_no_verification_result(text):
    assert VerificationResult.parse(text) is None


@pytest.mark.parametrize("seconds", [1 << 62, -(1 << 62), 1e99, float("nan")])
def test_a_number_that_is_no_time_is_the_epoch(seconds):
    assert moment_at(seconds) == datetime(1970, 1, 1, tzinfo=UTC)
    assert moment_at(60) == datetime(1970, 1, 1, 0, 1, tzinfo=UTC)
