import os
import signal

import pytest

from snaporch.errors import InterruptedRunError
from snaporch.run.context import SIGNALS, Interrupt


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_only_noted_and_looked_at_later(number):
    interrupt = Interrupt()
    with interrupt.watching():
        interrupt.check("web")
        os.kill(os.getpid(), number)
        with pytest.raises(InterruptedRunError) as caught:
            interrupt.check("web")
    assert caught.value.signum == number
    assert str(caught.value) == f"web: stopped by {signal.Signals(number).name}"


def test_afterwards_signals_do_what_they_did():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupt().watching():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
