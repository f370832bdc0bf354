"""--sweep: which of the open choices the published numbers support."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable
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
    log, groups = report.Log(), []
    choices = {name: values[0] for name, values in alternatives.items()}
    analysis, meta = analyse(choices)
    search = Search(script, compare.read_published(script.stem), analyse, choices,
                    {"meta": meta, "sections": {}})
    search.recompute(analysis, {section.name for section in script.sections})
    log(f"== WHICH OPEN CHOICES THE PUBLISHED NUMBERS SUPPORT ({meta['model']})")
    published_model = search.published.get("model")
    if not compare.is_published_model(meta, published_model):
        log(f"  the published numbers are of {published_model}: on {meta['model']} they support no "
            "setting, and nearly all tie")
    log("  * no other setting of the group does better")
    for affects in script.sweeps:
        groups.append(search.try_group(affects, alternatives))
        _print_group(groups[-1], log)
    log("  the defaults stay as they are until somebody who has the weights changes them")
    found = {"meta": meta, "groups": [g.as_json() for g in groups], "winner": search.choices}
    out = report.results_dir(args, script.model)
    wrote = report.write_results(out, f"sweep_{script.stem}", found, log)
    common.notice("wrote " + ", ".join(map(str, wrote)))
    return found


@dataclass
class Search:
    """A sweep under way: the winners so far, and the sections of the setting computed last."""

    script: report.Script
    published: dict
    analyse: Callable[[dict], tuple]
    choices: dict  # the winners of the groups tried so far, the defaults of the others
    results: dict

    def recompute(self, analysis, names: set[str]) -> None:
        for section in self.script.sections:
            if section.name in names:
                found = section.compute(analysis, self.results)
                self.results["sections"][section.name] = found

    def try_group(self, affects: dict[str, set], alternatives: dict[str, list]) -> Group:
        """Try all settings of one group; `affects` maps each choice to the sections it changes.

        Afterwards the winner is among self.choices, and self.results are its own.
        """
        compared = {"claims"}.union(*affects.values())
        settings = [dict(zip(affects, values)) for values in itertools.product(
            *(alternatives[name] for name in affects))]
        n_published = _reproduced({}, self.published, self.results, compared).of
        if n_published:
            tried, sections = self._try_all(settings, affects, compared, n_published)
        else:  # no published number can be compared here, so that all settings are as good
            tried = [Tried(setting, misses=0.0) for setting in settings]
            sections = self.results["sections"]
        group = Group(list(affects), tried, {name: self.choices[name] for name in affects})
        self.choices, self.results["sections"] = self.choices | group.winner, sections
        return group

    def _try_all(self, settings: list[dict], affects, compared: set[str], n_published: int):
        """(the settings tried, in their order, and the sections of the best one)."""
        misses = [0] * len(settings)
        if self.script.quick and len(settings) > MANY:
            misses = [self._quick_misses(s) for s in common.progress(settings, "quick search")]
        tried: dict[int, Tried] = {}
        best, sections, now = None, self.results["sections"], self.choices
        for i in common.progress(sorted(range(len(settings)), key=misses.__getitem__), "settings"):
            at_most = n_published - misses[i]
            if best is not None and at_most < best.reproduced:
                tried[i] = Tried(settings[i], of=n_published, at_most=at_most)
                continue
            changed = [affects[name] for name in affects if now[name] != settings[i][name]]
            tried[i] = self._try(settings[i], changed, compared)
            if tried[i].ruled_out:
                continue
            now = self.choices | settings[i]
            if best is None or tried[i].merit > best.merit:
                best, sections = tried[i], dict(self.results["sections"])
        return [tried[i] for i in range(len(settings))], sections

    def _try(self, setting: dict, changed: list[set], compared: set[str]) -> Tried:
        """Analyse one setting, computing again the sections that have changed."""
        try:
            analysis, _ = self.analyse(self.choices | setting)
        except common.UserError as e:
            return Tried(setting, ruled_out=str(e))
        if changed:
            self.recompute(analysis, {"claims"}.union(*changed))
        return _reproduced(setting, self.published, self.results, compared)

    def _quick_misses(self, setting: dict) -> int:
        """How many published numbers a setting misses by what script.quick finds of it."""
        try:
            analysis, _ = self.analyse(self.choices | setting)
        except common.UserError:
            return 0  # it is ruled out, with the reason, when its turn comes
        parts = {"meta": self.results["meta"], "sections": self.script.quick(analysis)}
        rows = compare.with_published(self.published, parts)
        return sum(r.verdict == compare.DIFFERS for r in rows)


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
    analysed = [s for s in group.possible if s.at_most is None]
    if len(group.equal) == len(analysed) > 1:
        line = "    tie: the published numbers cannot choose"
    else:
        line = (f"    wins: {_in_words(group.winner)}; cannot be told apart: "
                f"{', '.join(group.not_identifiable) or 'none'}")
    if group.not_tried:
        line += f"; no alternative to try here: {', '.join(group.not_tried)}"
    log(line)


def _in_words(setting: dict) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in setting.items())
