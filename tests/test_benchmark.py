"""benchmark.py runs, prints a row for every measure, and sees results that differ."""

import dataclasses
import re

import pytest
import torch

import benchmark
import common

SMALL = ["--small", "--pairs", "1"]


def test_every_measure_has_its_row(capsys):
    benchmark.main(SMALL)
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert rule == "|---" * (header.count("|") - 1) + "|"
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [what[:3] for what, *_ in cells] == [
        f"{letter}. " for letter in "abccdeffgghj"]
    for (what, seconds, ratio, goal, met, memory, _, machine), row in zip(cells, rows):
        assert row.count("|") == header.count("|")
        sides = what.count(" / ") + 1
        assert len(re.findall(r"\d\S*", seconds)) == len(re.findall(r"\d\S*", memory)) == sides
        no_goal = "heads 2" in what or "TransformerLens" in what
        assert (goal, met) == ("none", "-") if no_goal else met in ("yes", "no")
        assert re.fullmatch(r"at (most|least) \S+|linear.*|none", goal)
        assert re.search(r"\d+ cores, torch \d\S+, \d+ threads", machine)
        if what[0] != "f":
            shown = re.fullmatch(r"(\S+) \((\S+)\.\.(\S+)\)", ratio).groups()
            assert len(set(shown)) == 1 and float(shown[0]) > 0


@pytest.mark.parametrize("letter, kernel", [
    ("b", "unembed"), ("c", "composition_scores"), ("d", "circuit_eigenvalues"),
    ("d", "copy_score"), ("d", "circuit_diagonal"), ("d", "self_rank")])
def test_a_result_that_differs_is_seen(monkeypatch, letter, kernel):
    original = getattr(common, kernel)

    def off(*args, **more):
        found = original(*args, **more)
        if isinstance(found, common.Unembedded):
            return dataclasses.replace(found, loss_increase=off_by(found.loss_increase))
        return (off_by(found[0]), *found[1:]) if isinstance(found, tuple) else off_by(found)

    def off_by(x):
        return x + 1 if x.dtype == torch.int64 else x * 1.001 + 1e-3

    monkeypatch.setattr(common, kernel, off)
    with pytest.raises(AssertionError, match=f"^{letter}. .*the two differ by"):
        benchmark.main([*SMALL, "--only", letter])


@pytest.mark.parametrize("argv", [["--pairs", "0"], ["--only", "a,z"], ["--only", ""], ["--fast"]])
def test_what_cannot_be_asked(argv):
    with pytest.raises(common.UserError):
        benchmark.main([*SMALL, *argv])
