"""Runs a script: from its options to its files."""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import sys

import torch

import common
from results import compare, loading, page, report


def from_files(script: report.Script, args: argparse.Namespace) -> dict | None:
    """Do what needs only a results file, --diff or --figures-only; None if a run is needed."""
    given = {"--diff": args.diff is not None, "--figures-only": args.figures_only,
             "--sweep": getattr(args, "sweep", False),
             "--no-figures": args.no_figures and args.figures_only}
    given = [name for name, is_given in given.items() if is_given]
    if len(given) > 1:
        raise common.UserError(f"{' and '.join(given)} cannot be combined: use one at a time")
    if args.diff is not None:
        return compare.diff(script, args)
    if not args.figures_only:
        return None
    out, figures = report.output_dirs(args, script.model)
    results = report.read_results(out / f"{script.stem}.json", script)
    common.notice(f"wrote {len(report.draw(script, results, figures))} files to {figures}")
    file = None if args.no_page else page.write(script, out, figures)
    if file:
        common.notice(f"wrote {file}")
    return results


@loading.on_own_device
def run_analysis(script: report.Script, meta: dict, args: argparse.Namespace, analysis) -> dict:
    """Compute and print every section of a real model, compare, write and draw."""
    published, log = compare.read_published(script.stem), report.Log()
    meta |= {"log_lines": {}}  # {section: how many}
    out, results = report.results_dir(args, script.model), {"meta": meta, "sections": {}}
    for section in script.sections:
        found, before = section.compute(analysis, results), len(log.lines)
        results["sections"][section.name] = found
        section.print(found, results, log)
        meta["log_lines"][section.name] = len(log.lines) - before
    return _finish(script, args, results, published, out, log)


@loading.on_own_device
def run_toy(script: report.Script, description: str, argv: list[str] | None) -> dict:
    """The main of a toy script, which has no model and only the output options."""
    p = report.Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.output_options(p, "results/ and figures/")
    p.set_defaults(model="")
    args = p.parse_args(argv)
    done = from_files(script, args)
    if done:
        return done
    published, log = compare.read_published(script.stem), report.Log()
    out = report.results_dir(args, script.model)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    meta = {"script": script.file, "dtype": "float64", "versions": versions, "log_lines": {}}
    results = {"meta": meta, "sections": {}}
    for section in script.sections:
        found, before = section.compute(), len(log.lines)
        results["sections"][section.name] = found
        section.print(found, log)
        meta["log_lines"][section.name] = len(log.lines) - before
    return _finish(script, args, results, published, out, log)


def _finish(script, args, results: dict, published: dict, out: pathlib.Path, log) -> dict:
    """Compare a finished run with the published numbers, write its files, figures and page."""
    report.check_finite(results)
    log("== AGAINST WHAT THE ARTICLE PRINTS (--diff shows every number)")
    compare.print_comparison(compare.with_published(published, results), log, every=False)
    files = report.write_results(out, script.stem, results, log)
    figures, wrote = None, ""
    if script.figures and not args.no_figures:
        figures = report.output_dirs(args, script.model)[1]
        wrote = f", and {len(report.draw(script, results, figures))} files to {figures}"
    if not args.no_page:
        files.append(page.write(script, out, figures))
    common.notice(f"wrote {', '.join(map(str, files))}{wrote}")
    return results


def run_script(main) -> int:
    """Run a script's main and return its exit code.

    0: done. 1: stdout was closed. 2: an error that the user can fix, told in one line on stderr.
    130: interrupted with Ctrl-C. A bug keeps its traceback.
    """
    name = pathlib.Path(sys.argv[0]).name
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # tokens are in every script, whatever the locale
    try:
        main()
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        common.notice(f"{name}: stdout was closed; no file was left half written")
        return 1
    except KeyboardInterrupt:
        common.notice(f"{name}: interrupted; no file was left half written")
        return 130
    except (common.UserError, OSError) as e:
        message = str(e)
    except (MemoryError, RuntimeError) as e:
        if not loading.lacks_memory(e):
            raise
        message = (f"not enough memory ({common.cause(e)}): use fewer --tokens or a shorter "
                   "--seq-len")
    printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
    common.notice(f"{name}: error: {printable}")
    return 2
