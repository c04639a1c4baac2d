import os
from datetime import UTC, datetime, timedelta

import pytest

from snaporch.bundle.firmware_files import HostFileError
from snaporch.bundle.manifest import Role
from snaporch.bundle.store import BundleStore
from snaporch.hypervisor import Pause
from snaporch.model import DomainState
from snaporch.snapshot.bundle_parts import side_parts

UUID = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"


@pytest.fixture
def bundle(tmp_path):
    return BundleStore(tmp_path / "bundles").create(UUID, "run")


@pytest.fixture
def variables(tmp_path):
    path = tmp_path / "vars.fd"
    path.write_bytes(b"nvram")
    return path


def exact(bundle, domain, pause):
    return [part.exact for part in side_parts(bundle, domain, pause) if part.role is Role.NVRAM]


@pytest.mark.parametrize(("seconds", "known"), [(-10, True), (10, False)])
def test_a_running_guests_nvram_is_exact_if_it_did_not_change_since(
    world, bundle, variables, seconds, known
):
    freeze = datetime.now(UTC)
    changed = (freeze + timedelta(seconds=seconds)).timestamp()
    os.utime(variables, (changed, changed))
    domain = world.add_guest(nvram=str(variables))
    assert exact(bundle, domain, Pause(freeze, 1.0)) == [known]


def test_a_running_guests_nvram_is_not_exact_without_the_time_of_the_freeze(
    world, bundle, variables
):
    domain = world.add_guest(nvram=str(variables))
    assert exact(bundle, domain, Pause(None, 0.0)) == [None]


def test_the_nvram_of_a_guest_that_is_off_is_exact(world, bundle, variables):
    domain = world.add_guest(nvram=str(variables), state=DomainState.OFF)
    assert exact(bundle, domain, Pause(None, 0.0)) == [True]


def test_files_that_do_not_exist_yet_are_no_parts(world, bundle, tmp_path):
    domain = world.add_guest(nvram=str(tmp_path / "absent"), tpm=str(tmp_path / "no-tpm"))
    roles = [part.role for part in side_parts(bundle, domain, Pause(None, 0.0))]
    assert roles == [Role.LIVE_XML, Role.INACTIVE_XML]


def test_a_transient_guest_has_no_definition(world, bundle):
    domain = world.add_guest(persistent=False)
    roles = [part.role for part in side_parts(bundle, domain, Pause(None, 0.0))]
    assert roles == [Role.LIVE_XML]


def test_the_state_of_a_tpm_in_one_file_is_kept(world, bundle, tmp_path):
    state = tmp_path / "any-name"
    state.write_bytes(b"secret")
    domain = world.add_guest(tpm=str(state))
    (part,) = [
        each for each in side_parts(bundle, domain, Pause(None, 0.0)) if each.role is Role.TPM
    ]
    assert part.source == str(state)
    assert (bundle.directory / part.name).read_bytes() == b"secret"


def test_the_state_of_a_tpm_is_not_read_through_a_link(world, bundle, tmp_path):
    (tmp_path / "state").touch()
    domain = world.add_guest(tpm=str(tmp_path / "state"))
    (tmp_path / "state").unlink()
    (tmp_path / "state").symlink_to("/etc/hostname")
    with pytest.raises(HostFileError, match="regular file"):
        side_parts(bundle, domain, Pause(None, 0.0))


def test_only_the_permanent_state_of_a_tpm_is_kept(world, bundle, tmp_path):
    state = tmp_path / "tpm2"
    state.mkdir()
    for name in ("tpm2-00.permall", "tpm2-00.volatilestate", ".lock"):
        (state / name).write_bytes(b"x")
    domain = world.add_guest(tpm=str(state))
    parts = side_parts(bundle, domain, Pause(None, 0.0))
    assert [part.source for part in parts if part.role is Role.TPM] == [
        str(state / "tpm2-00.permall")
    ]
