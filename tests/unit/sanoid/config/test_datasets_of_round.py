import pytest
from fakes.sanoid import script

from snaporch.errors import ConfigError
from snaporch.sanoid.config.datasets_of_round import conf_of, promised, takes_children
from snaporch.sanoid.hooks.caller import Caller

DEFAULTS = """\
[version]
version = 2
[template_default]
recursive =
use_template =
skip_children =
process_children_only =
autosnap =
hourly = 48
daily = 90
pre_snapshot_script =
post_snapshot_script =
"""
HOOKED = """
[template_vm]
autosnap = yes
pre_snapshot_script = pre
post_snapshot_script = post
[template_bare]
autosnap = yes
"""


@pytest.fixture
def conf(tmp_path):
    def read(text, pid=1):
        (tmp_path / "sanoid.defaults.conf").write_text(DEFAULTS)
        (tmp_path / "sanoid.conf").write_text(text + HOOKED)
        return conf_of(Caller(pid, tmp_path))

    return read


def test_a_recursive_snapshot_includes_the_children(conf):
    read = conf("[tank]\nuse_template = vm\nrecursive = zfs\n[data]\nuse_template = vm\n")
    assert takes_children(read, "tank")
    assert not takes_children(read, "data")
    assert not takes_children(read, "elsewhere")


@pytest.mark.parametrize("recursive", ["yes", "zfs"])
def test_datasets_of_a_recursive_section_are_promised(conf, recursive):
    read = conf(f"[tank]\nuse_template = vm\nrecursive = {recursive}\n")
    assert promised(read, "tank/a", ["tank/a", "tank/b", "data/a"]) == {"tank/a", "tank/b"}


def test_a_dataset_with_another_schedule_is_not_waited_for(conf):
    sections = "[a]\nuse_template = vm\n[b]\nuse_template = vm\ndaily = 0\n"
    assert promised(conf(sections), "a", ["a", "b"]) == {"a"}


@pytest.mark.parametrize(
    "other", ["use_template = bare", "use_template = vm\nautosnap = no", "use_template ="]
)
def test_a_dataset_without_hooks_is_not_waited_for(conf, other):
    assert promised(conf(f"[a]\nuse_template = vm\n[b]\n{other}\n"), "a", ["a", "b"]) == {"a"}


def test_a_section_for_children_only(conf):
    sections = (
        "[a]\nuse_template = vm\n[b]\nuse_template = vm\nprocess_children_only = yes\n"
        "recursive = yes\n"
    )
    assert promised(conf(sections), "a", ["a", "b", "b/c"]) == {"a", "b/c"}


@pytest.mark.parametrize(("release", "awaited"), [("2.2.0", {"t/a", "t/new"}), ("2.3.0", {"t/a"})])
def test_a_dataset_that_a_running_sanoid_has_not_listed_is_not_waited_for(
    conf, tmp_path, release, awaited
):
    conf("[t]\nuse_template = vm\nrecursive = yes\n")
    (tmp_path / "datasets.txt").write_text("t\nt/a\n")
    caller = Caller(1, tmp_path, script(tmp_path, release), tmp_path)
    assert promised(conf_of(caller), "t/a", ["t/a", "t/new"]) == awaited


def test_without_sanoid_no_configuration_is_needed(tmp_path):
    assert conf_of(Caller(0, tmp_path)) is None
    with pytest.raises(ConfigError):
        conf_of(Caller(1, tmp_path))
