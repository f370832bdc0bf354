"""The figures of part 5 and of its toy: they show what the results say, and nothing stands in the
way of anything. Almost all of it is read off the Figure objects; few files are written."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.container import BarContainer
from matplotlib.text import Text

import circuits_part5 as part5
import circuits_part5_toy as toy
import common
from figures import charts
from figures import part5 as pictures
from pictures import collisions
from results import report

HEADS = (1, 8, 16, 32)
TOKENS = ["<|BOS|>", "$$", "\n", "\t ", "\ufffd", "Ġâ", "漢字", "🙂" * 9, "long" * 70, "'", "\\",
          "_^{", "", " ", "\u202e", "a\u0301", "\x00", "ﷺ", "<|x|>", "%", "$x^2$", "\r\n", "fi",
          "Ω"]
NAMES = [name for name, *_ in pictures.FIGURES]
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def style():
    with charts.style():
        yield


def random_results(n_heads: int, n_sequences: int = 12, model: str = "a-model",
                   n_layers: int = 2) -> dict:
    """What the figures read, of a model of so many heads: random numbers, awkward tokens."""
    r = np.random.default_rng(n_heads)
    names = [[f"{layer}.{h}" for h in range(n_heads)] for layer in range(n_layers)]
    readers, writers = sum(names[1:], []), sum(names[:-1], [])

    def pairs(low, high):
        """A table with None where a head does not read an earlier one, as compute_x has it."""
        return [[r.uniform(low, high) if writer < reader[:1] else None for writer in writers]
                for reader in readers]

    def scores():
        return {"scores": pairs(0, 0.2)}

    def virtual(h2, h1):
        pattern = np.tril(r.uniform(0.01, 1, (len(TOKENS), len(TOKENS))))
        return {"reader": f"{n_layers - 1}.{h2}", "writer": f"0.{h1}", "map_tokens": TOKENS,
                "map": (pattern / pattern.sum(1, keepdims=True)).tolist()}

    def error(*shape):
        return r.uniform(0.01, 0.2, shape).tolist() if n_sequences > 1 else None

    meta = {"script": "circuits_part5.py", "dtype": "float32", "model": model}
    by_order = [math.comb(n_layers, k) * n_heads**k for k in range(n_layers + 1)]
    return {"meta": meta, "sections": {
        "model": {"n_layers": n_layers, "n_by_order": by_order, "readers": readers,
                  "writers": writers},
        "term_importance": {
            "marginal": [-0.684, -4.04, 0.2, -0.1, 0.03][:n_layers + 1],
            "marginal_se": error(n_layers + 1), "n_sequences": n_sequences,
            "virtual_removed": pairs(-0.1, 0.7),
            "start_delta": -0.9, "start_delta_se": error(), "real_delta": 0.07,
            "real_delta_se": error()},
        "composition": {kind: scores() for kind in "QKV"} | {
            "baseline": {"mean": 0.0442, "margin": 0.05},
            "first_published": {kind: scores() for kind in "QKV"} | {
                "baseline": {"mean": 0.0156, "margin": 0.025}}},
        "attention_groups": {
            "tv": {k: r.uniform(0, 1, len(readers)).tolist() for k in ("without_K", "without_Q")},
            "tv_without_K_of_head": pairs(0, 1)},
        "virtual_heads": {"most_important": virtual(n_heads - 1, 0),
                          "most_two_back": virtual(0, n_heads - 1)},
        "induction": {"score": r.uniform(0, 0.9, (n_layers, n_heads)).tolist(),
                      "n_ids": 50, "n_rows": 8,
                      "score_sd": r.uniform(0, 0.1, (n_layers, n_heads)).tolist()},
    }}


def figure_of(name: str, results: dict, figures=pictures.FIGURES):
    section, plot = next((s, p) for n, s, p in figures if n == name)
    return plot(results["sections"][section], results)


def nothing_in_the_way(figure) -> None:
    """Every text lies whole inside the figure, and on no other text; no legend on a bar."""
    assert collisions(figure) == []
    for ax in figure.axes:
        legend = ax.get_legend()
        for bar in ax.patches if legend else ():
            assert not legend.get_window_extent().overlaps(bar.get_window_extent())


def close(found, wanted) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def bars_of(ax) -> list[BarContainer]:
    return [c for c in ax.containers if isinstance(c, BarContainer)]


def heights(bar: BarContainer) -> list[float]:
    return [p.get_height() for p in bar]


def half_lengths(bar: BarContainer):
    """Of the error bars."""
    return [(high[1] - low[1]) / 2 for low, high in bar.errorbar.lines[2][0].get_segments()]


def map_of(ax):
    return np.ma.filled(ax.collections[0].get_array().astype(float), np.nan)


def cells(ax) -> list[str]:
    """The numbers in the cells of a map, or at the bars."""
    of_map = [t for t in ax.figure.texts if t.get_transform() == ax.transData]
    return [t.get_text() for t in of_map or ax.texts]


def ticks(axis) -> list[str]:
    return [t.get_text() for t in axis.get_majorticklabels()]


def rounded(values, digits: int) -> list[str]:
    """As the log prints them, with a real minus; none before zero."""
    return [charts.minus(f"{round(v, digits) + 0:.{digits}f}") for v in np.ravel(values)]


# ------------------------------------------------------------------ every figure


@pytest.mark.parametrize("n_heads", HEADS)
@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_a_figure_can_be_read(name, n_heads):
    figure = figure_of(name, random_results(n_heads))
    nothing_in_the_way(figure)
    assert "a-model" in figure.get_suptitle()
    for ax in figure.axes:
        shown = ax.get_subplotspec() and ax.get_subplotspec().is_first_col()
        assert ax.get_ylabel() or not shown, "an axis says what it measures"


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_model_breaks_a_figure(name):
    figure = figure_of(name, random_results(2, model="$\\frac $漢\n" + "name" * 30))
    nothing_in_the_way(figure)
    assert r"$\\frac $\u6f22\nname" in figure.get_suptitle().replace("\n", " ")


@pytest.mark.parametrize("name", ["part5_term_importance", "part5_virtual_removed"])
def test_one_sequence_has_no_error_bars(name):
    figure = figure_of(name, random_results(3, n_sequences=1))
    nothing_in_the_way(figure)
    assert all(bar.errorbar is None for ax in figure.axes for bar in bars_of(ax))
    assert not any("error" in t.get_text() for t in figure.findobj(Text))


# ------------------------------------------------------------------ one layer, three and four


def drawn(results: dict) -> dict:
    """{name: figure} of what these results have figures for, as report.draw() has it."""
    sections = results["sections"]
    figures = {name: plot(sections[section], results)
               for name, section, plot in pictures.FIGURES if sections[section]}
    return {name: figure for name, figure in figures.items() if figure}


def test_one_layer_has_no_picture_of_pairs():
    results = random_results(3, n_layers=1)
    of_pairs = ("composition", "attention_groups", "virtual_heads")
    results["sections"] |= dict.fromkeys(of_pairs, {})
    del results["sections"]["term_importance"]["virtual_removed"]
    figures = drawn(results)
    assert figures.keys() == {"part5_term_importance", "part5_induction"}
    for figure in figures.values():
        nothing_in_the_way(figure)
    bar, = bars_of(figures["part5_term_importance"].axes[0])
    assert heights(bar) == [0.684, 4.04]
    assert len(figures["part5_induction"].axes) == 1


@pytest.mark.parametrize("n_layers, n_heads", [(3, 3), (4, 3), (4, 9)])
def test_more_layers(n_layers, n_heads):
    results = random_results(n_heads, n_layers=n_layers)
    figures, m = drawn(results), results["sections"]["model"]
    assert list(figures) == NAMES
    for figure in figures.values():
        nothing_in_the_way(figure)
    ax = figures["part5_composition"].axes[1]
    values = map_of(ax)
    assert values.shape == (len(m["readers"]), len(m["writers"]))
    exists = [[writer < reader[:1] for writer in m["writers"]] for reader in m["readers"]]
    np.testing.assert_array_equal(np.isfinite(values), exists)
    assert ax.patch.get_hatch() and "-" not in cells(ax)
    assert len(cells(ax)) == (np.sum(exists) if len(m["writers"]) <= charts.MOST_COLUMNS else 0)
    first = figures["part5_composition"].axes[0]
    assert ticks(first.yaxis) == m["readers"] and ticks(first.xaxis) == m["writers"]
    assert first.get_ylabel() == "head that reads"
    assert len(figures["part5_induction"].axes) == n_layers


def test_only_two_layers_stand_beside_the_papers():
    figure = drawn(random_results(3, n_layers=4))["part5_term_importance"]
    bar, = bars_of(figure.axes[0])
    assert heights(bar) == [0.684, 4.04, -0.2, 0.1, -0.03]
    assert ticks(figure.axes[0].xaxis)[1:] == [
        "single heads\n(12)", "virtual heads\n(54)", "of order 3\n(108)", "of order 4\n(81)"]


# ------------------------------------------------------------------ what each of them shows


def test_term_importance_beside_the_papers():
    results = random_results(8)
    figure = figure_of("part5_term_importance", results)
    r, (paper, ours) = results["sections"]["term_importance"], bars_of(figure.axes[0])
    published = json.loads((common.HERE / "results/published/part5.json").read_text("utf-8"))
    printed = {p["beside"]: p["printed"] for p in published["paper"] if "fall of the" in p["what"]}
    papers = [printed[f"term_importance.marginal.{i}"] for i in range(3)]
    close(heights(paper), [float(p) for p in papers])
    close(heights(ours), [-x for x in r["marginal"]])
    close(half_lengths(ours), r["marginal_se"])
    assert paper.errorbar is None
    assert cells(figure.axes[0]) == papers + ["0.68", "4.04", "−0.20"]
    assert (paper.get_label(), ours.get_label()) == ("the paper's model", "this model")
    assert "nats per token)\n± standard error, 12 sequences" in figure.axes[0].get_ylabel()
    assert "16 here, 24" in ticks(figure.axes[0].xaxis)[1] and "64 here, 144" in ticks(
        figure.axes[0].xaxis)[2]


def test_virtual_heads_removed_and_split():
    results = random_results(8)
    left, right, bar = figure_of("part5_virtual_removed", results).axes
    r = results["sections"]["term_importance"]
    close(map_of(left), r["virtual_removed"])
    assert cells(left) == rounded(r["virtual_removed"], 3)
    assert ticks(left.yaxis) == [f"1.{h}" for h in range(8)]
    assert ticks(left.xaxis) == [f"0.{h}" for h in range(8)]
    largest = np.max(np.abs(r["virtual_removed"]))
    close(left.collections[0].get_clim(), (-largest, largest))
    (found,) = bars_of(right)
    close(heights(found), [-0.2, 0.9, -0.07])
    close(half_lengths(found), [r["marginal_se"][2], r["start_delta_se"], r["real_delta_se"]])
    assert cells(right) == ["−0.20", "0.90", "−0.07"]
    assert "nats per token" in right.get_ylabel() and "nats per token" in bar.get_ylabel()


def test_titles_say_what_is_seen():
    results = random_results(8)
    s = results["sections"]
    cost = np.array(s["term_importance"]["virtual_removed"])
    reader, writer = np.unravel_index(cost.argmax(), cost.shape)
    title = figure_of("part5_virtual_removed", results).get_suptitle().replace("\n", " ")
    assert f"1.{reader} ∘ 0.{writer} costs most when removed, +{cost.max():.3f}" in title
    tv = s["attention_groups"]["tv"]
    more = int(np.sum(np.array(tv["without_K"]) > tv["without_Q"]))
    title = figure_of("part5_attention_groups", results).get_suptitle()
    assert f"{more} of 8 patterns change more without K terms" in title
    counts = [int(np.sum(np.array(s["composition"][k]["scores"]) > 0.0442 + 0.05)) for k in "QKV"]
    title = figure_of("part5_composition", results).get_suptitle()
    assert "{} Q-, {} K- and {} V-composition".format(*counts) in title


def of_composition(axes, s: dict, least: float = 0.05) -> None:
    """Three maps of one side: scores minus baseline, on one scale with zero in the middle."""
    minus = {k: np.array(s[k]["scores"]) - s["baseline"]["mean"] for k in "QKV"}
    largest = max(abs(v).max() for v in minus.values())
    for ax, (kind, values) in zip(axes, minus.items()):
        close(map_of(ax), values)
        close(ax.collections[0].get_clim(), (-largest, largest))
        assert ax.collections[0].get_cmap().name == charts.DIVERGING
        assert cells(ax) == rounded(values, 3)
        assert ax.get_title().startswith(f"{kind}-composition")
        framed = {(p.get_y() + 0.5, p.get_x() + 0.5) for p in ax.patches}
        assert framed == {(i, j) for i, j in np.argwhere(values > least)} and framed


def test_composition_is_three_maps_on_one_scale():
    s = random_results(8)["sections"]["composition"]
    *axes, bar = figure_of("part5_composition", random_results(8)).axes
    assert len(axes) == 3
    of_composition(axes, s)
    assert "0.0442" in bar.get_ylabel()
    assert ticks(axes[0].yaxis) == [f"1.{h}" for h in range(8)]
    assert ticks(axes[2].xaxis) == [f"0.{h}" for h in range(8)]
    assert "layer-1" in axes[0].get_ylabel() and "layer-0" in axes[0].get_xlabel()


def test_composition_as_first_published_has_its_own_baseline():
    s = random_results(8)["sections"]["composition"]
    axes = figure_of("part5_first_published", random_results(8)).axes
    of_composition(axes[:3], s)
    of_composition(axes[3:6], s["first_published"], 0.025)
    assert [a.get_ylabel()[-6:] for a in axes[6:]] == ["0.0442", "0.0156"]
    assert all("corrected" in a.get_title() for a in axes[:3])
    assert all("first published" in a.get_title() for a in axes[3:6])


def test_attention_groups():
    results = random_results(8)
    (ax,) = figure_of("part5_attention_groups", results).axes
    found = {bar.get_label(): heights(bar) for bar in bars_of(ax)}
    tv = results["sections"]["attention_groups"]["tv"]
    assert found.keys() == {"without Q terms", "without K terms"}
    close(found["without Q terms"], tv["without_Q"])
    close(found["without K terms"], tv["without_K"])
    assert cells(ax) == rounded([tv["without_Q"], tv["without_K"]], 2)
    assert ticks(ax.xaxis) == [f"1.{h}" for h in range(8)]


def test_single_K_terms_removed():
    results = random_results(8)
    ax, bar = figure_of("part5_without_K_of_head", results).axes
    wanted = results["sections"]["attention_groups"]["tv_without_K_of_head"]
    close(map_of(ax), wanted)
    assert cells(ax) == rounded(wanted, 2) and ax.collections[0].get_clim()[0] == 0
    assert "layer-1" in ax.get_ylabel() and "layer-0" in ax.get_xlabel()
    assert "total variation" in bar.get_ylabel()


def test_patterns_of_two_virtual_heads():
    """What lies ahead of a token is left blank; tokens are written so that they can be read."""
    results = random_results(8)
    *axes, _ = figure_of("part5_virtual_heads", results).axes
    s = results["sections"]["virtual_heads"]
    past = np.tril(np.ones((24, 24), dtype=bool))
    for ax, key, name in zip(axes, ("most_important", "most_two_back"), ("1.7 ∘ 0.0", "1.0 ∘ 0.7")):
        close(map_of(ax)[past], np.array(s[key]["map"])[past])
        assert np.isnan(map_of(ax)[~past]).all() and ax.get_title().startswith(name)
        close(ax.collections[0].get_clim(), (0, 1))
    for axis in (axes[0].yaxis, axes[0].xaxis, axes[1].xaxis):
        assert ticks(axis) == [charts.label(t) for t in TOKENS]


def test_induction_scores():
    results = random_results(8)
    figure, r = figure_of("part5_induction", results), results["sections"]["induction"]
    for layer, ax in enumerate(figure.axes):
        (bar,) = bars_of(ax)
        close(heights(bar), r["score"][layer])
        close(half_lengths(bar), r["score_sd"][layer])
        assert cells(ax) == rounded(r["score"][layer], 2)
        assert ticks(ax.xaxis) == [f"{layer}.{h}" for h in range(8)]
        assert ax.get_ylabel() == f"layer {layer}"
    assert "8 sequences of 50 random tokens" in ax.get_xlabel()
    units = [ax.bbox.height / ax.get_ylim()[1] for ax in figure.axes]
    assert units == pytest.approx(units[:1] * 2, rel=0.02)
    best = np.unravel_index(np.argmax(r["score"]), (2, 8))
    assert f"head {best[0]}.{best[1]} has the largest" in figure.get_suptitle()


def test_a_layer_without_induction_has_a_small_panel():
    results = random_results(8)
    results["sections"]["induction"]["score"][0] = results["sections"]["induction"][
        "score_sd"][0] = [0.0] * 8
    figure = figure_of("part5_induction", results)
    nothing_in_the_way(figure)
    assert [round(ax.get_ylim()[1], 2) for ax in figure.axes][0] == 0.25


# ------------------------------------------------------------------ the toy


def toy_results() -> dict:
    return {"meta": {}, "sections": {name: compute() for name, compute, _ in toy.SECTIONS}}


@pytest.mark.parametrize("name", [name for name, *_ in pictures.TOY_FIGURES])
def test_every_part_of_a_toy_figure_can_be_read(name):
    figure = figure_of(name, toy_results(), pictures.TOY_FIGURES)
    nothing_in_the_way(figure)
    assert "toy" in figure.get_suptitle()


def test_the_toys_paths_are_stacked_to_its_output():
    results = toy_results()
    (ax,) = figure_of("part5_toy_path_expansion", results, pictures.TOY_FIGURES).axes
    top = np.zeros(3)
    for bar, path in zip(bars_of(ax), ("direct", "head_1", "head_2", "virtual")):
        close(heights(bar), results["sections"]["path_expansion"]["paths"][path])
        close([p.get_y() for p in bar], top)
        top = top + heights(bar)
    assert len(bars_of(ax)) == 4
    close(top, [4.5, 6.5, 12])
    close([line[0][1] for line in ax.collections[0].get_segments()], top)
    assert cells(ax)[-3:] == ["4.5", "6.5", "12"]


def test_the_toys_patterns():
    *axes, _ = figure_of("part5_toy_previous_tokens", toy_results(), pictures.TOY_FIGURES).axes
    one = [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    two = [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
    for ax, wanted in zip(axes, (one, one, two), strict=True):
        close(map_of(ax), wanted)
        assert cells(ax) == [str(v) for v in np.ravel(wanted)]


# ------------------------------------------------------------------ what they are made of


@pytest.mark.parametrize("token, wanted", [
    ("$$", "'$$'"), ("\n", r"'\n'"), (" a", "' a'"), ("漢", r"'\u6f22'"), ("\ufffd", r"'\ufffd'"),
    ("\u202e", r"'\u202e'"), ("", "''"), ("'", "“'”"), ("'" + "x" * 18, f"“'{'x' * 16}…”"),
    ('"', "'\"'"), ("x" * 18, f"'{'x' * 18}'"), ("x" * 19, f"'{'x' * 17}…'")])
def test_label(token, wanted):
    assert charts.label(token) == wanted


@pytest.mark.parametrize("colour, wanted", [("black", "white"), ("white", "black"),
                                            ("#0072B2", "white"), ("#F0E442", "black")])
def test_ink(colour, wanted):
    assert charts.ink(colour) == wanted


@pytest.mark.parametrize("n", [3, 24])
def test_a_map_grows_with_its_table(n):
    """Every number has room in its cell, beside cells without a number."""
    names = [f"3.{h}" for h in range(n)]
    table = [[-0.123] * n for _ in range(n)]
    table[0][:2] = [None, math.nan]
    figure, axes = charts.map_figure(table, 1, 3)
    charts.heat_maps(axes, [table] * 3, names, names, "scores", 3, diverging=True)
    nothing_in_the_way(charts.finished(figure, "maps"))
    for ax in axes:
        assert cells(ax) == ["-", *["−0.123"] * (n**2 - 2)]
        width, height = ax.bbox.width / n, ax.bbox.height / n
        of_map = [t for t in figure.texts if t.get_transform() == ax.transData]
        assert all(box.width < width and box.height < height
                   for box in (t.get_window_extent() for t in of_map))
        assert ax.patch.get_hatch() and np.isnan(map_of(ax)).sum() == 2


def test_a_score_that_is_not_defined_is_a_dash():
    """That of a dead head, in maps and at bars."""
    results = random_results(3)
    s = results["sections"]
    s["composition"]["K"]["scores"][1][2] = None
    s["term_importance"]["virtual_removed"][0][0] = None
    s["attention_groups"]["tv"]["without_K"][1] = None
    s["induction"]["score"][1][0] = s["induction"]["score_sd"][1][0] = None
    assert cells(figure_of("part5_composition", results).axes[1])[5] == "-"
    assert cells(figure_of("part5_first_published", results).axes[1])[5] == "-"
    assert cells(figure_of("part5_virtual_removed", results).axes[0])[0] == "-"
    assert cells(figure_of("part5_attention_groups", results).axes[0])[4] == "-"
    assert cells(figure_of("part5_induction", results).axes[1])[0] == "-"


def test_a_figure_is_laid_out_once():
    """Saving it must not work out the layout again."""
    figure = figure_of("part5_composition", random_results(2))
    assert figure.get_layout_engine() is None


# ------------------------------------------------------------------ the files


@pytest.mark.parametrize("script, names, results", [
    (part5.SCRIPT, ["part5_attention_groups", "part5_virtual_heads"], random_results(2)),
    (toy.SCRIPT, ["part5_toy_path_expansion"], toy_results())], ids=["part5", "toy"])
def test_the_same_files_every_time(script, names, results, tmp_path):
    script = dataclasses.replace(script, figures=[f for f in script.figures if f[0] in names])
    first, second = (report.draw(script, results, tmp_path / run) for run in ("first", "second"))
    wanted = [f"{name}.{suffix}" for name in names for suffix in ("png", "svg")]
    assert [p.name for p in first] == wanted == sorted(p.name for p in first[0].parent.iterdir())
    for a, b in zip(first, second):
        assert a.read_bytes() == b.read_bytes() and a.stat().st_size > 5_000


def test_figures_come_from_the_results_alone(tmp_path):
    """--figures-only draws from the file, and neither TransformerLens nor pyplot is imported."""
    (tmp_path / "part5.json").write_text(json.dumps(random_results(2)), encoding="utf-8")
    code = ("import sys, dataclasses, circuits_part5 as p\n"
            "p.SCRIPT = dataclasses.replace(p.SCRIPT, figures=p.pictures.FIGURES[-1:])\n"
            "p.main(['--model', 'mini', '--figures-only', '--out', sys.argv[1]])\n"
            "print({'transformer_lens', 'transformers', 'matplotlib.pyplot'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=common.HERE, text=True,
                          capture_output=True, check=True)
    assert done.stdout == "set()\n"
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == [
        "part5_induction.png", "part5_induction.svg"]


HOSTILE = """
backend: module://no_such_backend
text.usetex: True
font.size: 30
figure.facecolor: black
axes.facecolor: black
text.color: white
savefig.facecolor: black
savefig.bbox: tight
savefig.transparent: True
figure.autolayout: True
svg.fonttype: path
axes.unicode_minus: False
"""


@pytest.mark.parametrize("backend", ["module://no_such_backend", "nonsense", "pdf", ""])
def test_the_users_settings_of_matplotlib_change_no_picture(backend, tmp_path):
    """A matplotlibrc beside the run, and MPLBACKEND, which stays as it was."""
    results = random_results(2)
    (tmp_path / "part5.json").write_text(json.dumps(results), encoding="utf-8")
    (tmp_path / "matplotlibrc").write_text(HOSTILE, encoding="utf-8")
    code = ("import sys, os, dataclasses; sys.path.insert(0, sys.argv[1])\n"
            "import circuits_part5 as p\n"
            "p.SCRIPT = dataclasses.replace(p.SCRIPT, figures=p.pictures.FIGURES[:2])\n"
            "p.main(['--model', 'mini', '--figures-only', '--no-page', '--out', '.'])\n"
            "print(os.environ['MPLBACKEND'])")
    done = subprocess.run([sys.executable, "-c", code, str(common.HERE)], cwd=tmp_path, text=True,
                          capture_output=True, check=True,
                          env=os.environ | {"MPLBACKEND": backend})
    assert done.stdout.endswith(f"{backend}\n")
    script = dataclasses.replace(part5.SCRIPT, figures=pictures.FIGURES[:2])
    for path in report.draw(script, results, tmp_path / "here"):
        assert path.read_bytes() == (tmp_path / "figures" / path.name).read_bytes(), path.name


def test_settings_of_this_process_change_no_picture(tmp_path):
    results, script = random_results(2), dataclasses.replace(part5.SCRIPT,
                                                             figures=pictures.FIGURES[:1])
    plain = report.draw(script, results, tmp_path / "plain")
    with matplotlib.rc_context({"text.usetex": True, "savefig.transparent": True,
                                "axes.facecolor": "black", "font.size": 30}):
        hostile = report.draw(script, results, tmp_path / "hostile")
    for a, b in zip(plain, hostile, strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_matplotlib_that_cannot_be_imported_is_named(monkeypatch, tmp_path):
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(common.UserError, match="matplotlib cannot be imported.*--no-figures"):
        report.draw(part5.SCRIPT, random_results(2), tmp_path)


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("name", [name for name, *_ in pictures.TOY_FIGURES])
def test_the_toys_figures_are_committed(name, suffix):
    assert (common.HERE / "figures" / f"{name}.{suffix}").stat().st_size > 10_000
