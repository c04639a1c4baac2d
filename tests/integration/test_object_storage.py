"""Copies in S3: the real restic, and a server of S3 on this machine.

The streams are those of a fake pool: what ZFS does with them is tested in the lab.
"""

import hashlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes.cloud import Cloud
from fakes.manifests import of_snapshots
from fakes.pool import FakePool

from snaporch.bundle.manifest import manifest_bytes
from snaporch.config import Config
from snaporch.errors import InterruptedRunError
from snaporch.interrupt import Interrupt
from snaporch.replication.interface import ReplicaError
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.restic import repository_problem
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.replication.unsent_files import unsent_files
from snaporch.schedule.prune_chains import prune_chains

ALL = 1 << 62
WEB, COPY = "tank/web", "tank:web"
UUID = "4b1d2f0e-0000-4000-8000-000000000001"
REFERENCE = f"{UUID}/r-1"
FILES = {"manifest.json": b"{}", "ram.save": b"RAM" * 1_000_000, "z": b"last"}
SUMS = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
PATIENCE = 20
"""Seconds within which a command ends after a signal."""


@pytest.fixture(scope="module")
def server():
    """The address of a server of S3, which keeps everything in memory."""
    words = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        for line in process.stderr:
            if found := re.search(rb"http://127\.0\.0\.1:[0-9]+", line):
                break
        rest = threading.Thread(target=process.stderr.read)  # it logs each request
        rest.start()
        yield found[0].decode()
        process.terminate()
        rest.join()


def in_s3(made, address, tmp_path):
    """Let the repository of a host be in S3, by the real restic."""
    (made.tools / "restic").unlink()
    variables = tmp_path / "environment"
    variables.write_text("AWS_ACCESS_KEY_ID=AKIATEST\nAWS_SECRET_ACCESS_KEY=hush\n")
    variables.chmod(0o600)
    repository = f"s3:{address}/{tmp_path.name.replace('_', '-').lower()}/vm1"
    made.options = {"repository": repository, "environment_file": str(variables)}
    return made


@pytest.fixture
def cloud(server, tmp_path, monkeypatch):
    """A host with a new repository in S3."""
    made = in_s3(Cloud(tmp_path / "cloud", FakePool(WEB)), server, tmp_path)
    monkeypatch.setenv("PATH", str(made.tools), prepend=":")
    made.repository().host.run("restic", "init")
    return made


@pytest.fixture
def silent(tmp_path, monkeypatch):
    """A host whose server of S3 accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        made = in_s3(Cloud(tmp_path / "cloud", FakePool(WEB)), address, tmp_path)
        monkeypatch.setenv("PATH", str(made.tools), prepend=":")
        yield made


def receive(cloud, name):
    """What ``zfs receive`` would get of a snapshot, even if an error came."""
    source, target = cloud.source(), cloud.place / "received"
    (wanted,) = (each for each in source.snapshots() if each.name == name)
    try:
        source.receive(wanted, "", NO_TOKEN, ["sh", "-c", f"cat >{target}"], raw=False)
    finally:
        cloud.got = target.read_bytes() if target.exists() else b""
    return cloud.got


def store_bundle(cloud, tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for name, content in FILES.items():
        (bundle / name).write_bytes(content)
    assert cloud.destination().store(bundle, REFERENCE, SUMS) == []


def store_own_bundle(cloud, name):
    """A bundle of a run, on this host and in the repository."""
    found = next(each for each in cloud.pool.snapshots() if each.name == name)
    bundle = cloud.place / "store" / UUID / f"r-{name}"
    bundle.mkdir(parents=True)
    content = manifest_bytes(of_snapshots(f"{UUID}/r-{name}", found))
    (bundle / "manifest.json").write_bytes(content)
    sums = {"manifest.json": hashlib.sha256(content).hexdigest()}
    assert cloud.destination().store(bundle, f"{UUID}/r-{name}", sums) == []


def asked(address, **more):
    """The answer to a request of another client, whose signature the server does not check."""
    credential = "Credential=AKIATEST/20261126/us-east-1/s3/aws4_request"
    headers = {"Authorization": f"AWS4-HMAC-SHA256 {credential}"}
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers, **more)) as found:
        return found.read()


def largest_pack(server, tmp_path):
    """The address of a pack in the bucket."""
    bucket = f"{server}/{tmp_path.name.replace('_', '-').lower()}"
    text = asked(f"{bucket}?prefix=vm1/data/").decode()
    found = re.findall(r"<Key>([^<]*)</Key>.*?<Size>([0-9]+)</Size>", text, re.DOTALL)
    return f"{bucket}/{max(found, key=lambda each: int(each[1]))[0]}"


def test_chains_and_a_bundle_go_there_and_come_back(cloud, tmp_path):
    cloud.take(*(f"{WEB}@{name}" for name in "abcd"), run="r-1", note="a, ü")
    cloud.destination(chain=1).send(WEB, raw=False, until=ALL)
    assert [each.name for each in cloud.destination().snapshots([WEB])] == [*"abcd"]
    source = cloud.source()
    found = source.snapshots()
    assert [dict(each.properties)["note"] for each in found] == ["a, ü"] * 4
    for name, base in ("a", ""), ("b", f"{WEB}@a"), ("c", ""), ("d", f"{WEB}@c"):
        assert receive(cloud, name) == cloud.stream(f"{WEB}@{name}", base)
    store_bundle(cloud, tmp_path)
    source = cloud.source()
    assert source.manifest(REFERENCE) == "{}"
    assert source.damaged(REFERENCE, SUMS) == []
    (tmp_path / "store").mkdir()
    received = ReceivedBundles(tmp_path / "store", "")
    sizes = {name: len(content) for name, content in FILES.items()}
    assert source.fetch(REFERENCE, unsent_files(sizes, SUMS, {}), received) == []
    for name, content in FILES.items():
        assert (tmp_path / "store" / REFERENCE / name).read_bytes() == content


def stored(server, tmp_path):
    """The bytes of the packs in the bucket."""
    bucket = f"{server}/{tmp_path.name.replace('_', '-').lower()}"
    text = asked(f"{bucket}?prefix=vm1/data/").decode()
    return sum(map(int, re.findall(r"<Size>([0-9]+)</Size>", text)))


def prune(cloud, *, dry_run=False):
    options = {"replica": {"cloud": cloud.section(chain=1, keep={"last": 2})}}
    places = {"runtime": "runtime", "bundles": "store", "schedule": "schedule"}
    paths = {name: cloud.place / place for name, place in places.items()}
    return prune_chains(
        Config.model_validate({**options, "paths": paths}),
        cloud.pool,
        lambda _name, _replica: cloud.repository(),
        Interrupt(),
        dry_run=dry_run,
    )


def test_an_old_chain_and_its_bundle_go_and_the_rest_comes_back(cloud, server, tmp_path):
    for number, name in enumerate("abcd"):
        cloud.take(f"{WEB}@{name}", run=f"r-{name}", uuid=UUID, domain="web")
        cloud.pool.age(f"{WEB}@{name}", datetime.now(UTC) - timedelta(days=9 - number))
    for number, name in enumerate("abcd"):
        with (cloud.place / "streams" / f"tank:web@{name}").open("ab") as stream:
            stream.write(random.Random(number).randbytes(1 << 21))
    cloud.destination(chain=1).send(WEB, raw=False, until=ALL)
    for name in "abcd":
        store_own_bundle(cloud, name)
    shutil.rmtree(cloud.place / "store" / UUID / "r-a")  # the host has pruned it since
    before = stored(server, tmp_path)
    assert [each.action for each in prune(cloud, dry_run=True).decisions] == ["delete", "keep"]
    assert stored(server, tmp_path) == before
    done = prune(cloud)
    assert done.failures == []
    assert [each.action for each in done.decisions] == ["delete", "keep"]
    assert stored(server, tmp_path) < before * 0.75
    assert [each.name for each in cloud.destination().snapshots([WEB])] == [*"cd"]
    assert cloud.destination().bundles(UUID).keys() == {"r-c", "r-d"}
    content = (cloud.place / "streams" / "tank:web@c").read_bytes()
    assert receive(cloud, "c") == content
    assert len(receive(cloud, "d")) == len(content)
    cloud.repository().host.run("restic", "check", "--read-data")


def test_nothing_is_deleted_with_a_lock_of_another_restic(cloud):
    """As one that was killed leaves it."""
    for number, name in enumerate("abcd"):
        cloud.take(f"{WEB}@{name}", run=f"r-{name}", uuid=UUID, domain="web")
        cloud.pool.age(f"{WEB}@{name}", datetime.now(UTC) - timedelta(days=9 - number))
    cloud.destination(chain=1).send(WEB, raw=False, until=ALL)
    for name in "abcd":
        store_own_bundle(cloud, name)
    repository = cloud.repository()
    environment = repository.host.environment
    words = ["restic", "backup", "--quiet", "--tag", "other", "--stdin"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, env=environment) as other:
        while not repository.host.run("restic", "list", "locks", "--no-lock").strip():
            assert other.poll() is None
        (failure,) = prune(cloud).failures
        assert "restic forget: repository is already locked by PID" in failure.line()
        assert failure.line().endswith("unlock)")
        other.stdin.write(b"x")
    assert prune(cloud).failures == []


def test_a_damaged_pack_is_found_and_its_stream_never_ends(cloud, server, tmp_path):
    cloud.take(f"{WEB}@a")
    with (cloud.place / "streams" / "tank:web@a").open("ab") as stream:
        stream.write(random.randbytes(1 << 21))
    cloud.destination().send(WEB, raw=False, until=ALL)
    pack = largest_pack(server, tmp_path)
    data = bytearray(asked(pack))
    data[len(data) // 2] ^= 1
    asked(pack, data=bytes(data), method="PUT")
    with pytest.raises(ReplicaError, match="did not come back"):
        receive(cloud, "a")
    assert len(cloud.got) < 1 << 21


def test_a_wrong_password_is_one_line_with_its_file(cloud):
    assert repository_problem(cloud.section(), Interrupt()) == ""
    cloud.secret.write_text("wrong\n")
    with pytest.raises(ReplicaError) as caught:
        cloud.source().snapshots()
    line = caught.value.line()
    assert "cannot be listed: wrong password or no key found" in line
    assert f"put the password of the repository into {cloud.secret}" in line
    assert "{" not in line
    assert "hush" not in line


def test_a_repository_that_was_not_made_is_a_problem_with_its_command(server, cloud):
    section = cloud.section(repository=f"s3:{server}/none/vm1")
    found = repository_problem(section, Interrupt())
    assert f"restic -r s3:{server}/none/vm1 --password-file {cloud.secret} init" in found


def test_a_server_that_is_away_is_reported_with_the_reason_of_restic(cloud):
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
    section = cloud.section(repository=f"s3:http://127.0.0.1:{port}/none/vm1")
    assert "connection refused" in repository_problem(section, Interrupt())


def ask(cloud, interrupt):
    repository_problem(cloud.section(), interrupt)


def list_copies(cloud, interrupt):
    cloud.repository(interrupt).contents()


def store(cloud, interrupt):
    cloud.repository(interrupt).record(["snaporch"])


@pytest.mark.parametrize("act", [ask, list_copies, store])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_waits_for_a_silent_server(silent, act, number):
    interrupt, begun = Interrupt(), time.monotonic()
    with interrupt.watching():
        timer = threading.Timer(1, signal.raise_signal, [number])
        timer.start()
        with pytest.raises(InterruptedRunError, match=signal.Signals(number).name):
            act(silent, interrupt)
        timer.join()
    assert time.monotonic() - begun < PATIENCE
