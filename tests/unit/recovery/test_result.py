import pytest

from snaporch.recovery.result import Effect


@pytest.mark.parametrize("effect", Effect)
def test_each_effect_has_a_text_with_its_details(effect):
    details = [f"detail-{number}" for number in range(effect.value.count("{}"))]
    text = str(effect.of(*details))
    assert all(detail in text for detail in details)
    assert "{" not in text


def test_a_name_with_braces_stays_as_it_is():
    assert str(Effect.COMMITTED.of("{0}{x}")) == "committed {0}{x}"
