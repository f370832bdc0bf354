"""circuits_part5_toy.py: answers written by hand, the published ones, and the identities."""

import contextlib
import io
import json
import pathlib
import subprocess
import sys
import types

import pytest
import torch

import circuits_part5_toy as toy
import common

ROOT = pathlib.Path(toy.__file__).parent
PUBLISHED = json.loads((ROOT / "results/published/part5_toy.json").read_text("utf-8"))
HEAVY = ("transformer_lens", "transformers", "datasets", "huggingface_hub")

BY_HAND = {
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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out, printed = tmp_path_factory.mktemp("toy"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        results = toy.main(["--out", str(out)])
    return types.SimpleNamespace(results=results, sections=results["sections"], out=out,
                                 printed=printed.getvalue())


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


@pytest.mark.parametrize("key, answer", leaves(BY_HAND))
def test_answers_by_hand(run, key, answer):
    assert at(run.sections, key) == answer


@pytest.mark.parametrize("entry", PUBLISHED["entries"], ids=lambda e: e["key"])
def test_published_values(run, entry):
    assert entry["kind"] == "exact"
    assert at(run.sections, entry["key"]) == entry["value"]


def test_main_prints_and_writes_the_same(run):
    assert (run.out / "part5_toy_stdout.txt").read_text("utf-8") == run.printed
    assert json.loads((run.out / "part5_toy.json").read_text("utf-8")) == run.results
    headings = [line for line in run.printed.splitlines() if line.startswith("==")]
    assert [h.split()[1] for h in headings] == [f"{i}." for i in range(1, 11)]
    assert all(len(line) <= 100 for line in run.printed.splitlines())
    for line in ("  direct path                                 1        2        3",
                 "  token 3: 3 + 1 + 6 + 2 = 12; max |diff| over all tokens = 0",
                 "  the product: tokens 1 to 4 read [1, 1, 1, 2]; mean weight 1 back 0.33, 2 back "
                 "1.00",
                 "  K-composition   q_d . k_h = (1, 0) . (1, 3) = 1",
                 "  K-composition of head 2: 2 / (1 x 2) = 1"):
        assert line in run.printed.splitlines()


def test_the_committed_results_are_these(run):
    committed = json.loads((ROOT / "results/part5_toy.json").read_text("utf-8"))
    assert committed["sections"] == run.sections
    assert (ROOT / "results/part5_toy_stdout.txt").read_text("utf-8") == run.printed


def test_it_starts_nothing_heavy_and_is_quick(tmp_path):
    code = ("import sys, time, circuits_part5_toy as t; t.main(['--out', sys.argv[1]]); "
            f"print([m for m in {HEAVY} if m in sys.modules], time.process_time())")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, text=True,
                          capture_output=True, check=True)
    loaded, seconds = done.stdout.splitlines()[-1].rsplit(" ", 1)
    assert loaded == "[]" and float(seconds) < 4


def test_a_wrong_option_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["circuits_part5_toy.py", "--no-such-option"])
    assert common.run_script(toy.main) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "--no-such-option" in message


def test_the_real_models_expansion_gives_the_same_four_paths(run):
    """common.expand on the toy. A stream (x, -x) is its own centred self, so LayerNorm is a 1."""
    both = toy.tensor([[1, -1]])
    ones = torch.ones(3, 1, 3, 1, dtype=torch.float64)
    nothing = torch.zeros(2, 1, 1, dtype=torch.float64)
    W_V = toy.tensor([[[[1], [0]]]] * 2)  # [layer, head, d_model, d_head]
    W_O = toy.tensor([toy.W_1, toy.W_2])[:, None, None, None] * both
    model = types.SimpleNamespace(W_V=W_V, W_O=W_O, b_V=nothing, b_O=nothing[:, 0] * both)
    x0 = toy.tensor(toy.X0)[None, :, None] * both
    patterns = toy.tensor([toy.A_1, toy.A_2])[:, None, None]
    paths = common.expand(common.FrozenRun(model, None, x0[None], ones, patterns, None, None))
    found = {"direct": paths.direct, "head_1": paths.heads(0), "head_2": paths.heads(1),
             "virtual": paths.virtual()}
    for name, stream in found.items():
        assert (stream == toy.tensor(run.sections["path_expansion"]["paths"][name])[None, :, None]
                * both).all(), name
    assert paths.stream(2)[0, :, 0].tolist() == run.sections["path_expansion"]["x2"]


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
