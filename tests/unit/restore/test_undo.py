"""The script that undoes a restore: it looks at everything before it touches anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from snaporch.restore.barrier import left_barred
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.restore import restore

_TOOL = """#!{python}
import json, os, sys
from pathlib import Path

here = Path({here!r})
facts = json.loads((here / "facts.json").read_text())
tool, asked = Path(sys.argv[0]).name, sys.argv[1:]
if tool == "zfs" and asked[0] == "get":
    key, name = asked[3].partition("@")[0], asked[4]
    if name not in facts:
        sys.exit(1)
    print(facts[name][key])
elif tool == "zfs" and asked[0] == "list":
    print("\\n".join(facts["newer"]))
elif tool == "findmnt":
    print(facts["mount"])
    sys.exit(not facts["mount"])
elif tool == "virsh" and asked[0] in ("domstate", "dominfo", "list"):
    if facts["down"]:
        sys.exit(1)
    print({{"domstate": facts["state"], "dominfo": facts["info"], "list": ""}}[asked[0]])
else:
    with (here / "done").open("a") as log:
        print(tool, *asked, file=log)
"""


class Host:
    """Stand-ins for zfs, virsh and findmnt, which say what ``facts`` has."""

    def __init__(self, here, story, script):
        self.here, self.script = here, script
        for tool in ("zfs", "virsh", "findmnt"):
            (here / tool).write_text(_TOOL.format(python=sys.executable, here=str(here)))
            (here / tool).chmod(0o755)
        self.facts = {
            "newer": [],
            "mount": "",
            "state": "shut off",
            "info": "Managed save:   no",
            "down": False,
        }
        for snapshot in story.world.pool.snapshots():
            self.facts[snapshot.full_name] = {"guid": snapshot.guid, "createtxg": 100}
            self.facts[snapshot.dataset] = {
                "available": 1 << 30,
                "written": 0,
                "type": "filesystem",
            }

    def undo(self):
        """Its status, what it said, and what it did."""
        (self.here / "facts.json").write_text(json.dumps(self.facts))
        path = {**os.environ, "PATH": f"{self.here}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["sh", self.script], env=path, capture_output=True, text=True, check=False
        )
        log = self.here / "done"
        return done.returncode, done.stderr, log.read_text() if log.exists() else ""


@pytest.fixture
def host(story, world, tmp_path_factory):
    plan = make_restore_plan(world.context, "web", "s1", discard_newer=True)
    script = restore(world.context, plan, safety=True).undo
    return Host(tmp_path_factory.mktemp("host"), story, script)


def refused(host, *words):
    status, said, done = host.undo()
    assert (status, done) == (5, "")
    for word in (*words, "nothing was touched"):
        assert word in said


def test_nothing_in_the_way(host):
    status, said, done = host.undo()
    assert (status, said) == (0, "")
    lines = done.splitlines()
    assert lines[0] == "virsh define barred.xml"
    assert lines.count("zfs rollback -r tank/web@s1") == lines.count("virsh define domain.xml") == 1
    assert not [line for line in lines if "managedsave-remove" in line]


@pytest.mark.parametrize("dataset", ["tank/web", "flash/web"])
def test_a_target_that_is_gone_or_another(host, dataset):
    """Whichever it is: before the first is rolled back."""
    host.facts[f"{dataset}@s1"]["guid"] += 1
    refused(host, f"{dataset}@s1 is gone, or is another of that name")
    del host.facts[f"{dataset}@s1"]
    refused(host, f"{dataset}@s1 is gone, or is another of that name")


@pytest.mark.parametrize(("holds", "clones"), [("1", "-"), ("0", "tank/test")])
def test_what_cannot_be_destroyed(host, holds, clones):
    host.facts["newer"] = ["99\t1\ttank/x\ttank/web@old", f"101\t{holds}\t{clones}\ttank/web@new"]
    refused(host, "tank/web@new")


def test_no_room(host):
    host.facts["flash/web"]["available"] = 3
    refused(host, "flash/web has no room")
    host.facts["flash/web"]["written"] = 1 << 20
    assert host.undo()[0] == 0


def test_disks_that_somebody_uses(host):
    """Under whatever name: their files are open."""
    with (host.here / "image").open("w"):
        host.facts["mount"] = str(host.here)
        refused(host, "is in use: /proc/")


def test_a_libvirt_that_does_not_answer(host):
    host.facts["down"] = True
    refused(host, "libvirt does not answer")


def test_a_managed_save_made_since_goes(host):
    """A start would resume it on disks that it is not of."""
    host.facts["info"] = "Managed save:   yes"
    _, _, done = host.undo()
    lines = done.splitlines()
    (place,) = [index for index, line in enumerate(lines) if "managedsave-remove" in line]
    assert place < lines.index("zfs rollback -r tank/web@s1")


def test_a_guest_left_barred_by_an_undo_is_told_of(host, story, world):
    assert left_barred(world.context) == []
    world.guest().inactive = (Path(host.script).parent / "barred.xml").read_text()
    (error,) = left_barred(world.context)
    assert host.script in error.line()
    assert "snaporch restore" in error.line()
