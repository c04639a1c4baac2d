import pytest

from snaporch.hypervisor.clone_xml import NAMESPACE
from snaporch.schedule.policy_assignment import assign

EARLIER = ["section", "metadata", "property"]
"""The places that come before patterns of domains."""
POLICIES = {"a": {}, "b": {}, "c": {}, "d": {}, "e": {}}
METADATA = '<metadata><s:policy xmlns:s="urn:snaporch">{}</s:policy></metadata><memory'


@pytest.fixture
def assigned(scheduled):
    """Assigns policies to a guest for which every place names one; tests remove places."""
    world = scheduled.world
    guest = world.guest()
    state = {
        "section": {"web": {"policies": ["a"]}},
        "metadata": "b",
        "property": "c",
        "domains": ["w*"],
        "defaults": ["e"],
    }

    def ask(without=(), **more):
        said = {key: value for key, value in (state | more).items() if key not in without}
        scheduled.configure(
            policy=POLICIES | {"d": {"domains": said.get("domains", [])}},
            domain=said.get("section", {}),
            defaults={"policies": said.get("defaults", [])},
        )
        if "metadata" in said:
            metadata = METADATA.format(said["metadata"])
            guest.inactive = guest.live.replace("<memory", metadata, 1)
        else:
            guest.inactive = guest.live
        properties = {"tank/web": said["property"]} if "property" in said else {}
        return assign(scheduled.context, world.hypervisor.domain("web"), properties)

    return ask


def test_the_first_place_with_policies_counts(assigned):
    order = ["section", "metadata", "property", "domains", "defaults"]
    for index, policy in enumerate("abcde"):
        found = assigned(without=order[:index])
        assert (found.policies, found.unknown) == ((policy,), ())
        assert found.source
    assert assigned(without=order).policies == ()


def test_a_section_may_be_named_by_a_uuid(assigned, scheduled):
    uuid = scheduled.world.hypervisor.domain("web").uuid
    assert assigned(section={uuid: {"policies": ["a"]}}).policies == ("a",)


@pytest.mark.parametrize(
    ("place", "nothing"),
    [
        ("section", {"web": {"policies": []}}),
        ("metadata", "none"),
        ("metadata", ""),
        ("property", "none"),
    ],
)
def test_a_place_may_assign_no_policy(assigned, place, nothing):
    earlier = {"section": (), "metadata": ("section",), "property": ("section", "metadata")}
    assert assigned(without=earlier[place], **{place: nothing}).policies == ()


def test_several_policies_by_comma_or_blank(assigned):
    found = assigned(without=["section"], metadata="c, a b,a")
    assert found.policies == ("c", "a", "b")


def test_a_policy_that_does_not_exist_is_reported(assigned):
    found = assigned(without=["section", "metadata"], property="c,weekly")
    assert (found.policies, found.unknown) == (("c",), ("weekly",))
    assert found.source == "snaporch:policy of tank/web"


def test_a_section_without_policies_does_not_count(assigned):
    assert assigned(section={"web": {"wait": "3s"}}).policies == ("b",)


@pytest.mark.parametrize("pattern", ["web", "w*", "we?", "[vw]eb"])
def test_patterns(assigned, pattern):
    assert assigned(without=EARLIER, domains=[pattern]).policies == ("d",)


@pytest.mark.parametrize("pattern", ["WEB", "we", "*x", "tank/web"])
def test_patterns_that_do_not_match(assigned, pattern):
    assert assigned(without=EARLIER, domains=[pattern]).policies == ("e",)


def test_a_guest_on_an_overlay_keeps_the_policy_of_its_dataset(scheduled):
    world = scheduled.world
    guest = world.guest()
    base = str(world.image("tank/web", "web-vda.img"))
    below = f'<backingStore type="file"><source file="{base}"/></backingStore>'
    overlay = str(world.root / "overlay.qcow2")
    guest.live = guest.live.replace(f'file="{base}" />', f'file="{overlay}" />{below}')
    assert overlay in guest.live
    (world.root / "overlay.qcow2").touch()
    domain = world.hypervisor.domain("web")
    assert assign(scheduled.context, domain, {"tank/web": "hourly"}).source.endswith("tank/web")


def test_a_clone_has_the_policies_of_its_own_section_alone(scheduled):
    guest = scheduled.world.guest()
    scheduled.configure(policy=POLICIES, defaults={"policies": ["e"]})
    mark = f'<c:clone xmlns:c="{NAMESPACE}" uuid="{guest.uuid}" of="origin@s"/>'
    metadata = METADATA.format("b").replace("</metadata>", f"{mark}</metadata>")
    guest.inactive = guest.live.replace("<memory", metadata, 1)
    domain = scheduled.context.hypervisor.domain("web")
    found = assign(scheduled.context, domain, {"tank/web": "c"})
    assert (found.policies, found.source) == ((), "it is a clone of origin@s")
    scheduled.configure(policy=POLICIES, domain={"web": {"policies": ["a"]}})
    assert assign(scheduled.context, domain, {}).policies == ("a",)
