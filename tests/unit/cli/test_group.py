"""``snapshot --group`` as a user sees it."""

import pytest
from fakes.hooks import failing

from snaporch.errors import ExitCode
from snaporch.zfs import PoolError


@pytest.fixture
def pair(host):
    host.add_guest("app", disks={"vda": "tank/app"})
    host.add_guest("db", disks={"vda": "flash/db"})
    with host.config_file.open("a") as stream:
        stream.write('[group.pair]\ndomains = ["app", "d*"]\n')
        stream.write('[policy.hourly]\nevery = "1h"\nlevel = "crash"\n')
    return host


def test_all_domains_of_a_group(pair, snaporch):
    answer = snaporch("snapshot", "--group", "pair", "--name", "s1", "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert [line.split("  ")[:3] for line in sorted(answer.out.splitlines())] == [
        ["app@s1", "ram", "complete"],
        ["db@s1", "ram", "complete"],
    ]
    assert "GROUP" in snaporch("list").out
    assert {entry["group"] for entry in snaporch("list", "--json").json} == {"pair"}
    assert "pair: app, db" in snaporch("show", "db@s1").out
    answer = snaporch("restore", "db@s1")
    assert "note: of the group pair: app@s1 would be of the same instant" in answer.err


def test_a_restore_of_all_members(pair, snaporch):
    assert snaporch("snapshot", "--group", "pair", "--name", "s1", "--quiet").code == 0
    answer = snaporch("restore", "db@s1", "--group", "--dry-run")
    assert answer.code == 0
    heads = [line for line in answer.out.splitlines() if line.startswith("restoring ")]
    assert heads == [
        "restoring app@s1:",
        "restoring app@s1 discards:",
        "restoring db@s1:",
        "restoring db@s1 discards:",
    ]
    assert snaporch("restore", "db@s1", "--group").code == ExitCode.REFUSED  # no terminal
    answer = snaporch("restore", "db@s1", "--group", "--yes")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        "app@s1  restored, running, resumed from RAM",
        "db@s1  restored, running, resumed from RAM",
    ]
    assert answer.err.count("undo it with: snaporch undo") == 2
    document = snaporch("restore", "app@s1", "--group", "--yes", "--json").json
    assert [entry["domain"] for entry in document] == ["app", "db"]


def test_a_member_that_is_not_restored_sets_the_exit_code(pair, snaporch):
    assert snaporch("snapshot", "--group", "pair", "--name", "s1", "--quiet").code == 0
    pair.hooks.at["pool.rollback flash/db@s1"] = failing(PoolError("flash/db", "broken"))
    answer = snaporch("restore", "db@s1", "--group", "--yes", "--quiet")
    assert answer.code == ExitCode.ATTENTION
    assert answer.out == "app@s1  restored, running, resumed from RAM\n"
    (line,) = answer.err.splitlines()
    assert line.startswith("snaporch: db@s1: the restore stopped half way (flash/db: broken)")


def test_a_bug_in_one_member_is_printed_once(pair, snaporch):
    assert snaporch("snapshot", "--group", "pair", "--name", "s1", "--quiet").code == 0
    pair.hooks.at["pool.rollback flash/db@s1"] = failing(ValueError("of a test"))
    answer = snaporch("restore", "db@s1", "--group", "--yes", "--quiet")
    assert answer.code == ExitCode.BUG
    assert answer.out == "app@s1  restored, running, resumed from RAM\n"
    assert answer.err.count("of a test") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--jobs", "2"],
        ["--group", "--from", "nas"],
        ["--group", "--bundle", "/somewhere"],
        ["--group", "--jobs", "0"],
    ],
)
def test_options_that_go_only_with_a_group_or_without(pair, snaporch, words):
    assert snaporch("restore", "db@s1", *words).code == ExitCode.USAGE


def test_an_array_as_json(pair, snaporch):
    document = snaporch("snapshot", "--group", "pair", "--json").json
    assert [entry["domain"] for entry in document] == ["app", "db"]
    assert len({entry["group_run"] for entry in document}) == 1


def test_without_groups_the_list_has_no_column(pair, snaporch):
    assert snaporch("snapshot", "db", "--name", "s1", "--quiet").code == 0
    assert "GROUP" not in snaporch("list").out
    assert snaporch("list", "--json").json[0]["group"] is None


def test_a_failing_member_prints_one_line_and_no_snapshot_is_taken(pair, snaporch):
    pair.guest("db").job = "migration out"
    answer = snaporch("snapshot", "--group", "pair", "--quiet")
    assert answer.code == ExitCode.REFUSED
    (line,) = [line for line in answer.err.splitlines() if line.startswith("snaporch:")]
    assert "migration out" in line
    assert pair.pool.names() == []
    assert pair.is_as_it_was("app")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--group", "pear"], ExitCode.NOT_FOUND),
        (["--group", "pair", "db"], ExitCode.USAGE),
        ([], ExitCode.USAGE),
        (["--group", "pair", "--name", "a/b"], ExitCode.USAGE),
    ],
)
def test_wrong_groups_and_options_are_refused(pair, snaporch, words, code):
    answer = snaporch("snapshot", *words)
    assert answer.code == code
    assert pair.pool.names() == []


def test_a_dry_run_prints_each_plan_and_changes_nothing(pair, snaporch):
    answer = snaporch("snapshot", "--group", "pair", "--dry-run")
    assert answer.code == 0
    assert answer.out.count(", with the group pair") == 2
    assert pair.pool.names() == []


def test_with_a_policy_the_group_of_a_domain_is_snapshotted_once(pair, snaporch):
    document = snaporch("snapshot", "db", "app", "--policy", "hourly", "--json").json
    assert [(e["domain"], e["policy"], e["level"]) for e in document] == [
        ("app", "hourly", "crash"),
        ("db", "hourly", "crash"),
    ]
    assert len({entry["snapshot"] for entry in document}) == 1
    assert len(pair.pool.names()) == 2


def test_a_failing_member_leaves_an_empty_array(pair, snaporch):
    pair.guest("db").job = "migration out"
    answer = snaporch("snapshot", "--group", "pair", "--json")
    assert (answer.code, answer.json) == (ExitCode.REFUSED, [])


def test_of_several_groups_a_policy_takes_the_first_of_the_file(pair, snaporch):
    pair.add_guest("mail", disks={"vda": "tank/mail"})
    with pair.config_file.open("a") as stream:
        stream.write('[group.all]\ndomains = ["app", "db", "mail"]\n')
    document = snaporch("snapshot", "db", "--policy", "hourly", "--json").json
    assert {(entry["domain"], entry["group"]) for entry in document} == {
        ("app", "pair"),
        ("db", "pair"),
    }


def test_a_group_is_snapshotted_even_if_nothing_changed(pair, snaporch):
    """Alone, each guest would be found unchanged, because both are off."""
    for name in ("app", "db"):
        pair.hypervisor.destroy(pair.guest(name).uuid)
    words = ["snapshot", "db", "--policy", "hourly", "--if-changed", "--json"]
    first, second = (snaporch(*words).json for _ in range(2))
    assert [entry["domain"] for entry in second] == ["app", "db"]
    assert not {e["run"] for e in first} & {e["run"] for e in second}


def test_without_a_policy_a_domain_is_snapshotted_alone(pair, snaporch):
    assert snaporch("snapshot", "db", "--json").json["group"] is None
    assert len(pair.pool.names()) == 1
