"""What the article prints, compared with the results of a run."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
from dataclasses import dataclass

import numpy as np

import common
from results import loading, report
from results.report import is_number

ROUNDING = 4  # allowed error of a run beside a printed digit, in machine epsilons of its dtype
BOUND_FACTOR = 10  # a rounding error agrees up to this many times the printed one
SAMPLING_ERRORS = 4  # standard errors that a drawn mean may be off
AGREES, INPUT, DIFFERS, MISSING = "agrees", "input", "DIFFERS", "MISSING"
EXPLAINED, STALE, NOT_COMPARED = "explained", "EXPLAINED, BUT AGREES", "not compared"
DISAGREEMENTS = (DIFFERS, MISSING, STALE)
TOKENISED_WIKITEXT = "Salesforce/wikitext/wikitext-2-v1/test"  # it may be the article's text too
OTHER_MODEL, OTHER_TEXT = "of another model", "of another text"


@dataclass(frozen=True)
class Row:
    """One line of a comparison."""

    key: str
    section: str
    printed: str
    ours: str
    difference: str
    verdict: str
    distance: float = 0.0  # between printed and ours, in units of the last printed digit
    why: str = ""  # it is not compared, or explained


def read_published(stem: str) -> dict:
    """What the article prints: {source, model, rows_sha256 of its text, on_text (the keys that
    depend on it), entries, paper, explained}. No run writes these files."""
    try:
        published, explained = (
            json.loads((report.PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
            for name in (stem, "explained"))
        explained = {e["key"]: e for e in explained.get(stem, [])}
        return {**published, "entries": published["entries"], "explained": explained}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise common.UserError(f"cannot read {stem}.json and explained.json in {report.PUBLISHED} "
                               f"({common.cause(e)}): fetch them again with the scripts") from None


def look_up(results: dict, key: str):
    """The value under a dotted key of the results' sections; None if there is none."""
    value = results["sections"]
    for part in key.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (LookupError, TypeError, ValueError):
            return None
    return value


# ------------------------------------------------------------------ the distance of one number


def distance(entry: dict, ours, results: dict) -> float:
    """How far ours is from a published entry, in units of the last printed digit.

    0 if the two agree, 1 for another word or another type of value. By the entry's kind:

    exact    the same; to 1e-9 for a computed number (toys)
    input    likewise, but set by the script itself, so that it is not counted as reproduced
    rounded  within half a unit, and the rounding error of the run's dtype
    ends     likewise, one printed end of a fixed set: "between 0.44 and 0.81"
    bound    at most BOUND_FACTOR times what is printed
    range    every value between the two ends, rounded as they are: "no other above 0.04"
    sampled  draws whose range overlaps the published one; one value within SAMPLING_ERRORS
    """
    kind = entry["kind"]
    error = ROUNDING * float(np.finfo(results["meta"]["dtype"]).eps)
    if kind in ("exact", "input", "rounded", "ends"):
        return _distance_of_leaves(entry, ours, error)
    numbers = [value for _, value in report.leaves(ours)]
    if not numbers or not all(map(is_number, numbers)):
        return 1.0
    if kind == "bound":
        return _beyond_bound(entry, max(map(abs, numbers)))
    if kind == "sampled" and is_number(entry["value"]):
        return _distance_of_mean(entry, numbers[0], look_up(results, entry["spread"]))
    ends = (min(numbers), max(numbers))
    return _beyond_range(entry, ends[::-1] if kind == "sampled" else ends, error)


def _unit(entry: dict) -> float:
    return 10.0 ** -(entry["decimals"] or 0)


def _half_unit(entry: dict) -> float:
    return 0.0 if entry["decimals"] is None else _unit(entry) / 2


def _distance_of_leaves(entry: dict, ours, error: float) -> float:
    """The largest distance of a leaf; 1 if the two trees have different keys."""
    wanted, found = dict(report.leaves(entry["value"])), dict(report.leaves(ours))
    if wanted.keys() != found.keys():
        return 1.0
    largest = 0.0
    for key, x in found.items():
        slack = 0.0
        if is_number(x) and entry["kind"] in ("rounded", "ends"):
            slack = _half_unit(entry) + error * abs(x)
        elif isinstance(x, float):
            slack = 1e-9 * max(1, abs(x))
        largest = max(largest, _leaf_distance(wanted[key], x, slack, _unit(entry)))
    return min(largest, 1.0) if entry["decimals"] is None else largest


def _leaf_distance(wanted, ours, slack: float, unit: float) -> float:
    if is_number(wanted) and is_number(ours):
        off = abs(ours - wanted)
        return 0.0 if off <= slack else max(1.0, round(off / unit))
    return float(wanted != ours or is_number(wanted) != is_number(ours))


def _beyond_bound(entry: dict, largest: float) -> float:
    return 0.0 if largest <= BOUND_FACTOR * entry["value"] else largest / _unit(entry)


def _distance_of_mean(entry: dict, mean: float, sd) -> float:
    if not is_number(sd):
        return 1.0
    slack = _half_unit(entry) + SAMPLING_ERRORS * sd / entry["n"] ** 0.5
    return _leaf_distance(entry["value"], mean, slack, _unit(entry))


def _beyond_range(entry: dict, ends: tuple[float, float], error: float) -> float:
    """How far the first of our ends is below the published range, or the second above it."""
    low, high = ends
    first, last = entry["value"]
    below = first - low if first is not None else 0.0
    above = high - last if last is not None else 0.0
    beyond = max(below, above, 0.0)
    slack = _half_unit(entry) + error * max(abs(low), abs(high))
    return beyond / _unit(entry) if beyond > slack else 0.0


# ------------------------------------------------------------------ as the article would print it


def shown(entry: dict, ours) -> str:
    """Our value as the article would print it."""
    if ours is None:
        return "-"
    # the article's sentence has no room for a list of another length
    in_words = "format" in entry and (not isinstance(ours, list) or ours == entry["value"])
    if in_words:
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            return entry["format"].format(ours, **ours if isinstance(ours, dict) else {})
    if isinstance(ours, list):
        without_words = {k: v for k, v in entry.items() if k != "format"}
        items = (shown(entry if in_words else without_words, x) for x in ours)
        return f"[{', '.join(items)}]"
    if is_number(ours):
        return _shown_number(entry, ours)
    return ours if isinstance(ours, str) else repr(ours)


def _shown_number(entry: dict, ours: float) -> str:
    decimals = entry["decimals"]
    if decimals is None:
        return f"{ours:.3g}"
    if entry["kind"] == "bound":
        return f"{ours:.1e}"
    sign = "+" if entry["printed"].startswith("+") else ""
    return f"{round(ours, decimals):{sign},.{max(decimals, 0)}f}"


def _difference(entry: dict, ours) -> str:
    """Ours minus printed: one digit more than printed, or three."""
    if not (is_number(ours) and is_number(entry["value"])):
        return ""
    decimals = entry["decimals"]
    by_decimals = decimals is not None and decimals > 0 and entry["kind"] != "bound"
    return format(ours - entry["value"], f"+.{decimals + 1}f" if by_decimals else "+.3g")


# ------------------------------------------------------------------ rows


def with_published(published: dict, results: dict) -> list[Row]:
    """Every published entry against a run's results, in the article's order.

    Entries of another model or text than the run's, or marked as not comparable, are not compared.
    """
    reason = _reasons(published, results["meta"])
    rows = []
    for entry in published["entries"]:
        ours, why = look_up(results, entry["key"]), reason(entry)
        if ours is None and results["meta"].get("model") != published.get("model"):
            why = why or OTHER_MODEL  # one of other depth may have no such number
        if why:
            off, verdict = 0.0, NOT_COMPARED
        else:
            off = distance(entry, ours, results)
            verdict, why = _verdict(off, ours, published["explained"].get(entry["key"]))
            if verdict == AGREES and entry["kind"] == "input":
                verdict = INPUT
        rows.append(Row(entry["key"], entry["section"], entry["printed"], shown(entry, ours),
                        _difference(entry, ours), verdict, off, why))
    return rows


def _reasons(published: dict, meta: dict):
    """A function that says why an entry is not compared with a run of this meta; "" if it is."""
    same_model = is_published_model(meta, published.get("model"))
    same_text = meta.get("rows_sha256") == published.get("rows_sha256") or (
        meta.get("text") == TOKENISED_WIKITEXT)
    on_text = tuple(published.get("on_text", ()))

    def reason(entry: dict) -> str:
        if entry["kind"] == "not comparable":
            return entry["reason"]
        if entry.get("model_independent"):
            return ""
        if entry.get("reason"):
            return entry["reason"]
        if not same_model:
            return OTHER_MODEL
        return OTHER_TEXT if not same_text and entry["key"].startswith(on_text) else ""

    return reason


def _verdict(off: float, ours, known: dict | None) -> tuple[str, str]:
    """The verdict on a compared entry, and why; `known` is its explained difference, if any."""
    if ours is None:
        verdict = MISSING
    else:
        verdict = DIFFERS if off else AGREES
    if known and verdict == AGREES:
        return STALE, known["reason"]
    if known and ours == known["ours"]:
        return EXPLAINED, known["reason"]
    return verdict, ""


def with_results(a: dict, b: dict, rtol: float) -> list[Row]:
    """Every value of one results file against another's.

    Counts and words have to be the same; other numbers agree within rtol, relative above 1 and
    absolute below.
    """
    ours, theirs = (dict(report.leaves(r["sections"])) for r in (a, b))
    rows = []
    for key in sorted(ours.keys() | theirs.keys()):
        x, y = ours.get(key), theirs.get(key)
        if key not in ours or key not in theirs:
            verdict = MISSING
        else:
            verdict = AGREES if _close(x, y, rtol) else DIFFERS
        difference = f"{y - x:+.3g}" if is_number(x) and is_number(y) else ""
        rows.append(Row(key, "", repr(x), repr(y), difference, verdict))
    return rows


def _close(x, y, rtol: float) -> bool:
    if type(x) is not type(y):
        return False
    return abs(x - y) <= rtol * max(1, abs(x), abs(y)) if isinstance(x, float) else x == y


# ------------------------------------------------------------------ the printed comparison


def print_comparison(rows: list[Row], log: report.Log, every: bool) -> None:
    """The summary of a comparison, then every row, or only those that do not agree."""
    verdicts = [r.verdict for r in rows]
    n_agree, n_explained = verdicts.count(AGREES), verdicts.count(EXPLAINED)
    n_disagree = sum(v in DISAGREEMENTS for v in verdicts)
    log(f"  {n_agree + n_disagree + n_explained} of {len(rows)} compared: {n_agree} agree, "
        f"{n_disagree} disagree, {n_explained} explained")
    if INPUT in verdicts:
        log(f"  {verdicts.count(INPUT)} more are inputs of the script, and as in the article")
    not_compared = [r.why for r in rows if r.verdict == NOT_COMPARED]
    for why in sorted(set(not_compared)):
        log(f"  {not_compared.count(why)} not compared: {why}")
    section = ""  # the rows of two results files have none
    for r in rows:
        if not (every and r.why not in (OTHER_MODEL, OTHER_TEXT)
                or r.verdict in (*DISAGREEMENTS, EXPLAINED)):
            continue
        if r.section != section:
            section = r.section
            log(f"  {section}")
        reason = f": {r.why}" if r.why else ""
        log(f"    {r.key:<44} {r.printed:>14} {r.ours:>14} {r.difference:>8}  {r.verdict}{reason}")


def print_context(published: dict, results: dict, log: report.Log) -> None:
    """The paper's own figures beside ours: other models, never compared."""
    log("== THE PAPER'S OWN FIGURES, OF OTHER MODELS: FOR CONTEXT, NEVER COMPARED")
    for p in published["paper"]:
        ours = look_up(results, p["beside"]) if p.get("beside") else None
        if is_number(ours) and p.get("fall"):
            ours = 0 - ours  # what a loss falls by is minus its change
        if isinstance(ours, float):
            ours = f"{ours:.4g}"
        log(f"    {p['what']:<52} paper {p['printed']:>12}   ours {'-' if ours is None else ours}")


def print_independent(results: dict, stem: str, model: str, log: report.Log) -> None:
    """What others measured on the same weights; said of the article's own model alone."""
    file = report.PUBLISHED / "independent.json"
    source = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not is_published_model(results["meta"], model) or stem not in source:
        return
    log(f"== A SECOND SOURCE ON THE SAME WEIGHTS, COUNTED APART: {source['source']}")
    for entry in source[stem]["entries"]:
        theirs = dict(report.leaves(entry["values"]))
        ours = look_up(results, entry["key"]) if entry["key"] else None
        ours = dict(report.leaves(ours)) if isinstance(ours, list) else {}
        far = [key for key, x in theirs.items()
               if not is_number(ours.get(key)) or abs(ours[key] - x) > entry["tolerance"]]
        log(f"  {len(theirs) - len(far)} of {len(theirs)} agree to {entry['tolerance']:g}: "
            f"{entry['what']}")
        for key in far if ours else ():
            log(f"    {key}: theirs {theirs[key]:.4f}, ours {ours.get(key)}")


def is_published_model(meta: dict, model: str | None) -> bool:
    """Whether a run is of the article's model: the hub's, not a folder with that name."""
    return meta.get("model") == model and (
        meta.get("revision") is not None or model not in loading.PUBLIC)


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
        rows = _print_two(files, results, args.rtol, log)
    else:
        rows = _print_published(files[0], results[0], script, log)
    if any(r.verdict in DISAGREEMENTS for r in rows):
        raise SystemExit(1)
    return results[0]


def _print_two(files: list[pathlib.Path], results: list[dict], rtol: float, log) -> list[Row]:
    """Two results files against each other, their meta included."""
    log(f"== {files[0]} AGAINST {files[1]} (to {rtol:g}, relative above 1)")
    a, b = (dict(report.leaves(r["meta"])) for r in results)
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            log(f"  meta.{key}: {a.get(key)} | {b.get(key)}")
    rows = with_results(*results, rtol)
    print_comparison(rows, log, every=False)
    return rows


def _print_published(file: pathlib.Path, results: dict, script: report.Script, log) -> list[Row]:
    """Every published number against a results file, then the paper's own figures."""
    published = read_published(script.stem)
    name = file.relative_to(common.HERE) if file.is_relative_to(common.HERE) else file
    log(f"== WHAT THE ARTICLE PRINTS AGAINST {name}: printed, ours, ours - printed")
    rows = with_published(published, results)
    print_comparison(rows, log, every=True)
    if published["paper"]:
        print_context(published, results, log)
    print_independent(results, script.stem, script.model, log)
    return rows
