import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snaporch.errors import UsageError
from snaporch.sanoid.hooks.request import read_request

PRE = {
    "SANOID_SCRIPT": "pre",
    "SANOID_TARGET": "tank/a",
    "SANOID_TARGETS": "tank/a",
    "SANOID_SNAPNAME": "autosnap_x_daily",
    "SANOID_SNAPNAMES": "autosnap_x_daily,autosnap_x_hourly",
    "SANOID_TYPES": "daily,hourly",
}


def post(**more):
    return PRE | {"SANOID_SCRIPT": "post", "SANOID_SNAPNAME": "tank/a@autosnap_x_daily"} | more


def test_pre():
    request = read_request("pre", PRE)
    assert request.targets == ("tank/a",)
    assert request.names == ("autosnap_x_daily", "autosnap_x_hourly")
    assert not request.pre_failed


def test_post_with_its_name_that_holds_the_dataset():
    assert read_request("post", post()).names == ("autosnap_x_daily", "autosnap_x_hourly")


def test_post_after_a_pre_that_failed():
    assert read_request("post", post(SANOID_PRE_FAILURE="1")).pre_failed
    assert not read_request("post", post(SANOID_PRE_FAILURE="0")).pre_failed


def test_sanoid_2_0_3_names_one_of_each():
    old = {"SANOID_TARGET": "tank/a b", "SANOID_SNAPNAME": "autosnap_x_daily"}
    assert read_request("pre", old).targets == ("tank/a b",)
    assert read_request("post", old | {"SANOID_SNAPNAME": "tank/a b@n"}).names == ("n",)


BAD = {
    "nothing at all": {},
    "no name": {"SANOID_TARGET": "tank/a"},
    "empty": PRE | {"SANOID_TARGETS": ""},
    "doubled": PRE | {"SANOID_TARGETS": "tank/a,tank/a"},
    "a gap": PRE | {"SANOID_TARGETS": "tank/a,,tank/b"},
    "a line break": PRE | {"SANOID_TARGETS": "tank/a\ntank/b"},
    "a shell's": PRE | {"SANOID_TARGETS": "tank/$(touch x)"},
    "an option": PRE | {"SANOID_TARGETS": "-r"},
    "a path": PRE | {"SANOID_TARGETS": "/tank/a"},
    "upwards": PRE | {"SANOID_TARGETS": "tank/../a"},
    "a snapshot": PRE | {"SANOID_TARGETS": "tank/a@b"},
    "64 KiB": PRE | {"SANOID_TARGETS": "t" * 65536},
    "64 KiB of commas": PRE | {"SANOID_TARGETS": "," * 65536},
    "a name with a dataset": PRE | {"SANOID_SNAPNAMES": "tank/a@x"},
    "a name doubled": PRE | {"SANOID_SNAPNAMES": "x,x"},
    "a name too long": PRE | {"SANOID_SNAPNAMES": "x" * 250},
    "another phase": PRE | {"SANOID_SCRIPT": "prune"},
    "not UTF-8": PRE | {"SANOID_TARGETS": "tank/\udcff"},
    "no digit": PRE | {"SANOID_PRE_FAILURE": "yes"},
}


@pytest.mark.parametrize("environment", BAD.values(), ids=BAD)
def test_invalid_requests_are_usage_errors_on_a_short_line(environment):
    with pytest.raises(UsageError) as caught:
        read_request("pre", environment)
    assert len(caught.value.line()) < 200
    assert caught.value.line().isprintable()


TEXT = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="ta/,@ \n\0'$.-", max_size=40),
    st.lists(st.sampled_from(["tank", "tank/a", "x y", "..", ""])).map(",".join),
)


@given(st.dictionaries(st.sampled_from([*PRE, "SANOID_PRE_FAILURE"]), TEXT))
@example({"SANOID_TARGET": "tank", "SANOID_SNAPNAME": "x "})
@example({"SANOID_TARGET": "tank", "SANOID_SNAPNAME": "-"})
def test_any_environment_is_refused_or_clean(environment):
    for phase in ("pre", "post"):
        try:
            request = read_request(phase, environment)
        except UsageError:
            continue
        for text in (*request.targets, *request.names):
            assert text
            assert not set(text) & set("\n\0@,$'\"")
            assert not text.startswith("/")
        assert len(set(request.targets)) == len(request.targets)
