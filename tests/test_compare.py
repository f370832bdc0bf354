"""The comparison of published numbers with a run: by perturbation, at the edges, and as --diff."""

import contextlib
import copy
import io
import json
import pathlib
import subprocess
import sys

import pytest
import test_published
from hypothesis import given
from hypothesis import strategies as st

import circuits_part4 as part4
import circuits_part4_toy as part4_toy
import circuits_part5 as part5
import circuits_part5_toy as part5_toy
import common
from planted import leaves, plant
from results import compare, report, runner

SCRIPTS = {"part4": part4, "part5": part5, "part4_toy": part4_toy, "part5_toy": part5_toy}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{part: results file} of tiny models of eight heads, and of the toys."""
    found = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for part, script in SCRIPTS.items():
            home = tmp_path_factory.mktemp(part)
            if part.endswith("toy"):
                script.main(["--out", str(home / "out"), "--no-figures"])
            else:
                getattr(test_published, f"run_{part}")(home)
            found[part] = home / "out" / f"{part}.json"
    return found


@pytest.fixture(scope="module")
def planted(files):
    """{part: (published file with the run's values, the run's results)}."""
    found = {}
    for part, file in files.items():
        results = json.loads(file.read_text("utf-8"))
        found[part] = plant(compare.read_published(part), results), results
    return found


def verdicts(published: dict, results: dict) -> list[str]:
    return [r.verdict for r in compare.with_published(published, results)]


def step_away(entry: dict, value, ours):
    """The value one unit of its last digit further from ours; another word for a word."""
    if not report.is_number(value):
        return f"{value}?"
    unit = 10.0 ** -(entry["decimals"] or 0)
    return value + unit if value >= ours else value - unit


def perturbed(entry: dict, ours) -> list:
    """Values that must not agree with ours: each number of the entry moved, each bound and range
    drawn tight on the far side of ours."""
    value, kind = entry["value"], entry["kind"]
    if kind in ("exact", "input", "rounded", "ends"):
        if not isinstance(value, list | dict):
            return [step_away(entry, value, ours)]
        found = []
        for i in range(len(leaves(value))):
            places = iter(range(len(leaves(value))))
            found.append(rebuild(value, ours, lambda v, o: step_away(entry, v, o)
                                 if next(places) == i else v))  # noqa: B023
        return found
    unit = 10.0 ** -(entry["decimals"] or 0)
    found = leaves(ours)
    low, high = min(found), max(found)
    if kind == "bound":
        return [high / 10.01] if high else []
    if report.is_number(value):
        return [1e6]
    return [[low - 3 * unit, low - unit]] * (value[1] is not None) + [
        [high + unit, high + 3 * unit]] * (value[0] is not None)


def rebuild(value, ours, change):
    if isinstance(value, dict):
        return {k: rebuild(v, ours[k], change) for k, v in value.items()}
    if isinstance(value, list):
        return [rebuild(v, o, change) for v, o in zip(value, ours)]
    return change(value, ours)


@pytest.mark.parametrize("part", SCRIPTS)
def test_a_published_file_of_its_own_run_agrees(planted, part):
    published, results = planted[part]
    inputs = [e["kind"] == "input" for e in published["entries"]]
    assert verdicts(published, results) == [compare.INPUT if is_input else compare.AGREES
                                            for is_input in inputs]
    assert len(published["entries"]) > 60


@pytest.mark.parametrize("part", SCRIPTS)
def test_a_step_flips_its_own_verdict_and_no_other(planted, part):
    published, results = planted[part]
    before, tried = verdicts(published, results), 0
    for i, entry in enumerate(published["entries"]):
        for value in perturbed(entry, compare.look_up(results, entry["key"])):
            entries = [*published["entries"]]
            entries[i] = entry | {"value": value}
            after = verdicts(published | {"entries": entries}, results)
            assert after == [*before[:i], compare.DIFFERS, *before[i + 1:]], (entry, value)
            tried += 1
    kinds = {e["kind"] for e in published["entries"]}
    assert tried >= len(published["entries"]) - 5 and kinds >= {"exact", "rounded"} - (
        {"rounded"} if part == "part5_toy" else set())


def verdict(ours, dtype="float32", **entry) -> str:
    entry = {"key": "a.b", "section": "", "printed": "", "decimals": 2, "kind": "rounded"} | entry
    results = {"meta": {"dtype": dtype, "model": "m"}, "sections": {"a": {"b": ours, "sd": 0.1}}}
    return verdicts({"model": "m", "entries": [entry], "explained": {}}, results)[0]


@pytest.mark.parametrize("ours, dtype, agrees", [
    (0.125, "float32", True), (0.115, "float32", True), (0.12500001, "float32", True),
    (0.1250001, "float64", False), (0.1251, "float32", False), (0.1149, "float32", False),
    (0.1249, "float64", True), (-0.12, "float64", False),
])
def test_the_edge_of_rounding(ours, dtype, agrees):
    """Half a unit either way, and no more than the run's own rounding beyond it."""
    assert verdict(ours, dtype, value=0.12) == (compare.AGREES if agrees else compare.DIFFERS)


@pytest.mark.parametrize("ours, entry, agrees", [
    (2329220644, dict(value=2330000000, decimals=-7), True),
    (2336000000, dict(value=2330000000, decimals=-7), False),
    (1.124e14, dict(value=1e14, decimals=-14), True),
    (1.6e14, dict(value=1e14, decimals=-14), False),
    (1e-12, dict(kind="bound", value=1e-13), True),
    (1.01e-12, dict(kind="bound", value=1e-13), False),
    (-5.0, dict(kind="bound", value=1e-13), False),
    (0.0, dict(kind="bound", value=1e-13), True),
    (0.814, dict(kind="ends", value=0.81), True),
    (0.79, dict(kind="ends", value=0.81), False),
    (0.816, dict(kind="ends", value=0.81), False),
    (16.9, dict(kind="range", value=[15.5, 17], decimals=None), True),
    (17.1, dict(kind="range", value=[15.5, 17], decimals=None), False),
    (0.814, dict(kind="range", value=[0.44, 0.81]), True),
    (0.816, dict(kind="range", value=[0.44, 0.81]), False),
    (0.434, dict(kind="range", value=[0.44, 0.81]), False),
    (0.046, dict(kind="range", value=[None, 0.04]), False),
    (-5.0, dict(kind="range", value=[None, 0.04]), True),
    (1e9, dict(kind="range", value=[700, None], decimals=0), True),
    (699.0, dict(kind="range", value=[700, None], decimals=0), False),
    (0.0, dict(kind="range", value=[0, None], decimals=None), True),
    (-1e-9, dict(kind="range", value=[0, None], decimals=None), False),
    ([0.5, 0.8], dict(kind="range", value=[0.44, 0.81]), True),
    ([0.5, 0.9], dict(kind="range", value=[0.44, 0.81]), False),
    ([0.1, 0.3], dict(kind="sampled", value=[0.2, 0.5], n=20), True),
    ([0.1, 0.15], dict(kind="sampled", value=[0.2, 0.5], n=20), False),
    ([0.6, 0.9], dict(kind="sampled", value=[0.2, 0.5], n=20), False),
    (0.5, dict(kind="sampled", value=0.38, n=16, spread="a.sd"), False),  # 4 errors are 0.1
    (0.48, dict(kind="sampled", value=0.38, n=16, spread="a.sd"), True),
    (0.48, dict(kind="sampled", value=0.38, n=16, spread="a.none"), False),
    (3.0, dict(kind="exact", value=3, decimals=0), True),
    (3.0000000001, dict(kind="exact", value=3, decimals=0), True),
    (3.00001, dict(kind="exact", value=3, decimals=0), False),
    (4, dict(kind="exact", value=3, decimals=None), False),
    (True, dict(kind="exact", value=1, decimals=None), False),
    ("1", dict(kind="exact", value=1, decimals=None), False),
    (" Van", dict(kind="exact", value="Van", decimals=None), False),
    ([1, 2], dict(kind="exact", value=[1, 2, 3], decimals=None), False),
    ([], dict(kind="exact", value=[], decimals=None), True),
    ({}, dict(kind="exact", value=[], decimals=None), False),
    ({"h2": 1, "h1": 2}, dict(kind="exact", value={"h2": 1, "h1": 2}, decimals=None), True),
    ({"h2": 2, "h1": 1}, dict(kind="exact", value={"h2": 1, "h1": 2}, decimals=None), False),
    ("0.12", dict(value=0.12), False),
    ("0.12", dict(kind="bound", value=0.12), False),
    (["x"], dict(kind="range", value=[0, 1]), False),
    (None, dict(kind="sampled", value=[0, 1], n=3), None),
    (None, dict(value=0.12), None),
])
def test_kinds(ours, entry, agrees):
    wanted = {True: compare.AGREES, False: compare.DIFFERS, None: compare.MISSING}[agrees]
    assert verdict(ours, **entry) == wanted


@given(st.floats(-1e6, 1e6), st.integers(0, 6))
def test_what_is_rounded_agrees_and_a_unit_more_does_not(x, decimals):
    value, unit = round(x, decimals), 10.0**-decimals
    assert verdict(x, "float64", value=value, decimals=decimals) == compare.AGREES
    away = value + unit * (1 if value >= x else -1)
    assert verdict(x, "float64", value=away, decimals=decimals) == compare.DIFFERS


def test_two_printings_of_one_value_are_both_held():
    assert verdict(0.9149, value=0.915, decimals=3) == compare.AGREES
    assert verdict(0.9149, value=0.91) == compare.AGREES
    assert verdict(0.9161, value=0.915, decimals=3) == compare.DIFFERS


@pytest.mark.parametrize("kind, value, decimals, ours, difference", [
    ("exact", 51, 0, 0, "-51"), ("rounded", 353117, 0, 724.0, "-3.52e+05"),
    ("bound", 6.8e-14, 15, 3e-13, "+2.32e-13"), ("rounded", 0.75, 2, 0.7, "-0.050"),
])
def test_a_difference_is_shown_to_three_digits_or_one_more_than_printed(
        kind, value, decimals, ours, difference):
    entry = dict(key="x", section="", printed="", kind=kind, value=value, decimals=decimals)
    results = {"meta": {"dtype": "float32"}, "sections": {"x": ours}}
    row, = compare.with_published({"entries": [entry], "explained": {}}, results)
    assert row.difference == difference


def test_a_list_that_is_not_the_published_one_is_shown_whole():
    entry = next(e for e in compare.read_published("part4")["entries"]
                 if e["key"] == "claims.eigen.negative")
    assert compare.shown(entry, entry["value"]) == entry["printed"] == "heads 0.1 and 0.5"
    for ours in ([], ["0.1"], ["0.1", "0.5", "0.7"]):
        assert compare.shown(entry, ours) == f"[{', '.join(ours)}]"


def test_explained_differences(planted):
    published, results = copy.deepcopy(planted["part5"])
    entry = next(e for e in published["entries"] if e["key"] == "term_importance.virtual_median")
    ours = compare.look_up(results, entry["key"])
    published["explained"] = {entry["key"]: {"ours": ours, "reason": "a slip"}}
    assert verdicts(published, results).count(compare.STALE) == 1  # explained for nothing
    entry["value"] += 1
    assert verdicts(published, results).count(compare.EXPLAINED) == 1
    assert not set(verdicts(published, results)) & set(compare.DISAGREEMENTS)
    published["explained"][entry["key"]]["ours"] = ours + 1  # another difference than the known one
    assert verdicts(published, results).count(compare.DIFFERS) == 1
    del results["sections"]["term_importance"]["virtual_median"]
    assert verdicts(published, results).count(compare.MISSING) == 1


def test_an_explained_difference_that_is_gone_fails(diff, planted, tmp_path):
    entry = planted["part5"][0]["entries"][0]
    known = {"key": entry["key"], "ours": entry["value"], "reason": "a slip"}
    (tmp_path / "explained.json").write_text(json.dumps({"part5": [known]}), "utf-8")
    code, out, _ = diff("part5")
    assert code == 1 and out.count(compare.STALE) == 1 and ", 1 disagree, 0 explained" in out


def test_whose_model_it_is():
    """The public models are the hub's: a folder of the same name is another model."""
    results = {"meta": {"dtype": "float32", "model": "attn-only-2l", "revision": None},
               "sections": {"x": 1}}
    entry = {"key": "x", "section": "", "printed": "1", "value": 1, "decimals": None,
             "kind": "exact"}
    published = {"model": "attn-only-2l", "entries": [entry], "explained": {}}
    assert verdicts(published, results) == [compare.NOT_COMPARED]
    results["meta"]["revision"] = "0123abc"
    assert verdicts(published, results) == [compare.AGREES]


@pytest.mark.parametrize("model, text, model_independent, compared", [
    ("m", None, False, {"model", "text"}), ("other", None, False, set()),
    ("m", "x", False, {"model"}), ("other", "x", True, {"model", "text"}),
])
def test_what_is_compared(model, text, model_independent, compared):
    results = {"meta": {"dtype": "float32", "model": model, "rows_sha256": text},
               "sections": {"text": {"x": 1}, "model": {"x": 1}}}
    entries = [{"key": f"{k}.x", "section": "", "printed": "1", "value": 1, "decimals": None,
                "kind": "exact"} | ({"model_independent": True} if model_independent else {})
               for k in ("text", "model")]
    published = {"model": "m", "rows_sha256": None, "on_text": ["text."], "entries": entries,
                 "explained": {}}
    rows = compare.with_published(published, results)
    assert {r.key[:-2] for r in rows if r.verdict == compare.AGREES} == compared
    assert all(r.why for r in rows if r.verdict == compare.NOT_COMPARED)


# ------------------------------------------------------------------ --diff


@pytest.fixture
def diff(files, planted, tmp_path, monkeypatch):
    """diff(part, change) -> (exit code, stdout, stderr) of --diff on a changed results file."""
    for part, (published, _) in planted.items():
        (tmp_path / f"{part}.json").write_text(json.dumps(published), "utf-8")
    (tmp_path / "explained.json").write_text("{}", "utf-8")
    monkeypatch.setattr(report, "PUBLISHED", tmp_path)

    def run(part: str, change=lambda text: text, also=()) -> tuple[int, str, str]:
        file = tmp_path / f"changed_{part}.json"
        file.write_text(change(files[part].read_text("utf-8")), "utf-8")
        script, out, err = SCRIPTS[part], io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", [f"circuits_{part}.py"])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = runner.run_script(lambda: script.main(["--diff", str(file), *also]))
            except SystemExit as e:
                code = e.code
        return code, out.getvalue(), err.getvalue()

    return run


def changing(*path, to=None):
    """A change of a results file: the value under a path, deleted if there is none to put."""
    def change(text: str) -> str:
        tree = json.loads(text)
        *folders, last = path
        node = tree["sections"]
        for p in folders:
            node = node[p]
        if to is None:
            del node[last]
        else:
            node[last] = to
        return json.dumps(tree)

    return change


@pytest.mark.parametrize("part", SCRIPTS)
def test_diff_of_a_run_that_agrees(diff, planted, part):
    code, out, err = diff(part)
    n = len(planted[part][0]["entries"])
    assert (code, err) == (0, "")
    n_inputs = sum(e["kind"] == "input" for e in planted[part][0]["entries"])
    n -= n_inputs
    assert f"{n} of {n + n_inputs} compared: {n} agree, 0 disagree, 0 explained" in out
    assert sum(line.endswith("  agrees") for line in out.splitlines()) == n
    assert sum(line.endswith("  input") for line in out.splitlines()) == n_inputs


@pytest.mark.parametrize("change, line", [
    (changing("term_importance", "virtual_median", to=9.5), "9.5"),
    (changing("term_importance", "virtual_median"), compare.MISSING),
    (changing("term_importance", "virtual_median", to="much"), "much"),
    (changing("term_importance", "virtual_largest", to={}), compare.MISSING),
    (changing("claims", to=[]), compare.MISSING),
])
def test_diff_of_a_changed_number(diff, change, line):
    code, out, err = diff("part5", change)
    assert (code, err) == (1, "")
    assert any(line in x and x.rstrip().endswith((compare.DIFFERS, compare.MISSING))
               for x in out.splitlines())


@pytest.mark.parametrize("change", [
    lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]", lambda text: "3",
    lambda text: '{"meta": 3, "sections": {}}', lambda text: '{"meta": {}, "sections": {}}',
    lambda text: text.replace('"sections": {', '"sections": 3, "others": {', 1),
    changing("term_importance", "virtual_median", to=float("nan")),
    changing("term_importance", "virtual_median", to=float("inf")),
    lambda text: text.replace("circuits_part5.py", "circuits_part4.py"),
    lambda text: text.replace('"dtype": "float32"', '"dtype": "float8"'),
    lambda text: text.replace('"virtual_median": ', '"virtual_median": ' + "[" * 980 + "]" * 980
                              + ', "x": ', 1),
    lambda text: "[" * 100_000,
])
def test_diff_of_what_is_no_results_file(diff, change):
    code, out, err = diff("part5", change)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "changed_part5.json" in err and "circuits_part5.py makes it" in err


def test_diff_of_no_file_and_of_too_many(diff, tmp_path, capsys):
    for also, words in ((["a.json", "b.json"], "two"), (["nowhere.json"], "cannot read")):
        code, out, err = diff("part5", also=also)
        assert code == 2 and words in err and err.count("\n") == 1


def test_two_results(diff, files):
    same = str(files["part5"])
    assert diff("part5", also=[same])[0] == 0
    code, out, _ = diff("part5", changing("term_importance", "loss_model", to=4.0), [same])
    assert code == 1 and "term_importance.loss_model" in out and out.count(compare.DIFFERS) == 1
    model = json.loads(files["part5"].read_text("utf-8"))["sections"]["term_importance"]
    close = changing("term_importance", "loss_model", to=model["loss_model"] * (1 + 1e-3))
    assert diff("part5", close, [same])[0] == 1
    assert diff("part5", close, [same, "--rtol", "0.01"])[0] == 0
    for change in (changing("counting", to=[]), changing("counting", to={}),
                   changing("model", "n_heads", to=9), changing("model", "n_heads"),
                   changing("model", "n_heads", to=8.0), changing("model", "n_heads", to="8")):
        assert diff("part5", change, [same, "--rtol", "0.5"])[0] == 1
    code, out, _ = diff("part5", lambda t: t.replace('"seed": 0', '"seed": 1'), [same])
    assert code == 0 and "  meta.seed: 1 | 0" in out.splitlines()


@pytest.mark.parametrize("rtol", ["-1", "nan", "inf", "much"])
def test_a_tolerance_that_is_none(diff, files, rtol):
    code, _, err = diff("part5", also=[str(files["part5"]), "--rtol", rtol])
    assert code == 2 and "--rtol" in err and err.count("\n") == 1


def test_diff_loads_no_model(files):
    """Neither TransformerLens nor datasets nor matplotlib is imported."""
    code = ("import sys, circuits_part5\n"
            f"circuits_part5.main(['--diff', {str(files['part5'])!r}])\n"
            "heavy = {'transformer_lens', 'transformers', 'datasets', 'matplotlib'}\n"
            "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n")
    home = pathlib.Path(common.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_ends_with_the_summary(files):
    log = (files["part5"].parent / "part5_stdout.txt").read_text("utf-8").splitlines()
    i = log.index("== AGAINST WHAT THE ARTICLE PRINTS (--diff shows every number)")
    assert log[i + 1] == "  6 of 144 compared: 6 agree, 0 disagree, 0 explained"
    assert log[i + 2] == "  3 more are inputs of the script, and as in the article"
    assert log[i + 3] == "  135 not compared: of another model"


@pytest.mark.parametrize("text", [None, "{", ""])
def test_published_numbers_that_cannot_be_read(tmp_path, monkeypatch, text):
    """Said before anything is computed, so that no run is lost over it."""
    monkeypatch.setattr(report, "PUBLISHED", tmp_path)
    if text is not None:
        (tmp_path / "part5_toy.json").write_text(text, "utf-8")
    with pytest.raises(common.UserError, match="part5_toy.json.*fetch them again"):
        part5_toy.main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out" / "part5_toy.json").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_run_that_is_not_finite_is_not_compared(tmp_path, monkeypatch, value):
    first, *others = part5_toy.SECTIONS
    sections = [first._replace(compute=lambda: first.compute() | {"max_abs_diff": value}), *others]
    monkeypatch.setattr(part5_toy, "SCRIPT", report.Script("circuits_part5_toy.py", sections, []))
    with pytest.raises(common.UserError, match="path_expansion.max_abs_diff is not finite"):
        part5_toy.main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["published", "mini"])
def test_a_model_folder_with_a_name_that_is_taken(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(common.UserError, match=f"named {name} would replace .*--out DIR"):
        part5.main(["--model", str(tmp_path / name), "--figures-only"])


@pytest.mark.parametrize("options", [("--diff", "--sweep"), ("--diff", "--figures-only"),
                                     ("--figures-only", "--no-figures"),
                                     ("--sweep", "--figures-only")])
def test_options_that_do_not_go_together(options, tmp_path):
    with pytest.raises(common.UserError, match="cannot be combined"):
        part5.main(["--model", "mini", "--out", str(tmp_path), *options])


def test_the_published_numbers_are_no_place_for_results():
    for argv in (["--out", str(report.PUBLISHED)], ["--model", "/"]):
        with pytest.raises(common.UserError, match="name another|--out DIR"):
            part5.main([*argv, "--figures-only"])


def test_a_wrong_head_is_one_unit_whichever_it_is():
    results = {"meta": {"dtype": "float32"}, "sections": {}}
    entry = {"kind": "exact", "value": 7, "decimals": None}
    assert compare.distance(entry, 0, results) == compare.distance(entry, 6, results) == 1
