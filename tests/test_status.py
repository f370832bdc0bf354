"""What a run says while the user waits: on a terminal, and never in a file."""

import io
import sys

import common


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_status_is_taken_away_again(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with common.status("loading x"):
        assert sys.stderr.getvalue() == "loading x ...\r"
    assert sys.stderr.getvalue().endswith("\r" + " " * len("loading x ...") + "\r")


def test_a_file_gets_nothing_of_it(monkeypatch):
    for stderr in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stderr)
        with common.status("loading x"):
            pass
        assert not stderr or stderr.getvalue() == ""
