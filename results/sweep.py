"""--sweep: which of the open choices the published numbers support."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from dataclasses import dataclass

import common
from results import compare, report

MANY = 16  # settings of a group, from which on a quick search comes first


@dataclass(frozen=True)
class Tried:
    """One setting of a group of open choices, and how much of the article it reproduces."""

    setting: dict
    reproduced: int = 0  # published numbers
    of: int = 0
    misses: float = math.inf  # sum over the published numbers, in units of the last printed digit
    largest_miss: dict | None = None  # {key, units}
    ruled_out: str | None = None  # why the setting is not possible here
    at_most: int | None = None  # published numbers; not analysed in full, since others do better

    @property
    def merit(self) -> tuple:
        """More numbers reproduced are better, then a smaller sum of misses."""
        return self.reproduced, -self.misses

    def as_json(self) -> dict:
        if self.ruled_out:
            return {"setting": self.setting, "ruled_out": self.ruled_out}
        if self.at_most is not None:
            return {"setting": self.setting, "of": self.of, "at_most": self.at_most}
        found = dataclasses.asdict(self)
        del found["ruled_out"], found["at_most"]
        return found


@dataclass(frozen=True)
class Group:
    """The settings of choices that are tried jointly."""

    choices: list[str]
    settings: list[Tried]
    default: dict
    results: dict  # of the best setting

    @property
    def possible(self) -> list[Tried]:
        return [s for s in self.settings if not s.ruled_out]

    @property
    def equal(self) -> list[dict]:
        """The settings that no other one beats."""
        analysed = [s for s in self.possible if s.at_most is None]
        best = max(s.merit for s in analysed)
        return [s.setting for s in analysed if s.merit == best]

    @property
    def winner(self) -> dict:
        return self.default if self.default in self.equal else self.equal[0]

    @property
    def not_identifiable(self) -> list[str]:
        """The choices in which equally good settings differ."""
        return [n for n in self.choices if len({repr(s[n]) for s in self.equal}) > 1]

    @property
    def not_tried(self) -> list[str]:
        """The choices that have only one possible value here."""
        return [n for n in self.choices
                if len({repr(s.setting[n]) for s in self.possible}) < 2]

    def as_json(self) -> dict:
        return {"choices": self.choices, "settings": [s.as_json() for s in self.settings],
                "equal": self.equal, "winner": self.winner,
                "not_identifiable": self.not_identifiable, "not_tried": self.not_tried}


def try_settings(
    script: report.Script, args: argparse.Namespace, analyse, alternatives: dict[str, list]
) -> dict:
    """Try every setting of what the article leaves open and report which one its numbers support.

    The groups of script.sweeps are tried in turn, the choices of a group jointly and with the
    winners of the earlier groups. Where equally good settings differ in a choice, the published
    numbers cannot identify that choice. Of a group of many settings, script.quick first finds those
    that miss published numbers already by what costs little; what then can reproduce no more than
    another setting does is not analysed in full.

    Args:
        analyse: analyse(choices) returns (analysis, meta); a UserError rules the setting out.
        alternatives: the values of each choice, the default first.

    Writes sweep_{stem}.json and its log.
    """
    published, log, groups = compare.read_published(script.stem), report.Log(), []
    choices = {name: values[0] for name, values in alternatives.items()}
    analysis, meta = analyse(choices)
    results = {"meta": meta, "sections": {}}
    _recompute(script, analysis, results, {section.name for section in script.sections})
    log(f"== WHICH OPEN CHOICES THE PUBLISHED NUMBERS SUPPORT ({meta['model']})")
    log("  * no other setting of the group does better")
    for affects in script.sweeps:
        group = _try_group(script, published, results, analyse, choices, alternatives, affects)
        choices, results = choices | group.winner, group.results
        _print_group(group, log)
        groups.append(group)
    log("  the defaults stay as they are until somebody who has the weights changes them")
    found = {"meta": meta, "groups": [g.as_json() for g in groups], "winner": choices}
    out = report.results_dir(args, script.model)
    wrote = report.write_results(out, f"sweep_{script.stem}", found, log)
    common.notice("wrote " + ", ".join(map(str, wrote)))
    return found


def _recompute(script: report.Script, analysis, results: dict, names: set[str]) -> None:
    for section in script.sections:
        if section.name in names:
            results["sections"][section.name] = section.compute(analysis, results)


def _try_group(script, published, results, analyse, choices, alternatives, affects) -> Group:
    """Try all settings of one group of choices; `affects` maps each to the sections it changes."""
    names, tried, best = list(affects), {}, None
    compared = {"claims"}.union(*affects.values())
    now, sections = choices, dict(results["sections"])
    working = {"meta": results["meta"], "sections": sections}
    combinations = [*itertools.product(*(alternatives[n] for n in names))]
    of = _reproduced({}, published, working, compared).of
    misses = dict.fromkeys(combinations, 0)
    if script.quick and of and len(combinations) > MANY:
        misses = _quick_misses(script, published, working, analyse, choices, names, combinations)
    for values in common.progress(sorted(combinations, key=misses.__getitem__), "settings"):
        setting = dict(zip(names, values))
        if best is not None and of - misses[values] < best.reproduced:
            tried[values] = Tried(setting, of=of, at_most=of - misses[values])
            continue
        if not of:  # no published number can be compared here: all settings are as good
            tried[values] = best = Tried(setting, misses=0.0)
            continue
        try:
            analysis, _ = analyse(choices | setting)
        except common.UserError as e:
            tried[values] = Tried(setting, ruled_out=str(e))
            continue
        changed = [affects[n] for n in names if now[n] != setting[n]]
        if changed:
            _recompute(script, analysis, working, {"claims"}.union(*changed))
        now = choices | setting
        tried[values] = _reproduced(setting, published, working, compared)
        if best is None or tried[values].merit > best.merit:
            best, sections = tried[values], dict(working["sections"])
    default = {n: choices[n] for n in names}
    found = {"meta": results["meta"], "sections": sections}
    return Group(names, [tried[values] for values in combinations], default, found)


def _quick_misses(script, published, results, analyse, choices, names, combinations) -> dict:
    """How many published numbers each setting misses by what script.quick finds of it."""
    misses = {}
    for values in common.progress(combinations, "quick search"):
        misses[values] = 0
        try:
            analysis, _ = analyse(choices | dict(zip(names, values)))
        except common.UserError:
            continue  # it is ruled out, with the reason, when its turn comes
        parts = {"meta": results["meta"], "sections": script.quick(analysis)}
        rows = compare.with_published(published, parts)
        misses[values] = sum(r.verdict == compare.DIFFERS for r in rows)
    return misses


def _reproduced(setting: dict, published: dict, results: dict, compared: set[str]) -> Tried:
    """How many published numbers of the compared sections the results reproduce."""
    rows = [r for r in compare.with_published(published, results)
            if r.verdict not in (compare.NOT_COMPARED, compare.INPUT)
            and r.key.split(".")[0] in compared]
    worst = max(rows, key=lambda r: r.distance, default=None)
    return Tried(setting, sum(not r.distance for r in rows), len(rows),
                 float(sum(r.distance for r in rows)),
                 {"key": worst.key, "units": worst.distance} if worst else None)


def _print_group(group: Group, log: report.Log) -> None:
    n_pruned = 0
    log(f"  {', '.join(group.choices)}: {len(group.settings)} settings")
    for s in group.settings:
        if s.ruled_out:
            log(f"    {_in_words(s.setting)}: not possible here ({s.ruled_out.split(':')[0]})")
            continue
        if s.at_most is not None:
            n_pruned += 1
            continue
        miss = "none"
        if s.largest_miss and s.largest_miss["units"]:
            miss = f"{s.largest_miss['units']:.0f} units ({s.largest_miss['key']})"
        mark = " *" if s.setting in group.equal else ""
        log(f"    {_in_words(s.setting)}: {s.reproduced} of {s.of} published numbers; largest miss "
            f"{miss}{mark}")
    if n_pruned:
        log(f"    {n_pruned} more settings were not analysed in full: by the attention of single "
            "heads alone they miss too many numbers to win")
    line = (f"    wins: {_in_words(group.winner)}; cannot be told apart: "
            f"{', '.join(group.not_identifiable) or 'none'}")
    if group.not_tried:
        line += f"; no alternative to try here: {', '.join(group.not_tried)}"
    log(line)


def _in_words(setting: dict) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in setting.items())
