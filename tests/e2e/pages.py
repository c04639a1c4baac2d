"""The command blocks of the README and of docs/how-to, and how their output is compared."""

import re
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]

RUN = {
    "README.md": (
        "# snaporch snapshot demo --name before-upgrade",
        "# snaporch list",
        "# snaporch restore demo@before-upgrade --yes",
    ),
    "docs/how-to/check.md": (
        "snaporch check                  # everything",
        "mkdir -p /etc/sanoid && snaporch render sanoid >>/etc/sanoid/sanoid.conf",
        "zfs set recordsize=16K tank/vm/web",
        "find /var/lib/snaporch/overlays -name '*.qcow2'",
        "df -h /var/lib/snaporch/overlays",
        "findmnt -T /var/lib/snaporch/overlays",
        "zfs create -o encryption=on -o keyformat=passphrase tank/bundles",
        "findmnt -T /var/lib/snaporch/bundles",
        "zfs create -o encryption=on -o keyformat=passphrase tank/secret",
    ),
    "docs/how-to/clone.md": ("# snaporch clone web@before-upgrade test",),
    "docs/how-to/delete.md": (
        "# snaporch delete demo@before-upgrade --dry-run",
        "# snaporch keep demo@before-upgrade",
        '# snaporch snapshot demo --name before-upgrade --note "before the upgrade to 14"',
    ),
    "docs/how-to/groups.md": (
        "[group.shop]",
        "# snaporch snapshot --group shop --name before-upgrade",
        "snaporch restore db@before-upgrade --group",
    ),
    "docs/how-to/logging.md": ("# snaporch --verbose snapshot web1 --name before-upgrade",),
    "docs/how-to/pruning.md": (
        "# snaporch prune --dry-run",
        "15 4 * * *  root  /usr/bin/snaporch prune",
    ),
    "docs/how-to/recovery.md": (
        "snaporch recover --dry-run",
        "guest=web",
        'zfs snapshot "$dataset@compare"',
        '$as qemu-img compare "$upper" "json:$lower"',
        "state=base",
        'virsh destroy "$guest-$state"',
        '$as qemu-img commit -d "$upper"',
        'rm -f "$overlay"',
        "top=/tank/vm/web/disk.backup",
    ),
    "docs/how-to/replication.md": (
        "[replica.offsite]",
        "guest=web",
        "name=$(tail -n 1 copies.txt | cut -f 2 | cut -d @ -f 2)",
        'mkdir -p -m 700 "$store"',
        'virsh domuuid "$guest" || virsh define "$store/$bundle/domain.xml"',
        "[backup/kvm]",
    ),
    "docs/how-to/restore.md": (
        "snaporch restore web@before-upgrade",
        "zfs diff tank/vm/web@before-upgrade",
        "snaporch undo web",
    ),
    "docs/how-to/schedule.md": ("[policy.hourly]", "# snaporch plan web"),
    "docs/how-to/show.md": (
        "snaporch show web@nightly > web-nightly.txt",
        "by hand, with zfs and virsh alone:",
    ),
    "docs/how-to/status.md": ("# snaporch status",),
    "docs/how-to/verify.md": ("# snaporch verify web@nightly",),
}
"""The blocks that tests/e2e/test_pages.py runs, by their first lines, in this order."""
_OUTPUT = "is what a command prints"
_PACKAGE = "tests/package/inside installs and removes the package in bare systems"
_PLACES = "has placeholders; a test has the commands with names: "
_OUTPUT_OF_EXPORT = "test_export runs it, with names of its own"
_PLACES_OF_FILES = "the lab has no libguestfs; tests/integration/test_guest_files.py runs it"
NOT_RUN = {
    "docs/how-to/clone.md": {
        "# seq 10 | xargs": "test_several_clones_of_one_snapshot_are_made_at_once makes two",
    },
    "docs/how-to/databases.md": {
        "scp /usr/share/snaporch/guest/postgresql": "installs in a guest; test_databases has both",
        "scp /usr/share/snaporch/guest/mariadb": "installs in a guest; test_databases has it",
        "[general]": "is a file in a guest; that of test_databases has it",
        "[domain.db]": "test_databases has such a section",
    },
    "README.md": {
        "make demo": "runs the lab",
        "make test": "runs these tests",
        "make deb": _PACKAGE,
    },
    "docs/how-to/check.md": {
        "error  [tank/web]  [script-timeout]": _OUTPUT,
        "next: take a first snapshot: snaporch snapshot web": _OUTPUT,
        "zpool import": "the lab's pools are imported",
        "ssh -o BatchMode=yes root@nas": "test_a_lost_guest_comes_back runs it",
    },
    "docs/how-to/export.md": {
        "# snaporch export web@nightly": _OUTPUT_OF_EXPORT,
        "# snaporch import web@nightly.tar.zst": _OUTPUT_OF_EXPORT,
        "ssh vm1 snaporch export web@nightly - |": _OUTPUT_OF_EXPORT,
        "mkdir web && tar --zstd": _OUTPUT_OF_EXPORT,
    },
    "docs/how-to/failover.md": {
        "# here": "names another host",
        "snaporch failover web --to offsite": _PLACES + "test_failover",
        "snaporch failover web --to home": _PLACES + "test_failover",
        "zfs create -p -o mountpoint=none backup/home": _PLACES + "test_failover",
    },
    "docs/how-to/files.md": {
        "# snaporch files web@nightly": _PLACES_OF_FILES,
        "# snaporch mount web@nightly": _PLACES_OF_FILES,
    },
    "docs/how-to/groups.md": {
        "snapshot=before-upgrade": "tests/unit/restore/test_group_by_hand.py runs it, with stubs",
    },
    "docs/how-to/install.md": {
        "apt update": "needs a kernel module",
        "make deb": _PACKAGE,
        "make deb FLAVOUR=vendored": _PACKAGE,
        "python3 -m venv --system-site-packages /opt/snaporch": "needs a package registry",
        "systemctl enable snaporch-recover": "test_boot_systemd starts the unit",
        "apt remove snaporch": _PACKAGE,
    },
    "docs/how-to/logging.md": {"journalctl DOMAIN=web1": "the journal belongs to systemd"},
    "docs/how-to/notify.md": {
        "[notify]": "names services of others",
        '{"event": "failure"': _OUTPUT,
        "ntfys://ntfy.example.org/snapshots": "names services of others",
    },
    "docs/how-to/object-storage.md": {
        "apt install restic": "needs a package registry",
        "[replica.cloud]": "test_restic has it as its configuration",
        "AWS_ACCESS_KEY_ID=…": "is a key of a service of others",
        "(set -a; . /etc/snaporch/cloud-environment": "needs object storage; test_restic runs it",
        "bash": "needs object storage; test_restic runs it",
        "find /srv/restic/vm1/snapshots": "names another machine; the files are named by ID",
        "snaporch rebuild web --from cloud": "test_restic runs it, without --dry-run",
        "restic snapshots --tag kind=stream": _PLACES + "test_restic",
        "restic check --read-data-subset=10%": "is restic's own",
        "keep = { daily = 30": "test_object_storage has such a configuration",
        "snaporch prune --dry-run --kept": "test_object_storage runs it, with the real restic",
        "tag=chain=tank/vm/web@1234567890": _PLACES + "test_restic_contract",
    },
    "docs/how-to/pruning.md": {
        "[template_guests]": "test_sanoid has the configuration",
        "mv STORE/.trash/20261121T142229Z.UUID.RUN STORE/UUID/RUN": _PLACES + "test_prune",
    },
    "docs/how-to/pull.md": {
        "zfs create -o canmount=off": "test_pull runs it",
        'restrict,command="snaporch send': "test_pull has it in authorized_keys",
        "Host vm1": "test_pull has it in its configuration of ssh",
        "[source.vm1]": "test_pull has it as its configuration",
        "keep = { hourly = 720": "test_copies_retention has such a configuration",
        "ssh vm1": "test_pull runs it, without the timer",
        "zfs create -o encryption=on -o keyformat=passphrase -o quota": "asks for a passphrase",
        "zfs set snaporch:new-key=DIGEST": "test_pull runs the one that the error has",
        "snaporch rebuild web --from vm1": "test_pull runs it, without --dry-run",
        "[replica.pulled]": "names another host",
    },
    "docs/how-to/recovery.md": {
        "systemctl enable snaporch-recover": "test_boot_systemd starts the unit",
        "error: Failed to start domain 'web'": _OUTPUT,
        "snaporch: web: could not be returned": _OUTPUT,
    },
    "docs/how-to/replication.md": {
        "apt install age": "test_encrypted_bundles makes keys by it",
        "apt install rsync mbuffer": "needs another host",
        "encrypt_to = [": "test_encrypted_bundles has it in its configuration",
        "17 * * * *  root  /usr/bin/snaporch replicate --all --to offsite --quiet": "as above",
        "network a day = H": "is a formula",
        "[copies.vm1]": "test_copies_retention has such a configuration",
        "snaporch prune --dry-run --kept": "test_copies_retention runs it",
        'window = "22:00-06:00"': "needs a night",
        "user=snaporch-vm1 dataset=backup/vm1": "test_append_only runs it",
        "[replica.nas]": "test_append_only has it as its configuration",
        "bundles=/backup/snaporch": "tests/unit/rebuild/test_by_hand.py runs it, without a replica",
        "snaporch rebuild web --from offsite": "test_rebuild runs it, without the question",
        "dataset=backup/vm1 limit=": "test_append_only runs it",
        "zfs list -H -o name -t bookmark -r tank/vm": _PLACES + "test_replicate_faults",
    },
    "docs/how-to/restore.md": {
        "error: Cannot access storage file": _OUTPUT,
    },
    "docs/how-to/sanoid.md": {
        "[tank/vm]": "test_sanoid has the configuration",
        "# snaporch list web": "test_sanoid has snapshots of sanoid",
        "plan = 120 s + the longer of wait and hook_deadline": "is a formula",
    },
    "docs/how-to/schedule.md": {
        "systemctl enable snaporch-recover": "test_units_systemd starts the units",
        "systemctl enable --now snaporch.service": "test_units_systemd starts the units",
        "# snaporch snapshot --all --jobs 4": "shows a guest that is being migrated",
        "zfs inherit snaporch:retention": _PLACES + "test_retention",
    },
    "docs/how-to/show.md": {"losetup --find": "needs loop and nbd devices"},
    "docs/how-to/status.md": {
        "# snaporch status --nagios": "shows a policy that failed",
        "nagios ALL=(root) NOPASSWD: /usr/bin/snaporch status --nagios": "is a line for sudoers",
    },
    "docs/how-to/verify.md": {
        "[domain.db]": "test_databases has such a section",
        "snaporch verify --on offsite": "test_verify_on runs it",
        "snaporch verify --on vm1": "test_pull runs it",
    },
}
"""The other blocks, by how their first lines begin, each with the reason."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    text: str

    @property
    def first(self) -> str:
        """Its first line, which names it."""
        return self.text.splitlines()[0].strip()

    def commands(self) -> list[tuple[str, list[str] | None]]:
        """Each command, and the lines that it prints according to the page.

        In a block without prompts each line is a command, whose output is not shown: ``None``, as
        where a block with prompts shows none. A line of a crontab is the command in it.
        """
        lines = self.text.splitlines()
        if not lines[0].startswith("# "):
            return [(re.sub(r"^(\S+ ){5} *root +", "", line), None) for line in lines]
        found: list[tuple[str, list[str]]] = []
        for line in filter(None, lines):
            if line.startswith("# "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
        return [
            (command, shown if any(more for _, more in found) else None) for command, shown in found
        ]


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in its order."""
    text = (TOP / page).read_text("utf-8")
    found = re.findall(r"^( *)```\w*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [
        Block(page, re.sub(f"^{indent}", "", body, flags=re.MULTILINE)) for indent, body in found
    ]


_SIZE = r"\d[\d.]* ?(?:[KMGT]iB|[BKMGT])(?![\w-])"
_SPAN = r"\d[\d.]* ?(?:ms|s|m|h|d)(?: \d+ ?[smh])?(?![\w-])"
_PARTS = {
    "…": ".*",
    r"\d{8}T\d{6}Z": r"\d{8}T\d{6}Z",
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+": r"[\d-]+ [\d:]+ [A-Z]+",
    r"(?<=-)[0-9a-f]{8}\b": "[0-9a-f]{8}",
    _SIZE: _SIZE,
    _SPAN: _SPAN,
    r"\d+": r"\d+",
    " +": " +",
}
"""What differs from run to run, and what stands for it: the first that matches counts."""


def shape(line: str) -> re.Pattern[str]:
    """Matches a line that differs from this one in times, sizes, counts and widths only."""
    every = re.compile("|".join(f"({pattern})" for pattern in _PARTS))
    parts = list(_PARTS.values())
    made, at = "", 0
    for match in every.finditer(line):
        made += re.escape(line[at : match.start()])
        made += parts[match.lastindex - 1]
        at = match.end()
    return re.compile(made + re.escape(line[at:]))


def differences(shown: list[str], printed: list[str]) -> list[str]:
    """Lines of the page that were not printed, and printed lines that are not on the page.

    The order of the lines of several guests is chance. ``...`` stands for any lines.
    """
    left = [line.rstrip() for line in printed if line.strip()]
    wrong = []
    for line in shown:
        if line == "...":
            continue
        found = next((each for each in left if shape(line).fullmatch(each)), None)
        if found is None:
            wrong.append(f"is not printed: {line}")
        else:
            left.remove(found)
    return wrong + ([] if "..." in shown else [f"is not on the page: {line}" for line in left])
