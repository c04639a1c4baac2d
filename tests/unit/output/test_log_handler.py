"""The log on standard error."""

import logging

from snaporch.output.log_handler import TerminalLogHandler


def test_a_record_is_a_line(capsys):
    record = logging.makeLogRecord({"msg": "web  zfs list: ok, 0.010 s"})
    TerminalLogHandler().handle(record)
    assert capsys.readouterr().err == "web  zfs list: ok, 0.010 s\n"
