from pathlib import Path

from snaporch.systemd.configurations_in_units import unit_configurations


def test_units_and_drop_ins_with_a_configuration_are_found(tmp_path):
    (tmp_path / "snaporch.service").write_text(
        "[Service]\nExecStart=/usr/bin/snaporch --config /etc/o.toml daemon\n"
    )
    (tmp_path / "snaporch-run-due.service").write_text("ExecStart=/usr/bin/snaporch run-due\n")
    (tmp_path / "other.service").write_text("ExecStart=/bin/x --config /etc/x.toml\n")
    dropin = tmp_path / "snaporch-verify.service.d"
    dropin.mkdir()
    (dropin / "a.conf").write_text(
        'ExecStart=\nExecStart=/usr/bin/snaporch --config "/etc/a b.toml" x\n'
    )
    assert unit_configurations([tmp_path, tmp_path / "absent"]) == {
        Path("/etc/o.toml"): {"snaporch.service"},
        Path("/etc/a b.toml"): {"snaporch-verify.service"},
    }
