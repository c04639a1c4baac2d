"""Plans of a restore, and why one is refused."""

import pytest

from snaporch.errors import RefusedError
from snaporch.restore.plan import make_restore_plan


def plan(world, name="s1", *, domain="web", **options):
    return make_restore_plan(world.context, domain, name, **options)


def refusal(world, **options):
    with pytest.raises(RefusedError) as caught:
        plan(world, **options)
    assert world.hooks.log == []
    return str(caught.value)
