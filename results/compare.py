"""What the article prints against a run's results."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib

import torch

import common
from results import report

ROUNDING = 4  # units of relative rounding of its dtype that a run may be off beside a printed digit
AGREES, DIFFERS, MISSING = "agrees", "DIFFERS", "MISSING"
EXPLAINED, STALE, NOT_COMPARED = "explained", "EXPLAINED, BUT AGREES", "not compared"
DISAGREE = (DIFFERS, MISSING, STALE)
OTHER_MODEL, OTHER_TEXT = "of another model", "of another text"


def read_published(stem: str) -> dict:
    """What the article prints: {source, model, rows_sha256 of its text, on_text (the keys that
    depend on it), entries, paper, explained}. Data: no run writes it."""
    try:
        published, explained = (json.loads((report.PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
                                for name in (stem, "explained"))
        explained = {e["key"]: e for e in explained.get(stem, [])}
        return {**published, "entries": published["entries"], "explained": explained}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise common.UserError(f"cannot read {stem}.json and explained.json in {report.PUBLISHED} ({common.cause(e)}): "
                        "fetch them again with the scripts") from None


def look_up(results: dict, key: str):
    """The value under a dotted key of a results file's sections; None where there is none."""
    value = results["sections"]
    for part in key.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (LookupError, TypeError, ValueError):
            return None
    return value


def miss(entry: dict, ours, results: dict) -> float:
    """By how much ours misses a published entry, in units of the last printed digit; 0 where the
    two agree, 1 for a wrong word or a value of another type.

    exact    the same; to 1e-9 where it is computed (toys)
    rounded  within half a unit, and the rounding error of the run's dtype
    bound    at most 4 times what is printed
    range    every value within the two ends, rounded as they are
    sampled  draws that overlap the published range; one value within 4 standard errors of it
    """
    kind, value, decimals = entry["kind"], entry["value"], entry["decimals"]
    unit = 10.0 ** -(decimals or 0)
    half = 0.0 if decimals is None else unit / 2
    error = ROUNDING * torch.finfo(common.DTYPES[results["meta"]["dtype"]]).eps
    found = dict(report.leaves(ours))
    if kind in ("exact", "rounded"):
        wanted = dict(report.leaves(value))
        if wanted.keys() != found.keys():
            return 1.0
        slack = (lambda x: half + error * abs(x)) if kind == "rounded" else (
            lambda x: 1e-9 * max(1, abs(x)) if isinstance(x, float) else 0)
        off = max(_off(wanted[k], x, slack(x) if report.is_number(x) else 0, unit)
                  for k, x in found.items())
        return min(off, 1.0) if decimals is None else off  # a wrong head is a wrong word
    if not found or not all(map(report.is_number, found.values())):
        return 1.0
    low, high = min(found.values()), max(found.values())
    if kind == "bound":
        high = max(high, -low)
        return 0.0 if high <= 4 * value else high / unit
    if kind == "sampled" and report.is_number(value):
        sd = look_up(results, entry["spread"])
        return _off(value, low, half + 4 * sd / entry["n"]**0.5, unit) if report.is_number(sd) else 1.0
    first, last = (v if v is not None else end for v, end in zip(value, (-torch.inf, torch.inf)))
    if kind == "sampled":
        low, high = high, low
    beyond = max(first - low, high - last, 0.0)
    return beyond / unit if beyond > half + error * max(abs(low), abs(high)) else 0.0


def _off(wanted, ours, slack: float, unit: float) -> float:
    if not (report.is_number(wanted) and report.is_number(ours)):
        return float(wanted != ours or report.is_number(wanted) != report.is_number(ours))
    return 0.0 if abs(ours - wanted) <= slack else max(1.0, round(abs(ours - wanted) / unit))


def shown(entry: dict, ours) -> str:
    """Our value as the article would print it."""
    decimals = entry["decimals"]
    if ours is None:
        return "-"
    if isinstance(ours, list) and ours != entry["value"]:  # its sentence has room for no other list
        entry = {k: v for k, v in entry.items() if k != "format"}
    if "format" in entry:
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            return entry["format"].format(ours, **ours if isinstance(ours, dict) else {})
    if isinstance(ours, list):
        return "[" + ", ".join(shown(entry, x) for x in ours) + "]"
    if not report.is_number(ours) or decimals is None:
        return ours if isinstance(ours, str) else f"{ours:.3g}" if report.is_number(ours) else repr(ours)
    if entry["kind"] == "bound":
        return f"{ours:.1e}"
    sign = "+" if entry["printed"].startswith("+") else ""
    return f"{round(ours, decimals):{sign},.{max(decimals, 0)}f}"


def with_published(published: dict, results: dict) -> list[dict]:
    """Every published entry against a run's results, in the article's order.

    Returns:
        a row each: {key, section, printed, ours, difference, verdict, miss, why}. What belongs to
        another model or text than the run's, or is marked as not comparable, is not compared.
    """
    meta, rows = results["meta"], []
    # of a public name, the hub's model alone and no folder of that name
    same_model = meta.get("model") == published.get("model") and (
        meta.get("revision") is not None or published.get("model") not in common.PUBLIC)
    same_text = meta.get("rows_sha256") == published.get("rows_sha256")
    for e in published["entries"]:
        ours = look_up(results, e["key"])
        on_text = e["key"].startswith(tuple(published.get("on_text", ())))
        why = e.get("reason") or (OTHER_MODEL if not same_model else
                                  OTHER_TEXT if on_text and not same_text else "")
        if e["kind"] != "not comparable" and (e.get("model_independent") or not why):
            off, known = miss(e, ours, results), published["explained"].get(e["key"])
            verdict, why = MISSING if ours is None else DIFFERS if off else AGREES, ""
            if known and verdict == AGREES or known and ours == known["ours"]:
                verdict, why = EXPLAINED if off else STALE, known["reason"]
        else:
            off, verdict = 0.0, NOT_COMPARED
        both = report.is_number(ours) and report.is_number(e["value"])
        small = (e["decimals"] or -1) >= 0 and e["kind"] != "bound"
        digits = f"+.{e['decimals'] + 1}f" if small else "+.3g"
        rows.append({"key": e["key"], "section": e["section"], "printed": e["printed"],
                     "ours": shown(e, ours), "verdict": verdict, "miss": off, "why": why,
                     "difference": format(ours - e["value"], digits) if both else ""})
    return rows


def with_results(a: dict, b: dict, rtol: float) -> list[dict]:
    """Two results files: every value of the one against the other's, rows as compare gives them.
    Numbers that are no counts agree within rtol, relative above 1 and absolute below."""
    ours, theirs = (dict(report.leaves(r["sections"])) for r in (a, b))
    rows = []
    for key in sorted(ours.keys() | theirs.keys()):
        x, y = ours.get(key), theirs.get(key)
        close = key in ours and key in theirs and type(x) is type(y) and (
            abs(x - y) <= rtol * max(1, abs(x), abs(y)) if isinstance(x, float) else x == y)
        missing = key not in ours or key not in theirs
        both = report.is_number(x) and report.is_number(y)
        rows.append({"key": key, "section": "", "printed": repr(x), "ours": repr(y), "miss": 0.0,
                     "verdict": AGREES if close else MISSING if missing else DIFFERS, "why": "",
                     "difference": f"{y - x:+.3g}" if both else ""})
    return rows


def print_comparison(rows: list[dict], log: report.Log, every: bool) -> None:
    """The summary of a comparison, and its rows: every one, or only what does not agree."""
    count = {v: sum(r["verdict"] == v for r in rows) for v in (AGREES, *DISAGREE, EXPLAINED)}
    compared = sum(count.values())
    log(f"  {compared} of {len(rows)} compared: {count[AGREES]} agree, "
        f"{sum(count[v] for v in DISAGREE)} disagree, {count[EXPLAINED]} explained")
    for why in sorted({r["why"] for r in rows if r["verdict"] == NOT_COMPARED}):
        log(f"  {sum(r['why'] == why for r in rows)} not compared: {why}")
    section = ""  # the rows of two results files have none
    for r in rows:
        if r["verdict"] in (*DISAGREE, EXPLAINED) or (
                every and r["why"] not in (OTHER_MODEL, OTHER_TEXT)):
            if r["section"] != section:
                section = r["section"]
                log(f"  {section}")
            log(f"    {r['key']:<44} {r['printed']:>14} {r['ours']:>14} {r['difference']:>8}  "
                f"{r['verdict']}" + (f": {r['why']}" if r["why"] else ""))


def print_context(published: dict, results: dict, log: report.Log) -> None:
    """The paper's own figures beside ours: other models, never compared."""
    log("== THE PAPER'S OWN FIGURES, OF OTHER MODELS: FOR CONTEXT, NEVER COMPARED")
    for p in published["paper"]:
        ours = look_up(results, p["beside"]) if p.get("beside") else None
        ours = f"{ours:.4g}" if isinstance(ours, float) else "-" if ours is None else str(ours)
        log(f"    {p['what']:<52} paper {p['printed']:>12}   ours {ours}")


def diff(script: report.Script, args: argparse.Namespace) -> dict:
    """--diff: the published numbers against a results file, or one results file against another.

    Raises:
        SystemExit: with 1 if anything disagrees. UserError: a file cannot be read.
    """
    files = [pathlib.Path(f) for f in args.diff]
    files = files or [report.output_dirs(args, script.model)[0] / f"{script.stem}.json"]
    if len(files) > 2:
        raise common.UserError("--diff takes a results file, or two: python "
                        f"{script.file} --diff A.json B.json")
    results, log = [report.read_results(f, script) for f in files], report.Log()
    if len(files) == 2:
        log(f"== {files[0]} AGAINST {files[1]} (to {args.rtol:g}, relative above 1)")
        a, b = (dict(report.leaves(r["meta"])) for r in results)
        for key in sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k)):
            log(f"  meta.{key}: {a.get(key)} | {b.get(key)}")
        rows = with_results(*results, args.rtol)
        print_comparison(rows, log, every=False)
    else:
        published = read_published(script.stem)
        name = files[0].relative_to(common.HERE) if files[0].is_relative_to(common.HERE) else files[0]
        log(f"== WHAT THE ARTICLE PRINTS AGAINST {name}: printed, ours, ours - printed")
        rows = with_published(published, results[0])
        print_comparison(rows, log, every=True)
        if published["paper"]:
            print_context(published, results[0], log)
    if any(r["verdict"] in DISAGREE for r in rows):
        raise SystemExit(1)
    return results[0]
