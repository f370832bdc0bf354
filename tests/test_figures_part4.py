"""The figures of part 4, drawn from made-up results: any number of heads, tokens of any kind."""

import dataclasses
import json
import math
import random
import re
import shutil
import subprocess
import sys
import warnings

import matplotlib
import pytest

import circuits_part4 as part4
import circuits_part4_toy as toy
import common
from figures import charts
from figures import part4 as pictures
from pictures import collisions
from results import report

AWKWARD = [" MERCHANTABILITY", "$$", "\n", "\n" + 19 * " ", "って", "$x^2$", "\\frac{1}", "\x00",
           "😀", "'", "�", "ĠÃ", 60 * "=", " ", "\u202eabc", "e\u0301"]
MODEL = "attn-only-1l"


@pytest.fixture(autouse=True)
def styled():
    """As draw() has it, and every warning an error."""
    with charts.style(), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def made_word(n_heads: int, g: random.Random, next: str) -> dict:
    tokens = ["<|BOS|>", *AWKWARD[:5], " Ralph", *AWKWARD[5:9], "R"]
    pushes = [g.uniform(-9, 9) for _ in range(n_heads)]
    return {"prompt": "".join(tokens[1:]), "tokens": tokens, "source": " Ralph", "next": next,
            "head": n_heads - 1, "attention": g.random(), "pushes": pushes,
            "pushes_through_source": [x / 2 for x in pushes]}


def made_bug(g: random.Random, pair: list[str]) -> dict:
    prompts = []
    for text in ("You need to keep this in", "You need to keep the dogs at" + 40 * "\n"):
        weight = g.random()
        prompts.append({"prompt": text, "attention": weight, "ratio": 3.0,
                        "through": {pair[0]: 2 * weight, pair[1]: 6 * weight}})
    return {"head": 0, "source": " keep", "pair": pair, "prompts": prompts}


def made_eigenvalues(g: random.Random, rank: int) -> list[list[float]]:
    """Conjugate pairs over six powers of ten, and a zero."""
    pairs = [(10 ** g.uniform(-2, 4), g.uniform(0, math.pi)) for _ in range(rank // 2)]
    values = [[r * math.cos(t), s * r * math.sin(t)] for r, t in pairs for s in (1, -1)]
    return [*values[:-2], [-3.0, 0.0], [0.0, 0.0]]


def made(n_heads: int, rank: int = 64) -> dict:
    """Results of a model of `n_heads` heads: random numbers, awkward tokens, one row skipped."""
    g = random.Random(n_heads)
    draw = lambda n, top=1.0: [g.uniform(0, top) for _ in range(n)]  # noqa: E731
    rows = [{"head": h, "source": s, "dest": g.sample(AWKWARD, 5),
             "out": [s.strip(), *g.sample(AWKWARD, 4)]}
            for h, s in zip([0, n_heads - 1] * 3, [" Ralph", "$$", *AWKWARD[9:13]])]
    rows[1:1] = [{"head": 9, "source": " Paris", "skipped": "no", "pieces": []}]
    scores = [math.cos(x) for x in draw(n_heads, math.pi)]
    sections = {
        "sizes": {"d_vocab": 48262, "n_heads": n_heads, "rank": rank},
        "skip_trigrams": rows,
        "at_work": {"ralph": made_word(n_heads, g, "alph")},
        "positional": {"query": 200, "lean": [0], "from_positions":
                       [draw(3, 0.5) for _ in scores], "on_text": [draw(3, 0.3) for _ in scores]},
        "keep": made_bug(g, [" mind", "$$"]),
        "eigen": {"heads": [{"copy_score": x, "eigenvalues": made_eigenvalues(g, rank)}
                            for x in scores],
                  "random": {"copy_score": [-0.035, 0.07, 0.01],
                             "eigenvalues": made_eigenvalues(g, rank)}},
        "copying": [dict(zip(("diagonal_positive", "top1", "top5"), draw(3)),
                         sources=[1000, 2999]) for _ in scores]}
    return {"meta": {"model": MODEL, "n_tokens": 1000}, "sections": sections}


def plotted(results: dict, stem: str):
    section, plot = {name: rest for name, *rest in pictures.FIGURES}[f"part4_{stem}"]
    return plot(results["sections"][section], results)


def heights(ax) -> list[list[float]]:
    """Of the bars of axes, series by series."""
    return [[bar.get_height() for bar in series] for series in ax.containers]


def x_labels(ax) -> list[str]:
    return [t.get_text() for t in ax.get_xticklabels()]


@pytest.mark.parametrize("n_heads", [1, 8, 16, 32])
def test_every_figure_names_its_model_and_nothing_collides(n_heads):
    results = made(n_heads)
    for stem, section, plot in pictures.FIGURES:
        figure = plot(results["sections"][section], results)
        assert MODEL in figure.get_suptitle(), stem
        assert collisions(figure) == [], stem


def test_a_collision_is_found():
    figure, ax = charts.new_figure(4, 4)
    ax.text(0.5, 0.5, "one")
    assert collisions(figure) == []
    ax.text(0.52, 0.5, "two")
    figure.text(0.9, 0.9, "out of the figure")
    assert sorted(collisions(figure)) == [("out of the figure", "is clipped"), ("two", "one")]


def test_the_table_holds_its_tokens():
    results = made(8)
    figure = plotted(results, "skip_trigrams")
    rows = [t for t in results["sections"]["skip_trigrams"] if "skipped" not in t]
    cells = {}
    for text in figure.axes[0].texts:
        cells.setdefault(text.get_position()[1], []).append(text)
    assert [[t.get_text() for t in cells[i]] for i in range(len(rows))] == [
        [f"0.{t['head']}", *map(charts.label, [t["source"], *t["dest"], *t["out"]])] for t in rows]
    shaded = [t.get_text() for t in cells[0] if t.get_bbox_patch()]
    assert shaded == ["'Ralph'"]  # the source ' Ralph' is no entry of its own row
    assert "not in this model: ' Paris'" in figure.get_supxlabel()


@pytest.mark.parametrize("n_heads", [1, 16])
def test_pushes(n_heads):
    results = made(n_heads)
    word = results["sections"]["at_work"]["ralph"]
    prompt, ax = plotted(results, "at_work").axes
    assert heights(ax) == [word["pushes"], word["pushes_through_source"]]
    assert x_labels(ax) == [f"0.{h}" for h in range(n_heads)]
    assert "'alph' (logits)" in ax.get_ylabel()
    shown = [t.get_text() for t in prompt.texts]
    assert [t for t in shown if t.startswith("'")] == [
        charts.label(t) for t in [*word["tokens"], "alph"]]
    assert f"head 0.{n_heads - 1} reads ' Ralph' with weight {word['attention']:.2f}" in shown
    through, whole = (charts.minus(f"{word[key][-1]:+.2f}")
                      for key in ("pushes_through_source", "pushes"))
    assert f"through ' Ralph':\n{through} of {whole} logits" in shown


def test_no_picture_of_a_word_that_was_skipped():
    results = made(4)
    results["sections"]["at_work"]["ralph"] = {"next": "alph", "skipped": "no token", "pieces": []}
    assert plotted(results, "at_work") is None


def test_attention_by_distance_is_on_one_scale():
    results = made(8)
    r = results["sections"]["positional"]
    axes = plotted(results, "positional").axes
    for ax, key in zip(axes, ("from_positions", "on_text")):
        assert heights(ax) == [list(column) for column in zip(*r[key])]
    assert axes[0].get_ylim() == axes[1].get_ylim()
    assert x_labels(axes[1])[:2] == ["0.0*", "0.1"]  # the star: leans on position
    r["on_text"] = [x[:1] for x in r["on_text"]]  # a text of one token has one distance
    assert len(heights(plotted(results, "positional").axes[1])) == 1


def test_the_bug_is_one_ratio_in_both_prompts():
    results = made(2)
    r = results["sections"]["keep"]
    ax, = plotted(results, "keep").axes
    assert heights(ax) == [[p["through"][w] for p in r["prompts"]] for w in r["pair"]]
    for text, p in zip(x_labels(ax), r["prompts"]):
        assert f"weight {p['attention']:.2f}" in text and "'$$' / ' mind' = 3.00" in text
    r["prompts"][0]["ratio"] = None  # no push on the first word: no ratio
    assert x_labels(plotted(results, "keep").axes[0])[0].endswith("'$$' / ' mind' = -")
    r["prompts"] = [{"prompt": p["prompt"], "skipped": "no"} for p in r["prompts"]]
    assert plotted(results, "keep") is None


@pytest.mark.parametrize("n_heads", [1, 8])
def test_the_dots_are_the_eigenvalues(n_heads):
    """Each dot, taken back from direction and log radius; those below the floor at the centre."""
    results = made(n_heads)
    r = results["sections"]["eigen"]
    axes = plotted(results, "eigenvalues").axes
    heads = [(x["eigenvalues"], x["copy_score"]) for x in r["heads"]]
    heads.append((r["random"]["eigenvalues"], r["random"]["copy_score"][0]))
    assert len(axes) == len(heads)
    for ax, (values, score) in zip(axes, heads):
        (dots,), top = ax.collections, max(math.hypot(*v) for v in values)
        for (x, y), (real, imag), colour in zip(
                dots.get_offsets().tolist(), values, dots.get_facecolors().tolist()):
            radius, angle = math.hypot(x, y), math.atan2(y, x)
            size = top * 10 ** (radius - pictures.DECADES)
            if radius:
                assert size * math.cos(angle) == pytest.approx(real, rel=1e-9, abs=1e-9 * top)
                assert size * math.sin(angle) == pytest.approx(imag, rel=1e-9, abs=1e-9 * top)
            else:
                assert math.hypot(real, imag) <= top * 10**-pictures.DECADES
            rgb = matplotlib.colors.to_rgb(charts.COLOURS[0 if real > 0 else 5])
            assert colour[:3] == pytest.approx(rgb)
        assert charts.minus(f"copy score {score:+.2f}") in ax.get_title()
    assert "random" in axes[-1].get_title() and "head 0.0:" in axes[0].get_title()


def test_copy_scores_fall_and_the_band_is_that_of_the_random_heads():
    results = made(8)
    r = results["sections"]["eigen"]
    ax, = plotted(results, "copy_scores").axes
    scores = {f"0.{h}" + "*" * (h == 0): x["copy_score"] for h, x in enumerate(r["heads"])}
    assert heights(ax) == [sorted(scores.values(), reverse=True)]
    assert [scores[name] for name in x_labels(ax)] == heights(ax)[0]
    band = ax.patches[-1]
    assert (band.get_y(), band.get_height()) == pytest.approx((-0.035, 0.105))
    assert "3 random heads: −0.035 to +0.070" in ax.get_legend().get_texts()[0].get_text()


def test_the_measures_of_copying_have_one_unit():
    results = made(8)
    r, figure = results["sections"]["copying"], plotted(results, "copying")
    figure.draw_without_rendering()
    assert [heights(ax)[0] for ax in figure.axes] == [
        [x["copy_score"] for x in results["sections"]["eigen"]["heads"]],
        *([x[k] for x in r] for k in ("diagonal_positive", "top1", "top5"))]
    units = [ax.bbox.height / (ax.get_ylim()[1] - ax.get_ylim()[0]) for ax in figure.axes]
    assert units == pytest.approx(units[:1] * 4, rel=0.02)
    assert "all 48,262 tokens" in figure.axes[1].get_title("left")
    assert "tokens 1,000 to 2,999" in figure.axes[2].get_title("left")


def test_shares_that_are_all_small_are_enlarged():
    results = made(8)
    for x in results["sections"]["copying"]:
        x["top1"] /= 10
    axes = plotted(results, "copying").axes
    assert ["(enlarged)" in ax.get_title("left") for ax in axes] == [False, False, True, False]
    assert max(heights(axes[2])[0]) > 0.7 * axes[2].get_ylim()[1]
    for x in results["sections"]["copying"]:
        x["top1"] = 0.0
    assert collisions(plotted(results, "copying")) == []


def toy_results() -> dict:
    """The sections that are drawn, in the order of the run, not in that of a file."""
    sections = {"keep": toy.compute_keep(), "matrices": toy.compute_matrices()}
    return {"meta": {}, "sections": sections}


def test_the_toys_figures():
    results = toy_results()
    keep, matrices = (plot(results["sections"][s], results) for _, s, plot in pictures.TOY_FIGURES)
    assert collisions(keep) == collisions(matrices) == []
    needs, gives = keep.axes
    assert heights(gives) == [[1.0, 1.6], [3.0, 4.8]]
    assert [t.get_text() for t in gives.get_legend().get_texts()] == ["mind", "bay"]
    assert "after 'in'\nweight 0.5" in x_labels(gives)[0] and "bay / mind = 3" in x_labels(gives)[1]
    (a, b), (c, d) = heights(needs)
    assert a > c and b < d  # mind after in, bay after at
    titles = [ax.get_title() for ax in matrices.axes]
    assert ["90.0°" in t for t in titles] == [True, True, False, False]
    assert "8.1° apart\ntoken 1 read: logits (−1, −1)" in titles[3]
    assert "eigenvalues 3, 1" in titles[0] and "eigenvalues +i, −i" in titles[2]
    arrows = [[t.xy for t in ax.texts] for ax in matrices.axes]
    assert arrows == [[(2, 1), (1, 2)], [(0, 1), (1, 0)], [(0, 1), (-1, 0)], [(-1, -1), (6, 4)]]
    eigenvectors = [[line.get_xy2() for line in ax.lines if line.get_linestyle() == "--"]
                    for ax in matrices.axes]
    assert eigenvectors == [[[1, 1], [1, -1]], [[1, 1], [1, -1]], [], [[2, 1], [3, 1]]]


@pytest.fixture(scope="module")
def redrawn(tmp_path_factory):
    """The folder of --figures-only on the committed results, in a process of its own."""
    out = tmp_path_factory.mktemp("redrawn")
    for home, stem in (("mini", "part4"), ("", "part4_toy")):
        shutil.copy(common.HERE / "results" / home / f"{stem}.json", out)
    code = f"""
import sys
import circuits_part4, circuits_part4_toy
for script, model in ((circuits_part4, ["--model", "mini"]), (circuits_part4_toy, [])):
    script.main([*model, "--figures-only", "--out", {str(out)!r}])
assert "transformer_lens" not in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], cwd=common.HERE,
                   check=True, capture_output=True)
    return out / "figures"


def test_files_are_the_same_every_time(redrawn, tmp_path):
    """In another process, and from what was computed as from what was read."""
    mini = json.loads((common.HERE / "results/mini/part4.json").read_text(encoding="utf-8"))
    two = [f for f in pictures.FIGURES if f[0] in ("part4_at_work", "part4_keep")]
    wrote = report.draw(dataclasses.replace(part4.SCRIPT, figures=two), mini, tmp_path)
    wrote += report.draw(toy.SCRIPT, toy_results(), tmp_path)
    assert sorted(p.name for p in wrote) == sorted(p.name for p in tmp_path.iterdir())
    assert len(wrote) == 8 and {p.suffix for p in wrote} == {".png", ".svg"}
    for path in wrote:
        assert path.read_bytes() == (redrawn / path.name).read_bytes(), path.name


def svg_words(folder) -> dict[str, list[str]]:
    """The texts of every SVG."""
    return {p.name: re.findall("<text[^>]*>(.*?)</text>", p.read_text(encoding="utf-8"), re.DOTALL)
            for p in folder.glob("part4*.svg")}


def test_the_committed_figures_are_of_these_scripts(redrawn):
    """The same words in each; its lines and colours may be rounded otherwise elsewhere."""
    names = [f[0] for f in pictures.FIGURES + pictures.TOY_FIGURES]
    homes = common.HERE / "figures" / "mini", common.HERE / "figures"
    paths = [p for folder in homes for p in folder.glob("part4*.*g")]
    wanted = [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    assert sorted(p.name for p in paths) == sorted(wanted)
    assert svg_words(redrawn) == svg_words(homes[0]) | svg_words(homes[1])
    assert all(svg_words(redrawn).values())
    assert max(p.stat().st_size for p in paths if p.suffix == ".svg") < 3e5
    assert sum(p.stat().st_size for p in paths) < 2.1e6


def test_a_dead_head_is_a_gap_with_a_dash():
    """It has no eigenvalue but zero, and so no copy score."""
    results = made(3)
    results["sections"]["eigen"]["heads"][1] = {"copy_score": None, "eigenvalues": [[0.0, 0.0]] * 4}
    ax, = plotted(results, "copy_scores").axes
    assert x_labels(ax)[2] == "0.1" and heights(ax)[0][2] == 0
    assert ax.texts[2].get_text() == plotted(results, "copying").axes[0].texts[1].get_text() == "-"
    assert plotted(results, "eigenvalues").axes[1].get_title() == (
        "head 0.1: copy score -\nlargest |λ| 0")


def test_the_model_of_a_headline_is_short_and_drawable():
    results = made(1)
    results["meta"]["model"] = "モデル" + "x" * 200
    figure = plotted(results, "copy_scores")
    assert collisions(figure) == [] and figure.get_suptitle().startswith(r"\u30e2\u30c7\u30ebxxx")


def test_no_figure_of_an_earlier_run_stays(tmp_path):
    """What these results have nothing for is taken away; other files are left alone."""
    results = made(2)
    results["sections"]["keep"] = {"head": 1, "source": " keep", "skipped": "no", "pieces": []}
    for name in ("part4_keep.png", "part4_keep.svg", "mine.png"):
        (tmp_path / name).write_text("old", "utf-8")
    keep = next(f for f in pictures.FIGURES if f[0] == "part4_keep")
    assert report.draw(dataclasses.replace(part4.SCRIPT, figures=[keep]), results, tmp_path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["mine.png"]
