"""A second source on the public weights: what it has in common with the article, and what not."""

import json
import math

import numpy as np
import pytest
import test_part4

import circuits_part4 as part4
import common
from results import compare, report

SOURCE = json.loads((report.PUBLISHED / "independent.json").read_text("utf-8"))
MODELS = {"part4": "attn-only-1l", "part5": "attn-only-2l"}


def values(part: str, key: str) -> np.ndarray:
    return np.array(next(e["values"] for e in SOURCE[part]["entries"] if e["key"] == key))


def printed(part: str, prefix: str) -> dict:
    return {e["key"].removeprefix(prefix): e for e in compare.read_published(part)["entries"]
            if e["key"].startswith(prefix)}


def test_the_composition_scores_give_what_the_article_prints():
    """24 printed values of 192 measured ones, to the digit."""
    n = 0
    for kind in "QKV":
        scores, article = values("part5", f"composition.{kind}.scores"), printed(
            "part5", f"composition.{kind}.")
        reader, writer = np.unravel_index(scores.argmax(), scores.shape)
        assert article["max_pair"]["value"] == {"reader": f"1.{reader}", "writer": f"0.{writer}"}
        ours = {"max": scores.max(), "mean": scores.mean()} | {
            f"mean_by_writer.{h}": mean for h, mean in enumerate(scores.mean(0))}
        for key in ours.keys() & article.keys():
            assert round(ours[key], article[key]["decimals"]) == article[key]["value"], (kind, key)
            n += 1
    assert n == 3 * 2 + 2 * 8


def test_five_copy_scores_lie_above_the_articles():
    """Which are those that a centred unembedding would raise."""
    article = {e["key"]: e["value"] for e in compare.read_published("part4")["entries"]
               if e["key"].endswith(".copy_score") and e["decimals"] == 3}
    off = []
    for h, score in enumerate(values("part4", "eigen.copy_score_centred")):
        printed_score = article[f"eigen.heads.{h}.copy_score"]
        if round(score, 3) != printed_score:
            off.append(h)
            assert score > printed_score
    assert off == [1, 2, 4, 5, 6]


def results_of(part: str, change: float, **meta) -> dict:
    """Results with the second source's own values, the first one of each table changed."""
    sections: dict = {}
    for entry in SOURCE[part]["entries"]:
        if entry["key"]:
            *path, last = entry["key"].split(".")
            table = sections
            for key in path:
                table = table.setdefault(key, {})
            changed = np.array(entry["values"])
            changed.flat[0] += change * entry["tolerance"]
            table[last] = changed.tolist()
    return {"meta": {"model": MODELS[part], "revision": "0123"} | meta, "sections": sections}


@pytest.mark.parametrize("part, n", [("part4", 1), ("part5", 5)])
def test_values_are_held_to_their_own_tolerance(part, n, capsys):
    compare.print_independent(results_of(part, 0.9), part, MODELS[part], report.Log())
    assert capsys.readouterr().out.count(": theirs") == 0
    compare.print_independent(results_of(part, 1.1), part, MODELS[part], report.Log())
    out = capsys.readouterr().out
    assert out.count(": theirs") == n and out.startswith("== A SECOND SOURCE")


@pytest.mark.parametrize("meta", [{"model": "mini-2l"}, {"revision": None}])
def test_of_another_model_nothing_is_said(meta, capsys):
    compare.print_independent(results_of("part5", 0, **meta), "part5", MODELS["part5"],
                              report.Log())
    assert capsys.readouterr().out == ""


def test_the_centred_copy_score_is_that_of_a_centred_unembedding():
    plain = test_part4.analyse(test_part4.make_model(center_unembed=False))
    centred = test_part4.analyse(test_part4.make_model(center_unembed=True))
    wanted = common.copy_score(common.circuit_eigenvalues(centred.A, centred.B)[0]).tolist()
    for a in (plain, centred):
        assert part4.centred_copy_scores(a) == pytest.approx(wanted, abs=1e-6)  # folded in float32
    own = common.copy_score(common.circuit_eigenvalues(plain.A, plain.B)[0]).tolist()
    assert not any(math.isclose(x, y, abs_tol=1e-5) for x, y in zip(own, wanted))
