"""Dead heads: all weights zero, as ablation studies leave them. Their scores are 0/0, so there are
none; everything else is computed, printed, drawn and written."""

import contextlib
import io
import json
import re

import numpy as np
import pytest
import safetensors.torch
import test_part4
import test_part5
import torch

import circuits_part4 as part4
import circuits_part5 as part5
import common
import naive4
import tiny
from results import report, runner

SCRIPTS = {"part4": part4, "part5": part5}
WHOLE = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V")


def silence(state: dict, layer: int, head: int, names=WHOLE) -> None:
    """Set these weights of a head to zero."""
    for name in names:
        state[f"blocks.{layer}.attn.{name}"][head] = 0


def silence_all(state: dict) -> None:
    for weights in state.values():
        weights.zero_()


def make_folder(home, part: str, change):
    """A model folder whose weights change(state) has changed, with a text."""
    one_layer = part == "part4"
    folder = tiny.folder(home / "model", test_part4.SIZES if one_layer else tiny.SIZES)
    if one_layer:
        test_part4.TOKENIZER.save_pretrained(folder)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    change(state)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    text = test_part4.text_of_all_words() * 3 if one_layer else test_part5.TEXT
    (home / "text.txt").write_text(text, encoding="utf-8")
    return folder


def run(home, part: str, change, *more) -> tuple[dict, list[str]]:
    """The results file and the log of a whole run, page included, which must exit with 0."""
    home.mkdir(parents=True, exist_ok=True)
    folder, out = make_folder(home, part, change), home / "out"
    options = ["--model", str(folder), "--text", str(home / "text.txt"), "--out", str(out), *more]
    if part == "part5":
        options += ["--tokens", "39", "--seq-len", "13"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert runner.run_script(lambda: SCRIPTS[part].main(options)) == 0
    results = json.loads((out / f"{part}.json").read_text("utf-8"))
    log = (out / f"{part}_stdout.txt").read_text("utf-8").splitlines()
    assert not any(re.search(r"\b(nan|inf|None)\b", line) for line in log)
    assert (out / f"{part}.html").exists()
    return results["sections"], log


def nulls(value) -> set[str]:
    """The keys under which there is no number."""
    return {key for key, v in report.leaves(value) if v is None}


# ------------------------------------------------------------------ the kernels


def test_a_circuit_of_zeros_has_no_score_and_no_condition_number():
    """Beside live ones in the same batch, whose numbers are the dense matrices'."""
    g = torch.Generator().manual_seed(0)
    A = torch.randn(4, 13, 3, generator=g, dtype=torch.float64)
    B = torch.randn(4, 3, 13, generator=g, dtype=torch.float64)
    A[1], B[2] = 0, 0
    values, trace = common.circuit_eigenvalues(A, B)
    scores, conditions = common.copy_score(values), common.eigenvector_condition(A, B)
    assert trace[[1, 2]].tolist() == [0, 0]
    for h in range(4):
        if h in (1, 2):
            assert scores[h].isnan() and conditions[h].isnan()
            assert [int(n[h]) for n in common.eigenvalue_counts(values)] == [0, 0, 0]
            assert common.match_eigenvalues(torch.linalg.eigvals(A[h] @ B[h]), values[h]) == (0, 0)
            continue
        dense = (A[h] @ B[h]).numpy()
        assert scores[h].item() == pytest.approx(
            naive4.copy_score(naive4.largest_eigenvalues(dense, 3)), abs=1e-12)
        assert conditions[h].item() == pytest.approx(naive4.eigenvector_condition(dense, 3), 1e-9)
    assert common.listed(scores)[1:3] == [None, None] and common.listed(scores)[0] is not None


def test_a_circuit_of_lower_rank_has_no_full_set_of_eigenvectors():
    """A row of W_O that is zero: the condition number is infinite, and no SVD of NaN is tried."""
    A, B = torch.ones(5, 2), torch.tensor([[1.0, 2, 3, 4, 5], [0, 0, 0, 0, 0]])
    assert common.eigenvector_condition(A, B).item() == torch.inf


@pytest.mark.parametrize("form", [common.composition_scores, common.first_published_scores])
def test_composition_of_dead_heads(form):
    g = torch.Generator().manual_seed(0)
    W_V, read, other = torch.randn(3, 2, 11, 5, generator=g)
    W_O = torch.randn(2, 5, 11, generator=g)
    W_V[1], other[0] = 0, 0
    assert form(W_V, W_O, read, other).isnan().tolist() == [[True, True], [False, True]]


def test_a_head_that_composes_with_nothing_is_not_a_dead_one():
    """What it writes is orthogonal to what is read: 0, though rounding can make the square less."""
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        U = torch.linalg.qr(torch.randn(12, 12, generator=g, dtype=torch.float64))[0]
        mix = torch.randn(4, 4, generator=g, dtype=torch.float64)
        found = common.composition_scores(torch.randn(1, 12, 4, generator=g), (mix @ U[:4])[None],
                                          U[4:8].T[None] @ mix, torch.randn(1, 12, 4, generator=g))
        assert found.item() == pytest.approx(0, abs=1e-7)


# ------------------------------------------------------------------ part 4


@pytest.fixture(scope="module")
def alive(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alive"), "part4", dict, "--no-figures")[0]


@pytest.mark.parametrize("names", [WHOLE, ("W_V",), ("W_O",)], ids=["all of it", "W_V", "W_O"])
def test_part_4_with_a_dead_head(tmp_path, alive, names):
    """Head 0.2 has no score and no condition number; the other heads keep theirs."""
    s, log = run(tmp_path, "part4", lambda state: silence(state, 0, 2, names))
    assert nulls(s["eigen"]) == {"heads.2.copy_score", "copy_score_centred.2"}
    assert not nulls(s["copying"])
    assert {key for key in nulls(s["beyond"]) if ".2." in key} == {
        "heads.2.condition", "heads.2.copies"}
    assert s["beyond"]["heads"][2]["loss_increase"] == 0 and not s["beyond"]["heads"][2]["disagree"]
    for h in {*range(8)} - {2}:
        assert s["eigen"]["heads"][h] == alive["eigen"]["heads"][h]
        assert s["copying"][h] == alive["copying"][h]
        assert s["beyond"]["heads"][h]["condition"] == alive["beyond"]["heads"][h]["condition"]
    scores = [e["copy_score"] for h, e in enumerate(alive["eigen"]["heads"]) if h != 2]
    assert s["claims"]["eigen"]["above_0_7"] == sum(score > 0.7 for score in scores)
    assert s["claims"]["eigen"]["at_least_0_97"] == sum(round(x, 3) >= 0.97 for x in scores)
    assert s["claims"]["eigen"]["negative"] == [
        f"0.{h}" for h, e in enumerate(alive["eigen"]["heads"]) if e["copy_score"] < 0 and h != 2]
    assert any(line.startswith("  head 0.2: copy score sum(l)/sum(|l|) = -; 0/5") for line in log)
    assert any(line.split()[:3] == ["0.2", "-", "0.00"] for line in log)
    assert any(line.startswith("  head 0.2: condition number of the eigenvectors - (1")
               for line in log)
    assert list((tmp_path / "out" / "figures").glob("part4_copying.svg"))


def test_the_ratio_of_a_dead_head_s_pushes():
    """0.2, of the article's bug, is dead: its pushes are 0 and have no ratio; p has one."""
    state = tiny.state_dict(test_part4.SIZES)
    silence(state, 0, 2)
    model = tiny.model(state, test_part4.SIZES)
    model.tokenizer = test_part4.TOKENIZER
    s = test_part4.compute(test_part4.analyse(model))["sections"]
    for p in s["keep"]["prompts"]:
        assert p["ratio"] is None and set(p["through"].values()) == {0.0}
    assert s["claims"]["keep"]["ratio_difference"] is None
    assert None not in s["at_work"]["ratios"]
    lines = test_part4.lines_of(part4.print_keep, s["keep"])
    assert sum("(ratio bay/mind -)" in line for line in lines) == 2


def test_part_4_on_weights_that_are_all_zero(tmp_path):
    """Every token is as likely as every other one, and no head has a score."""
    s, log = run(tmp_path, "part4", silence_all)
    assert nulls(s["eigen"]) == {f"{key}.{h}{end}" for h in range(8) for key, end in
                                 (("heads", ".copy_score"), ("copy_score_centred", ""))}
    n = s["sizes"]["d_vocab"]
    assert s["beyond"]["loss_model"] == pytest.approx(np.log(n))
    assert s["at_work"]["ratios"] == [1.0] * 3
    assert s["claims"]["eigen"]["above_0_7"] == 0 and s["claims"]["eigen"]["negative"] == []
    assert sum("condition number of the eigenvectors - (1" in line for line in log) == 8


def test_random_heads_without_a_score():
    """Gaussian W_V and W_O between embeddings of zeros, one of the open choices."""
    state = tiny.state_dict(test_part4.SIZES)
    silence_all(state)
    model = tiny.model(state, test_part4.SIZES)
    model.tokenizer = test_part4.TOKENIZER
    s = test_part4.compute(test_part4.analyse(model, {"random_heads": "head"}))["sections"]
    assert s["eigen"]["random"]["copy_score"] == [None] * 20
    assert s["eigen"]["random"]["mean"] is s["claims"]["random"]["copy_score_sd"] is None
    others = {name: s[name] for name in ("eigen", "sizes")}
    assert "copy score from - to - (mean -)" in "".join(
        test_part4.lines_of(part4.print_copying, s["copying"], **others))


def test_one_predicted_token_has_no_standard_error():
    model = test_part4.make_model()
    a = test_part4.analyse(model)
    results = test_part4.compute(a)
    short = part4.Analysis(common.freeze(model, a.run.tokens[:1, :2]), a.A, a.B, a.choices, a.args)
    found = part4.compute_beyond(short, results)
    assert [x["loss_increase_se"] for x in found["heads"]] == [None] * 8
    assert not any(x["matters"] for x in found["heads"])
    lines = test_part4.lines_of(part4.print_beyond, found)
    assert sum(line.endswith(" +- -") for line in lines) == 8


# ------------------------------------------------------------------ part 5


@pytest.mark.parametrize("names, kinds", [(WHOLE, "QKV"), (("W_V",), "V"), (("W_O",), "V"),
                                          (("W_Q",), "QK")], ids=["all", "W_V", "W_O", "W_Q"])
def test_part_5_with_dead_heads_is_the_oracles(names, kinds):
    """A writing head and a reading head are dead; kinds: of composition that the latter lacks."""
    state = tiny.state_dict()
    silence(state, 0, 2, names)
    silence(state, 1, 1, names)
    model = tiny.model(state)
    found, wanted = test_part5.found_numbers(model), test_part5.wanted_numbers(model)
    for s in found, wanted:  # the dead ones all cost 0, so that they have no order
        s["term_importance"].pop("virtual_largest")
    assert not test_part5.misses(found, wanted, tolerance=1e-12)
    for kind in "QKV":
        scores = found["composition"][kind]["scores"]
        dead_writer = names != ("W_Q",)  # it still writes
        assert [[v is None for v in row] for row in scores] == [
            [(i == 1 and kind in kinds) or (j == 2 and dead_writer) for j in range(3)]
            for i in range(3)]


def test_a_run_of_part_5_with_dead_heads(tmp_path):
    def change(state):
        silence(state, 0, 0)
        silence(state, 1, 1)

    s, log = run(tmp_path, "part5", change)
    assert all("scores" in key or ".z." in key or key.endswith(("mean_by_writer.0", "share.0"))
               for key in nulls(s["composition"]))
    assert s["claims"]["column"]["head"] != "0.0" and nulls(s["claims"]) == {"constant_share.0"}
    assert any(line.startswith("  K-composition, mean over the 3 layer-1 heads, per layer-0 head: "
                               "0.0 -, 0.1 0.") for line in log)
    assert list((tmp_path / "out" / "figures").glob("part5_composition.svg"))


def test_part_5_on_weights_that_are_all_zero(tmp_path):
    s, log = run(tmp_path, "part5", silence_all)
    for kind in "QKV":
        summary = s["composition"][kind]
        assert (summary["max"], summary["mean"], summary["n_above"]) == (None, None, 0)
        assert summary["max_pair"] == {"reader": None, "writer": None}
    assert s["term_importance"]["loss_model"] == pytest.approx(s["term_importance"]["uniform"])
    assert s["claims"]["column"] == {} and s["claims"]["single_share"] is None
    assert "  Q-composition: max -, mean -, pairs above baseline + 0.05: 0 of 9" in log
    assert "  layer-0 head with the highest mean Q- and K-composition: -" in log
    assert list((tmp_path / "out" / "figures").glob("part5_composition.svg"))


def test_a_baseline_without_spread():
    """Scores that all are 1 but for rounding: no z, and the article's margin for either form."""
    ones, spread = torch.ones(9).double(), torch.arange(9) / 9
    ones[3] += 1e-15
    baseline = part5._baseline(ones, ones)
    assert baseline["sd"] == 0 and baseline["margin"] == part5.THRESHOLD
    assert part5._baseline(spread, ones)["margin"] == part5.THRESHOLD
    m = {"n_layers": 2, "readers": ["1.0"], "writers": ["0.0", "0.1"]}
    found = part5._score_summary(torch.tensor([[0.5, 1.5]]), baseline, m)
    assert found["z"] == [[None, None]] and found["n_above"] == 1
