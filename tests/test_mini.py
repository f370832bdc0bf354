"""Both scripts end to end on the bundled models, and the results that are committed beside them."""

import contextlib
import io
import itertools
import json
import math
import pathlib
import re

import numpy as np
import pytest
import torch
from mini import train

import circuits_part4
import circuits_part5
import common
from results import loading

SCRIPTS = {"part4": circuits_part4, "part5": circuits_part5}
COMMITTED = common.HERE / "results" / "mini"
FLOAT32 = 5e-5  # measured between one thread and two: 1.3e-6; other processors round otherwise


@pytest.fixture(scope="session")
def mini(tmp_path_factory):
    """{part: (results, stdout, folder)}, each script run once."""
    found = {}
    for part, script in SCRIPTS.items():
        out, stdout = tmp_path_factory.mktemp(part), io.StringIO()
        with contextlib.redirect_stdout(stdout):
            results = script.main(["--model", "mini", "--out", str(out)])
        found[part] = results, stdout.getvalue(), out
    return found


def leaves(value, key=""):
    """(key, value) of every number, string and None in a results tree."""
    if isinstance(value, dict):
        for k, v in value.items():
            yield from leaves(v, f"{key}.{k}")
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from leaves(v, f"{key}.{i}")
    else:
        yield key, value


def differences(ours, theirs) -> list[str]:
    """Keys that only one side has, or whose values are not the same up to float32 rounding."""
    ours, theirs = dict(leaves(ours)), dict(leaves(theirs))
    bad = sorted(ours.keys() ^ theirs.keys())
    for key in ours.keys() & theirs.keys():
        a, b = ours[key], theirs[key]
        if isinstance(a, float) and isinstance(b, float):
            if not math.isclose(a, b, rel_tol=FLOAT32, abs_tol=FLOAT32):
                bad.append(f"{key}: {a} {b}")
        elif a != b:
            bad.append(f"{key}: {a!r} {b!r}")
    return bad


@pytest.mark.parametrize("part", SCRIPTS)
def test_files_are_what_was_printed_and_returned(mini, part):
    results, stdout, out = mini[part]
    assert (out / f"{part}_stdout.txt").read_text(encoding="utf-8") == stdout
    assert json.loads((out / f"{part}.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(results))
    assert sorted(p.name for p in out.iterdir()) == [
        "figures", f"{part}.html", f"{part}.json", f"{part}_stdout.txt"]
    drawn = sorted(p.name for p in (out / "figures").iterdir())
    assert drawn == sorted(f"{name}.{suffix}" for name, *_ in SCRIPTS[part].SCRIPT.figures
                           for suffix in ("png", "svg"))
    assert all((common.HERE / "figures" / "mini" / name).is_file() for name in drawn)


@pytest.mark.parametrize("part", SCRIPTS)
def test_the_committed_results_are_of_these_models(mini, part):
    """Same weights, text and ids, and the same numbers wherever rounding does not decide."""
    results, (committed, log) = mini[part][0], (
        json.loads((COMMITTED / f"{part}.json").read_text(encoding="utf-8")),
        (COMMITTED / f"{part}_stdout.txt").read_text(encoding="utf-8"))
    for key in ("weights_sha256", "text_sha256", "token_ids_sha256", "choices", "processing"):
        assert committed["meta"][key] == results["meta"][key], key
    assert differences(results["sections"], committed["sections"]) == []
    assert lines_that_differ(log, mini[part][1]) == []


# What no oracle sees: which number stands where in the lines that the article does not show. Each
# line's own words lead to its numbers in the results: (part, start of the line, values by head).
SHOWN = [
    ("part4", "    head 0.{h}: [", "positional", lambda s, h: s["from_positions"][h]),
    ("part4", "    head 0.{h}: [", "positional", lambda s, h: s["on_text"][h]),
    ("part4", "  head 0.{h}: condition", "beyond", lambda s, h: [
        s["heads"][h][k] for k in ("condition", "loss_increase", "loss_increase_se")]),
    ("part5", "  layer-0 heads, mean attention to the previous", "composition",
     lambda s, h: s["prev_token"]),
    ("part5", "  layer-0 heads, mean attention to the start", "composition",
     lambda s, h: s["start_token"]),
    ("part5", "  layer-0 heads, mean attention to two", "composition", lambda s, h: s["two_back"]),
    ("part5", "    K-composition: max", "composition", lambda s, h: [
        s["first_published"]["K"]["max"], s["first_published"]["K"]["mean"]]),
    ("part5", "    head 1.{h}: 0.0", "attention_groups", lambda s, h: s["tv_without_K_of_head"][h]),
    ("part5", "    head 1.{h}: without", "attention_groups", lambda s, h: [
        s["tv"][k][h] for k in ("without_K", "without_Q", "without_QK", "none_alone")]),
    ("part5", "    1.0 ", "induction", lambda s, h: s["score"][1]),
]
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


@pytest.mark.parametrize("part, start, section, values", SHOWN)
def test_a_line_shows_its_own_numbers(mini, part, start, section, values):
    """Every value of the line stands in it as printed, in order, head by head."""
    results, stdout, _ = mini[part]
    for h in range(8 if "{h}" in start else 1):
        lines = [x for x in stdout.splitlines() if x.startswith(start.format(h=h))]
        wanted = values(results["sections"][section], h)
        assert any(holds_in_order(line.split(":", 1)[-1], wanted) for line in lines), (h, lines)


def holds_in_order(line: str, wanted: list[float]) -> bool:
    """Whether the numbers stand in the line in this order, each to the decimals printed."""
    numbers = iter(NUMBER.findall(line))
    return all(any(same_printed(n, x) for n in numbers) for x in wanted)


def same_printed(printed: str, value: float, units: float = 0.5) -> bool:
    """Whether a printed number is this value, up to `units` of its last digit."""
    digits = printed.split("e")[0].partition(".")[2]
    return abs(float(printed.replace(",", "")) - value) <= units * 10.0 ** -len(digits) + 1e-9


def lines_that_differ(ours: str, theirs: str) -> list:
    """Line pairs whose words differ, or whose numbers do by more than one in the last digit; the
    size of a rounding error (1.0e-05) is free."""
    pairs = itertools.zip_longest(ours.splitlines(), theirs.splitlines(), fillvalue="")
    return [(a, b) for a, b in pairs if NUMBER.sub("#", a) != NUMBER.sub("#", b) or not all(
        "e-" in x or same_printed(x, float(y.replace(",", "")), 1)
        for x, y in zip(NUMBER.findall(a), NUMBER.findall(b)))]


def test_lines_that_differ():
    a = "head 0.1: 2.50, max 3.1e-05"
    assert lines_that_differ(a, "head 0.1: 2.51, max 9.0e-05") == []
    for b in ("head 0.1: 2.52, max 3.1e-05", "head 0.1: -2.50, max 3.1e-05", "head 0.1: 2.50",
              "Head 0.1: 2.50, max 3.1e-05"):
        assert lines_that_differ(a, b)


def test_differences_finds_what_differs(mini):
    """One number moved, one key gone: each is found, and nothing else."""
    sections = json.loads(json.dumps(mini["part5"][0]["sections"]))
    sections["composition"]["K"]["max"] += 0.001
    del sections["counting"]["heads"]
    found = differences(sections, mini["part5"][0]["sections"])
    assert len(found) == 2
    assert any("composition.K.max:" in x for x in found) and ".counting.heads" in found


def test_what_the_two_layer_model_is_there_for(mini):
    """A previous-token head whose output the keys of an induction head read."""
    s = mini["part5"][0]["sections"]
    previous = max(s["composition"]["prev_token"])
    assert previous > 0.6 and max(s["induction"]["score"][1]) > 0.7
    K, baseline = s["composition"]["K"], s["composition"]["baseline"]
    assert K["max_pair"]["writer"] == f"0.{s['composition']['prev_token'].index(previous)}"
    assert K["max"] > baseline["mean"] + 0.05
    assert s["path_expansion"]["logits_max_abs_diff"] < 1e-3
    assert abs(s["term_importance"]["loss_by_order"][2] - s["term_importance"]["loss_model"]) < 1e-5


def test_what_the_one_layer_model_is_there_for(mini):
    """Most heads copy, no row, prompt or word of the article is skipped, and a word in the prompt
    makes its second piece more likely."""
    s = mini["part4"][0]["sections"]
    assert sum(h["copy_score"] > 0.7 for h in s["eigen"]["heads"]) >= 5
    assert not [key for key, _ in leaves(s) if key.endswith((".skipped", ".pieces"))]
    assert s["keep"]["no_token"] == []
    assert sum(ratio > 2 for ratio in s["at_work"]["ratios"]) >= 2
    assert all(p["ratio"] is not None for p in s["keep"]["prompts"])


@pytest.mark.parametrize("folder", ["mini-1l", "mini-2l"])
def test_the_bundle_is_small_and_says_what_made_it(folder):
    path = loading.MINI / folder
    assert sum(f.stat().st_size for f in path.iterdir()) < 8e6
    log = (path / "training_log.txt").read_text(encoding="utf-8")
    for word in ("tokens seen", "seed", "torch", "held-out", "CORPUS", "HELD OUT", "sinusoids"):
        assert word in log


@pytest.mark.parametrize("n_layers", [1, 2])
def test_a_trained_model_can_be_evaluated(monkeypatch, n_layers):
    """The last step of hours of training, on ids drawn at random; its loss is the model's own."""
    monkeypatch.setattr(train, "BATCH", 1)
    held_out, folder = np.random.default_rng(0).integers(3, 999, 9000), f"mini-{n_layers}l"
    found = train.evaluate(loading.MINI / folder, n_layers, held_out)
    model, rng = loading.load_model("mini", n_layers=n_layers)[0], np.random.default_rng(2)
    rows = torch.cat([train.batch(held_out, rng, 0.0) for _ in range(32)])
    loss = model(rows, return_type="loss").item()
    assert found[0] == f"loss on 8,192 held-out tokens: {loss:.3f} nats" and len(found) > 2


def test_the_sample_text_is_long_enough():
    model, _ = loading.load_model("mini", n_layers=2)
    text = pathlib.Path(loading.MINI / "sample.txt").read_text(encoding="utf-8")
    assert len(loading.encode(model, text)) >= 3500


def test_the_readme_shows_the_committed_logs_and_figures():
    text = (common.HERE / "README.md").read_text(encoding="utf-8")
    start = text.index("## From the bundled models")
    shown = [line[4:] for line in text[start:text.index("## What has been run")].splitlines()
             if line.startswith("    ") and line.strip() != "..." and not line.startswith("    $")]
    logs = [line for part in SCRIPTS for line in
            (COMMITTED / f"{part}_stdout.txt").read_text(encoding="utf-8").splitlines()]
    assert len(shown) > 40 and not set(shown) - set(logs)
    figures = re.findall(r"\]\((figures/mini/[^)]+)\)", text)
    assert sorted(pathlib.Path(f).stem for f in figures) == sorted(
        name for script in SCRIPTS.values() for name, *_ in script.SCRIPT.figures)
    assert all((common.HERE / f).is_file() for f in figures)
