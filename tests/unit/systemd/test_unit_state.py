from snaporch.default_paths import HostPaths
from snaporch.systemd import unit_state

SHOWN = """LoadState=loaded
Id=snaporch.service
ActiveState=active

Id=snaporch-run-due.timer
LoadState=not-found
ActiveState=inactive
"""


def test_units_that_exist():
    assert unit_state.parse(SHOWN) == {"snaporch.service": "active"}
    assert unit_state.parse("") == {}


def test_without_systemd_there_are_none(tmp_path):
    assert unit_state.unit_states(HostPaths(run=tmp_path)) == {}


def test_a_systemctl_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "systemd/system").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert unit_state.unit_states(HostPaths(run=tmp_path)) == {}
