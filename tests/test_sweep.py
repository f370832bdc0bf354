"""--sweep: a setting planted in a published file is found again; what cannot be told is said."""

import contextlib
import io
import json
import sys

import pytest
import test_published

import circuits_part4 as part4
import circuits_part5 as part5
import common
import tiny
from planted import plant
from results import compare, loading, report, sweep

ROWS = ["a cab", "had", "", "a bad", "egg ", "", "and", " ", "a big dog", "did dig", " = x = "] * 15
LENGTHS, IDS = [13, 10, 16, 64], [5, 3, 8]  # of the tiny model's context of 17; 64 is too long
SCRIPTS = {"part4": part4, "part5": part5}


@pytest.fixture
def rows_of_text(monkeypatch):
    """A WikiText of a few rows."""
    def wikitext(join="\n\n", keep_blank=True, config=""):
        return join.join(r for r in ROWS if keep_blank or r.strip()), "hash of the rows"

    monkeypatch.setattr(loading, "wikitext", wikitext)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(part, *options, **choices) -> results, on a tiny model of eight heads."""
    for script, name, values in ((part5, "seq_len", LENGTHS), (part5, "induction_ids", IDS)):
        monkeypatch.setitem(script.OPEN, name, values)
        monkeypatch.setitem(script.CHOICES, name, values[0])
    monkeypatch.setattr(test_published, "TEXT", test_published.TEXT * 2)

    def run(part: str, *options: str, **choices) -> dict:
        script, home = SCRIPTS[part], tmp_path / part
        home.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
            for name, value in choices.items():
                patch.setitem(script.CHOICES, name, value)
            main = script.main
            patch.setattr(script, "main", lambda argv: main([*argv, *options]))
            patch.setattr(report, "parser", at_default_length(report.parser))
            return getattr(test_published, f"run_{part}")(home)

    return run


def at_default_length(parser):
    """The shared options without --seq-len, which a sweep sets itself."""
    def build(*args, **kwargs):
        p = parser(*args, **kwargs)
        parse = p.parse_args
        p.parse_args = lambda argv: parse(without(argv, "--seq-len"))
        return p

    return build


def without(argv: list[str], option: str) -> list[str]:
    if option not in argv:
        return argv
    i = argv.index(option)
    return argv[:i] + argv[i + 2:]


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """publish(part, results, change) makes a published file of a run's own numbers."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "explained.json").write_text("{}", "utf-8")

    def publish(part: str, results: dict, change=lambda published: published) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report, "PUBLISHED", test_published.PUBLISHED)
            published = change(plant(compare.read_published(part), results))
        (folder / f"{part}.json").write_text(json.dumps(published), "utf-8")
        monkeypatch.setattr(report, "PUBLISHED", folder)

    return publish


PLANTED = [
    ("part4", {"table_layernorm": "QK"}), ("part4", {"table_layernorm": "QK and OV"}),
    ("part4", {"qk_scaled": True}), ("part4", {"position_layernorm": False}),
    ("part4", {"position_scaled": False}), ("part4", {"position_biases": False}),
    ("part4", {"fold_value_biases": False}), ("part4", {"center_unembed": True}),
    ("part4", {"tables_from": "stored"}),
    ("part4", {"center_unembed": True, "fold_value_biases": False}),
    ("part4", {"table_layernorm": "QK", "qk_scaled": True}),
    ("part4", {"qk_scaled": True, "position_scaled": False, "fold_value_biases": False}),
    ("part5", {"seq_len": 10}), ("part5", {"bos_counted": False}),
    ("part5", {"distinct_places": True}), ("part5", {"first_row": False}),
    ("part5", {"bias_is_moved": True}),
    ("part5", {"median": "lower"}), ("part5", {"induction_ids": 8}),
    ("part5", {"seq_len": 16, "distinct_places": True}),
    ("part5", {"bias_is_moved": True, "induction_ids": 8}),
]


@pytest.mark.parametrize("part, planted", PLANTED, ids=str)
def test_what_was_planted_is_found(run, publish, part, planted):
    publish(part, run(part, **planted))
    found = run(part, "--sweep")
    defaults = SCRIPTS[part].CHOICES
    assert found["winner"] == defaults | planted
    unknown = {n for g in found["groups"] for n in g["not_identifiable"]}
    assert not unknown & planted.keys()
    last = found["groups"][-1]
    best = [s for s in last["settings"] if s["setting"] in last["equal"]]
    assert best and all(s["reproduced"] == s["of"] and not s["misses"] for s in best)


def test_what_was_planted_is_found_in_three_layers(run, publish, monkeypatch):
    monkeypatch.setitem(test_published.EIGHT_HEADS, "n_layers", 3)
    test_what_was_planted_is_found(run, publish, "part5", {"bias_is_moved": True})


@pytest.mark.parametrize("planted", [{"join": "\n"}, {"keep_blank": False}, {"join": "end-of-text"},
                                     {"join": "\n", "keep_blank": False}], ids=str)
def test_how_rows_are_joined_is_found(run, publish, rows_of_text, monkeypatch, planted):
    load = loading.load_tokens
    monkeypatch.setattr(loading, "load_tokens", lambda model, name, text, *args, **kwargs:
                        load(model, name, None, *args, **kwargs))
    for name, values in {"seq_len": [13], "bos_counted": [True], "distinct_places": [False],
                         "bias_is_moved": [False], "median": ["lower"]}.items():
        monkeypatch.setitem(part5.OPEN, name, values)
        monkeypatch.setitem(part5.CHOICES, name, values[0])
    publish("part5", run("part5", **planted))
    found = run("part5", "--sweep")
    assert {n: found["winner"][n] for n in ("join", "keep_blank")} == {
        "join": "\n\n", "keep_blank": True} | planted
    assert not {"join", "keep_blank"} & {*found["groups"][0]["not_identifiable"]}


def test_what_agrees_at_the_printed_digits_cannot_be_told_apart(run, publish):
    """The two medians differ, but not in the digits of this published file."""
    def coarse(published: dict) -> dict:
        return published | {"entries": [e | {"decimals": 0, "value": round(e["value"])}
                                        for e in published["entries"]
                                        if e["key"].endswith("virtual_median")]}

    publish("part5", run("part5", median="lower"), coarse)
    found = run("part5", "--sweep")
    names = {n for g in found["groups"] for n in g["not_identifiable"]}
    assert "median" in names and found["winner"]["median"] == "middle two"


def test_merit_counts_first_and_then_sums_the_misses():
    def merit(reproduced: int, misses: float) -> tuple:
        return sweep.Tried({}, reproduced, misses=misses).merit

    assert merit(3, 9.0) > merit(2, 0.0) and merit(3, 1.0) > merit(3, 2.0)


def test_what_cannot_be_tried_is_not_called_found(run, publish, monkeypatch):
    monkeypatch.setitem(part5.OPEN, "seq_len", [13, 64, 128])
    publish("part5", run("part5"))
    group = run("part5", "--sweep")["groups"][0]
    assert "seq_len" in group["not_tried"] and "seq_len" not in group["not_identifiable"]


def test_the_random_heads_of_part_4_cannot_be_told_apart(run, publish):
    publish("part4", run("part4"))
    found = run("part4", "--sweep")
    group = next(g for g in found["groups"] if g["choices"] == ["random_heads"])
    assert group["not_identifiable"] == ["random_heads"] and len(group["equal"]) == 3


def test_another_models_numbers_say_nothing(run, publish):
    """Then every setting is as good as any, and the defaults stand."""
    publish("part5", run("part5", seq_len=10), lambda published: published | {"model": "another"})
    found = run("part5", "--sweep")
    assert found["winner"] == part5.CHOICES
    assert all({*g["not_identifiable"], *g["not_tried"]} == set(g["choices"])
               for g in found["groups"])
    # a file has no rows
    assert found["groups"][0]["not_tried"] == ["join", "keep_blank", "wikitext"]


def test_settings_that_do_not_fit_are_named(run, publish, tmp_path):
    publish("part5", run("part5"))
    found = run("part5", "--sweep")
    out = [s["ruled_out"] for g in found["groups"] for s in g["settings"] if "ruled_out" in s]
    assert len(out) == 8 and all("longer than the context" in x for x in out)
    written = tmp_path / "part5" / "out"
    assert json.loads((written / "sweep_part5.json").read_text("utf-8")) == found
    log = (written / "sweep_part5_stdout.txt").read_text("utf-8")
    assert log.startswith("== WHICH OPEN CHOICES THE PUBLISHED NUMBERS SUPPORT (tiny)\n")
    assert ("first_row True: not possible here (--seq-len 64 plus a start token is "
            "longer than the context of") in log
    assert "join, keep_blank" in log and "cannot be told apart" in log


def test_sections_that_a_choice_changes_are_all_named(run):
    """A section that changes with a choice but is not recomputed would be stale in a sweep."""
    for part, script in SCRIPTS.items():
        before = run(part)["sections"]
        for affects in script.SWEEPS:
            for name, sections in affects.items():
                for value in script.OPEN[name][1:2]:
                    if name in ("join", "keep_blank"):
                        continue
                    after = run(part, **{name: value})["sections"]
                    changed = {s for s in before if before[s] != after[s]}
                    rest = {"claims", "beyond", "correction", "copying", "reader"}
                    assert changed - rest <= sections, (name, changed)


def test_the_bundled_model(publish, tmp_path, monkeypatch):
    """Two choices planted jointly in a run of mini-2l."""
    for name, values in {"seq_len": [64, 32], "bos_counted": [True], "bias_is_moved": [False],
                         "median": ["middle two"]}.items():
        monkeypatch.setitem(part5.OPEN, name, values)
        monkeypatch.setitem(part5.CHOICES, name, values[0])
    argv = ["--model", "mini", "--tokens", "128", "--out", str(tmp_path), "--no-figures"]
    monkeypatch.setattr(sys, "argv", ["circuits_part5.py"])
    planted = {"seq_len": 32, "induction_ids": 20}
    with contextlib.redirect_stdout(io.StringIO()):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in planted.items():
                patch.setitem(part5.CHOICES, name, value)
            results = part5.main(argv)
        publish("part5", results)
        found = part5.main([*argv, "--sweep"])
    assert found["winner"] == part5.CHOICES | planted
    assert found["meta"]["model"] == "mini-2l"


def test_tiny_context_holds_what_is_swept():
    assert max(LENGTHS[:-1]) < tiny.SIZES["n_ctx"] < LENGTHS[-1]


def test_the_quick_search_rules_out_and_finds_the_same_winner(run, publish, monkeypatch):
    """A setting that is not analysed in full can only be one that another one beats."""
    publish("part5", run("part5", seq_len=16, first_row=False))
    quick = run("part5", "--sweep")["groups"][0]
    expanded, expand = [], common.expand
    monkeypatch.setattr(common, "expand", lambda *a: expanded.append(a) or expand(*a))
    run("part5", "--sweep")
    assert len(expanded) < 0.5 * len(quick["settings"])  # the quick search expands nothing
    monkeypatch.setattr(sweep, "MANY", 10**6)
    full = run("part5", "--sweep")["groups"][0]
    assert quick["winner"] == full["winner"] and quick["equal"] == full["equal"]
    bounded = [(s["at_most"], f["reproduced"]) for s, f in zip(quick["settings"], full["settings"])
               if "at_most" in s]
    assert len(bounded) > 10 and all(f <= most for most, f in bounded)
