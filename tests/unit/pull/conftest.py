import pytest
from fakes.pull_case import PullCase


@pytest.fixture
def case(tmp_path):
    return PullCase(tmp_path)
