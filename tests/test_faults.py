"""What is left where a run is cut off: killed, interrupted, out of disk or memory, refused by the
file system. A file is the old one or the new one, whole.

A forked child does the writing, so that it can be killed at every touch of a file.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys
import tempfile

import pytest
import torch

import common
from results import report, runner

resource = pytest.importorskip("resource")
if not hasattr(os, "fork"):
    pytest.skip("no fork", allow_module_level=True)

class Drawing:
    """As much of a figure as draw() sees."""

    def __init__(self, results: dict):
        self.what = results["sections"]["a"]

    def get_suptitle(self) -> str:
        return self.what

    def savefig(self, file: pathlib.Path, **options) -> None:
        with file.open("wb") as f:
            f.write(self.what.encode() * 1000)


SCRIPT = report.Script("circuits_part5.py", [], [
    ("one", "a", lambda section, results: Drawing(results)),
    ("two", "a", lambda section, results: None)])  # these results lack what it draws


def write(out: pathlib.Path, what: str) -> None:
    out.mkdir(exist_ok=True)
    log = report.Log()
    log.lines.append(f"the log of {what}")
    meta = {"script": SCRIPT.file, "dtype": "float32"}
    results = {"meta": meta, "sections": {"a": what}}
    report.write_results(out, SCRIPT.stem, results, log)


def write_and_draw(out: pathlib.Path, what: str) -> None:
    write(out, what)
    report.draw(SCRIPT, report.read_results(out / "part5.json", SCRIPT), out)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """All files but unfinished ones."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*")
            if f.is_file() and f.suffix != ".part"}


def start(do) -> int:
    """A forked child that runs do() and exits with what it returns; its process id."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        with contextlib.suppress(BaseException):
            os._exit(do() or 0)
        os._exit(99)
    return child


def end(child: int) -> int:
    """The exit status of a child, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(n: int, out: pathlib.Path, do) -> bool:
    """Whether do() had an n-th touch of a file below `out`, and was killed before it."""
    def child():
        left = [n]

        def hook(event, args):
            if any(isinstance(a, str | os.PathLike) and str(a).startswith(str(out)) for a in args):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        do()

    code = end(start(child))
    assert code in (0, -signal.SIGKILL)
    return code != 0


# ======================================================================================== Killed


def test_killed_while_results_are_written(tmp_path):
    """Each file is the old or the new one, and the next run is as if nothing had happened."""
    new, n = tmp_path / "new", 0
    write(new, "new")
    while True:
        n, out = n + 1, tmp_path / str(n)
        write(out, "old")
        old = contents(out)
        killed = killed_at(n, out, lambda out=out: write(out, "new"))
        left = contents(out)
        assert left.keys() == old.keys()
        for name, data in left.items():
            assert data in (old[name], contents(new)[name]), (n, name)
        write(out, "new")
        assert contents(out) == contents(new)
        if not killed:
            break
    assert n > 5


def test_killed_in_a_first_run(tmp_path):
    """Nothing was there before: a JSON is there whole or not at all, and with its log."""
    n = 0
    while True:
        n, out = n + 1, tmp_path / str(n)
        out.mkdir()
        killed = killed_at(n, out, lambda out=out: write(out, "new"))
        if (out / "part5.json").exists():
            assert json.loads((out / "part5.json").read_text())["sections"] == {"a": "new"}
            assert (out / "part5_stdout.txt").read_text() == "the log of new\n"
        if not killed:
            break
    assert n > 5


def test_killed_while_figures_are_drawn(tmp_path):
    """A figure is the old or the new one, and no other file is touched."""
    new, out, n = tmp_path / "new", tmp_path / "out", 0
    write_and_draw(new, "new")
    write_and_draw(out, "old")
    old = contents(out)
    assert old.keys() == {"part5.json", "part5_stdout.txt", "one.png", "one.svg"}
    theirs = {"three.png": b"theirs"}
    while True:
        n += 1
        for name, data in (old | theirs).items():
            (out / name).write_bytes(data)
        killed = killed_at(n, out, lambda: write_and_draw(out, "new"))
        for name in old:
            assert (out / name).read_bytes() in (old[name], contents(new)[name]), (n, name)
        write_and_draw(out, "new")
        assert contents(out) == contents(new) | theirs
        if not killed:
            break
    assert n > 10


def test_two_runs_into_one_folder(tmp_path):
    """Their unfinished files have names of their own; the later one to finish wins, whole."""
    out = tmp_path / "out"
    out.mkdir()
    with report.whole(out / "part5.json") as slow:
        slow.write_text("slow")
        assert end(start(lambda: write_and_draw(out, "fast"))) == 0
        assert json.loads((out / "part5.json").read_text())["sections"] == {"a": "fast"}
    assert (out / "part5.json").read_text() == "slow"
    assert not [f for f in out.rglob("*") if f.suffix == ".part"]


# ==================================================================================== Interrupted


def test_ctrl_c():
    """130 and one line."""
    (heard, said), (errors, stderr) = os.pipe(), os.pipe()

    def main():
        os.write(said, b"!")
        signal.pause()

    def child():
        sys.stderr = open(stderr, "w")  # noqa: SIM115
        return runner.run_script(main)

    process = start(child)
    os.close(stderr)
    os.read(heard, 1)
    os.kill(process, signal.SIGINT)
    assert end(process) == 130
    message = os.read(errors, 9999).decode()
    assert message.count("\n") == 1 and "interrupted" in message


# ==================================================================== Out of disk, memory, reason


def test_the_disk_is_full_while_figures_are_drawn(tmp_path):
    """The figures that were there stay, nothing half is left, and the error says what to do."""
    write_and_draw(tmp_path, "old")
    old, limits = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(common.UserError, match="one: .*--no-figures"):
            report.draw(SCRIPT, {"sections": {"a": "new"}}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == old


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_stdout_on_a_full_disk():
    """python circuits_part4.py > log, and the disk is full: one line, no traceback."""
    def child():
        sys.stdout = open("/dev/full", "w")  # noqa: SIM115
        return runner.run_script(lambda: report.Log()("a line"))

    assert end(start(child)) == 2


OUT_OF = {
    "not enough memory": [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried"),
                          RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")],
    "No space left": [OSError(28, "No space left on device")],
    r"a\nb\x1b\udcff cé": [common.UserError("a\nb\x1b\udcff cé")],
}


@pytest.mark.parametrize("words, error", [(k, e) for k, es in OUT_OF.items() for e in es])
def test_what_is_no_bug_is_one_line(words, error, capsys):
    def main():
        raise error

    assert runner.run_script(main) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"),
                                   ValueError("allocate memory"), KeyError("linalg")])
def test_a_bug_keeps_its_traceback(error):
    def main():
        raise error

    with pytest.raises(type(error)):
        runner.run_script(main)


def test_results_that_are_no_file(tmp_path):
    for path in tmp_path, tmp_path / "none":
        with pytest.raises(common.UserError, match="cannot read .*makes it"):
            report.read_results(path, SCRIPT)


# ===================================================================================== Read-only


def test_a_folder_that_is_read_only():
    """The results of a protected folder stay as they are."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is root's where root tests
        out = pathlib.Path(folder)
        write(out, "old")
        old = contents(out)
        out.chmod(0o555)

        def child():
            if os.getuid() == 0:  # to whom nothing is read-only
                os.setuid(65534)
            with pytest.raises(common.UserError, match="denied"):
                write(out, "new")

        assert end(start(child)) == 0
        assert contents(out) == old
        out.chmod(0o777)
