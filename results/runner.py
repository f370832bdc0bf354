"""A script from its options to its files."""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import sys

import torch

import common
from results import compare, report


def from_files(script: report.Script, args: argparse.Namespace) -> dict | None:
    """Do what needs results alone, --diff or --figures-only; None where the script has to run."""
    asked = {"--diff": args.diff is not None, "--figures-only": args.figures_only,
             "--sweep": getattr(args, "sweep", False),
             "--no-figures": args.no_figures and args.figures_only}
    asked = [name for name, is_asked in asked.items() if is_asked]
    if len(asked) > 1:
        raise common.UserError(f"{' and '.join(asked)} do not go together: take one at a time")
    if args.diff is not None:
        return compare.diff(script, args)
    if not args.figures_only:
        return None
    out, figures = report.output_dirs(args, script.model)
    results = report.read_results(out / f"{script.stem}.json", script)
    common.notice(f"wrote {len(report.draw(script, results, figures))} files to {figures}")
    return results


def run_sections(script: report.Script, meta: dict, args: argparse.Namespace, *analysis) -> dict:
    """Compute and print each section in turn, write the results, draw the figures; returns them.

    With an analysis compute(analysis, results), print(section, results, log); a toy has neither.
    """
    out, figures = report.results_dir(args, script.model), report.output_dirs(args, script.model)[1]
    published, results = compare.read_published(script.stem), {"meta": meta, "sections": {}}
    report.remove_parts(figures / f"{stem}.{x}" for stem, *_ in script.figures for x in ("png", "svg"))
    report.remove_parts(out / f"sweep_{script.stem}{end}" for end in (".json", "_stdout.txt"))
    given, log = (results,) if analysis else (), report.Log()
    for name, compute, show in script.sections:
        results["sections"][name] = compute(*analysis, *given)
        show(results["sections"][name], *given, log)
    report.check_finite(results)  # before anything is compared
    log("== AGAINST WHAT THE ARTICLE PRINTS (--diff shows every number)")
    compare.print_comparison(compare.with_published(published, results), log, every=False)
    wrote = ", ".join(str(p) for p in report.write_results(out, script.stem, results, log))
    if script.figures and not args.no_figures:
        wrote += f", and {len(report.draw(script, results, figures))} files to {figures}"
    common.notice(f"wrote {wrote}")
    return results


def run_toy(script: report.Script, description: str, argv: list[str] | None) -> dict:
    """The main of a toy script: no model, only what comes out."""
    p = report.Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.output_options(p, "results/ and figures/")
    p.set_defaults(model="")
    args = p.parse_args(argv)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    meta = {"script": script.file, "dtype": "float64", "versions": versions}
    return from_files(script, args) or run_sections(script, meta, args)


def run_script(main) -> int:
    """Run a script's main: 0, or one line on stderr and 1 for a closed stdout, 2 for what a user
    can mend, 130 for Ctrl-C."""
    name = pathlib.Path(sys.argv[0]).name
    if hasattr(sys.stdout, "reconfigure"):  # tokens are in every script, whatever the locale
        sys.stdout.reconfigure(encoding="utf-8")

    try:
        main()
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        common.notice(f"{name}: stdout was closed; no file was left half written")
        return 1
    except (common.UserError, OSError, MemoryError, RuntimeError) as e:
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in _what_to_mend(e))
        common.notice(f"{name}: error: {line}")
        return 2
    except KeyboardInterrupt:
        common.notice(f"{name}: interrupted; no file was left half written")
        return 130


def _what_to_mend(e: Exception) -> str:
    """Cause and remedy of an exception that is no bug; one that is goes on."""
    if isinstance(e, common.UserError):
        return str(e)
    if isinstance(e, OSError):  # stdout on a full disk; every other one names its file
        return f"{e}; no file was left half written: make room, or mend what it names"
    if isinstance(e, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(e):
        return f"not enough memory ({common.cause(e)}): take fewer --tokens or a shorter --seq-len"
    if "linalg" in str(e):
        return f"no solution for these weights ({common.cause(e)}): are they sound?"
    raise e
