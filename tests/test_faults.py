"""What is left where a run is cut off: killed, interrupted, out of disk or memory, refused by the
file system. A file is the old one or the new one, whole; the next run clears the rest away.

A forked child does the writing, so that it can be killed at every touch of a file.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import safetensors.torch
import torch

import circuits_part4
import common
import tiny
from results import report, runner

resource = pytest.importorskip("resource")
if not hasattr(os, "fork"):
    pytest.skip("no fork", allow_module_level=True)

class Drawing:
    """As much of a figure as draw() sees."""

    def __init__(self, results: dict):
        self.what = results["sections"]["a"]

    def savefig(self, file: pathlib.Path, **options) -> None:
        with file.open("wb") as f:
            f.write(self.what.encode() * 1000)


SCRIPT = report.Script("circuits_part5.py", [], [
    ("one", "a", lambda section, results: Drawing(results)),
    ("two", "a", lambda section, results: None)])  # these results have not what it shows


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
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


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


def test_killed_while_results_are_written(tmp_path, capsys):
    """Each file is the old or the new one; two that do not belong together are told apart; the
    next run leaves what it would have left alone, and touches nothing else."""
    new, n, mixed = tmp_path / "new", 0, 0
    write(new, "new")
    while True:
        n, out = n + 1, tmp_path / str(n)
        out.mkdir()
        (out / ".part4.json.part").write_text("of another script")
        write(out, "old")
        old = contents(out)
        killed = killed_at(n, out, lambda out=out: write(out, "new"))
        left = {name: data for name, data in contents(out).items()
                if not (name.startswith(".part5") and name.endswith(".part"))}
        assert left.keys() == old.keys()
        for name, data in left.items():
            assert data in (old[name], contents(new).get(name)), (n, name)
        capsys.readouterr()
        json_is_new, log_is_new = (left[f"part5{x}"] != old[f"part5{x}"]
                                   for x in (".json", "_stdout.txt"))
        what = report.read_results(out / "part5.json", SCRIPT)["sections"]["a"]
        assert what == ("new" if json_is_new else "old")
        assert ("is not the log" in capsys.readouterr().err) == (json_is_new != log_is_new)
        mixed += json_is_new != log_is_new
        write(out, "new")
        assert contents(out) == contents(new) | {".part4.json.part": b"of another script"}
        if not killed:
            break
    assert n > 10 and mixed == 1


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
    """A figure is the old or the new one; the next run clears the hidden ones away, also that of
    a figure that these results have not, and no other file."""
    new, out, n = tmp_path / "new", tmp_path / "out", 0
    write_and_draw(new, "new")
    write_and_draw(out, "old")
    old = contents(out)
    assert old.keys() == {"part5.json", "part5_stdout.txt", "one.png", "one.svg"}
    theirs = {".three.png.part": b"of another script", "three.png": b"theirs"}
    while True:
        n += 1
        for name, data in (old | theirs | {".two.svg.part": b"stale"}).items():
            (out / name).write_bytes(data)
        killed = killed_at(n, out, lambda: write_and_draw(out, "new"))
        for name in old:
            assert (out / name).read_bytes() in (old[name], contents(new)[name]), (n, name)
        write_and_draw(out, "new")
        assert contents(out) == contents(new) | theirs
        if not killed:
            break
    assert n > 20


# ==================================================================================== Interrupted


def deaf(said: int) -> None:
    """A main that swallows every exception, as libraries do while they are imported."""
    os.write(said, b"!")
    while True:
        with contextlib.suppress(BaseException):
            signal.pause()


@pytest.mark.parametrize("ignored", [False, True], ids=["", "in the background"])
def test_ctrl_c_ends_a_run_at_once(ignored):
    """130 and one line, whoever swallows exceptions; a job that is to ignore it ignores it."""
    (heard, said), (errors, stderr) = os.pipe(), os.pipe()

    def child():
        os.dup2(stderr, 2)
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
        return runner.run_script(lambda: deaf(said))

    process = start(child)
    os.close(stderr)
    os.read(heard, 1)
    os.kill(process, signal.SIGINT)
    if ignored:
        time.sleep(0.3)
        os.kill(process, signal.SIGTERM)
    assert end(process) == (-signal.SIGTERM if ignored else 130)
    said_to_the_user = os.read(errors, 9999).decode()
    assert said_to_the_user.count("\n") == (not ignored)
    assert "interrupted" in said_to_the_user or ignored


IMPORTING = """
import os, signal
os.write(1, b"!")
while True:
    try:
        signal.pause()
    except BaseException:
        pass
"""


@pytest.mark.parametrize("script", sorted(common.HERE.glob("circuits_part*.py")),
                         ids=lambda path: path.stem)
def test_ctrl_c_while_libraries_are_imported(script, tmp_path):
    """The seconds before main; torch is one that takes for ever and swallows exceptions."""
    (tmp_path / "torch.py").write_text(IMPORTING)
    process = subprocess.Popen([sys.executable, script], env=os.environ | {
        "PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    process.kill()
    assert process.stderr.read() == (
        f"{script.name}: interrupted; no file was left half written\n")
    assert process.returncode == 130


def test_the_handler_is_given_back():
    """Python's own Ctrl-C is back after a run, whatever its end."""
    def refuse():
        raise common.UserError("no")

    for main in refuse, lambda: None:
        runner.run_script(main)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ==================================================================== Out of disk, memory, reason


def test_the_disk_is_full_while_figures_are_drawn(tmp_path):
    """The figures that were there stay, nothing half is left, and the error says what to do."""
    write_and_draw(tmp_path, "old")
    old, limits = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(common.UserError, match="one.png.*--no-figures"):
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
    "are they sound": [torch.linalg.LinAlgError("linalg.svd: failed to converge"),
                       RuntimeError("torch.linalg.eig: input should not contain infs or NaNs.")],
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
    """A folder, a pipe that nobody writes to."""
    os.mkfifo(tmp_path / "pipe")
    for path in tmp_path, tmp_path / "pipe", tmp_path / "none":
        with pytest.raises(common.UserError, match="no such file"):
            report.read_results(path, SCRIPT)


def test_weights_of_zeros(tmp_path, monkeypatch, capsys):
    """Nothing can be decomposed or divided: one line, and no files."""
    folder = tiny.folder(tmp_path / "model", tiny.SIZES | dict(n_layers=1, d_vocab=70))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file({k: 0 * v for k, v in weights.items()},
                                folder / "model.safetensors")
    (tmp_path / "text.txt").write_text("a b c " * 99)
    arguments = ["--model", folder, "--text", tmp_path / "text.txt", "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["circuits_part4.py", *map(str, arguments)])
    assert runner.run_script(circuits_part4.main) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "are they sound" in error
    assert contents(tmp_path / "out") == {}


# ===================================================================================== Read-only


@pytest.mark.parametrize("mode, name", [(0o444, "part5.json"), (0o444, "part5_stdout.txt"),
                                        (0o555, ".")])
def test_read_only(mode, name):
    """Results that are protected stay as they are, and so do those of a protected folder."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is root's where root tests
        out = pathlib.Path(folder)
        write(out, "old")
        old = contents(out)
        out.chmod(0o777)
        (out / name).chmod(mode)

        def child():
            if os.getuid() == 0:  # to whom nothing is read-only
                os.setuid(65534)
            with pytest.raises(common.UserError, match="read-only|denied"):
                write(out, "new")

        assert end(start(child)) == 0
        assert contents(out) == old
        out.chmod(0o777)
