import pytest
from fakes.pool import FakePool

from snaporch.errors import RefusedError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.model import DatasetKind
from snaporch.rebuild import local_datasets
from snaporch.rebuild.local_datasets import LocalDatasets
from snaporch.remote_host import CommandError, Host

FILESYSTEM, VOLUME = DatasetKind.FILESYSTEM, DatasetKind.VOLUME


class Asked:
    """The commands that were run, and the properties that ``zfs get`` prints."""

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
def asked(monkeypatch):
    made = Asked()
    monkeypatch.setattr(Host, "run", made.run)
    return made


@pytest.fixture
def local(asked):
    pool = FakePool("tank")
    pool.create("tank/web")
    return LocalDatasets(pool, Interrupt())


@pytest.fixture
def free(monkeypatch, tmp_path):
    """A directory in which a replica may choose mount points."""
    monkeypatch.setattr(local_datasets, "IMAGES", tmp_path)
    return tmp_path


def test_what_is_mounted_there_by_itself_needs_no_mount_point(local, asked):
    asked.values["mountpoint"] = "/pool-of-a-test"
    assert local.mountpoint_to_set("tank/vm/new", "/pool-of-a-test/vm/new") == ""
    assert local.mountpoint_to_set("tank/vm/new", "") == ""
    asked.values["mountpoint"] = "none"
    assert local.mountpoint_to_set("tank/vm/new", "") == ""


def test_a_new_or_empty_directory_may_be_a_mount_point(local, free):
    place = free / "images"
    assert local.mountpoint_to_set("tank/new", str(place)) == str(place)
    place.mkdir()
    assert local.mountpoint_to_set("tank/new", str(place)) == str(place)


@pytest.mark.parametrize(
    "place",
    [
        *("/", "/etc", "/etc/cron.new", "/usr/local/lib/new", "/var", "/var/spool/new", "/lib32"),
        *("/var/run/systemd/system/ssh.service.d", "/home/new", "/var/lib/libvirt/qemu/save"),
    ],
)
@pytest.mark.parametrize("is_inherited", [False, True])
def test_a_replica_does_not_choose_a_directory_of_the_system(local, asked, place, is_inherited):
    """Nor by the name of a dataset: a pool may be mounted on /."""
    if is_inherited:
        asked.values["mountpoint"] = "/"
        dataset, wanted = f"tank{place.rstrip('/')}", ""
    else:
        dataset, wanted = "tank/new", place
    if dataset == "tank":
        return
    with pytest.raises(RefusedError, match="a directory of the system"):
        local.mountpoint_to_set(dataset, wanted)


def test_nor_one_that_a_link_leads_to(local, free):
    (free / "link").symlink_to("/etc")
    with pytest.raises(RefusedError, match="a directory of the system"):
        local.mountpoint_to_set("tank/new", str(free / "link" / "new"))


@pytest.mark.parametrize("kind", ["directory", "file", "dangling"])
def test_a_replica_does_not_choose_a_directory_that_exists(local, free, kind):
    place = free / "images"
    if kind == "directory":
        (place / "something").mkdir(parents=True)
    elif kind == "file":
        place.touch()
    else:
        place.symlink_to(free / "nowhere")
    with pytest.raises(RefusedError, match="where something is"):
        local.mountpoint_to_set("tank/new", str(place))


def test_where_the_dataset_itself_is_mounted_is_no_obstacle(local, asked, free):
    (free / "disk").touch()
    asked.values |= {"mountpoint": str(free), "mounted": "yes"}
    assert local.mountpoint_to_set("tank/web", str(free)) == ""


def test_a_dataset_that_is_mounted_is_not_moved_to_a_place_of_the_system(local, asked, free):
    """The replica may show another manifest the second time."""
    asked.values |= {"mountpoint": str(free), "mounted": "yes"}
    with pytest.raises(RefusedError, match="would be mounted on /etc, a directory of the system"):
        local.mountpoint_to_set("tank/web", "/etc")


def test_a_file_system_is_mounted_where_its_images_were(local, asked):
    local.mount("tank/web", FILESYSTEM, "/srv/web")
    assert asked.commands == [
        ("zfs", "set", "canmount=on", "tank/web"),
        ("zfs", "set", "mountpoint=/srv/web", "tank/web"),
        ("zfs", "mount", "tank/web"),
    ]


def test_what_is_mounted_is_not_mounted_twice(local, asked):
    asked.values["mounted"] = "yes"
    local.mount("tank/web", FILESYSTEM, "")
    assert asked.commands == [("zfs", "set", "canmount=on", "tank/web")]


def test_a_volume_gets_its_device_at_the_end(local, asked):
    assert local.receiver("tank/v", "s1", VOLUME)[4:6] == ["-o", "volmode=none"]
    local.mount("tank/v", VOLUME, "")
    assert asked.commands == [("zfs", "inherit", "volmode", "tank/v")]


@pytest.mark.parametrize("kind", [FILESYSTEM, VOLUME])
def test_without_its_key_nothing_is_mounted_and_the_error_has_the_command(local, asked, kind):
    asked.values |= {"keystatus": "unavailable", "encryptionroot": "tank/web"}
    with pytest.raises(UnavailableError) as raised:
        local.mount("tank/web", kind, "")
    assert raised.value.step == "zfs load-key tank/web, and run this command again"
    assert asked.commands == []


def test_a_failed_mount_has_a_next_step(local, asked):
    asked.failing = ("mount",)
    with pytest.raises(RefusedError, match="no mountpoint set") as raised:
        local.mount("tank/web", FILESYSTEM, "")
    assert raised.value.step.startswith("zfs set mountpoint=")


def test_missing_parents_are_created_and_never_mounted(local, asked):
    local.make_parents("tank/a/b/web")
    local.make_parents("tank/web")
    local.make_parents("tank")
    assert asked.commands == [
        ("zfs", "create", "-o", "canmount=off", "tank/a"),
        ("zfs", "create", "-o", "canmount=off", "tank/a/b"),
    ]


def test_the_state_of_a_dataset(local, asked):
    asked.values["receive_resume_token"] = "1-abc"
    assert local.state("tank/none").exists is False
    assert local.state("tank/web") == (True, "1-abc", (), "")
    words = local.receiver("tank/web", "s1", FILESYSTEM)
    options = ("canmount=noauto", "setuid=off", "exec=off", "devices=off")
    marks = [word for each in (*options, "snaporch:rebuild=transfer") for word in ("-o", each)]
    assert words == ["zfs", "receive", "-s", "-u", *marks, "tank/web@s1"]
