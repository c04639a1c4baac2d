import pytest

from snaporch.config import Config, DomainSettings

UUID = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"


def config(**document):
    return Config.model_validate(document)


def test_without_a_section_the_defaults_hold():
    found = config(defaults={"wait": "5s"}, domain={"other": {"wait": "9s"}}).settings("web", UUID)
    assert found == DomainSettings(wait="5s")


@pytest.mark.parametrize("key", ["web", UUID])
def test_a_section_is_found_by_name_or_uuid(key):
    assert config(domain={key: {"wait": "9s"}}).settings("web", UUID).wait == 9


def test_a_section_overrides_option_by_option():
    merged = config(
        defaults={"wait": "5s", "compression": "none", "exclude_disks": ["vdb"]},
        domain={"web": {"compression": "gzip"}},
    ).settings("web", UUID)
    assert (merged.wait, merged.compression, merged.exclude_disks) == (5, "gzip", ("vdb",))


def test_a_list_is_replaced_and_not_joined():
    merged = config(
        defaults={"exclude_disks": ["vdb"]}, domain={"web": {"exclude_disks": []}}
    ).settings("web", UUID)
    assert merged.exclude_disks == ()


def test_a_section_may_go_back_to_a_built_in_value():
    merged = config(defaults={"wait": "5s"}, domain={"web": {"wait": "0s"}}).settings("web", UUID)
    assert merged.wait == 0


def test_a_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().libvirt_uri = "test:///default"
