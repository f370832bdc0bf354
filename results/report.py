"""Options, log, results files and saved figures of a script."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
from dataclasses import dataclass

import common
from figures import charts

PUBLISHED = common.HERE / "results" / "published"


def is_number(x) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def leaves(value, key: str = ""):
    """(key, value) of everything in a results tree that is no table or list."""
    items = value.items() if isinstance(value, dict) else (
        [*enumerate(value)] if isinstance(value, list) else None)
    if items is None:
        yield key, value
    elif not items:
        yield key, value  # nothing in it, which is something to compare
    for k, v in items or ():
        yield from leaves(v, f"{key}.{k}" if key else str(k))


def draw(script: Script, results: dict, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw a script's figures from its results, each as PNG and SVG, whole or not at all. One that
    these results have nothing for is not there afterwards, nor what an earlier run drew."""
    import matplotlib

    wrote, file = [], folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_parts(folder / f"{stem}.{x}" for stem, *_ in script.figures for x in ("png", "svg"))
        with matplotlib.rc_context(charts.STYLE):
            for stem, section, plot in common.progress(script.figures, "figures"):
                figure = plot(results["sections"][section], results)
                for suffix, no in ("png", "Software"), ("svg", "Date"):
                    file = folder / f"{stem}.{suffix}"
                    if figure is None:
                        file.unlink(missing_ok=True)
                        continue
                    with whole(file) as part:
                        figure.savefig(part, format=suffix, metadata={no: None})
                    wrote.append(file)
    except OSError as e:
        raise common.UserError(f"cannot write {file}: {e.strerror}; take --no-figures, or name another "
                        "folder with --out DIR") from None
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise common.UserError(f"these results have not what {stem} draws ({common.cause(e)}): run python "
                        f"{script.file} anew") from None
    return wrote


class Log:
    """Prints the lines of the article's log and keeps them for the file."""

    def __init__(self):
        self.lines: list[str] = []

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, like every other of ours."""

    def error(self, message: str):
        raise common.UserError(f"{message} (see --help)")


def whole_number(text: str) -> int:
    """For argparse: from 0 to 2^31 - 1, more than any size or seed needs."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**31 - 1}")
    return int(text)


def tolerance(text: str) -> float:
    """For argparse: a number from 0 up."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")


def parser(description: str, model: str, n_tokens: int = 3072, seq_len: int = 256) -> Parser:
    """The options that all scripts on a real model share; the rest are their defaults."""
    p = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=model, help="TransformerLens name of an attention-only "
                   f"model, mini (bundled), or a model folder (default {model})")
    p.add_argument("--device", default="cpu", help="cpu, cuda, ... (default cpu)")
    p.add_argument("--dtype", default="float32", choices=sorted(common.DTYPES),
                   help="of all that is computed on the model (default float32)")
    p.add_argument("--text", metavar="FILE", help="UTF-8 text to run on (default: the WikiText-2 "
                   "test split; the bundled sample for mini)")
    p.add_argument("--tokens", type=whole_number, help=f"tokens in all (default {n_tokens})")
    p.add_argument("--seq-len", type=whole_number, help="tokens of a sequence, BOS counted "
                   f"(default {seq_len}, or the model's context where that is shorter)")
    p.add_argument("--seed", type=whole_number, default=0, help="of the random draws (default 0)")
    p.add_argument("--sweep", action="store_true", help="try every setting of what the article "
                   "leaves open, and say which one the published numbers speak for")
    output_options(p, "results/ and figures/, with /<model> for other models")
    return p


def output_options(p: Parser, default: str) -> None:
    """What all scripts do with results: where they go, their figures."""
    p.add_argument("--out", metavar="DIR", type=pathlib.Path,
                   help=f"where results go, figures to DIR/figures (default {default})")
    p.add_argument("--no-figures", action="store_true", help="write no figures")
    p.add_argument("--figures-only", action="store_true",
                   help="draw them again from the results that are there, without a model")
    p.add_argument("--diff", nargs="*", metavar="FILE", help="compare the results that are there, "
                   "or those in FILE, with what the article prints; two files with each other")
    p.add_argument("--rtol", type=tolerance, default=1e-4, help="how close the numbers of two "
                   "files have to be, relative above 1 and absolute below (default 1e-4)")


@dataclass(frozen=True)
class Script:
    """What the shared options need to know of a script."""

    file: str  # circuits_part5.py: its results are part5.json, published/part5.json what it checks
    sections: list  # (name, compute, print) in the order of the log
    figures: list  # (file name, section, plot); plot(section, results) gives a Figure, or None
    model: str = ""  # the published one; a toy has none
    sweeps: list = dataclasses.field(default_factory=list)  # {open choice: sections it changes}

    @property
    def stem(self) -> str:
        return self.file.removeprefix("circuits_").removesuffix(".py")


def output_dirs(args: argparse.Namespace, published: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Where results go, and where figures go; UserError where others would be lost."""
    if args.out:
        if args.out.resolve() == PUBLISHED:
            raise common.UserError(f"--out {args.out} holds what the article prints: name another folder")
        return args.out, args.out / "figures"
    folder = "mini" if args.model in common.BUNDLED else pathlib.Path(args.model).resolve().name
    folder = "" if args.model == published else folder
    if folder in ("mini", PUBLISHED.name) and args.model not in common.BUNDLED or (
            not folder and args.model != published):
        raise common.UserError(f"results of a model folder named {folder} would replace others in "
                        f"results/{folder}: rename it, or name another place with --out DIR")
    return common.HERE / "results" / folder, common.HERE / "figures" / folder


def results_dir(args: argparse.Namespace, published: str) -> pathlib.Path:
    """The folder for results, made if need be; UserError where it cannot be written to."""
    out = output_dirs(args, published)[0]
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise common.UserError(f"cannot write to {out}: {e.strerror}; name another folder with --out "
                        "DIR") from None
    return out


def run_meta(
    script: str, source: dict, text: dict, args: argparse.Namespace, choices: dict
) -> dict:
    """What made a results file: model, text, settings and versions. No times."""
    packages = ("torch", "transformer_lens", "transformers", "tokenizers", "datasets", "numpy")
    versions = {p: importlib.metadata.version(p) for p in packages}
    return {"script": script, **source, **text, "processing": common.PROCESSING, "dtype": args.dtype,
            "device": args.device, "seed": args.seed, "choices": choices,
            "versions": versions | {"python": platform.python_version()}}


def part_of(file: pathlib.Path) -> pathlib.Path:
    """The hidden file that a file is while it is being written."""
    return file.with_name(f".{file.name}.part")


def remove_parts(files) -> None:
    """Remove what is left of these files where a run was killed while it wrote them."""
    for file in files:
        with contextlib.suppress(OSError):
            part_of(file).unlink()


@contextlib.contextmanager
def whole(file: pathlib.Path):
    """A hidden file to write to: it takes the file's place, or nothing of it is left."""
    try:
        yield part_of(file)
        os.replace(part_of(file), file)
    finally:
        remove_parts([file])


def check_finite(results: dict) -> None:
    bad = next(not_finite(results), None)
    if bad is not None:
        raise common.UserError(f"{bad} is not finite; nothing was written (are the weights sound?)")


def write_results(out: pathlib.Path, stem: str, results: dict, log: Log) -> list[pathlib.Path]:
    """Write {stem}.json and {stem}_stdout.txt, whole or not at all; returns their paths.

    The log is replaced first. Where a run is killed before the JSON is, that one's meta.log_sha256
    is not the log's, and read_results says so.
    """
    check_finite(results)
    text = "\n".join(log.lines) + "\n"
    results["meta"]["log_sha256"] = common.sha256(text)
    data = json.dumps(results, indent=1, sort_keys=True, allow_nan=False) + "\n"
    json_file, log_file = files = [out / f"{stem}.json", out / f"{stem}_stdout.txt"]
    old_log, had_log = out / f"{stem}_stdout.txt.old", log_file.exists()
    try:
        for file, content in zip(files, (data, text)):
            if file.exists() and not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, f"{file.name} is read-only")
            part_of(file).write_text(content, encoding="utf-8", newline="")
        if had_log:
            shutil.copyfile(log_file, part_of(old_log))
        os.replace(part_of(log_file), log_file)
        try:
            os.replace(part_of(json_file), json_file)
        except BaseException:
            if had_log:
                os.replace(part_of(old_log), log_file)
            else:
                log_file.unlink()
            raise
    except OSError as e:
        raise common.UserError(f"cannot write results to {out}: {e.strerror}; what was there is as it "
                        "was (name another folder with --out DIR)") from None
    finally:
        remove_parts([*files, old_log])
    return files


def read_results(file: pathlib.Path, script: Script) -> dict:
    """A results file of this script; UserError if it is none, or holds what is not finite."""
    why = None
    try:
        if not file.is_file():  # a pipe or a device need not end
            raise FileNotFoundError(errno.ENOENT, "no such file")
        results = json.loads(file.read_text(encoding="utf-8"))
        json.dumps(results, ensure_ascii=False).encode()  # what cannot be printed ends here
        meta, bad = results["meta"], next(not_finite(results), None)
        if not isinstance(results["sections"], dict) or meta["dtype"] not in common.DTYPES or (
                script.model and not isinstance(meta["model"], str)):
            why = "its tables are not as that script writes them"
        elif meta["script"] != script.file or bad:
            why = f"{bad} is not finite" if bad else f"it is of {meta['script']}"
    except OSError as e:
        why = e.strerror
    except (ValueError, LookupError, TypeError, RecursionError) as e:
        why = common.cause(e)
    if why:
        raise common.UserError(f"cannot read {file} as results of {script.file} ({why}): python "
                        f"{script.file} makes it")
    log = file.with_name(f"{file.stem}_stdout.txt")
    if log.is_file() and meta.get("log_sha256") not in (None, common.sha256(log)):
        common.notice(f"warning: {log} is not the log of {file.name}, a run was cut off between the two: "
               f"python {script.file} makes both anew")
    return results


def not_finite(value, key: str = "results"):
    """The keys of all numbers in a results tree that are NaN or infinite."""
    if isinstance(value, dict):
        for k, v in value.items():
            yield from not_finite(v, f"{key}.{k}")
    elif isinstance(value, list | tuple):
        for i, v in enumerate(value):
            yield from not_finite(v, f"{key}[{i}]")
    elif is_number(value) and not abs(value) < 1e300:  # of a whole number as well
        yield key
