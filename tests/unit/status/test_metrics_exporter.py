import socket
import urllib.error
import urllib.request

import pytest
from fakes.schedule import NOW

from snaporch.config import MetricsOptions
from snaporch.schedule.forecast import make_forecasts
from snaporch.status.metrics_exporter import MetricsExporter


@pytest.fixture
def place():
    """A free address of the loopback, unless another process takes it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def scrape(place):
    with urllib.request.urlopen(f"http://{place}/metrics", timeout=60) as answer:
        return answer.read().decode()


def looked(observer, context):
    observer.forecasts_made(context, make_forecasts(context, NOW), NOW)


def test_metrics_of_the_last_forecast_are_served(scheduled, place):
    observer = MetricsExporter()
    with observer.serving(scheduled.context, MetricsOptions(listen=place)):
        assert "snaporch_snapshots" not in scrape(place)
        looked(observer, scheduled.context)
        assert 'snaporch_snapshots{domain="web"' not in scrape(place)
        scheduled.hours_ago(1)
        looked(observer, scheduled.context)
        assert 'snaporch_snapshots{domain="web",level="ram"} 1.0' in scrape(place)
    with pytest.raises(urllib.error.URLError):
        scrape(place)
    assert scheduled.world.heard.notes == []


def test_an_address_in_use_is_a_note(scheduled, place):
    first, second = MetricsExporter(), MetricsExporter()
    with (
        first.serving(scheduled.context, MetricsOptions(listen=place)),
        second.serving(scheduled.context, MetricsOptions(listen=place)),
    ):
        (note,) = scheduled.world.heard.notes
    assert note == f"metrics are not served at {place}: Address already in use"


def test_unless_configured_nothing_is_collected(scheduled):
    observer = MetricsExporter(lambda *_: pytest.fail("looked"))
    with observer.serving(scheduled.context, MetricsOptions()):
        looked(observer, scheduled.context)
