import pytest

from snaporch.hypervisor.clone_xml import NAMESPACE
from snaporch.schedule.policy_assignment import assign

POLICIES = {"a": {}, "b": {}, "c": {}, "d": {}, "e": {}}
METADATA = '<metadata><s:policy xmlns:s="urn:snaporch">{}</s:policy></metadata><memory'


@pytest.fixture
def told(scheduled):
    """Everybody says something; tests take one voice after the other away."""
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
            told = METADATA.format(said["metadata"])
            guest.inactive = guest.live.replace("<memory", told, 1)
        else:
            guest.inactive = guest.live
        properties = {"tank/web": said["property"]} if "property" in said else {}
        return assign(scheduled.context, world.hypervisor.domain("web"), properties)

    return ask


def test_the_first_place_that_says_anything_counts(told):
    order = ["section", "metadata", "property", "domains", "defaults"]
    for index, policy in enumerate("abcde"):
        found = told(without=order[:index])
        assert (found.policies, found.unknown) == ((policy,), ())
        assert found.source
    assert told(without=order).policies == ()


def test_a_section_may_be_of_a_uuid(told, scheduled):
    uuid = scheduled.world.hypervisor.domain("web").uuid
    assert told(section={uuid: {"policies": ["a"]}}).policies == ("a",)


@pytest.mark.parametrize(
    ("place", "nothing"),
    [
        ("section", {"web": {"policies": []}}),
        ("metadata", "none"),
        ("metadata", ""),
        ("property", "none"),
    ],
)
def test_nothing_is_an_answer_too(told, place, nothing):
    earlier = {"section": (), "metadata": ("section",), "property": ("section", "metadata")}
    assert told(without=earlier[place], **{place: nothing}).policies == ()


def test_several_policies_by_comma_or_blank(told):
    found = told(without=["section"], metadata="c, a b,a")
    assert found.policies == ("c", "a", "b")


def test_a_policy_that_there_is_not_is_named(told):
    found = told(without=["section", "metadata"], property="c,weekly")
    assert (found.policies, found.unknown) == (("c",), ("weekly",))
    assert found.source == "snaporch:policy of tank/web"


def test_a_section_without_policies_says_nothing(told):
    assert told(section={"web": {"wait": "3s"}}).policies == ("b",)


@pytest.mark.parametrize("pattern", ["web", "w*", "we?", "[vw]eb"])
def test_patterns(told, pattern):
    assert told(without=["section", "metadata", "property"], domains=[pattern]).policies == ("d",)


@pytest.mark.parametrize("pattern", ["WEB", "we", "*x", "tank/web"])
def test_patterns_that_do_not_match(told, pattern):
    assert told(without=["section", "metadata", "property"], domains=[pattern]).policies == ("e",)


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
    told = METADATA.format("b").replace("</metadata>", f"{mark}</metadata>")
    guest.inactive = guest.live.replace("<memory", told, 1)
    domain = scheduled.context.hypervisor.domain("web")
    found = assign(scheduled.context, domain, {"tank/web": "c"})
    assert (found.policies, found.source) == ((), "it is a clone of origin@s")
    scheduled.configure(policy=POLICIES, domain={"web": {"policies": ["a"]}})
    assert assign(scheduled.context, domain, {}).policies == ("a",)
