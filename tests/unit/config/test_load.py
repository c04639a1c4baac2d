from pathlib import Path

import pytest

from snaporch.config import Config, Copies, DomainSettings, Replica, Source, load_config
from snaporch.errors import ConfigError, ExitCode

SAMPLES = Path(__file__).parents[2] / "config-samples"


def samples(kind):
    found = sorted((SAMPLES / kind).glob("*.toml"))
    return pytest.mark.parametrize("path", found, ids=[path.stem for path in found])


@samples("good")
def test_good_samples_load(path):
    assert isinstance(load_config(path), Config)


@samples("bad")
def test_bad_samples_are_refused_with_file_and_key(path):
    expected = path.read_bytes().split(b"\n", 1)[0].removeprefix(b"# ").decode()
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert expected in message
    assert "\n" not in message
    assert "object at 0x" not in message
    assert "PosixPath" not in message
    assert caught.value.exit_code == ExitCode.CONFIG


def test_the_empty_file_is_the_defaults():
    assert load_config(SAMPLES / "good" / "empty.toml") == Config()


def test_the_full_sample_sets_every_option_to_something_else():
    config = load_config(SAMPLES / "good" / "full.toml")
    assert config.model_fields_set == set(Config.model_fields)
    nightly = config.policy["nightly"]
    assert nightly.model_fields_set == set(type(nightly).model_fields) - {"every"}
    assert config.replica["offsite"].model_fields_set == set(Replica.model_fields) - {"engine"}
    assert config.source["vm1"].model_fields_set == set(Source.model_fields)
    assert config.copies["vm2"].model_fields_set == set(Copies.model_fields)
    for section in (config.paths, config.ram_pages, config.defaults, config.schedule, nightly.keep):
        assert section.model_fields_set == set(type(section).model_fields)
    usual = config.defaults.model_dump().items() & DomainSettings().model_dump().items()
    assert usual == set()


def test_what_is_set_arrives():
    config = load_config(SAMPLES / "good" / "full.toml")
    assert config.paths.overlay_reserve_mib == 2048
    assert config.paths.bundles == Path("/srv/snaporch/bundles")
    assert config.defaults.exclude_disks == ("vdz", "sata0-0-0")


def test_the_default_file_need_not_exist(tmp_path):
    assert load_config(None, tmp_path / "absent.toml") == Config()


def test_the_default_file_is_read_when_it_exists(tmp_path):
    (tmp_path / "snaporch.toml").write_text('[defaults]\nwait = "7s"\n')
    assert load_config(None, tmp_path / "snaporch.toml").defaults.wait == 7


def test_a_named_file_must_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file; give the path"):
        load_config(tmp_path / "absent.toml")


def test_a_directory_is_no_configuration(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_a_hostile_value_cannot_break_out_of_the_message(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[defaults]\ncompression = "\\u001b[31m\\nred"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).isprintable()


SOURCE = """
[source.vm1]
host = "vm1"
dataset = "backup/vm1"
bundles = "/srv/vm1"
"""


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ('[replica.b]\ndataset = "backup/vm1"\nbundles = "/x"\n', "have the same dataset"),
        ('[replica.b]\ndataset = "backup/b"\nbundles = "/srv/vm1/x"\n', "have the same bundles"),
        ('[replica.vm1]\ndataset = "backup/b"\nbundles = "/x"\n', "have the same name"),
        ('[source.b]\nhost="b"\ndataset="backup/vm1"\nbundles="/x"\n', "have the same dataset"),
        ('[replica.pull-b]\ndataset = "backup/b"\nbundles = "/x"\n', "begins with pull-"),
        ('[source.b]\nhost=""\ndataset="backup/b"\nbundles="/x"\n', "source.b.host"),
        ('[paths]\nbundles = "/srv"\n', "own bundle store"),
    ],
)
def test_a_source_has_places_of_its_own(tmp_path, more, reason):
    path = tmp_path / "snaporch.toml"
    path.write_text(SOURCE)
    assert [*load_config(path).source] == ["vm1"]
    path.write_text(SOURCE + more)
    with pytest.raises(ConfigError, match=reason):
        load_config(path)
