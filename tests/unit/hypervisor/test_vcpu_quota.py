"""The quotas of vCPUs, in directories that look like the kernel's."""

import pytest

from snaporch.hypervisor import HypervisorError
from snaporch.hypervisor.vcpu_quota import left_reduced, read_quotas, reduced, write_quotas

UUID = "6f1d0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
SCOPE = "/machine.slice/machine-qemu\\x2d1\\x2dweb.scope/libvirt"


@pytest.fixture
def guest(tmp_path):
    """An emulator with two vCPUs and a thread of its own, and their control groups."""
    process = tmp_path / "proc" / "4711"
    process.mkdir(parents=True)
    (process / "cmdline").write_bytes(f"qemu\0-uuid\0{UUID}\0-m\0".encode())
    for number, group in enumerate(("emulator", "vcpu0", "vcpu1")):
        task = process / "task" / str(4711 + number)
        task.mkdir(parents=True)
        (task / "cgroup").write_text(f"0::{SCOPE}/{group}\n")
        directory = tmp_path / "cgroup" / f"{SCOPE}/{group}".lstrip("/")
        directory.mkdir(parents=True)
        (directory / "cpu.max").write_text("max 100000\n")
    return tmp_path


def read(guest):
    return read_quotas(UUID, guest / "proc", guest / "cgroup")


def test_only_vcpus_are_read(guest):
    assert read(guest) == {f"{SCOPE}/vcpu0": "max 100000", f"{SCOPE}/vcpu1": "max 100000"}


def test_quotas_are_reduced_and_restored(guest):
    own = read(guest)
    write_quotas(reduced(own, 25), guest / "cgroup")
    assert set(read(guest).values()) == {"2500 10000"}
    assert (guest / "cgroup" / SCOPE[1:] / "emulator" / "cpu.max").read_text() == "max 100000\n"
    write_quotas(left_reduced(own, read(guest)), guest / "cgroup")
    assert read(guest) == own


@pytest.mark.parametrize(
    ("own", "percent", "quota"),
    [
        ("max 100000", 50, "5000 10000"),
        ("50000 100000", 50, "2500 10000"),  # half of the half that it may use
        ("200000 100000", 50, "10000 10000"),
        ("10000 100000", 10, "1000 10000"),  # the kernel takes no less
    ],
)
def test_a_reduced_quota_is_a_share_of_the_own_one(own, percent, quota):
    assert reduced({"/a/vcpu0": own}, percent) == {"/a/vcpu0": quota}


@pytest.mark.parametrize("now", ["max 100000", "30000 100000"])
def test_a_quota_that_the_admin_has_set_since_is_left_alone(now):
    assert left_reduced({"/a/vcpu0": "max 100000"}, {"/a/vcpu0": now}) == {}


def test_a_guest_that_has_ended_has_none(guest):
    assert left_reduced({"/a/vcpu0": "max 100000"}, {}) == {}
    assert read_quotas("00000000-0000-0000-0000-000000000000", guest / "proc") == {}
    write_quotas({"/gone/vcpu0": "max 100000"}, guest / "cgroup")


def test_a_quota_that_the_kernel_refuses_is_an_error_and_the_others_are_set(guest):
    own = read(guest)
    file = guest / "cgroup" / SCOPE[1:] / "vcpu0" / "cpu.max"
    file.unlink()
    file.mkdir()
    with pytest.raises(HypervisorError, match="cannot be set to"):
        write_quotas(reduced(own, 25), guest / "cgroup")
    assert read(guest) == {f"{SCOPE}/vcpu1": "2500 10000"}


@pytest.mark.parametrize("group", ["0::/../../etc/vcpu0", "0::/a/vcpu0/b", "4:cpu:/a/vcpu0", ""])
def test_a_group_that_is_not_of_a_vcpu_is_left_alone(guest, group):
    (guest / "proc" / "4711" / "task" / "4712" / "cgroup").write_text(group)
    assert list(read(guest)) == [f"{SCOPE}/vcpu1"]


def test_a_file_that_holds_something_else_is_left_alone(guest):
    (guest / "cgroup" / SCOPE[1:] / "vcpu0" / "cpu.max").write_text("often\n")
    assert list(read(guest)) == [f"{SCOPE}/vcpu1"]
