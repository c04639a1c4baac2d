"""A file belongs to the dataset of its device number, whatever the mounts are."""

import os
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snaporch.default_paths import HostPaths
from snaporch.model import Dataset, DatasetKind
from snaporch.zfs.resolver import Mount, NotOnZfsError, Resolver, read_mounts

# The bytes of file names: any but "/" and NUL; hostile ones more often.
PART = st.one_of(
    st.sampled_from(
        [b"web", b" - zfs tank rw", b"-", b"\\040", b"a\nb", b"\t", b"#", b"\xff", b" "]
    ),
    st.binary(min_size=1, max_size=8).map(lambda raw: raw.replace(b"/", b"_").replace(b"\0", b"_")),
).filter(lambda part: part not in (b".", b".."))
PLACE = st.lists(PART, max_size=4).map(lambda parts: b"/" + b"/".join(parts))
NAME = st.from_regex(r"[a-z][A-Za-z0-9_.: -]{0,8}(/[A-Za-z0-9_.: -]{1,8}){0,3}", fullmatch=True)
OTHER = st.sampled_from([(b"ext4", b"/dev/sda1"), (b"tmpfs", b"tmpfs"), (b"fuse.zfs", b"tank/web")])
SOURCE = st.one_of(NAME.map(lambda name: (b"zfs", name.encode())), OTHER)
TABLE = st.lists(st.tuples(PLACE, SOURCE), min_size=1, max_size=8)
OPTIONAL = st.lists(st.sampled_from([b"shared:1", b"master:2", b"unbindable"]), max_size=3)


def escaped(name):
    """As the kernel's mangle() writes a name."""
    return b"".join(b"\\%03o" % byte if byte in b" \t\n\\#" else bytes([byte]) for byte in name)


def line(number, place, kind, source, optional=(), root=b"/"):
    fields = [b"%d 1 0:%d" % (number, number), escaped(root), escaped(place), b"rw,relatime"]
    fields += [*optional, b"-", kind, escaped(source), b"rw,xattr"]
    return b" ".join(fields) + b"\n"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A mountinfo file, in the place of the kernel's."""
    path = tmp_path_factory.mktemp("proc") / "self" / "mountinfo"
    path.parent.mkdir()
    return path


def resolve_on(table, number):
    """Resolve a file that lies on the mount with this device number."""
    status = SimpleNamespace(st_mode=0o100600, st_dev=os.makedev(0, number))
    host = HostPaths(proc=table.parents[1])
    return Resolver(host, stat=lambda _path: status).resolve("/any/path")


quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(TABLE, OPTIONAL, st.randoms(use_true_random=False))
def test_every_mount_is_found_by_its_number_alone(table, mounts, optional, random):
    lines = [
        line(number, place, kind, source, optional)
        for number, (place, (kind, source)) in enumerate(mounts, 1)
    ]
    random.shuffle(lines)
    table.write_bytes(b"".join(lines))
    for number, (_, (kind, source)) in enumerate(mounts, 1):
        if kind == b"zfs":
            assert resolve_on(table, number) == Dataset(source.decode(), DatasetKind.FILESYSTEM)
        else:
            with pytest.raises(NotOnZfsError, match=f"not on ZFS but on {kind.decode()}"):
                resolve_on(table, number)


@quick
@given(PLACE, st.lists(PART, min_size=1, max_size=3), NAME, NAME)
def test_a_dataset_mounted_inside_another_is_itself(table, above, below, outer, inner):
    """Also where both names, or both places, begin alike."""
    inside = above.rstrip(b"/") + b"/" + b"/".join(below)
    table.write_bytes(
        line(1, above, b"zfs", outer.encode()) + line(2, inside, b"zfs", inner.encode())
    )
    assert resolve_on(table, 1).name == outer
    assert resolve_on(table, 2).name == inner


@quick
@given(st.lists(st.tuples(PLACE, PLACE), min_size=1, max_size=5), NAME)
def test_bind_mounts_of_a_dataset_are_that_dataset(table, binds, name):
    table.write_bytes(
        b"".join(line(7, place, b"zfs", name.encode(), root=root) for root, place in binds)
    )
    assert resolve_on(table, 7).name == name


@quick
@given(PLACE, NAME, NAME)
def test_mounts_over_other_places_do_not_matter(table, place, hidden, visible):
    """A file opened before something was mounted over its place is where it was."""
    table.write_bytes(
        line(1, place, b"zfs", hidden.encode()) + line(2, place, b"zfs", visible.encode())
    )
    assert resolve_on(table, 1).name == hidden


@quick
@given(PLACE, NAME, st.from_regex(r"[a-z0-9_.:-]{1,8}", fullmatch=True))
def test_a_snapshot_is_never_taken_for_its_dataset(table, place, name, snapshot):
    table.write_bytes(line(1, place, b"zfs", f"{name}@{snapshot}".encode()))
    with pytest.raises(NotOnZfsError, match="read-only snapshot"):
        resolve_on(table, 1)


@quick
@given(PLACE, PART, OPTIONAL)
def test_every_byte_of_a_line_arrives(table, place, source, optional):
    table.write_bytes(line(5, place, b"zfs", source, optional))
    (found,) = read_mounts(table)
    assert found == Mount("0:5", os.fsdecode(place), "zfs", os.fsdecode(source))
