"""Fences: files that survive, whatever is in them, and that admins make and remove."""

import os

import pytest

from snaporch.errors import NotFoundError, RefusedError, UnavailableError
from snaporch.failover.fence_by_hand import find_fence, make_fence, remove_fence
from snaporch.fence import Fence, Fences
from snaporch.hypervisor import StartHookProblem
from snaporch.model import DomainState

UUID = "4b1d2f0e-0000-4000-8000-00000000000f"


@pytest.fixture
def fences(tmp_path):
    return Fences(tmp_path / "fences")


def test_a_fence_is_found_as_it_was_made(fences):
    assert fences.find(UUID) is None
    made = Fence(UUID, "web", "2026-11-26T10:00:00Z", "run", "snap")
    fences.put(made)
    assert fences.find(UUID) == made
    assert (fences.directory / UUID).stat().st_mode & 0o777 == 0o600
    fences.remove(UUID)
    fences.remove(UUID)
    assert fences.find(UUID) is None


def test_it_is_on_stable_storage_with_its_name(fences, to_disk):
    fences.put(Fence(UUID, "web"))
    assert to_disk == [f".{UUID}", f".{UUID} -> {UUID}", "fences", fences.directory.parent.name]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"uuid": "x", "domain": "web"}', "\xff"])
def test_a_damaged_fence_is_one(fences, text):
    fences.directory.mkdir()
    (fences.directory / UUID).write_text(text)
    found = fences.find(UUID)
    assert (found.uuid, found.domain, found.run) == (UUID, UUID, "")
    assert found.moment.year == 9999


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/nowhere"), os.mkfifo])
def test_what_is_no_file_is_a_fence(fences, make):
    fences.directory.mkdir()
    make(fences.directory / UUID)
    assert fences.find(UUID) is not None


def test_a_fence_that_cannot_be_looked_for_is_an_error(fences):
    fences.directory.parent.joinpath("fences").symlink_to("fences")
    with pytest.raises(UnavailableError):
        fences.find(UUID)


def test_a_guest_that_is_off_is_fenced_and_comes_free(world):
    domain = world.add_guest(state=DomainState.OFF)
    made = make_fence(world.context, "web")
    assert make_fence(world.context, domain.uuid) == made
    assert find_fence(world.context, "web") == made
    remove_fence(world.context, made)
    with pytest.raises(NotFoundError):
        find_fence(world.context, "web")


def test_a_guest_that_runs_is_not_fenced(world):
    domain = world.add_guest()
    with pytest.raises(RefusedError, match="runs, and no fence ends it"):
        make_fence(world.context, "web")
    assert world.fences.find(domain.uuid) is None
    world.fences.put(Fence(domain.uuid, "web"))
    with pytest.raises(RefusedError, match="runs, and no fence ends it"):
        make_fence(world.context, "web")
    assert world.fences.find(domain.uuid) is not None


def test_a_fence_that_libvirt_would_not_see_is_not_made(world):
    domain = world.add_guest(state=DomainState.OFF)
    world.hypervisor.why_unguarded = StartHookProblem("no hook", "snaporch install")
    with pytest.raises(RefusedError, match="no hook"):
        make_fence(world.context, "web")
    assert world.fences.find(domain.uuid) is None


def test_the_fence_of_a_guest_that_is_not_defined_is_found_by_its_uuid(world):
    world.fences.put(Fence(UUID, "web"))
    assert find_fence(world.context, UUID).domain == "web"
    for name in ("web", "../fences", ""):
        with pytest.raises(NotFoundError):
            find_fence(world.context, name)
