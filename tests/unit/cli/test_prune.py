from pathlib import Path

import pytest

from snaporch.cli.prune import may_be_barred
from snaporch.errors import ExitCode, UnavailableError
from snaporch.restore.start_bar import with_start_bar


@pytest.fixture
def lost(host, snaporch):
    """A guest with two snapshots; those of the first are destroyed."""
    host.add_guest()
    for name in ("s1", "s2"):
        host.bundle = Path(snaporch("snapshot", "web", "--name", name, "--json").json["bundle"])
    host.pool.destroy_snapshots(["tank/web@s1"])
    return host


def test_removed_items_are_printed_with_size_and_reason(lost, snaporch):
    answer = snaporch("prune")
    assert answer.code == 0
    first, last = answer.out.splitlines()
    assert first.startswith("web@s1  trashed  ")
    assert first.endswith("KiB  tank/web@s1 no longer exists")
    assert last.startswith("1 bundle (")
    assert "; 1 bundle in the trash (" in last
    assert last.endswith("; freed 0 B")
    assert answer.err == ""


def test_a_dry_run_prints_would(lost, snaporch):
    answer = snaporch("prune", "--dry-run")
    assert answer.out.startswith("web@s1  trash  ")
    assert answer.out.endswith("; would free 0 B\n")
    assert len(snaporch("list", "--json").json) == 1
    assert snaporch("prune").out.startswith("web@s1  trashed  ")


def test_verbose_prints_the_items_that_stay(lost, snaporch):
    assert "web@s2" not in snaporch("prune").out
    text = snaporch("prune", "--kept").out
    assert "web@s2  kept  " in text
    assert "tank/web@s2 exists" in text
    assert "tank/web@s1 no longer exists; stays until " in text


def test_a_pool_that_is_not_imported_is_printed_without_verbose(lost, snaporch):
    lost.pool.create("flash")
    lost.pool.exported.add("tank")
    answer = snaporch("prune")
    assert answer.code == 0
    assert answer.out.count("the pool tank is not imported") == 2


def test_json_has_every_item(lost, snaporch):
    answer = snaporch("prune", "--json")
    document = answer.json
    assert (document["dry_run"], document["freed_bytes"]) == (False, 0)
    first, second = sorted(document["items"], key=lambda item: item["snapshot"])
    assert first["action"] == "trash"
    assert first["reason"] == "tank/web@s1 no longer exists"
    assert (first["kind"], first["domain"]) == ("bundle", "web")
    assert first["bytes"] > 0
    assert second["action"] == "keep"
    assert second["path"] == str(lost.bundle)
    assert set(first) == {
        *("kind", "domain", "uuid", "snapshot", "path", "bytes", "action", "reason")
    }


def test_nothing_to_prune(host, snaporch):
    answer = snaporch("prune")
    assert (answer.code, answer.out, answer.err) == (0, "freed 0 B\n", "")
    assert snaporch("prune", "--json").json["items"] == []


def test_an_item_that_cannot_be_judged_needs_attention(lost, snaporch):
    (lost.bundle / "manifest.json").write_text("{")
    answer = snaporch("prune")
    assert answer.code == ExitCode.ATTENTION
    (line,) = answer.err.splitlines()
    assert str(lost.bundle / "manifest.json") in line
    assert "check it" in line
    assert "web@s1  trashed" in answer.out


def test_an_item_that_cannot_be_moved_is_a_failure(lost, snaporch, monkeypatch):
    def refuse(self, target):
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "rename", refuse)
    answer = snaporch("prune")
    assert answer.code == ExitCode.FAILED
    (line,) = answer.err.splitlines()
    assert "Read-only file system" in line


def test_a_misspelt_domain_is_an_error(lost, snaporch):
    answer = snaporch("prune", "wbe")
    assert answer.code == ExitCode.NOT_FOUND
    assert answer.err == "snaporch: wbe: no such domain\n"


def test_a_guest_may_be_barred_if_its_lock_is_found_or_libvirt_is_away(host, command_host):
    host.add_guest()
    guest = host.guest()
    config, uuid = host.context.config, guest.uuid
    assert not may_be_barred(command_host, config, uuid)
    guest.inactive = with_start_bar(host.context, guest.inactive)
    assert may_be_barred(command_host, config, uuid)
    assert not may_be_barred(command_host, config, "of-no-guest")

    def away(_uri):
        raise UnavailableError("libvirt", "does not answer")

    command_host.open_hypervisor = away
    assert may_be_barred(command_host, config, "of-no-guest")


def test_list_shows_no_trashed_bundles(lost, snaporch):
    before = snaporch("list", "--json").json
    snaporch("prune")
    assert snaporch("list", "--json").json == before
