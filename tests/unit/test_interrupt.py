import os
import signal
import subprocess
import sys

import pytest

from snaporch.errors import InterruptedRunError
from snaporch.interrupt import SIGNALS, Interrupt


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


def test_ctrl_z_stops_no_run_and_nothing_that_it_starts():
    with Interrupt().watching():
        os.kill(os.getpid(), signal.SIGTSTP)
        code = "import signal; print(signal.getsignal(signal.SIGTSTP).name)"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert child.stdout == b"SIG_IGN\n"
    assert signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL


def test_afterwards_signals_do_what_they_did():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupt().watching():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
