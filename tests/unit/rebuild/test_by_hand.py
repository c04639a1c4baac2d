"""The commands that find the copies of a guest whose snapshots have the marks of another."""

import json
import subprocess
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "replication.md"
SSH = """#!/bin/sh
shift
case "$*" in
    zfs*) printf '11\\tbackup/kvm/tank:vm@s1\\n12\\tbackup/kvm/tank:vm@s2\\n' ;;
    *) PATH=/usr/bin:/bin sh -c "$(printf %s "$*" | sed "s|/backup/snaporch|$STORE|g")" ;;
esac
"""


def test_they_list_what_the_newest_bundle_names(tmp_path):
    block = next(
        each
        for each in PAGE.read_text().split("```sh\n")[1:]
        if each.startswith("bundles=/backup/snaporch\n")
    ).partition("```")[0]
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    for uuid, run, name, guid in (
        ("u1", "20260102-a", "db", 12),
        ("u1", "20260101-a", "db", 11),
        ("u0", "20260103-a", "app", 13),
    ):
        place = tmp_path / "store" / uuid / run
        place.mkdir(parents=True)
        document = {"domain": name, "snapshots": [{"guid": guid}]}
        (place / "manifest.json").write_text(json.dumps(document, indent=2))
    done = subprocess.run(
        ["sh", "-euc", f"guest=db\n{block}"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "STORE": str(tmp_path / "store")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "db\tbackup/kvm/tank:vm@s2\tu1/20260102-a\n"
