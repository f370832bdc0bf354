"""Which of the open choices the published numbers support."""

from __future__ import annotations

import argparse
import itertools

import common
from results import compare, report


def try_settings(
    script: report.Script, args: argparse.Namespace, analyse, alternatives: dict[str, list]
) -> dict:
    """Try every setting of what the article leaves open, and see which one its numbers speak for.

    The groups of script.sweeps are tried in turn, the choices of a group jointly and the earlier
    winners kept. A setting's merit is how many published numbers it reproduces, then the sum of
    misses; where equal settings differ in a choice, that choice is not identifiable.

    Args:
        analyse: analyse(choices) gives (analysis, meta); a UserError rules the setting out.
        alternatives: the values of each choice, the default first.

    Writes sweep_{stem}.json and its log.
    """
    published, log, groups = compare.read_published(script.stem), report.Log(), []
    choices = {name: values[0] for name, values in alternatives.items()}
    analysis, meta = analyse(choices)
    results = {"meta": meta, "sections": {}}
    _recompute(script, analysis, results, {name for name, *_ in script.sections})
    log(f"== WHICH OPEN CHOICES THE PUBLISHED NUMBERS SPEAK FOR ({meta['model']})")
    log("  * no other setting of the group does better")
    for affects in script.sweeps:
        group = _sweep_group(script, published, results, analyse, choices, alternatives, affects)
        choices, results = choices | group["winner"], group.pop("results")
        _print_group(group, log)
        groups.append(group)
    log("  the defaults stay as they are until somebody who has the weights changes them")
    found = {"meta": meta, "groups": groups, "winner": choices}
    wrote = report.write_results(report.results_dir(args, script.model), f"sweep_{script.stem}", found, log)
    common.notice("wrote " + ", ".join(map(str, wrote)))
    return found


def _recompute(script: report.Script, analysis, results: dict, names: set[str]) -> None:
    for name, compute, _ in script.sections:
        if name in names:
            results["sections"][name] = compute(analysis, results)


def _sweep_group(script, published, results, analyse, choices, alternatives, affects) -> dict:
    """All settings of one group of choices; `affects` maps each to the sections that it changes."""
    names, settings, best = list(affects), [], None
    touched = {"claims"}.union(*affects.values())
    now, results = choices, {"meta": results["meta"], "sections": dict(results["sections"])}
    for values in common.progress([*itertools.product(*(alternatives[n] for n in names))], "settings"):
        one = dict(zip(names, values))
        try:
            analysis, _ = analyse(choices | one)
        except common.UserError as e:
            settings.append({"setting": one, "ruled_out": str(e)})
            continue
        changed = [affects[n] for n in names if now[n] != one[n]]
        _recompute(script, analysis, results, {"claims"}.union(*changed) if changed else set())
        now = choices | one
        settings.append({"setting": one} | _reproduced(published, results, touched))
        if best is None or _merit(settings[-1]) > _merit(best[0]):
            best = settings[-1], dict(results["sections"])
    equal = [s["setting"] for s in settings if "misses" in s and _merit(s) == _merit(best[0])]
    default = {n: choices[n] for n in names}
    tried = {n: {repr(s["setting"][n]) for s in settings if "misses" in s} for n in names}
    return {"choices": names, "settings": settings, "equal": equal,
            "winner": default if default in equal else best[0]["setting"],
            "not_identifiable": [n for n in names if len({repr(s[n]) for s in equal}) > 1],
            "not_tried": [n for n in names if len(tried[n]) < 2],
            "results": {"meta": results["meta"], "sections": best[1]}}


def _reproduced(published: dict, results: dict, touched: set[str]) -> dict:
    """How many of the published numbers of the touched sections the results have, and the misses,
    in units of the last printed digit."""
    rows = [r for r in compare.with_published(published, results) if r["verdict"] != compare.NOT_COMPARED
            and r["key"].split(".")[0] in touched]
    worst = max(rows, key=lambda r: r["miss"], default=None)
    return {"reproduced": sum(not r["miss"] for r in rows), "of": len(rows),
            "misses": float(sum(r["miss"] for r in rows)),
            "largest_miss": worst and {"key": worst["key"], "units": worst["miss"]}}


def _merit(setting: dict) -> tuple:
    return setting["reproduced"], -setting["misses"]


def _print_group(group: dict, log: report.Log) -> None:
    say = lambda setting: ", ".join(f"{k} {v!r}" for k, v in setting.items())  # noqa: E731
    log(f"  {', '.join(group['choices'])}: {len(group['settings'])} settings")
    for s in group["settings"]:
        if "ruled_out" in s:
            log(f"    {say(s['setting'])}: not possible here ({s['ruled_out'].split(':')[0]})")
            continue
        worst = s["largest_miss"]
        log(f"    {say(s['setting'])}: {s['reproduced']} of {s['of']} published numbers; largest "
            + (f"miss {worst['units']:.0f} units ({worst['key']})" if worst and worst["units"]
               else "miss none") + (" *" if s["setting"] in group["equal"] else ""))
    log(f"    wins: {say(group['winner'])}; cannot be told apart: "
        f"{', '.join(group['not_identifiable']) or 'none'}"
        + "; nothing else to try here: " * bool(group["not_tried"])
        + ", ".join(group["not_tried"]))
