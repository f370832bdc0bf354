"""Options, log, results files and saved figures of a script."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import common
from figures import charts
from results import loading

PUBLISHED = common.HERE / "results" / "published"


class Section(NamedTuple):
    """One section of a script's log.

    A section of a real model has compute(analysis, results) and print(section, results, log); one
    of a toy has compute() and print(section, log).
    """

    name: str  # its key in the results
    compute: Callable[..., dict | list]
    print: Callable[..., None]


@dataclass(frozen=True)
class Script:
    """What the shared options need to know about a script."""

    file: str  # circuits_part5.py writes part5.json and is compared with published/part5.json
    sections: list[Section]  # in the order of the log
    figures: list  # (file name, section, plot); plot(section, results) returns a Figure, or None
    model: str = ""  # the published model; a toy has none
    sweeps: list = field(default_factory=list)  # {open choice: sections it changes}, in order
    # quick(analysis) returns the parts of its sections that cost little: a sweep rules out by them
    quick: Callable[..., dict] | None = None

    @property
    def stem(self) -> str:
        return self.file.removeprefix("circuits_").removesuffix(".py")


class Log:
    """Prints the lines of the article's log and keeps them for the file."""

    def __init__(self):
        self.lines: list[str] = []

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)


# ------------------------------------------------------------------ options


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, as everything else here does."""

    def parse_args(self, args=None, namespace=None):
        for word in sys.argv[1:] if args is None else args:
            if not is_utf8(word):
                self.error(f"{ascii(word)} is not UTF-8: rename the file or folder")
            if word.endswith("=--"):  # argparse would drop the --, and so take the default
                self.error(f"{word} gives -- as a value, which cannot be given: use another")
        return super().parse_args(args, namespace)

    def error(self, message: str):
        if "expected one argument" in message:
            message += "; one that begins with - is written as in --source=-ing"
        raise common.UserError(f"{message} (see --help)")


def is_utf8(word: str) -> bool:
    """Whether a word of the command line was valid text; Python keeps other bytes as surrogates."""
    with contextlib.suppress(UnicodeEncodeError):
        return bool(word.encode("utf-8")) or not word
    return False


def whole_number(text: str) -> int:
    """For argparse: a whole number from 0 to 2^31 - 1."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**31 - 1}")
    return int(text)


def tolerance(text: str) -> float:
    """For argparse: a finite number that is not negative."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")


def parser(description: str, model: str, n_tokens: int = 3072, seq_len: int = 256) -> Parser:
    """The options of every script on a real model; model, n_tokens and seq_len are defaults."""
    p = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=model, help="TransformerLens name of an attention-only "
                   f"model, mini (bundled), or a model folder (default {model})")
    p.add_argument("--device", default="cpu", help="cpu, cuda, ... (default cpu)")
    p.add_argument("--dtype", default="float32", choices=sorted(loading.DTYPES),
                   help="precision of everything computed on the model (default float32)")
    p.add_argument("--text", metavar="FILE", help="UTF-8 text to run on (default: the WikiText-2 "
                   "test split; the bundled sample for mini)")
    p.add_argument("--tokens", type=whole_number, help=f"total number of tokens "
                   f"(default {n_tokens})")
    p.add_argument("--seq-len", type=whole_number, help="tokens of a sequence, BOS counted "
                   f"(default {seq_len}, or the model's context if that is shorter)")
    p.add_argument("--seed", type=whole_number, default=0, help="of the random draws (default 0)")
    p.add_argument("--sweep", action="store_true", help="try every setting that the article "
                   "leaves open and report which one the published numbers support")
    output_options(p, "results/ and figures/, with /<model> for other models")
    return p


def output_options(p: Parser, default: str) -> None:
    """The options of every script that say where results go and what is done with them."""
    p.add_argument("--out", metavar="DIR", type=pathlib.Path,
                   help=f"folder for results; figures go to DIR/figures (default {default})")
    p.add_argument("--no-figures", action="store_true", help="write no figures")
    p.add_argument("--no-page", action="store_true", help="write no page (.html)")
    p.add_argument("--figures-only", action="store_true", help="redraw the figures and write the "
                   "page again from the existing results file, without a model")
    p.add_argument("--diff", nargs="*", metavar="FILE", help="compare the existing results file, "
                   "or FILE, with the published numbers; or two results files with each other")
    p.add_argument("--rtol", type=tolerance, default=1e-4, help="with --diff A B: tolerance, "
                   "relative above 1 and absolute below (default 1e-4)")


# ------------------------------------------------------------------ folders


def output_dirs(args: argparse.Namespace, published: str) -> tuple[pathlib.Path, pathlib.Path]:
    """The folders for results and for figures; UserError if they would replace other results."""
    if args.out:
        if args.out.resolve() == PUBLISHED:
            raise common.UserError(f"--out {args.out} holds what the article prints: name another "
                                   "folder")
        return args.out, args.out / "figures"
    if args.model == published:
        return common.HERE / "results", common.HERE / "figures"
    if loading.bundled(args.model):
        return common.HERE / "results" / "mini", common.HERE / "figures" / "mini"
    name = pathlib.Path(args.model).resolve().name
    if name in ("", "mini", PUBLISHED.name):
        raise common.UserError(f"results of a model folder named {name} would replace others in "
                               f"results/{name}: rename it, or name another folder with --out DIR")
    return common.HERE / "results" / name, common.HERE / "figures" / name


def results_dir(args: argparse.Namespace, published: str) -> pathlib.Path:
    """The folder for results, created if needed; UserError if it cannot be written to."""
    out = output_dirs(args, published)[0]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(0, "permission denied")
    except OSError as e:
        raise common.UserError(f"cannot write to {out}: {e.strerror}; name another folder with "
                               "--out DIR") from None
    return out


@contextlib.contextmanager
def whole(file: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary path in the same folder, which replaces the file once it is written.

    Its name holds the process id, so that two runs into one folder never share it.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


# ------------------------------------------------------------------ results files


def is_number(x) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def leaves(value, key: str = "") -> Iterator[tuple]:
    """(dotted key, value) of every leaf of a results tree; an empty table or list is a leaf."""
    if not isinstance(value, dict | list) or not value:
        yield key, value
        return
    for k, v in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(v, f"{key}.{k}" if key else str(k))


def not_finite(sections: dict) -> str | None:
    """The key of the first number that is NaN or infinite."""
    bad = (key for key, v in leaves(sections) if isinstance(v, float) and not math.isfinite(v))
    return next(bad, None)


def check_finite(results: dict) -> None:
    bad = not_finite(results["sections"])
    if bad:
        raise common.UserError(f"{bad} is not finite, so nothing was written: check the weights")


def run_meta(
    script: str, source: dict, text: dict, args: argparse.Namespace, choices: dict
) -> dict:
    """What made a results file: model, text, settings and versions. No times."""
    packages = ("torch", "transformer_lens", "transformers", "tokenizers", "datasets", "numpy")
    versions = {p: importlib.metadata.version(p) for p in packages}
    return {"script": script, **source, **text, "processing": loading.PROCESSING,
            "dtype": args.dtype, "device": args.device, "seed": args.seed, "choices": choices,
            "versions": versions | {"python": platform.python_version()}}


def write_results(out: pathlib.Path, stem: str, results: dict, log: Log) -> list[pathlib.Path]:
    """Write {stem}.json and {stem}_stdout.txt, each whole or not at all; returns their paths."""
    contents = {
        out / f"{stem}.json": json.dumps(results, indent=1, sort_keys=True, allow_nan=False) + "\n",
        out / f"{stem}_stdout.txt": "\n".join(log.lines) + "\n",
    }
    try:
        with contextlib.ExitStack() as stack:  # nothing is replaced before both are written
            for file, text in contents.items():
                part = stack.enter_context(whole(file))
                part.write_text(text, encoding="utf-8", newline="")
    except OSError as e:
        raise common.UserError(f"cannot write results to {out}: {e.strerror}; name another folder "
                               "with --out DIR") from None
    return list(contents)


def read_results(file: pathlib.Path, script: Script) -> dict:
    """A results file of this script; UserError if it is missing, damaged or another script's."""
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        meta, sections = results["meta"], results["sections"]
        if not isinstance(sections, dict):
            why = "it has no sections"
        elif meta["script"] != script.file:
            why = f"it belongs to {meta['script']}"
        elif meta["dtype"] not in loading.DTYPES:
            why = f"it has no dtype {meta['dtype']!r}"
        else:
            bad = not_finite(sections)
            why = f"{bad} is not finite" if bad else None
    except OSError as e:
        why = e.strerror
    except (ValueError, LookupError, TypeError, RecursionError) as e:
        why = f"it is damaged: {common.cause(e)}"
    if why:
        raise common.UserError(f"cannot read {file} as results of {script.file} ({why}): python "
                               f"{script.file} makes it")
    return results


# ------------------------------------------------------------------ figures


def draw(script: Script, results: dict, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw a script's figures from its results, each as PNG and SVG, whole or not at all.

    Returns:
        the files written. Figures that these results have no data for are removed.
    """
    try:
        style = charts.style()
    except (ImportError, ValueError) as e:
        raise common.UserError(f"matplotlib cannot be imported ({common.cause(e)}): install the "
                               "packages of requirements.txt, mend matplotlibrc, or use "
                               "--no-figures") from None
    wrote, stem = [], ""
    gc.freeze()  # a collection need not search all that PyTorch has loaded: 15 % of the time
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with style:
            for stem, section, plot in common.progress(script.figures, "figures"):
                wrote += _draw_one(folder / stem, plot, results["sections"][section], results)
    except OSError as e:
        raise common.UserError(f"cannot write {folder / stem}: {e.strerror}; use --no-figures, or "
                               "name another folder with --out DIR") from None
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise common.UserError(f"these results lack the section that {stem} draws "
                               f"({common.cause(e)}): run python {script.file} again") from None
    finally:
        gc.unfreeze()
    return wrote


def _draw_one(path: pathlib.Path, plot, section, results: dict) -> list[pathlib.Path]:
    """Save one figure as PNG and SVG, without the date, so that the files are always the same.

    The SVG also holds the title as text: the page shows it to readers who cannot see the picture.
    An empty section has no figure: a model of one layer has no pairs of heads.
    """
    figure = plot(section, results) if section else None
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    if figure is None:
        for file in files:
            file.unlink(missing_ok=True)
        return []
    with whole(files[0]) as part:
        figure.savefig(part, format="png", metadata={"Software": None},
                       pil_kwargs={"compress_level": 3})
    with whole(files[1]) as part:
        title = figure.get_suptitle()
        figure.savefig(part, format="svg", metadata={"Date": None, "Title": title})
    return files
