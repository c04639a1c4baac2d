import shutil
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes.hooks import failing
from fakes.replica import FakeReplica
from fakes.schedule import Scheduled

from snaporch.config import Config
from snaporch.context import Clock
from snaporch.errors import BusyError, ExitCode
from snaporch.interrupt import Interrupt
from snaporch.locks import REPLICATION, domain_lock
from snaporch.replication.interface import ReplicaError
from snaporch.schedule.failed_attempts import REPLICATIONS
from snaporch.schedule.replicate_domains import choose_targets, replicate_domains

AWAY = ReplicaError("nas", "cannot be reached: no route to host")


@pytest.fixture
def there(host, command_host):
    """Two replicas, and what each has; the policy of all guests replicates to one of them."""
    host.add_guest()
    text = host.config_file.read_text()
    place = host.root / "schedule"
    text = text.replace("[paths]", f'[paths]\nschedule = "{place}"') + 'policies = ["hourly"]\n'
    text += '[policy.hourly]\nevery = "1h"\nreplicate = ["nas"]\n'
    for name in ("nas", "usb"):
        text += (
            f'[replica.{name}]\nhost = "{name}"\ndataset = "backup"\nbundles = "/backup/{name}"\n'
        )
    host.config_file.write_text(text)
    replicas = {}

    def opened(_context, name):
        return replicas.setdefault(name, FakeReplica(host.pool, host.root / "there" / name))

    command_host.open_replica = opened
    opened(None, "nas"), opened(None, "usb")
    return replicas


@pytest.fixture
def scheduled(host, there):
    made = Scheduled(host)
    document = tomllib.loads(host.config_file.read_text())
    made.context.config = Config.model_validate(document)
    return made


@pytest.fixture
def taken(scheduled):
    return lambda guest="web", hours=0, **more: scheduled.taken(
        datetime.now(UTC) - timedelta(hours=hours), guest=guest, **more
    )


def test_due_snapshots_are_replicated_and_printed(there, taken, snaporch):
    old, new = taken(hours=2), taken(hours=1)
    plan = snaporch("plan").out
    assert "web  nas  replicate due now  (nothing copied yet)" in plan
    answer = snaporch("replicate", "--due", "--quiet")
    words = f"web  nas  2 snapshots replicated, up to @{new.snapshot}\n"
    assert (answer.code, answer.out, answer.err) == (0, words, "")
    assert set(there["nas"].names()) == {f"tank/web@{r.snapshot}" for r in (old, new)}
    assert there["usb"].names() == []
    assert "replicate" not in snaporch("plan").out
    listed = snaporch("list", "--json").json
    assert [each["replicated"] for each in listed] == [["nas"], ["nas"]]
    assert snaporch("replicate", "--due").out == ""


def test_copies_of_another_host_are_not_copied_on(scheduled, there, taken, snaporch):
    """After a failover, while the old host goes on sending."""
    own = taken()
    scheduled.copied(datetime.now(UTC) + timedelta(seconds=5))
    assert snaporch("replicate", "web").code == 0
    assert there["nas"].names() == [f"tank/web@{own.snapshot}"]
    assert snaporch("replicate", "web").out == "web  nas  up to date\n"


def test_plan_as_json(taken, snaporch):
    record = taken()
    (foreseen,) = snaporch("plan", "--json").json["replications"]
    assert (foreseen["domain"], foreseen["replica"], foreseen["due"]) == ("web", "nas", True)
    assert foreseen["uuid"] == record.uuid


def test_by_hand_snapshots_are_copied_to_the_replicas_of_policies_or_the_named_ones(
    there, taken, snaporch
):
    taken()
    assert snaporch("replicate", "web").code == 0
    assert (len(there["nas"].names()), there["usb"].names()) == (1, [])
    answer = snaporch("replicate", "--all", "--to", "usb", "--json")
    (document,) = answer.json
    assert (document["replica"], len(document["arrived"]), document["incomplete"]) == ("usb", 1, [])
    assert len(there["usb"].names()) == 1
    assert snaporch("replicate", "web", "--to", "usb").out == "web  usb  up to date\n"


def test_damaged_bundles_on_the_replica_are_printed(there, taken, snaporch):
    record = taken()
    snaporch("replicate", "web")
    copy = there["nas"].root / record.uuid / record.run / "manifest.json"
    copy.write_bytes(b"")
    answer = snaporch("replicate", "web")
    assert answer.out == (
        f"web  nas  1 snapshot replicated, up to @{record.snapshot}; "
        "the replica's bundles of 1 were missing or damaged\n"
    )
    (document,) = snaporch("replicate", "web", "--recheck", "--json").json
    assert (document["arrived"], document["damaged"], document["read"]) == ([], [], 1)
    answer = snaporch("replicate", "web", "--recheck")
    assert answer.out == "web  nas  up to date; 1 of the replica's bundles read, and whole\n"


@pytest.mark.parametrize(("passed", "arrived"), [(59, 1), (3600, 2)])
def test_snapshots_that_were_taken_while_another_guest_was_copied_are_copied_too(
    host, there, taken, scheduled, passed, arrived
):
    host.add_guest("mail", {"vda": "tank/mail"})
    taken("mail", hours=3), taken("web", hours=2)
    now = [1000.0]
    context = scheduled.context
    context.clock = Clock(monotonic=lambda: now[0])

    def while_mail_is_sent():
        there["nas"].hooks.at.clear()
        now[0] += passed
        taken("web")

    there["nas"].hooks.at["replica.send"] = while_mail_is_sent
    targets = choose_targets(context, ["mail", "web"], ["nas"])
    outcomes = replicate_domains(context, targets, lambda _, name: there[name], recheck=False)
    assert [len(outcome.arrived) for _, _, outcome in outcomes] == [1, arrived]


@pytest.mark.parametrize("words", [["--due"], ["web", "mail", "--to", "nas", "--to", "usb"]])
def test_a_replica_is_opened_once(host, command_host, there, taken, snaporch, words):
    """So that the next guest does not wait for a replica that does not answer, either."""
    host.add_guest("mail", {"vda": "tank/mail"})
    taken("mail"), taken("web")
    names = []

    def opened(_context, name):
        names.append(name)
        return there[name]

    command_host.open_replica = opened
    assert snaporch("replicate", *words).code == 0
    assert sorted(names) == sorted({*words} & {"nas", "usb"} or {"nas"})


@pytest.mark.parametrize("words", [["--due"], ["web"]], ids=" ".join)
def test_a_torn_snapshot_is_sent_with_the_others_and_never_called_replicated(
    host, there, taken, snaporch, words
):
    whole, torn = taken(hours=1), taken()
    names = [f"{dataset}@{torn.snapshot}" for dataset in torn.datasets]
    host.pool.set_properties(names, {"snaporch:level": "torn", "snaporch:torn": "yes"})
    answer = snaporch("replicate", *words, "--json")
    assert [each["arrived"] for each in answer.json] == [[whole.snapshot]]
    listed = {each["snapshot"]: each["replicated"] for each in snaporch("list", "--json").json}
    assert listed == {whole.snapshot: ["nas"], torn.snapshot: []}
    copies = {each.full_name: each for each in there["nas"].snapshots(torn.datasets)}
    assert [copies[name].properties["level"] for name in names] == ["torn"] * len(names)
    assert [copies[name].properties["torn"] for name in names] == ["yes"] * len(names)
    assert not (there["nas"].root / torn.uuid / torn.run).exists()


def test_a_failure_is_a_line_and_stops_no_other(host, there, taken, snaporch):
    host.add_guest("mail", {"vda": "tank/mail"})
    taken("mail"), taken("web")
    real = there["nas"].send

    def send(dataset, **options):
        if dataset == "tank/mail":
            raise AWAY
        real(dataset, **options)

    there["nas"].send = send
    answer = snaporch("replicate", "--due", "--quiet")
    assert answer.code == ExitCode.FAILED
    assert answer.out.startswith("web  nas  1 snapshot replicated")
    assert answer.err == "snaporch: nas: cannot be reached: no route to host\n"
    again = snaporch("replicate", "--due")
    assert (again.code, again.out) == (0, "")
    assert "mail  nas  replicate next" in snaporch("plan").out
    assert "retry after a failure: nas: cannot be reached" in snaporch("plan").out


@pytest.mark.parametrize("words", [("replicate", "--due"), ("run-due",)])
def test_failures_are_notified(there, taken, snaporch, notified, words):
    taken()
    there["nas"].hooks.at["replica.send"] = failing(AWAY)
    snaporch(*words)
    assert notified() == [AWAY.line()]


def test_busy_is_not_notified(there, taken, snaporch, notified):
    taken()
    there["nas"].hooks.at["replica.send"] = failing(BusyError("web", "is busy"))
    assert snaporch("replicate", "--due").code == ExitCode.BUSY
    assert notified() == []


def test_status_shows_a_failed_replication(there, taken, snaporch):
    taken()
    assert "replica" not in snaporch("status").out
    there["nas"].hooks.at["replica.send"] = failing(AWAY)
    snaporch("replicate", "--due")
    answer = snaporch("status")
    assert answer.code == ExitCode.WARNINGS
    assert "critical  web: nas: cannot be reached: no route to host  [replica-failed]" in answer.out
    (web,) = snaporch("status", "--json").json["domains"]
    (replica,) = web["replicas"]
    assert (replica["replica"], replica["last"]) == ("nas", None)
    assert replica["failed"] == AWAY.line()
    text = snaporch("status", "--prometheus", "-").out
    assert 'snaporch_replica_last_try_failed{domain="web",replica="nas"} 1.0' in text


def test_status_shows_a_replication_by_hand_that_failed(there, taken, snaporch):
    taken()
    there["nas"].hooks.at["replica.send"] = failing(AWAY)
    assert snaporch("replicate", "web").code == ExitCode.FAILED
    assert f"web: {AWAY.line()}  [replica-failed]" in snaporch("status").out
    assert "retry after a failure" in snaporch("plan").out
    there["nas"].hooks.at.clear()
    assert snaporch("replicate", "web").code == 0
    assert "replica-failed" not in snaporch("status").out


def test_status_shows_a_failure_of_a_replica_that_no_policy_names(there, taken, snaporch):
    """Replications by cron have no policy."""
    taken()
    snaporch("replicate", "web")
    there["usb"].hooks.at["replica.send"] = failing(AWAY)
    assert snaporch("replicate", "--all", "--to", "usb").code == ExitCode.FAILED
    (web,) = snaporch("status", "--json").json["domains"]
    assert [(each["replica"], each["failed"]) for each in web["replicas"]] == [
        ("nas", None),
        ("usb", AWAY.line()),
    ]
    there["usb"].hooks.at.clear()
    assert snaporch("replicate", "--all", "--to", "usb").code == 0
    assert "replica-failed" not in snaporch("status").out


def test_status_shows_a_failed_recheck_although_nothing_is_due(there, taken, snaporch):
    old, _ = taken(hours=2), taken(hours=1)
    snaporch("replicate", "web")
    for bundle in (Path(old.bundle), there["nas"].root / old.uuid / old.run):
        (bundle / "ram.save").unlink()
    assert snaporch("replicate", "web", "--recheck").code == ExitCode.FAILED
    assert "[replica-failed]" in snaporch("status").out


def test_a_domain_without_snapshots_is_no_failed_replication(there, scheduled, taken, snaporch):
    assert snaporch("replicate", "web").code == ExitCode.NOT_FOUND
    assert not (scheduled.context.config.paths.schedule / REPLICATIONS).exists()
    taken()
    assert "replica-failed" not in snaporch("status").out


def test_run_due_replicates_except_with_no_replicate(there, taken, snaporch):
    record = taken()
    snaporch("run-due", "--no-replicate")
    assert there["nas"].names() == []
    answer = snaporch("run-due", "--json")
    (sent,) = answer.json["replicated"]
    assert (sent["domain"], sent["arrived"]) == ("web", [record.snapshot])
    assert answer.code == 0


def test_run_due_has_its_exit_code(there, taken, snaporch):
    taken()
    there["nas"].hooks.at["replica.send"] = failing(AWAY)
    answer = snaporch("run-due")
    assert answer.code == ExitCode.FAILED
    assert AWAY.reason in answer.err


def test_one_replication_at_a_time(host, there, taken, snaporch):
    taken()
    what = REPLICATION
    runtime = host.paths.runtime
    with domain_lock(runtime, what, what, "replicate", wait=0, interrupt=Interrupt()):
        answer = snaporch("replicate", "web")
        due = snaporch("replicate", "--due")
    assert answer.code == ExitCode.BUSY
    assert "replication: held by replicate" in answer.err
    assert due.code == 0
    assert "due replications run later" in due.err
    assert there["nas"].names() == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], ExitCode.USAGE, "expected DOMAIN..."),
        (["web", "--all"], ExitCode.USAGE, "expected DOMAIN..."),
        (["--due", "--to", "nas"], ExitCode.USAGE, "expected DOMAIN..."),
        (["--all", "--to", "away"], ExitCode.NOT_FOUND, "away: no such replica (nas, usb)"),
        (["wbe"], ExitCode.NOT_FOUND, "wbe"),
        (["web"], ExitCode.NOT_FOUND, "web: has no snapshots"),
    ],
)
def test_wrong_arguments_of_replicate(there, snaporch, words, code, said):
    answer = snaporch("replicate", *words)
    assert answer.code == code
    assert said in answer.err


@pytest.mark.parametrize(
    "words",
    [["replicate", "web"], ["undo", "web", "--yes"], ["snapshot", "web"], ["list", "web"]],
    ids=lambda words: words[0],
)
def test_a_guest_that_libvirt_does_not_know_may_be_on_a_replica(host, there, snaporch, words):
    host.hypervisor.guests.clear()
    answer = snaporch(*words)
    assert answer.code == ExitCode.NOT_FOUND
    assert "if this host has lost it: snaporch rebuild web --from nas (or from usb)" in answer.err


def test_an_undefined_guest_without_its_bundle_may_be_on_a_replica(host, there, taken, snaporch):
    """To boot it with --cold is refused, too: there is no definition."""
    record = taken()
    shutil.rmtree(record.bundle)
    host.hypervisor.guests.clear()
    for words in ([], ["--cold"]):
        answer = snaporch("restore", f"web@{record.snapshot}", "--yes", *words)
        assert answer.code == ExitCode.REFUSED
        assert "snaporch rebuild web --from nas" in answer.err
        assert "--cold" not in answer.err


def test_a_replica_must_be_given_or_come_from_a_policy(host, there, taken, snaporch):
    taken()
    text = host.config_file.read_text()
    host.config_file.write_text(text.replace('replicate = ["nas"]\n', ""))
    answer = snaporch("replicate", "web")
    assert answer.code == ExitCode.REFUSED
    assert "web: none of its policies replicates; name a replica: --to NAME" in answer.err


@pytest.mark.parametrize("words", [["--all"], ["--all", "--quiet"]], ids=" ".join)
def test_all_is_no_success_if_no_policy_replicates(host, there, taken, snaporch, words):
    """Of cron it would be a backup that never happens."""
    taken()
    text = host.config_file.read_text()
    host.config_file.write_text(text.replace('replicate = ["nas"]\n', ""))
    answer = snaporch("replicate", *words)
    assert (answer.code, answer.out) == (ExitCode.REFUSED, "")
    assert "--all: no policy of any domain replicates; name a replica (--to NAME)" in answer.err
    assert (there["nas"].names(), there["usb"].names()) == ([], [])
    host.config_file.write_text(text.replace('replicate = ["nas"]\n', "") + "[domain.web]\n")
    assert snaporch("replicate", "--due").code == 0


def test_all_names_the_guests_that_no_policy_replicates(host, there, taken, snaporch):
    host.add_guest("mail", {"vda": "tank/mail"})
    host.add_guest("db", {"vda": "tank/db"})
    taken("mail"), taken("web")
    text = host.config_file.read_text()
    host.config_file.write_text(f"{text}[domain.mail]\npolicies = []\n[domain.db]\npolicies = []\n")
    answer = snaporch("replicate", "--all", "--quiet")
    assert (answer.code, answer.out.startswith("web  nas  1 snapshot")) == (0, True)
    assert "no policy of these replicates: " in answer.err
    assert {"mail", "db"} == {*answer.err.strip().rpartition(": ")[2].split(", ")}
    assert "no policy" not in snaporch("replicate", "--all", "--to", "usb").err


def test_all_is_no_success_if_no_guest_has_snapshots(there, snaporch):
    answer = snaporch("replicate", "--all", "--to", "usb")
    assert answer.code == ExitCode.NOT_FOUND
    assert "--all: no domain has snapshots to replicate" in answer.err


def test_a_bundle_that_is_incomplete_is_printed(there, taken, snaporch):
    record, _ = taken(hours=1), taken()
    (Path(record.bundle) / "ram.save").unlink()
    answer = snaporch("replicate", "web")
    assert answer.code == 0
    assert "1 snapshot replicated" in answer.out
    assert "1 without their bundles, which are not whole here" in answer.out


@pytest.mark.parametrize(("host_name", "listed"), [("", 1), ("nas", 2)])
def test_copies_on_a_pool_of_this_host_are_not_listed(
    host, there, scheduled, taken, snaporch, host_name, listed
):
    """Their bundles are on the replica; a copy that another host sent is listed."""
    text = host.config_file.read_text().replace(
        'host = "nas"\ndataset = "backup"', f'host = "{host_name}"\ndataset = "tank/copies"'
    )
    host.config_file.write_text(text)
    taken()
    scheduled.copied(datetime.now(UTC) - timedelta(days=9))
    assert len(snaporch("list", "--json").json) == listed
    found = snaporch("verify", "--all", "--checksums", "--json").json
    assert [each["passed"] for each in found] == [False, True][-listed:]
