import pytest
from fakes.pool import FakePool

from snaporch.errors import RefusedError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.rebuild import local_datasets
from snaporch.rebuild.local_datasets import LocalDatasets
from snaporch.remote_host import CommandError, Host


@pytest.fixture
def asked(monkeypatch):
    """The commands that were run, and the properties that ``zfs get`` prints."""
    made = Asked()
    monkeypatch.setattr(Host, "run", made.run)
    return made


class Asked:
    def __init__(self):
        self.commands = []
        self.values = {"mountpoint": "/tank", "mounted": "no", "keystatus": "-"}
        self.failing = ()

    def run(self, *words, **_more):
        if words[1] == "get":
            return f"{self.values[words[5]]}\n"
        self.commands.append(words)
        if words[1] in self.failing:
            raise CommandError("zfs", "no mountpoint set")
        return ""


@pytest.fixture
def local(asked):
    pool = FakePool("tank")
    pool.create("tank/web")
    return LocalDatasets(pool, Interrupt())


def test_what_is_mounted_there_by_itself_needs_no_mount_point(local):
    assert local.mountpoint_to_set("tank/vm/new", "/tank/vm/new") == ""
    assert local.mountpoint_to_set("tank/vm/new", "") == ""


def test_a_new_directory_may_be_a_mount_point(local, tmp_path):
    place = str(tmp_path / "images")
    assert local.mountpoint_to_set("tank/new", place) == place


@pytest.mark.parametrize(
    "place", ["/etc/cron.new", "/usr/local/lib/new", "/var/spool/new", "/root"]
)
def test_a_replica_does_not_choose_a_directory_of_the_system(local, place):
    with pytest.raises(RefusedError, match="belongs to the system"):
        local.mountpoint_to_set("tank/new", place)


@pytest.mark.parametrize("kind", ["directory", "file", "dangling"])
def test_a_replica_does_not_choose_a_directory_that_exists(local, tmp_path, kind):
    place = tmp_path / "images"
    if kind == "directory":
        place.mkdir()
    elif kind == "file":
        place.touch()
    else:
        place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(RefusedError, match="exists on this host"):
        local.mountpoint_to_set("tank/new", str(place))


@pytest.mark.parametrize(("content", "is_refused"), [((), False), (("disk",), True)])
def test_only_an_empty_directory_of_libvirt_may_exist(
    local, tmp_path, monkeypatch, content, is_refused
):
    monkeypatch.setattr(local_datasets, "_LIBVIRT", tmp_path)
    place = tmp_path / "images"
    place.mkdir()
    for name in content:
        (place / name).touch()
    if is_refused:
        with pytest.raises(RefusedError):
            local.mountpoint_to_set("tank/new", str(place))
    else:
        assert local.mountpoint_to_set("tank/new", str(place)) == str(place)


def test_a_file_system_is_mounted_where_its_images_were(local, asked):
    local.mount("tank/web", "/srv/web")
    assert asked.commands == [
        ("zfs", "set", "mountpoint=/srv/web", "tank/web"),
        ("zfs", "mount", "tank/web"),
    ]


def test_what_is_mounted_is_left_alone(local, asked):
    asked.values["mounted"] = "yes"
    local.mount("tank/web", "")
    assert asked.commands == []


def test_without_its_key_nothing_is_mounted_and_the_error_has_the_command(local, asked):
    asked.values |= {"keystatus": "unavailable", "encryptionroot": "tank/web"}
    with pytest.raises(UnavailableError) as raised:
        local.mount("tank/web", "/srv/web")
    assert raised.value.step == "zfs load-key tank/web, and run this command again"
    assert asked.commands == []


def test_a_failed_mount_has_a_next_step(local, asked):
    asked.failing = ("mount",)
    with pytest.raises(RefusedError, match="no mountpoint set") as raised:
        local.mount("tank/web", "")
    assert raised.value.step.startswith("zfs set mountpoint=")


def test_missing_parents_are_created(local, asked):
    local.make_parent("tank/vm/web")
    local.make_parent("tank/web")
    assert asked.commands == [("zfs", "create", "-p", "tank/vm")]


def test_the_state_of_a_dataset(local, asked):
    asked.values["receive_resume_token"] = "1-abc"
    assert local.state("tank/none").exists is False
    assert local.state("tank/web") == (True, "1-abc", ())
    words = local.receiver("tank/web", "s1")
    assert words == ["zfs", "receive", "-s", "-u", "tank/web@s1"]
