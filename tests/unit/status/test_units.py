from snaporch.status import units

SHOWN = """LoadState=loaded
Id=snaporch.service
ActiveState=active

Id=snaporch-run-due.timer
LoadState=not-found
ActiveState=inactive
"""


def test_units_that_exist():
    assert units.parse(SHOWN) == {"snaporch.service": "active"}
    assert units.parse("") == {}


def test_without_systemd_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "SYSTEMD", tmp_path / "no")
    assert units.unit_states() == {}


def test_a_systemctl_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "SYSTEMD", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert units.unit_states() == {}
