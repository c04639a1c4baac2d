from types import SimpleNamespace

import pytest
from fakes.hooks import failing
from fakes.pool import FakePool
from fakes.rebuild_source import FakeLocal

from snaporch.bundle.manifest import DatasetEntry, HostObjectEntry, SurroundingsEntry
from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.hypervisor import HostObject
from snaporch.model import DatasetKind
from snaporch.rebuild.dataset_settings import Settings
from snaporch.rebuild.host_object_xml import NotAllowedError
from snaporch.rebuild.missing_storage_pools import AllowedPool
from snaporch.rebuild.plan import Incoming
from snaporch.rebuild.surroundings import (
    apply_settings,
    attempt,
    check_directory,
    define_objects,
    plan_surroundings,
    set_autostart,
    what_is_created,
)
from snaporch.zfs import PoolError

IP = "<ip address='10.77.{}.1' prefix='24'/>"


def incoming(dataset, kind=DatasetKind.FILESYSTEM, *, is_pages=False):
    place = f"/{dataset}" if kind is DatasetKind.FILESYSTEM else ""
    return Incoming(dataset, dataset.replace("/", ":"), (), place, False, kind, is_pages)


def network(name, third):
    xml = f"<network><name>{name}</name>{IP.format(third)}</network>"
    return HostObjectEntry(name=name, xml=xml, starts_at_boot=False)


def definition(*networks, pools=()):
    cards = "".join(
        f"<interface type='network'><source network='{each}'/></interface>" for each in networks
    )
    disks = "".join(f"<disk type='volume'><source pool='{each}'/></disk>" for each in pools)
    return f"<domain><devices>{cards}{disks}</devices></domain>"


def plan(world, entry, *definitions, datasets=("tank/web",), copies=()):
    parts = tuple(incoming(each) for each in datasets)
    given = SimpleNamespace(manifest=SimpleNamespace(surroundings=entry), incoming=parts)
    local = FakeLocal(world.pool, world.hooks)
    return plan_surroundings(world.context, local, given, dict.fromkeys(copies, ()), definitions)


def test_only_networks_that_the_guest_names_and_the_host_lacks_come(world):
    world.hypervisor.network_objects["here"] = HostObject("here", "<network/>", False)
    entry = SurroundingsEntry(networks=(network("a", 1), network("b", 2), network("here", 3)))
    found = plan(world, entry, definition("a", "here"), definition("new"))
    assert [each.name for each, _ in found.networks] == ["a"]
    (note,) = found.refused
    assert note.startswith("network 'new': is not on this host, and its definition is not in")


def test_networks_of_one_guest_do_not_overlap_each_other_or_those_of_this_host(world):
    entry = SurroundingsEntry(networks=(network("a", 1), network("b", 1), network("c", 2)))
    other = HostObject("other", f"<network>{IP.format(2)}</network>", False)
    world.hypervisor.network_objects["other"] = other
    found = plan(world, entry, definition("a", "b", "c"))
    assert [each.name for each, _ in found.networks] == ["a"]
    assert [each.split(",")[1] for each in found.refused] == [
        " which overlaps network a 10.77.1.0/24",
        " which overlaps other 10.77.2.0/24",
    ]


@pytest.mark.parametrize("place", ["hypervisor.defined_networks", "local.networks"])
def test_without_knowledge_of_the_hosts_networks_none_is_defined(world, place):
    world.hooks.at[place] = failing(SnaporchError("ip", "is not installed"))
    found = plan(world, SurroundingsEntry(networks=(network("a", 1),)), definition("a"))
    assert (found.networks, found.refused) == ((), ("no network is defined: ip: is not installed",))


def test_without_facts_nothing_is_asked(world):
    found = plan(world, None, definition())
    assert found.lines() == []
    assert found.refused == ()


def test_properties_of_other_datasets_are_ignored_and_the_first_of_two_counts(world):
    entry = SurroundingsEntry(
        datasets=(
            DatasetEntry(dataset="tank/mail", properties={"copies": "3"}),
            DatasetEntry(dataset="tank/web", properties={"atime": "off"}, encryption_root="tank"),
            DatasetEntry(dataset="tank/web", properties={"atime": "on", "mountpoint": "/etc"}),
        )
    )
    found = plan(world, entry)
    assert {name: dict(each.allowed) for name, each in found.settings.items()} == {
        "tank/web": {"atime": "off"}
    }
    assert found.lines() == [
        "properties of tank/web: atime=off",
        "dataset tank/web had the encryption root 'tank'",
    ]
    forbidden = DatasetEntry(dataset="tank/web", properties={"mountpoint": "/etc"})
    (note,) = plan(world, SurroundingsEntry(datasets=(forbidden,))).refused
    assert note.startswith("property of tank/web not set: 'mountpoint' = '/etc'")


def test_reservations_leave_half_of_the_free_room_to_others(world):
    world.pool.create("tank"), world.pool.create("flash")
    world.pool.room = 1 << 30
    half = str(1 << 29)
    entry = SurroundingsEntry(
        datasets=(
            DatasetEntry(dataset="tank/web", properties={"reservation": half, "copies": "2"}),
            DatasetEntry(dataset="tank/log", properties={"refreservation": "1", "atime": "off"}),
            DatasetEntry(dataset="flash/db", properties={"refreservation": str((1 << 29) + 1)}),
            DatasetEntry(dataset="gone/db", properties={"reservation": "none", "quota": half}),
        )
    )
    names = ("tank/web", "tank/log", "flash/db", "gone/db")
    found = plan(world, entry, datasets=names)
    assert {name: dict(each.allowed) for name, each in found.settings.items()} == {
        "tank/web": {"reservation": half, "copies": "2"},
        "tank/log": {"atime": "off"},
        "flash/db": {},
        "gone/db": {"reservation": "none", "quota": half},
    }
    assert [each.partition(" is ")[0] for each in found.refused] == [
        "property of tank/log not set: refreservation=1",
        "property of flash/db not set: refreservation=536870913",
    ]


def test_the_file_systems_that_a_rebuild_makes():
    parts = [
        incoming("tank/vm/web"),
        incoming("tank/ours/vol", DatasetKind.VOLUME),
        incoming("tank/ram/uuid", is_pages=True),
    ]
    copies = dict.fromkeys(
        ["tank:vm:web", "tank:ours:vol", "tank:vm:mail", "tank:ram:uuid", "tank:ram:other"], ()
    )
    found = what_is_created(parts, copies, {"tank"})
    assert found.file_systems == {"tank/vm/web", "tank/ours"}
    assert found.mountpoints == {"/tank/vm/web"}
    assert what_is_created(parts, copies, {"tank", "tank/ours"}).file_systems == {"tank/vm/web"}
    for other in ({**copies, "tank:vm:web:mail": ()}, copies):
        here = {"tank"} if other != copies else {"tank", "tank/vm/web/mail"}
        assert what_is_created(parts, other, here).file_systems == {"tank/ours"}
    mine = {"tank", "tank/vm", "tank/vm/web", "tank/ours/vol"}
    assert what_is_created(parts, copies, mine).file_systems == {"tank/vm/web", "tank/ours"}
    above = {**copies, "tank:ours": ()}
    assert what_is_created(parts, above, {"tank"}).file_systems == {"tank/vm/web"}


def test_a_property_that_is_refused_keeps_no_other_from_being_set():
    pool = FakePool("tank", "tank/web")
    pool.set_properties(["tank/web"], {"atime": "on"})  # by the admin, since
    refusing(pool, "recordsize=1048576")
    wanted = {"atime": "off", "copies": "2", "recordsize": "1048576", "sync": "always"}
    left_out = apply_settings(SimpleNamespace(pool=pool), {"tank/web": Settings(wanted, ())})
    reason = "property of tank/web not set: recordsize=1048576: not supported"
    assert left_out == [reason]
    assert pool.local_properties(list(wanted)) == {
        "tank/web": {"atime": "on", "copies": "2", "sync": "always"}
    }


def refusing(pool, pair):
    def refuse():
        if pool.hooks.log[-1].endswith(pair):
            raise PoolError("zfs set", "not supported")

    pool.hooks.at["pool.set_properties"] = refuse


def test_a_reservation_that_is_larger_than_the_volume_is_set_by_zfs_itself():
    pool = FakePool("tank")
    pool.create("tank/vol", DatasetKind.VOLUME)
    refusing(pool, "refreservation=1100000000")
    settings = {"tank/vol": Settings({"refreservation": "1100000000"}, ())}
    assert apply_settings(SimpleNamespace(pool=pool), settings) == []
    assert pool.local_properties(["refreservation"]) == {"tank/vol": {"refreservation": "auto"}}


def test_a_pool_is_not_led_out_of_the_file_system(tmp_path):
    real = tmp_path / "real"
    (real / "web" / "images").mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    (real / "web" / "out").symlink_to(tmp_path)
    place = tmp_path / "link" / "web"

    def pool(name):
        return AllowedPool("vms", "", "", str(place / name) if name else str(place), str(place))

    for good in ("", "images"):
        check_directory(pool(good))
    for bad in ("out", "out/real", "absent"):
        with pytest.raises(NotAllowedError):
            check_directory(pool(bad))


def test_a_signal_is_no_failure_that_is_collected():
    failed = []
    attempt(failed, failing(SnaporchError("x", "failed")))
    assert [each.reason for each in failed] == ["failed"]
    with pytest.raises(InterruptedRunError):
        attempt(failed, failing(InterruptedRunError("x", "a signal", 15)))


def test_objects_are_defined_as_planned(world):
    entry = SurroundingsEntry(networks=(network("a", 1), network("b", 2)))
    found = plan(world, entry, definition("a", "b"))
    world.hypervisor.network_objects["a"] = HostObject("a", "<network/>", False)
    (failure,) = define_objects(world.context, found)
    assert "already exists" in failure.reason
    assert world.hypervisor.network_objects.keys() == {"a", "b"}


@pytest.mark.parametrize("boots", [True, False, None])
def test_autostart_is_set_only_if_it_was(world, boots):
    uuid = world.add_guest().uuid
    facts = None if boots is None else SurroundingsEntry(starts_at_boot=boots)
    set_autostart(world.context, SimpleNamespace(surroundings=facts, uuid=uuid))
    assert world.guest().autostart is bool(boots)
