"""circuits_part*_toy.py: answers written by hand, the published ones, and the identities."""

import argparse
import contextlib
import copy
import io
import json
import math
import pathlib
import subprocess
import sys
import types

import pytest
import torch

import circuits_part4 as part4
import circuits_part4_toy as toy4
import circuits_part5_toy as toy
import common
import tiny
from results import runner

ROOT = pathlib.Path(common.__file__).parent
TOYS = {"part4": toy4, "part5": toy}
PUBLISHED = [(part, e) for part in TOYS for e in json.loads(
    (ROOT / f"results/published/{part}_toy.json").read_text("utf-8"))["entries"]]
HEAVY = ("transformer_lens", "transformers", "datasets", "huggingface_hub")
PART = pytest.mark.parametrize("part", TOYS)

LOOK_BACK = 3**0.6 / (3**0.6 + 1)  # softmax(0.6 log 3, 0): see "ones_moved"
MOVED = [0.792, 0, 2.4], [0.432 * LOOK_BACK, 1, 2.4 * LOOK_BACK]  # its logits, unscaled

PART4_BY_HAND = {
    "keep": {"entries": {"mind": 2, "bay": 6}, "weights": {"in": 0.5, "at": 0.8},
             "pushes": {"in": {"mind": 1, "bay": 3}, "at": {"mind": 1.6, "bay": 4.8}},
             "ratio": {"in": 3, "at": 3}},
    "matrices": {
        "copy": {"M": [[2, 1], [1, 2]], "eigenvalues": [[3, 0], [1, 0]], "sum": 4, "trace": 4,
                 "copy_score": 1, "positive": 2, "real_positive": 2, "complex": 0, "angle": 90,
                 "diagonal": [2, 2], "condition": 1, "self_rank": [1, 1],
                 "vectors": [{"v": [1, 1], "Mv": [3, 3], "factor": 3},
                             {"v": [1, -1], "Mv": [1, -1], "factor": 1}]},
        "swap": {"columns": [[0, 1], [1, 0]], "eigenvalues": [[1, 0], [-1, 0]], "sum": 0,
                 "trace": 0, "copy_score": 0, "positive": 1, "real_positive": 1, "complex": 0,
                 "diagonal": [0, 0], "angle": 90, "condition": 1, "self_rank": [2, 2],
                 "vectors": [{"v": [1, 1], "Mv": [1, 1], "factor": 1},
                             {"v": [1, -1], "Mv": [-1, 1], "factor": -1}]},
        "rotation": {"columns": [[0, 1], [-1, 0]], "eigenvalues": [[0, 1], [0, -1]], "sum": 0,
                     "trace": 0, "copy_score": 0, "positive": 0, "real_positive": 0, "complex": 2,
                     "diagonal": [0, 0], "self_rank": [2, 1], "vectors": []},
        "pathological": {
            "M": [[-1, 6], [-1, 4]], "columns": [[-1, -1], [6, 4]], "eigenvalues": [[2, 0], [1, 0]],
            "sum": 3, "trace": 3, "copy_score": 1, "positive": 2, "real_positive": 2, "complex": 0,
            "diagonal": [-1, 4], "self_rank": [2, 2],
            "angle": math.degrees(math.acos(7 / 50**0.5)),  # (2, 1) . (3, 1) = 7
            "condition": 1 / math.tan(math.acos(7 / 50**0.5) / 2),
            "vectors": [{"v": [2, 1], "Mv": [4, 2], "factor": 2},
                        {"v": [3, 1], "Mv": [3, 1], "factor": 1}]},
        "negative": {"eigenvalues": [[-1, 0], [-3, 0]], "copy_score": -1, "positive": 0,
                     "complex": 0, "trace": -4, "self_rank": [2, 2]}},
    "products": {"rows": {"PQ": [[1, 1, 1], [2, 2, 2], [0, 0, 0]], "QP": [[3]]},
                 "eigenvalues": {"PQ": [3, 0, 0], "QP": [3]}, "imaginary_max": 0,
                 "trace": {"PQ": 3, "QP": 3}, "norm": {"PQ": 15**0.5, "QP": 3}},
    "push": {"entry": 4, "weights": [0.5, 0.1], "pushes": [2, 0.4]},
    "stream_rotation": {
        # b looks back at a with log 3 against 0; at a: 3 a + 4 c, at b: 1.5 a + b + 3 c
        **{name: {"OV": [[2, 0, 4], [0, 0, 0], [0, 0, 0]], "eigenvalue": 2, "diagonal": [2, 0, 0],
                  "QK": [[0, 0, 0], [math.log(3), 0, 0], [0, 0, 0]],
                  "pattern": [[1, 0], [0.75, 0.25]],
                  "logits": [[3 / 5, 0, 4 / 5], [1.5 / 3.5, 1 / 3.5, 3 / 3.5]]}
           for name in ("before", "after")},
        # a and b have become 0.6 a + 0.8 b and 0.6 b - 0.8 a
        "embedding_only": {"OV": [[1.2, 0, 2.4], [-1.6, 0, -3.2], [0, 0, 0]], "eigenvalue": 1.2,
                           "diagonal": [1.2, 0, 0],
                           "QK": [[0.48 * math.log(3), -0.64 * math.log(3), 0],
                                  [0.36 * math.log(3), -0.48 * math.log(3), 0], [0, 0, 0]]},
        # a has become 0.6 a - 0.8 (1, 1, 1, 1); centred and scaled it is a, and reads as 0.6
        "ones_moved": {"OV": [[2, 0, 4], [0, 0, 0], [0, 0, 0]], "eigenvalue": 2,
                       "QK": [[0, 0, 0], [math.log(3), 0, 0], [0, 0, 0]],
                       "pattern": [[1, 0], [LOOK_BACK, 1 - LOOK_BACK]]},
        "max_change": 0},
    "sizes": {"d_vocab": 50_000, "entries_per_circuit": 2_500_000_000},
}
PART5_BY_HAND = {
    "path_expansion": {
        "x0": [1, 2, 3], "w1": 0.5, "w2": 2,
        "paths": {"direct": [1, 2, 3], "head_1": [0.5, 0.5, 1], "head_2": [2, 3, 6],
                  "virtual": [1, 1, 2]},
        "sum": [4.5, 6.5, 12], "token_3": [3, 1, 6, 2], "x1": [1.5, 2.5, 4], "x2": [4.5, 6.5, 12],
        "max_abs_diff": 0},
    "previous_tokens": {
        "product": [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]],
        "pattern_reads": [1, 1, 2, 3], "product_reads": [1, 1, 1, 2], "row_sums": [1, 1, 1, 1],
        "future_max": 0, "pattern_back": [1, 0], "product_back": [1 / 3, 1]},
    "score_terms": {"terms": {"none": 2, "Q": 1, "K": 1, "QK": 3}, "sum": 7, "score": 7,
                    "q": [1, 1], "k": [3, 4]},
    "composition": {
        "example_norm": 3, "norm_product": 2, "norm_QK": 1, "norm_OV": 2,
        "W_OV": [[0, 0, 0], [0, 0, 0], [2, 0, 0]], "W_QK": [[0, 0, 1], [0, 0, 0], [0, 0, 0]],
        "product": [[2, 0, 0], [0, 0, 0], [0, 0, 0]],
        "heads": {"head_2": {"query": 1, "key": 3, "K": 1, "Q": 0, "K_first_published": 1,
                             "Q_first_published": 0},
                  "third_head": {"query": 1, "key": 2, "K": 0, "Q": 0, "K_first_published": 0,
                                 "Q_first_published": 0},
                  # what head 1 writes arrives in the key: 1; W_Q^T W_V is (0, 1, 0) . (1, 0, 0)
                  "other_query": {"query": 2, "key": 3, "K": 1, "Q": 0, "K_first_published": 0,
                                  "Q_first_published": 0}}},
    "norms": {"u": [[1], [0]], "v": [[0, 1]], "norm": {"uv": 1, "vu": 0},
              "trace": {"uv": 0, "vu": 0}},
    "counting": {"ours": {"heads": 16, "layer_pairs": 1, "virtual_order_2": 64},
                 "paper": {"heads": 24, "layer_pairs": 1, "virtual_order_2": 144},
                 "larger": {"heads": 144, "layer_pairs": 66, "virtual_order_2": 9504}},
    "sum_of_heads": {"heads": [[[1, 0, 2], [2, 1, 4]], [[6, 0, 0], [2, 1, 1]]],
                     "sum": [[7, 0, 2], [4, 2, 5]], "concatenated": [[7, 0, 2], [4, 2, 5]],
                     "kernel": [[7, 0, 2], [4, 2, 5]]},
    "mixed_product": {"A2A1": [[1, 0, 0], [1, 0, 0], [0, 1, 0]], "W2W1": [[0, 1], [1, 2]],
                      "two_steps": [[0, 1], [0, 1], [1, 2]], "one_step": [[0, 1], [0, 1], [1, 2]],
                      "max_abs_diff": 0},
    "rotation": {"before": {"corrected": {"K": [1, 0, 1], "Q": [0, 0, 0]},
                            "first_published": {"K": [1, 0, 0], "Q": [0, 0, 0]}},
                 "after": {"corrected": {"K": [1, 0, 1], "Q": [0, 0, 0]},
                           "first_published": {"K": [1, 0, 0], "Q": [0, 0, 0]}},
                 # keys read 1, 3, 1 now and queries 2, 2, 3: head 1 writes into 3
                 "one_side_only": {"corrected": {"K": [0, 1, 0], "Q": [0, 0, 1]}},
                 "centre_then_rotate": [[3, -2, -1]], "rotate_then_centre": [[3, -2, -1]]},
    "sizes": {"attention": 4, "mlp": 8, "mlp_share": 2 / 3, "neurons_per_dimension": 100},
}


BY_HAND = {"part4": PART4_BY_HAND, "part5": PART5_BY_HAND}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    found = {}
    for part, script in TOYS.items():
        out = tmp_path_factory.mktemp("toy")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            results = script.main(["--out", str(out)])
        found[part] = types.SimpleNamespace(results=results, sections=results["sections"], out=out,
                                            printed=printed.getvalue())
    return found


def at(tree, key: str):
    for part in key.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


def leaves(tree, key: str = ""):
    if isinstance(tree, dict):
        for k, v in tree.items():
            yield from leaves(v, f"{key}.{k}" if key else k)
    else:
        yield key, tree


def same(ours, theirs) -> bool:
    """Part 4 is written to nine decimals."""
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs))
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in theirs)
    return abs(ours - theirs) < 1e-9


@pytest.mark.parametrize("part, key, answer", [
    (part, *leaf) for part, answers in BY_HAND.items() for leaf in leaves(answers)])
def test_answers_by_hand(runs, part, key, answer):
    ours = at(runs[part].sections, key)
    assert ours == answer if part == "part5" else same(ours, answer)


@pytest.mark.parametrize("part, entry", PUBLISHED, ids=[f"{part}-{e['key']}"
                                                        for part, e in PUBLISHED])
def test_published_values(runs, part, entry):
    ours = at(runs[part].sections, entry["key"])
    if entry["kind"] == "rounded":
        assert abs(ours - entry["value"]) <= 0.5 * 10 ** -entry["decimals"]
    else:
        assert entry["kind"] == "exact" and ours == entry["value"]


LINES = {
    "part4": [
        '  after "in": mind 0.5 x 2 = 1.0, bay 0.5 x 6 = 3.0; ratio bay/mind 3',
        '  after "at": mind 0.8 x 2 = 1.6, bay 0.8 x 6 = 4.8; ratio bay/mind 3',
        "  a rotating head     (0, -1) (1, 0)    +i, -i                0   (0, 0)      0 =  0",
        "  a pathological one  (-1, 6) (-1, 4)   2, 1                  1   (-1, 4)     3 =  3",
        "  a pathological one: M (2, 1) = (4, 2) = 2 (2, 1)",
        "  a pathological one                8.1 degrees              14.1                2, 2",
        "    eigenvalues 3, 0, 0; trace 3; norm 3.873",
        "  0.5 x 4 = 2; 0.1 x 4 = 0.4",
        "  50,000 x 50,000 tokens: 2.5 billion entries"],
    "part5": [
        "  direct path                                 1        2        3",
        "  token 3: 3 + 1 + 6 + 2 = 12; max |diff| over all tokens = 0",
        "  the product: tokens 1 to 4 read [1, 1, 1, 2]; mean weight 1 back 0.33, 2 back 1.00",
        "  K-composition   q_d . k_h = (1, 0) . (1, 3) = 1",
        "  K-composition of head 2: 2 / (1 x 2) = 1"],
}


@pytest.mark.parametrize("part, n_sections", [("part4", 6), ("part5", 10)])
def test_main_prints_and_writes_the_same(runs, part, n_sections):
    run = runs[part]
    assert (run.out / f"{part}_toy_stdout.txt").read_text("utf-8") == run.printed
    assert json.loads((run.out / f"{part}_toy.json").read_text("utf-8")) == run.results
    headings = [line for line in run.printed.splitlines() if line.startswith("==")]
    assert [h.split()[1] for h in headings] == [
        *(f"{i}." for i in range(1, n_sections + 1)), "AGAINST"]
    assert all(len(line) <= 100 for line in run.printed.splitlines())
    assert set(LINES[part]) <= set(run.printed.splitlines())


@PART
def test_the_committed_results_are_these(runs, part):
    committed = json.loads((ROOT / f"results/{part}_toy.json").read_text("utf-8"))
    assert committed["sections"] == runs[part].sections
    assert (ROOT / f"results/{part}_toy_stdout.txt").read_text("utf-8") == runs[part].printed


@PART
def test_it_starts_nothing_heavy_and_is_quick(part, tmp_path):
    code = (f"import sys, time, circuits_{part}_toy as t; t.main(['--out', sys.argv[1]]); "
            f"print([m for m in {HEAVY} if m in sys.modules], time.process_time())")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, text=True,
                          capture_output=True, check=True)
    loaded, seconds = done.stdout.splitlines()[-1].rsplit(" ", 1)
    assert loaded == "[]" and float(seconds) < 4


@PART
def test_a_wrong_option_is_one_line(part, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"circuits_{part}_toy.py", "--no-such-option"])
    assert runner.run_script(TOYS[part].main) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "--no-such-option" in message


def test_a_complex_number_is_written_as_one():
    written = {"0": (0, 0), "-2.5": (-2.5, 0), "+i": (0, 1), "-i": (0, -1), "2+3i": (2, 3),
               "1-11i": (1, -11), "-0.5i": (0, -0.5)}
    assert {text: toy4.number(list(value)) for text, value in written.items()} == {
        text: text for text in written}


def test_the_rotations_are_rotations_and_one_keeps_the_ones():
    for rows, keeps in ((toy4.TURN_AB, True), (toy4.TURN_ONES, False)):
        R = toy.tensor(rows) / 5
        assert close(R @ R.mT, torch.eye(4)) and close(torch.linalg.det(R), torch.tensor(1.0))
        assert close(torch.ones(4, dtype=R.dtype) @ R, torch.ones(4)) == keeps


def test_logits_where_the_ones_moved(runs):
    """Over the last scale, the root of the mean square of what is centred."""
    ours = toy.tensor(runs["part4"].sections["stream_rotation"]["ones_moved"]["logits"])
    pull = LOOK_BACK
    for row, moved, centred in zip(ours, MOVED, [(1.32, 0, 2.4), (0.72 * pull, 1, 2.4 * pull)]):
        scale = sum(v * v for v in centred) ** 0.5
        assert (row - toy.tensor(moved) / scale).abs().max() < 1e-9


def test_the_real_models_expansion_gives_the_same_four_paths(runs):
    """common.expand on the toy. A stream (x, -x) is its own centred self, so LayerNorm is a 1."""
    both = toy.tensor([[1, -1]])
    ones = torch.ones(3, 1, 3, 1, dtype=torch.float64)
    nothing = torch.zeros(2, 1, 1, dtype=torch.float64)
    W_V = toy.tensor([[[[1], [0]]]] * 2)  # [layer, head, d_model, d_head]
    W_O = toy.tensor([toy.W_1, toy.W_2])[:, None, None, None] * both
    model = types.SimpleNamespace(W_V=W_V, W_O=W_O, b_V=nothing, b_O=nothing[:, 0] * both)
    x0 = toy.tensor(toy.X0)[None, :, None] * both
    patterns = toy.tensor([toy.A_1, toy.A_2])[:, None, None]
    ids = torch.zeros(1, 3, dtype=torch.int64)  # expand reads neither these nor the last two
    run = common.FrozenRun(model, ids, x0.expand(3, *x0.shape), ones, patterns, patterns, x0)
    paths = common.expand(run)
    path_expansion = runs["part5"].sections["path_expansion"]
    found = {"direct": paths.sums[-1, 0], "head_1": paths.heads(0), "head_2": paths.heads(1),
             "virtual": paths.sums[-1, 2]}
    for name, stream in found.items():
        assert (stream == toy.tensor(path_expansion["paths"][name])[None, :, None]
                * both).all(), name
    assert paths.stream(2)[0, :, 0].tolist() == path_expansion["x2"]


# ------------------------------------------------------------------ the identities, on any numbers

SEEDS = pytest.mark.parametrize("seed", range(6))


def draw(seed: int, *shapes):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]


def close(a, b):
    return (a - b).abs().max().item() < 1e-12


@SEEDS
def test_concatenate_and_project_is_the_sum_of_heads(seed):
    z, W_O = draw(seed, (3, 2, 5, 4), (3, 4, 7))
    summed = sum(z[h] @ W_O[h] for h in range(3))
    assert close(common.write(z, W_O), summed)
    assert not close(common.write(z, W_O.flip(0)), summed)  # a head with another's W_O


@SEEDS
def test_two_heads_in_a_row_are_one(seed):
    A, x, W1, W2 = draw(seed, (2, 5, 5), (5, 4), (4, 4), (4, 4))
    A1, A2 = common.softmax_causal(A)
    in_a_row = toy.run_head(A2, toy.run_head(A1, x, W1), W2)
    assert close(in_a_row, toy.run_head(A2 @ A1, x, W2 @ W1))
    assert not close(in_a_row, toy.run_head(A1 @ A2, x, W2 @ W1))
    assert not close(in_a_row, toy.run_head(A2 @ A1, x, W1 @ W2))
    assert close(torch.kron(A2, W2) @ torch.kron(A1, W1), torch.kron(A2 @ A1, W2 @ W1))
    product = A2 @ A1
    assert close(product.sum(1), torch.ones(5)) and product.triu(1).abs().max() == 0


@SEEDS
@pytest.mark.parametrize("score", [common.composition_scores, common.first_published_scores])
def test_a_rotation_of_the_stream_changes_no_score(seed, score):
    W_V, W_O, W_Q, W_K, free = draw(seed, (3, 7, 2), (3, 2, 7), (4, 7, 2), (4, 7, 2), (7, 7))
    R = torch.linalg.qr(free)[0]
    before = score(W_V, W_O, W_K, W_Q)
    assert close(score(R.mT @ W_V, W_O @ R, R.mT @ W_K, R.mT @ W_Q), before)
    assert not close(score(W_V, W_O, R.mT @ W_K, R.mT @ W_Q), before)  # its readers alone
    assert not close(score(free.mT @ W_V, W_O @ free, free.mT @ W_K, free.mT @ W_Q), before)


@SEEDS
def test_both_orders_of_a_product_share_eigenvalues_and_trace_not_norms(seed):
    A, B = draw(seed, (7, 3), (3, 7))
    small, trace = common.circuit_eigenvalues(A, B)
    worst, rest = common.match_eigenvalues(torch.linalg.eigvals(A @ B), small)
    assert worst < 1e-12 and rest < 1e-12
    assert close(trace, (A @ B).trace()) and close(common.circuit_diagonal(A, B).sum(), trace)
    assert not close((A @ B).norm(), (B @ A).norm())
    X, Y = A[:3], B[:, :3]  # and square ones
    values = [torch.linalg.eigvals(m) for m in (X @ Y, Y @ X)]
    assert common.match_eigenvalues(*values)[0] < 1e-12
    assert not close((X @ Y).norm(), (Y @ X).norm())


SIZES = tiny.SIZES | {"n_layers": 1}
WRITERS, READERS = ("W_E", "W_pos", "W_O", "b_O"), ("W_Q", "W_K", "W_V", "W_U")


def rotation(seed: int, d: int, keeps_ones: bool):
    """A random rotation of d dimensions: one that keeps (1, ..., 1), or any."""
    ones, free, turn = torch.ones(d, 1, dtype=torch.float64), *draw(seed, (d, d - 1), (d, d))
    if not keeps_ones:
        return torch.linalg.qr(turn)[0]
    basis = torch.linalg.qr(torch.cat([ones, free], 1))[0]  # its first column: the ones
    inner = torch.linalg.qr(turn[1:, 1:])[0]
    return basis @ torch.block_diag(torch.ones(1, 1, dtype=inner.dtype), inner) @ basis.mT


def rotated(model, R, names=WRITERS + READERS):
    """The model with its writers times R, and its readers R^T times them."""
    model = copy.deepcopy(model)
    for name, w in model.named_parameters():
        name = name.rsplit(".", 1)[-1]
        if name in names:
            w.data = R.mT @ w if name in READERS else w @ R
    return model


def measured(model) -> dict:
    """What a rotation of the stream should leave alone: of the tables, and of a run."""
    run, ids = common.freeze(model, tiny.tokens(1)), torch.arange(23)
    a = part4.Analysis(run, model.W_E @ model.W_V[0], model.W_O[0] @ model.W_U, part4.CHOICES,
                       argparse.Namespace())
    values, trace = common.circuit_eigenvalues(a.A, a.B)
    tables = {"OV": torch.stack([part4.ov_row(a, 1, t) for t in range(23)]),
              "QK": torch.stack([part4.qk_column(a, 1, t) for t in range(23)]),
              "score": common.copy_score(values), "trace": trace, "diagonal": a.diagonal,
              "condition": common.eigenvector_condition(a.A, a.B),
              "ranks": common.self_rank(a.A, a.B, ids).double()}
    runs = {"patterns": run.patterns, "logits": model(run.tokens), "push": common.pushes(run, 7),
            "positions": part4.position_weights(a, 12)}
    return {"tables": tables, "eigenvalues": values, "runs": runs}


def unchanged(before: dict, after: dict) -> set[str]:
    return {k for k in before if (before[k] - after[k]).abs().max() < 1e-10}


@SEEDS
def test_a_rotation_of_the_stream_changes_no_table_eigenvalue_pattern_or_logit(seed):
    model = tiny.model(tiny.state_dict(SIZES, seed), SIZES)
    before = measured(model)
    kept, moved, half = (measured(rotated(model, rotation(seed, 11, ones), names))
                         for ones, names in ((True, WRITERS + READERS), (False, WRITERS + READERS),
                                             (True, WRITERS)))
    for after in (kept, moved):  # the tables leave LayerNorm out: they need no direction kept
        assert unchanged(before["tables"], after["tables"]) == set(before["tables"])
        for ours, theirs in zip(before["eigenvalues"], after["eigenvalues"]):
            assert common.match_eigenvalues(ours, theirs)[0] < 1e-10
    assert unchanged(before["runs"], kept["runs"]) == set(before["runs"])
    assert unchanged(before["runs"], moved["runs"]) == set()
    assert not unchanged(before["tables"], half["tables"]) - {"ranks"}  # its writers alone
    assert not unchanged(before["runs"], half["runs"])
