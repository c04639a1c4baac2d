import subprocess
import sys

import pytest
from fakes.sanoid import DEFAULTS, SAMPLES
from hypothesis import given
from hypothesis import strategies as st

from snaporch.errors import ExitCode
from snaporch.sanoid.config.resolve import SanoidConfigError, load_sanoid, release_of

DATASETS = ("flash", "tank", "tank/a", "tank/p", "tank/p/child", "tank/p/child/deep", "tank/q")


def samples(kind):
    found = sorted((SAMPLES / kind).glob("*.conf"))
    assert found
    return pytest.mark.parametrize("path", found, ids=[path.stem for path in found])


def put(tmp_path, path):
    (tmp_path / "sanoid.conf").write_bytes(path.read_bytes())
    return tmp_path


@samples("good")
def test_good_samples_load(path, tmp_path):
    assert load_sanoid(put(tmp_path, path), DATASETS, DEFAULTS).sections


@samples("bad")
def test_bad_samples_are_refused_with_the_file(path, tmp_path):
    with pytest.raises(SanoidConfigError) as caught:
        load_sanoid(put(tmp_path, path), DATASETS, DEFAULTS)
    assert str(caught.value).startswith(f"{tmp_path}/sanoid.conf")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == ExitCode.CONFIG


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(SanoidConfigError, match=r"sanoid\.conf: No such file"):
        load_sanoid(tmp_path, (), DEFAULTS)


def test_old_defaults_are_refused(tmp_path, sanoid_conf):
    old = tmp_path / "sanoid.defaults.conf"
    old.write_text("[template_default]\nhourly = 1\n")
    (tmp_path / "sanoid.conf").write_text("[tank]\n")
    with pytest.raises(SanoidConfigError, match="is of version 1"):
        load_sanoid(tmp_path, (), old)


def test_a_setting_that_this_sanoid_does_not_know_is_fatal(tmp_path):
    """``pre_pruning_script`` came with 2.2."""
    older = tmp_path / "sanoid.defaults.conf"
    kept = [k for k in DEFAULTS.read_text().splitlines() if not k.startswith("pre_pruning")]
    older.write_text("\n".join(kept) + "\n")
    (tmp_path / "sanoid.conf").write_text("[tank]\npre_pruning_script = x\n")
    assert load_sanoid(tmp_path, (), DEFAULTS)
    with pytest.raises(SanoidConfigError, match="pre_pruning_script is no setting"):
        load_sanoid(tmp_path, (), older)


def test_defaults_templates_own(sanoid_conf):
    config = sanoid_conf(
        "[tank]\nuse_template = one, two \ndaily = 3\n"
        "[template_default]\nyearly = 9\n"
        "[template_one]\nhourly = 1\ndaily = 1\nweekly = 1\n"
        "[template_two]\nweekly = 2\n"
    )
    settings = config.sections["tank"].settings
    wanted = {"hourly": "1", "daily": "3", "weekly": "2", "yearly": "9", "monthly": "6"}
    assert {key: settings[key] for key in wanted} == wanted
    assert settings["script_timeout"] == "5"


def test_recursion_makes_sections(sanoid_conf):
    config = sanoid_conf("[tank/p]\nrecursive = yes\nhourly = 7\n", *DATASETS)
    assert set(config.sections) == {"tank/p", "tank/p/child", "tank/p/child/deep"}
    child = config.sections["tank/p/child"]
    assert (child.settings["hourly"], child.origin, child.recursive) == ("7", "tank/p", "no")
    assert child.autosnap
    assert config.sections["tank/p"].recursive == "yes"


def test_zfs_recursion_covers_the_datasets_below(sanoid_conf):
    config = sanoid_conf("[tank/p]\nrecursive = zfs\n", *DATASETS)
    assert not config.sections["tank/p/child"].autosnap
    covering = config.covering("tank/p/child/deep")
    assert (covering.name, covering.recursive) == ("tank/p", "zfs")


def test_a_dataset_that_does_not_exist_is_resolved(sanoid_conf):
    config = sanoid_conf("[tank/p]\nrecursive = yes\n")
    assert set(config.sections) == {"tank/p"}
    assert config.covering("tank/p/new").origin == "tank/p"


@pytest.mark.parametrize(
    ("text", "covered"),
    [
        ("[tank/p]\n", False),
        ("[tank/p]\nrecursive = no\n", False),
        ("[tank/p]\nrecursive = yes \n", False),  # a blank at the end is part of it
        ("[tank/p]\nrecursive = yes\n", True),
        ("[tank/p]\nrecursive = zfs \n", True),
        ("[tank/p]\nrecursive = ZFS\n", True),
        ("[tank/p]\nrecursive = zfs\nprocess_children_only = yes\n", False),
        ("[tank/p]\nrecursive = yes\nprocess_children_only = yes\n", True),
        ("[tank/p]\nrecursive = yes\nskip_children = yes\n", False),
        ("[tank/p]\nrecursive = yes\nautosnap = no\n", False),
        ("[tank/p]\nrecursive = yes\n[tank/p/child]\nautosnap = off\n", False),
        ("[tank/p/child]\nautosnap = off\n[tank/p]\nrecursive = yes\n", True),
        ("[tank]\nrecursive = yes\n[tank/p]\nskip_children = yes\n", False),
        ("[web]\npath = tank/p/child\n", True),
        ("[template_x]\n[tank/p/child]\nuse_template = x\n", True),
        ("[template_x]\nrecursive = zfs\n[tank/p]\nuse_template = x\n", False),
        (
            "[tank/p/child]\nhourly = 0\ndaily = none\nmonthly = 0\nyearly=0\nfrequently=\n",
            False,
        ),
    ],
)
def test_covered_datasets(sanoid_conf, text, covered):
    assert (sanoid_conf(text).covering("tank/p/child") is not None) is covered


def test_the_section_of_the_dataset_itself_counts_first(sanoid_conf):
    config = sanoid_conf("[web]\npath = tank/a\n[tank/a]\n[tank]\nrecursive = zfs\nhourly = 1\n")
    assert config.covering("tank/a").name == "web"
    assert not config.covering("tank/a").runs_hooks
    both = sanoid_conf("[web]\npath = tank/a\n[tank/a]\n")
    assert both.covering("tank/a").runs_hooks


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("5", 5),
        ("0", 0),
        ("", 0),
        ("-1", 0),
        ("+5", 0),
        ("00", 0),
        ("60 # a minute", 60),
        ("ten", 0),
        ("0.5", 0),
    ],
)
def test_the_timeout_as_perl_reads_it(sanoid_conf, written, seconds):
    assert sanoid_conf(f"[tank]\nscript_timeout = {written}\n").sections["tank"].timeout == seconds


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[tank]\nhourly = 1\nhourly = 2\n", "[tank] sets hourly more than once"),
        ("[tank]\nuse_template = no\n", "[tank] uses the template no, which does not exist"),
        ("[tank]\nuse_template = t\n[template_t]\nrecursive = yes\n", "[template_t] sets rec"),
        ("[tank/a]\n[tank]\nrecursive = yes\n", "[tank/a] stands above [tank]"),
        (
            "[tank]\nrecursive = zfs\n[tank/a]\nautosnap = 1\n",
            "[tank/a] is part of a zfs recursion",
        ),
    ],
)
def test_ignored_settings_are_reported(sanoid_conf, text, complaint):
    (found,) = sanoid_conf(text, "tank", "tank/a").complaints
    assert found.startswith(complaint)


def test_a_sound_configuration_has_no_complaint(sanoid_conf):
    text = "[tank]\nrecursive = yes\nuse_template = t\n[tank/a]\nhourly = 1\n[template_t]\n"
    assert sanoid_conf(text, "tank", "tank/a").complaints == ()


LINES = st.sampled_from(
    [f"[{name}]" for name in ("tank", "tank/p", "tank/p/child", "flash", "template_t")]
    + [f"recursive = {value}" for value in ("yes", "no", "zfs")]
    + [f"{key} = {value}" for key in ("autosnap", "skip_children") for value in ("yes", "no")]
    + ["use_template = t", "hourly = 1", "process_children_only = yes", "path = tank/p"]
)


@given(st.lists(LINES, max_size=12), st.sampled_from(DATASETS))
def test_coverage_does_not_depend_on_known_datasets(lines, dataset):
    """So :meth:`covering` is right for a dataset that was created after the file was read."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as directory:
        text = "\n".join(["[tank/q]", *lines]) + "\n"
        Path(directory, "sanoid.conf").write_text(text)
        among_all = load_sanoid(Path(directory), DATASETS, DEFAULTS)
        unknown = load_sanoid(Path(directory), (), DEFAULTS)
    assert unknown.covering(dataset) == among_all.covering(dataset)
    covering = among_all.covering(dataset)
    if covering is not None:
        assert covering == among_all.sections[covering.name]


def test_it_is_cheap_to_import():
    program = "import sys, snaporch.sanoid.config.resolve; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.split()
    for heavy in ("pydantic", "typer", "rich", "libvirt", "jinja2", "subprocess", "tenacity"):
        assert heavy not in loaded


@pytest.mark.parametrize(
    ("said", "release"),
    [
        ("$::VERSION = '2.2.0';", (2, 2)),
        ("$::VERSION = '2.3.0';", (2, 3)),
        ("$::VERSION = '2.10.1';", (2, 10)),
        ("# $::VERSION = '2.3.0';", (0, 0)),
        ("my $version = '2.3.0';", (0, 0)),
    ],
)
def test_the_release_of_a_script(tmp_path, said, release):
    program = tmp_path / "sanoid"
    program.write_text(f"#!/usr/bin/perl\n{said}\nuse strict;\n")
    assert release_of(program) == release


def test_an_unreadable_script_has_no_release(tmp_path):
    assert release_of(tmp_path) == release_of(tmp_path / "none") == release_of(None) == (0, 0)


@pytest.mark.parametrize(
    ("text", "before", "since"),
    [
        ("[tank/p]\nrecursive = yes \n", None, "tank/p"),
        ("[tank/p/child]\nautosnap = no\t\n", "tank/p/child", None),
        ("[web]\npath =<<E\n tank/p/child\nE\n", None, "web"),
        ("[template_t]\nautosnap = no \n[tank/p/child]\nuse_template = t\n", "tank/p/child", None),
        (  # too late for values that were copied already
            "[tank/p/child]\nuse_template = t\n[template_t]\nautosnap = no \n",
            "tank/p/child",
            "tank/p/child",
        ),
    ],
)
def test_since_2_3_blanks_at_the_ends_of_values_do_not_count(sanoid_conf, text, before, since):
    answers = []
    for release in ("2.2.0", "2.3.0"):
        covering = sanoid_conf(text, release=release).covering("tank/p/child")
        answers.append(covering and covering.origin)
    assert answers == [before, since]


def test_since_2_3_the_first_of_doubles_counts_in_templates_too(sanoid_conf):
    text = "[tank]\nuse_template = t\n[template_t]\nhourly = 1\nhourly = 2\n"
    answers = [sanoid_conf(text, release=each).sections["tank"] for each in ("2.2.0", "2.3.0")]
    assert [section.settings["hourly"] for section in answers] == ["1\n2", "1"]


LIST = ("tank", "tank/p", "tank/p/child")


@pytest.mark.parametrize(
    ("release", "listed", "dataset", "covered"),
    [
        ("2.2.0", LIST, "tank/p/new", True),
        ("2.3.0", LIST, "tank/p/new", False),
        ("2.3.0", LIST, "tank/p/child", True),
        ("2.3.0", ("tank/other",), "tank/p/new", True),  # then it asks ZFS nevertheless
        ("2.3.0", (), "tank/p/new", True),
    ],
)
def test_recursion_of_2_3_reaches_listed_datasets(sanoid_conf, release, listed, dataset, covered):
    config = sanoid_conf("[tank/p]\nrecursive = yes\n", release=release, listed=listed)
    assert (config.covering(dataset) is not None) is covered


def test_zfs_recursion_includes_unlisted_datasets(sanoid_conf):
    config = sanoid_conf("[tank/p]\nrecursive = zfs\n", release="2.3.0", listed=LIST)
    assert config.covering("tank/p/new").origin == "tank/p"
