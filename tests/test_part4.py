"""circuits_part4.py and its kernels, held against the dense matrices and loops of naive4.py.

The models are tiny and random, one layer, sizes that differ from each other, every bias and every
LayerNorm parameter non-zero, and a vocabulary in which the article's words are one token each,
but for a few that are left out on purpose.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import types

import numpy as np
import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

import circuits_part4 as part4
import common
import naive4
import tiny
from results import loading, report

TOLERANCE = dict(rtol=1e-10, atol=1e-12)  # float64; measured: 8e-13
FLOAT32 = dict(rtol=5e-5, atol=5e-6)  # measured: 7e-6
MISSING = (" Paris", " forefront")  # no tokens of the tiny vocabulary


# ------------------------------------------------------------------ the tiny models


def text_of_all_words() -> str:
    prompts = [prompt for *two, _ in part4.PAIRS for prompt in two] + part4.BUG["prompts"]
    words = [word for *_, word in part4.TABLE_ROWS + part4.OV_ROWS]
    words += part4.BUG["out"] + part4.BUG["dest"]
    words = [w for w in words if w not in MISSING]
    return "\n".join([*prompts, "".join(words), "alph", "Zz"])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, merged until each word of the article is one token."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4000, show_progress=False, special_tokens=list(tiny.SPECIAL.values()),
        initial_alphabet=sorted(set(text_of_all_words() + "".join(MISSING) + "L")))
    raw.train_from_iterator([text_of_all_words()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, **tiny.SPECIAL)


TOKENIZER = make_tokenizer()
SIZES = dict(n_layers=1, n_heads=8, d_head=5, d_model=11, n_ctx=67, d_vocab=len(TOKENIZER))
VOCABULARY = loading._token_names(TOKENIZER, len(TOKENIZER))  # tests/test_loading.py has its oracle


def make_model(dtype=torch.float64, sizes=SIZES, seed=0, **flags):
    m = tiny.model(tiny.state_dict(sizes, seed), sizes, dtype, tiny.FLAGS | flags)
    m.tokenizer = TOKENIZER
    return m


def analyse(m, choices=(), heads_by_rule=False, **more) -> part4.Analysis:
    run = common.freeze(m, tiny.tokens(2, 31, m.cfg.d_vocab))
    return part4.Analysis(run, m.W_E.double() @ m.W_V[0].double(),
                          m.W_O[0].double() @ m.W_U.double(), part4.CHOICES | dict(choices),
                          asked(**more), heads_by_rule=heads_by_rule)


def asked(source=(), prompt=None, next=None) -> argparse.Namespace:
    return argparse.Namespace(seed=3, source=source, prompt=prompt, next=next)


def compute(a: part4.Analysis) -> dict:
    meta = {"n_tokens": a.run.tokens.numel(), "text": "random ids", "model": "tiny"}
    results: dict = {"meta": meta, "sections": {}}
    for name, compute_it, *_ in part4.SECTIONS:
        results["sections"][name] = compute_it(a, results)
    assert report.not_finite(results["sections"]) is None
    return results


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


@pytest.fixture(scope="module")
def results(model):
    return compute(analyse(model))


# ------------------------------------------------------------------ the oracle's answers


class Oracle:
    """What naive4 says about a model, for the same texts and words; each answer is made once."""

    def __init__(self, m):
        self.w, self.n_heads, self.d_head = naive4.weights(m), m.cfg.n_heads, m.cfg.d_head
        ids = tiny.tokens(2, 31, m.cfg.d_vocab)
        self.runs = [naive4.forward(self.w, row) for row in ids.tolist()]
        self.ov = [naive4.ov_circuit(self.w, h) for h in range(self.n_heads)]
        self.qk = [naive4.qk_circuit(self.w, h) for h in range(self.n_heads)]
        for name in ("prompt", "eigenvalues", "condition", "ranks", "loss"):
            setattr(self, name, functools.cache(getattr(self, name)))

    def eigenvalues(self, h):
        return naive4.largest_eigenvalues(self.ov[h], self.d_head)

    def condition(self, h):
        return naive4.eigenvector_condition(self.ov[h], self.d_head)

    def ranks(self, h):
        return [naive4.self_rank(row, t) for t, row in enumerate(self.ov[h].tolist())]

    def loss(self, without=None):
        return naive4.loss(self.w, self.runs, without)

    def prompt(self, text):
        ids = [1, *TOKENIZER(text, add_special_tokens=False)["input_ids"]]
        return naive4.forward(self.w, ids)

    def token(self, word):
        ids = TOKENIZER(word, add_special_tokens=False)["input_ids"]
        assert VOCABULARY[ids[0]] == word and len(ids) == 1
        return ids[0]

    def top(self, values, k):
        return [VOCABULARY[i] for i in naive4.top(values, k)]

    def p(self, prompt, word):
        return naive4.softmax(self.prompt(prompt)["logits"][-1])[self.token(word)]


def wanted(o: Oracle, s: dict, by_rule: bool = False) -> dict:
    """name -> (ours, the oracle's), for every number of the sections."""
    return {**wanted_words(o, s, by_rule), **wanted_bug(o, s["keep"], by_rule),
            **wanted_heads(o, s), **wanted_extra(o, s)}


def wanted_words(o, s, by_rule) -> dict:
    out = {}
    for i, t in enumerate(r for r in s["skip_trigrams"] if "skipped" not in r):
        token, h = o.token(t["source"]), t["head"]
        if by_rule:
            own = [dense[token, token] for dense in o.ov]
            out[f"rows.{i}.head"] = h, own.index(max(own))
        out[f"rows.{i}.out"] = t["out"], o.top(o.ov[h][token], 5)
        out[f"rows.{i}.dest"] = t["dest"], o.top(o.qk[h][:, token], 5)
    work = s["at_work"]
    w = work["ralph"]
    run, token = o.prompt(w["prompt"]), o.token(w["next"])
    j = run["ids"].index(o.token(w["source"]))
    through = [naive4.push(o.w, run, h, token, j) for h in range(o.n_heads)]
    head = through.index(max(through)) if by_rule else 0
    out["word.head"] = w["head"], head
    out["word.tokens"] = w["tokens"], [VOCABULARY[t] for t in run["ids"]]
    out["word.pushes"] = w["pushes"], [naive4.push(o.w, run, h, token) for h in range(o.n_heads)]
    out["word.through"] = w["pushes_through_source"], through
    out["word.attention"] = w["attention"], run["pattern"][head, -1, j]
    pairs = work["pairs"]
    p = [o.p(r["prompt"], r["next"]) for r in pairs]
    out["pairs.p"] = [r["p"] for r in pairs], p
    out["pairs.ratios"] = work["ratios"], [x / y for x, y in zip(p[::2], p[1::2])]
    return out


def wanted_bug(o, r, by_rule) -> dict:
    h, token, ids = r["head"], o.token(r["source"]), [o.token(w) for w in r["pair"]]
    ov, qk = o.ov[h][token], o.qk[h][:, token]
    smaller = [min(dense[token, t] for t in ids) for dense in o.ov]
    out = {
        "keep.head": (h, smaller.index(max(smaller)) if by_rule else 2),
        "keep.ov": (list(r["ov"].values()), [ov[o.token(w)] for w in r["ov"]]),
        "keep.qk": (list(r["qk"].values()), [qk[o.token(w)] for w in r["qk"]]),
        "keep.medians": ((r["ov_median"], r["qk_median"]),
                         (naive4.median(ov), naive4.median(qk))),
        "keep.tops": (r["ov_top"] + r["qk_top"], o.top(ov, 6) + o.top(qk, 6)),
    }
    for i, p in enumerate(r["prompts"]):
        out |= wanted_prompt(o, p, h, token, ids, f"keep.prompt.{i}.", by_rule)
    return out


def wanted_prompt(o, p, h, token, ids, at, by_rule) -> dict:
    run = o.prompt(p["prompt"])
    j, odds = run["ids"].index(token), naive4.softmax(run["logits"][-1])
    through = [naive4.push(o.w, run, h, t, j) for t in ids]
    first = [naive4.push(o.w, run, k, ids[0]) for k in range(o.n_heads)]
    others = [k for k in range(o.n_heads) if k != h]
    other = max(others, key=first.__getitem__) if by_rule else 7
    return {
        at + "attention": (p["attention"], run["pattern"][h, -1, j]),
        at + "through": (list(p["through"].values()), through),
        at + "ratio": (p["ratio"], through[1] / through[0]),
        at + "direct": (list(p["direct"].values()), [naive4.direct_push(o.w, run, t)
                                                     for t in ids]),
        at + "whole": (list(p["whole"].values()), [naive4.push(o.w, run, h, t) for t in ids]),
        at + "p": (list(p["p"].values()), [odds[t] for t in ids]),
        at + "top3": (p["top3"], o.top(odds, 3)),
        at + "other": ((p["other_head"], p["push_of_other"]), (other, first[other])),
    }


def wanted_heads(o, s) -> dict:
    near = [naive4.position_weights(o.w, h, 66)[::-1][:3] for h in range(o.n_heads)]
    out = {
        "positions": (s["positional"]["from_positions"], near),
        "lean": (s["positional"]["lean"], [h for h, x in enumerate(near) if sum(x) > 0.5]),
        "on_text": (s["positional"]["on_text"], [[naive4.mean_attention(o.runs, h, k)
                                                  for k in range(3)] for h in range(o.n_heads)]),
        "start_token": (s["positional"]["start_token"], [
            naive4.mean_on_start(o.runs, h) for h in range(o.n_heads)]),
    }
    for i, t in enumerate(s["positional"]["ov"]):
        out[f"positions.ov.{i}"] = t["out"], o.top(o.ov[t["head"]][o.token(t["source"])], 5)
    for h, (e, c) in enumerate(zip(s["eigen"]["heads"], s["copying"])):
        dense = o.ov[h]
        values = o.eigenvalues(h)
        diagonal = [dense[t, t] for t in range(len(dense))]
        ranks = o.ranks(h)
        ours = [complex(*v) for v in e["eigenvalues"]]
        size = sum(abs(values))
        out[f"eigenvalues.{h}"] = naive4.same_numbers(ours, values, 1e-9 * size), True
        out[f"copy_score.{h}"] = e["copy_score"], naive4.copy_score(values)
        out[f"counts.{h}"] = ((e["positive"], e["real_positive"], e["complex"]),
                              naive4.counts(values, 1e-6))
        out[f"sums.{h}"] = (e["trace"], e["diagonal_sum"]), (np.trace(dense), sum(diagonal))
        out[f"diagonal.{h}"] = c["diagonal_positive"], np.mean([v > 0 for v in diagonal])
        out[f"top.{h}"] = (c["top1"], c["top5"]), (np.mean([r <= 1 for r in ranks]),
                                                   np.mean([r <= 5 for r in ranks]))
    return out


def wanted_extra(o, s) -> dict:
    loss = o.loss()
    out = {"loss": (s["beyond"]["loss_model"], loss)}
    for h, x in enumerate(s["beyond"]["heads"]):
        out[f"loss_increase.{h}"] = x["loss_increase"], o.loss(h) - loss
        out[f"loss_error.{h}"] = (x["loss_increase_se"],
                                  naive4.loss_error(o.w, o.runs, h))
        out[f"condition.{h}"] = x["condition"], o.condition(h)
        for i, t in enumerate(t for d in x["disagree"] for t in d["tokens"]):
            token = VOCABULARY.index(t["source"])
            row = o.ov[h][token]
            out[f"telling.{h}.{i}"] = ((t["diagonal"], t["rank"]),
                                       (row[token], o.ranks(h)[token]))
            out[f"telling.{h}.{i}.first"] = t["first"], VOCABULARY[naive4.top(row, 1)[0]]
    return out


def is_text(x) -> bool:
    return isinstance(x, str) or (isinstance(x, list) and len(x) > 0 and is_text(x[0]))


def same(ours, theirs, tolerance: dict) -> bool:
    if is_text(theirs):
        return ours == theirs
    ours, theirs = np.array(ours, float), np.array(theirs, float)
    return ours.shape == theirs.shape and np.allclose(ours, theirs, **tolerance)


def failing(pairs: dict, tolerance: dict = TOLERANCE) -> set[str]:
    """The names of the numbers that are not the oracle's."""
    return {k for k, (ours, theirs) in pairs.items() if not same(ours, theirs, tolerance)}


# ------------------------------------------------------------------ every number


def test_every_number_is_the_oracles(results, oracle):
    pairs = wanted(oracle, results["sections"])
    assert len(pairs) > 110
    assert not failing(pairs)


def test_every_number_where_heads_are_found_by_rule(model, oracle):
    found = compute(analyse(model, heads_by_rule=True))["sections"]
    assert failing(wanted(oracle, found, by_rule=True)) == set()


def test_float32_stays_near_the_oracle():
    m = make_model(torch.float32)
    assert not failing(wanted(Oracle(m), compute(analyse(m))["sections"]), FLOAT32)


def test_ov_rows_are_not_columns(results, oracle):
    """The circuits are not symmetric: the transposed table answers differently everywhere."""
    for t in results["sections"]["skip_trigrams"]:
        if "skipped" not in t:
            token, dense = oracle.token(t["source"]), oracle.ov[t["head"]]
            assert t["out"] != oracle.top(dense[:, token], 5)
            assert t["dest"] != oracle.top(oracle.qk[t["head"]][token], 5)


def test_sizes(results, model):
    s, n = results["sections"]["sizes"], len(TOKENIZER)
    d_model, per_head = 11, 4 * 11 * 5 + 3 * 5
    weights = 2 * n * d_model + 67 * d_model + n + 8 * per_head + d_model
    assert s == {"d_vocab": n, "n_heads": 8, "rank": 5, "entries_per_circuit": n * n,
                 "entries_all": 16 * n * n, "entries_three_tokens": n**3, "weights": weights,
                 "ratio": 16 * n * n / weights}


def test_pushes_rebuild_the_logit():
    """With nothing centred beforehand: direct path, biases and all pushes are the logit."""
    m = make_model(center_writing_weights=False, center_unembed=False, fold_value_biases=False)
    prompt = part4.PAIRS[0][0]
    run, out = part4.prompt_run(m, prompt), 71
    last = run.streams[0][:, -1:] + m.b_O[0]
    direct = (common.cen(last) / run.scales[-1][:, -1:])[0, 0] @ m.W_U[:, out] + m.b_U[out]
    logit = m(run.tokens)[0, -1, out]
    by_source = common.pushes(run, out)
    torch.testing.assert_close(direct + by_source.sum(), logit, rtol=1e-11, atol=1e-11)
    o = Oracle(m)
    theirs = [[naive4.push(o.w, o.prompt(prompt), h, out, j) for j in range(11)] for h in range(8)]
    np.testing.assert_allclose(by_source, theirs, **TOLERANCE)


# ------------------------------------------------------------------ open choices


@pytest.mark.parametrize("normed, scaled, biases", itertools.product([True, False], repeat=3))
def test_grid_of_position_choices(model, oracle, normed, scaled, biases):
    a = analyse(model, dict(position_layernorm=normed, position_scaled=scaled,
                            position_biases=biases))
    ours = part4.position_weights(a, 40)
    theirs = [naive4.position_weights(oracle.w, h, 40, normed, scaled, biases) for h in range(8)]
    np.testing.assert_allclose(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("layernorm, scaled", itertools.product(["none", "QK", "QK and OV"],
                                                                [True, False]))
def test_table_choices(model, oracle, layernorm, scaled):
    a = analyse(model, dict(table_layernorm=layernorm, qk_scaled=scaled))
    theirs = naive4.qk_circuit(oracle.w, 3, scaled, layernorm != "none")[:, 71]
    np.testing.assert_allclose(part4.qk_column(a, 3, 71), theirs, **TOLERANCE)
    scale = 1.0
    if layernorm == "QK and OV":
        scale = naive4.norm_scale(oracle.w["W_E"][71], oracle.w["eps"])
    np.testing.assert_allclose(part4.ov_row(a, 3, 71), oracle.ov[3][71] / scale, **TOLERANCE)


def test_value_biases_in_the_pushes():
    """Open choice 6: b_V left in the values belongs to the pushes, and changes them."""
    m = make_model(fold_value_biases=False)
    s = compute(analyse(m))["sections"]
    assert not failing(wanted(Oracle(m), s))
    folded = compute(analyse(make_model()))["sections"]
    names = failing(wanted(Oracle(m), folded), FLOAT32)  # TransformerLens folds in float32
    assert {"word.pushes", "keep.prompt.0.through", "keep.prompt.1.ratio"} <= names
    assert not {"pairs.p", "loss", "loss_increase.0", "positions", "copy_score.0"} & names


@pytest.mark.parametrize("reading", ["factors", "all", "head"])
def test_random_heads(model, oracle, reading):
    """The same draws, by the dense circuits."""
    ours = common.random_heads(model, reading, 20, seed=5)
    assert ours.shape == (20, 5)
    g = torch.Generator().manual_seed(5)
    n, d, e = len(TOKENIZER), 11, 5
    draw = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64).numpy()  # noqa: E731
    for values in ours[:3]:
        if reading == "factors":
            dense = draw(n, e) @ draw(e, n)
        elif reading == "all":
            dense = draw(n, d) @ draw(d, e) @ draw(e, d) @ draw(d, n)
        else:
            dense = oracle.w["W_E"] @ draw(d, e) @ draw(e, d) @ oracle.w["W_U"]
        theirs = naive4.largest_eigenvalues(dense, e)
        assert naive4.same_numbers(values.tolist(), theirs, 1e-9 * sum(abs(theirs)))


def test_random_heads_of_the_public_shape_are_the_published_ones():
    """Two Gaussian factors from seed 0 give all seven figures of the article's line."""
    cfg = types.SimpleNamespace(d_vocab=48262, d_model=512, d_head=64)
    values = common.random_heads(types.SimpleNamespace(cfg=cfg), "factors", 20, seed=0)
    score, (positive, _, is_complex) = common.copy_score(values), common.eigenvalue_counts(values)
    figures = [f"{x:+.3f}" for x in (score.min(), score.max(), score.mean())]
    assert figures == ["-0.035", "+0.070", "-0.002"]
    assert [int(x) for c in (positive, is_complex) for x in (c.min(), c.max())] == [29, 35, 54, 60]


# ------------------------------------------------------------------ eigenvalue kernels

TOYS = [  # the article's matrix [out, source], its eigenvalues, copy score, counts, condition
    ([[2, 1], [1, 2]], [3, 1], 1, (2, 2, 0), 1.0),
    ([[0, 1], [1, 0]], [1, -1], 0, (1, 1, 0), 1.0),
    ([[0, -1], [1, 0]], [1j, -1j], 0, (0, 0, 2), 1.0),
    ([[-1, 6], [-1, 4]], [2, 1], 1, (2, 2, 0), 1 / math.tan(math.acos(7 / 50**0.5) / 2)),
]


@pytest.mark.parametrize("M, eigenvalues, score, counts, condition", TOYS)
def test_toys_of_the_article(M, eigenvalues, score, counts, condition):
    M, one = torch.tensor(M, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    for A, B in ((M.T, one), (one, M.T)):
        values, trace = common.circuit_eigenvalues(A, B)
        assert naive4.same_numbers(values.tolist(), eigenvalues, 1e-12)
        assert common.copy_score(values).item() == pytest.approx(score, abs=1e-12)
        assert tuple(int(c) for c in common.eigenvalue_counts(values)) == counts
        diagonal = common.circuit_diagonal(A, B)
        assert diagonal.tolist() == M.diagonal().tolist()
        assert trace == diagonal.sum() == pytest.approx(sum(eigenvalues).real, abs=1e-12)
        assert common.eigenvector_condition(A, B).item() == pytest.approx(condition, rel=1e-9)
    ranks = common.self_rank(M.T[None], one[None], torch.tensor([0, 1]))
    assert ranks.tolist() == [[naive4.self_rank(M[:, t].tolist(), t) for t in (0, 1)]]


def test_tall_and_wide_toy():
    """P = (1, 2, 0), Q = (1, 1, 1): the single non-zero eigenvalue 3, from a 1 x 1 matrix."""
    P, Q = torch.tensor([[1.0], [2.0], [0.0]]), torch.ones(1, 3)
    values, trace = common.circuit_eigenvalues(Q.T, P.T)
    assert values.tolist() == [3] and trace == 3
    assert common.circuit_diagonal(Q.T, P.T).tolist() == [1, 2, 0]
    assert common.self_rank(Q.T[None], P.T[None], torch.arange(3)).tolist() == [[2, 1, 3]]
    large = torch.linalg.eigvals((P @ Q).double())
    assert max(common.match_eigenvalues(large, values)) < 1e-12


def factors(n=29, d=4, heads=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(heads, n, d, generator=g, dtype=torch.float64),
            torch.randn(heads, d, n, generator=g, dtype=torch.float64))


def test_kernels_do_not_depend_on_the_factorisation():
    A, B = factors()
    S = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for kernel in (common.eigenvector_condition, common.circuit_diagonal,
                   lambda a, b: common.copy_score(common.circuit_eigenvalues(a, b)[0]),
                   lambda a, b: common.circuit_eigenvalues(a, b)[1]):
        torch.testing.assert_close(kernel(A @ S, torch.linalg.inv(S) @ B), kernel(A, B))


def test_trace_is_the_sum_of_eigenvalues_and_of_the_diagonal():
    A, B = factors()
    values, trace = common.circuit_eigenvalues(A, B)
    bound = 1e-12 * values.abs().sum(-1)
    assert ((values.sum(-1).real - trace).abs() < bound).all()
    assert ((common.circuit_diagonal(A, B).sum(-1) - trace).abs() < bound).all()


def test_a_broken_trace_stops_the_script(model, monkeypatch):
    a = analyse(model)
    monkeypatch.setitem(a.__dict__, "diagonal", a.diagonal * (1 + 1e-6))
    with pytest.raises(common.UserError, match=r"head 0\.\d: the sum of the diagonal"):
        part4.compute_eigen(a, {})


@pytest.mark.parametrize("share, stops", [(5e-9, True), (5e-10, False)])
@pytest.mark.parametrize("what", ["eigenvalues", "diagonal"])
def test_how_near_the_three_sums_must_be(model, monkeypatch, what, share, stops):
    """1e-9 of sum |l|, for the eigenvalues and for the diagonal alike."""
    a, original = analyse(model), common.circuit_eigenvalues
    size = original(a.A, a.B)[0].abs().sum(-1)
    if what == "diagonal":
        moved = a.diagonal.clone()
        moved[:, 0] += share * size
        monkeypatch.setitem(a.__dict__, "diagonal", moved)
    else:
        def moved_eigenvalues(A, B):
            values, trace = original(A, B)
            values[..., 0] += share * values.abs().sum(-1)
            return values, trace
        monkeypatch.setattr(common, "circuit_eigenvalues", moved_eigenvalues)
    if stops:
        with pytest.raises(common.UserError, match=f"the sum of the {what}"):
            part4.compute_eigen(a, {})
    else:
        part4.compute_eigen(a, {})


def test_the_piece_is_of_head_0(model, oracle, monkeypatch):
    seen, original = [], torch.linalg.eigvals
    monkeypatch.setattr(torch.linalg, "eigvals", lambda m: (seen.append(m), original(m))[1])
    n = part4.compute_eigen(analyse(model), {})["check"]["n_tokens"]
    piece = next(m for m in seen if m.shape == (n, n))
    np.testing.assert_allclose(piece, oracle.ov[0][:n, :n], rtol=1e-9, atol=1e-11)


def test_real_and_complex_are_told_apart_by_the_threshold():
    values = torch.tensor([1 + 1e-7j, 1 - 1e-7j, 1 + 1e-5j, 1 - 1e-5j, 1e-7 + 1j, -2],
                          dtype=torch.cdouble)
    assert [int(c) for c in common.eigenvalue_counts(values)] == [4, 2, 3]
    assert [int(c) for c in common.eigenvalue_counts(values * 1e-9)] == [4, 2, 3]


@pytest.mark.parametrize("block", [1, 2, 7, 29, 100])
def test_rank_does_not_depend_on_the_block(block, monkeypatch):
    monkeypatch.setattr(common, "TILE_COLUMNS", 3)  # 29 out tokens in tiles of 12
    A, B = factors()
    sources = torch.tensor([0, 28, 3, 3, 17, 5, 11])
    ranks = common.self_rank(A, B, sources, block)
    dense = (A @ B).numpy()
    assert ranks.tolist() == [[naive4.self_rank(m[t], t) for t in sources.tolist()] for m in dense]


def test_a_tie_is_not_first():
    """Token 1 has a twin, token 3: the same embedding and the same unembedding."""
    A = torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 1]])[None]
    B = torch.tensor([[3.0, 0, 1, 0], [0, 2, 1, 2]])[None]
    assert common.self_rank(A, B, torch.arange(4)).tolist() == [[1, 2, 4, 2]]
    strict = 1 + ((A @ B).diagonal(0, -2, -1)[..., None] < A @ B).sum(-1)
    assert strict.tolist() == [[1, 1, 2, 1]]  # what counting only larger entries would say


def test_a_tie_but_for_rounding_is_a_tie():
    A, B = factors()
    twin = torch.cat([B, B[..., :1] * (1 - 1e-15)], -1)
    A = torch.cat([A, A[:, :1]], 1)
    first, last = common.self_rank(A, twin, torch.tensor([0, 29])).T
    assert (first == last).all() and (first > 1).all()


def test_matching_needs_no_order():
    small = torch.tensor([2 + 1j, 2 - 1j, -3], dtype=torch.cdouble)
    large = torch.tensor([1e-14, -3 + 1e-13, 2 - 1j, -2e-14, 2 + 1j], dtype=torch.cdouble)
    match, rest = common.match_eigenvalues(large, small)
    assert match == pytest.approx(1e-13, rel=1e-2) and rest == 2e-14


def test_ranked_sources():
    def ranked(d_vocab):
        cfg = types.SimpleNamespace(d_vocab=d_vocab)
        run = types.SimpleNamespace(model=types.SimpleNamespace(cfg=cfg))
        return part4.Analysis(run, None, None, {}, asked()).ranked.tolist()

    assert ranked(3000) == ranked(48262) == list(range(1000, 3000))
    assert ranked(2999) == list(range(2999))


# ------------------------------------------------------------------ deliberate faults


def put_in(monkeypatch, name, function):
    for module in (part4, common):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, function)


def transposed_ov(monkeypatch):
    put_in(monkeypatch, "ov_row", lambda a, h, s: a.A[h] @ a.B[h][:, s])


def transposed_qk(monkeypatch):
    def row(a, h, s):
        m = a.model
        return m.W_E @ m.W_K[0, h] @ (m.W_E[s] @ m.W_Q[0, h])
    put_in(monkeypatch, "qk_column", row)


def root_d_head_in_the_table(monkeypatch):
    monkeypatch.setitem(part4.CHOICES, "qk_scaled", True)


def no_root_d_head_in_positions(monkeypatch):
    monkeypatch.setitem(part4.CHOICES, "position_scaled", False)


def no_biases_in_positions(monkeypatch):
    monkeypatch.setitem(part4.CHOICES, "position_biases", False)


def push_without_position(monkeypatch):
    right = common.pushes

    def wrong(run, out):
        bare = run.streams.clone()
        bare[0] -= run.model.W_pos[: run.tokens.shape[1]]
        return right(dataclasses.replace(run, streams=bare), out)
    put_in(monkeypatch, "pushes", wrong)


def push_with_its_own_scale(monkeypatch):
    right = common.pushes

    def wrong(run, out):
        m, scales = run.model, run.scales.clone()
        alone = common.write(common.attend(run.patterns[0], common.cen(run.x0) / run.scales[0],
                                           m.W_V[0]), m.W_O[0])
        scales[-1] = (common.cen(alone).pow(2).mean(-1, keepdim=True) + m.cfg.eps).sqrt()
        return right(dataclasses.replace(run, scales=scales), out)
    put_in(monkeypatch, "pushes", wrong)


def push_from_the_table(monkeypatch):
    """Attention times the entry of the table, as the article's formula has it without LayerNorm."""
    def wrong(run, out):
        m = run.model
        entry = m.W_E[run.tokens[0]] @ m.W_V[0] @ m.W_O[0] @ m.W_U[:, out]
        return run.patterns[0, :, 0, -1] * entry
    put_in(monkeypatch, "pushes", wrong)


def eigenvalues_of_another_head(monkeypatch):
    right = common.circuit_eigenvalues
    put_in(monkeypatch, "circuit_eigenvalues",
           lambda A, B: right(A, B.roll(1, 0) if B.ndim == 3 else B))


def score_of_real_parts(monkeypatch):
    put_in(monkeypatch, "copy_score", lambda v: v.real.sum(-1) / v.real.abs().sum(-1))


def rank_in_the_column(monkeypatch):
    right = common.self_rank
    put_in(monkeypatch, "self_rank", lambda A, B, s: right(B.mT, A.mT, s))


def condition_of_the_small_side(monkeypatch):
    put_in(monkeypatch, "eigenvector_condition", lambda A, B: torch.linalg.cond(
        torch.linalg.eig((B @ A).mT)[1]))


def removal_with_a_new_scale(monkeypatch):
    right = common.unembed

    def wrong(run, normed, z, heads):
        removed = []
        for z_head, W_O in zip(z, run.model.W_O[0]):
            x = common.cen(run.streams[-1] - z_head @ W_O)
            x = x / (x.pow(2).mean(-1, keepdim=True) + run.model.cfg.eps).sqrt()
            losses = right(run, {"whole": run.final, "without": x}).losses
            removed.append(losses["without"] - losses["whole"])
        return dataclasses.replace(right(run, normed),
                                   loss_increase=torch.stack(removed))
    put_in(monkeypatch, "unembed", wrong)


def attention_one_place_off(monkeypatch):
    right = common.mean_attention
    put_in(monkeypatch, "mean_attention", lambda A, back: right(A, back + 1))


FAULTS = [
    (transposed_ov, {"rows.0.out", "keep.ov", "keep.medians", "positions.ov.0"}),
    (transposed_qk, {"rows.0.dest", "keep.qk"}),
    (root_d_head_in_the_table, {"keep.qk"}),
    (no_root_d_head_in_positions, {"positions"}),
    (no_biases_in_positions, {"positions"}),
    (push_without_position, {"word.pushes", "keep.prompt.0.through", "keep.prompt.1.ratio"}),
    (push_with_its_own_scale, {"word.pushes", "keep.prompt.0.through", "keep.prompt.0.whole"}),
    (push_from_the_table, {"word.pushes", "keep.prompt.0.ratio"}),
    (score_of_real_parts, {f"copy_score.{h}" for h in (0, 1, 2, 6)}),
    (rank_in_the_column, {"top.0"}),
    (condition_of_the_small_side, {f"condition.{h}" for h in range(8)}),
    (removal_with_a_new_scale,
     {f"{name}.{h}" for name in ("loss_increase", "loss_error") for h in range(8)}),
    (attention_one_place_off, {"on_text"}),
]


@pytest.mark.parametrize("fault, seen_in", FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_deliberate_faults_are_caught(model, oracle, monkeypatch, fault, seen_in):
    fault(monkeypatch)
    assert seen_in <= failing(wanted(oracle, compute(analyse(model))["sections"]))


def test_another_heads_factor_is_caught_by_the_trace(model, monkeypatch):
    eigenvalues_of_another_head(monkeypatch)
    with pytest.raises(common.UserError, match="the sum of the diagonal is not the trace"):
        compute(analyse(model))


# ------------------------------------------------------------------ the article's lines


def lines_of(show, section, **others) -> list[str]:
    log = report.Log()
    with contextlib.redirect_stdout(io.StringIO()):
        show(section, {"meta": {"model": "attn-only-1l", "n_tokens": 1000, "text": "t"},
                       "sections": others}, log)
    return log.lines


def test_lines_of_sizes():
    n = 48262
    section = {"d_vocab": n, "n_heads": 8, "rank": 64, "entries_per_circuit": n * n,
               "entries_all": 16 * n * n, "entries_three_tokens": n**3, "weights": 51_040_000,
               "ratio": 16 * n * n / 51_040_000}
    assert lines_of(part4.print_sizes, section)[:3] == [
        "== 1. HOW BIG THE EXPANDED CIRCUITS ARE (attn-only-1l)",
        "  vocabulary 48,262 tokens, 8 heads; one expanded circuit is 48,262 x 48,262 = 2.33 "
        "billion numbers",
        "  QK + OV for all 8 heads: 37.3 billion numbers; the model stores 51.0 million weights"]


def test_lines_of_skip_trigrams():
    rows = [
        (0, " perfect", [" looks", "Exper", " look", " equally", "'),"],
         ["sembled", "perfect", " perfect", " perfection", "Perfect"]),
        (0, " Ralph", ["R", "Van", " Van", " van", "J"],
         ["alph", " MERCHANTABILITY", " Ralph", " deprec", " deduction"]),
        (6, " couldn", [" they"], [" couldn"])]
    section = [{"head": h, "source": s, "dest": d, "out": o, "words": "article"}
               for h, s, d, o in rows]
    assert lines_of(part4.print_skip_trigrams, section)[:4] == [
        "== 2. SKIP-TRIGRAMS READ FROM THE WEIGHTS: fix a source, top destinations (QK) and top "
        "out tokens (OV)",
        "  head 0.0  source ' perfect'  dest [' looks', 'Exper', ' look', ' equally', \"'),\"]  "
        "out ['sembled', 'perfect', ' perfect', ' perfection', 'Perfect']",
        "  head 0.0  source ' Ralph'    dest ['R', 'Van', ' Van', ' van', 'J']  "
        "out ['alph', ' MERCHANTABILITY', ' Ralph', ' deprec', ' deduction']",
        "  head 0.6  source ' couldn'   dest [' they']  out [' couldn']"]


def test_lines_at_work():
    p = [0.8278, 0.0203, 0.7899, 0.0154, 0.0492, 0.0030]
    prompts = [(text, out) for *two, out in part4.PAIRS for text in two]
    word = {"tokens": ["<|BOS|>", "My", "\n", '"', "R"], "next": "alph", "source": " Ralph",
            "pushes": [8.18, 1.60, -0.18, 0.16, 0.27, 0.60, 1.67, -0.24], "head": 0,
            "attention": 0.59}
    section = {"pairs": [{"prompt": t, "next": o, "p": x} for (t, o), x in zip(prompts, p)],
               "ratios": [40.8, 51.3, 16.4], "ralph": word}
    lines = lines_of(part4.print_at_work, section)
    assert lines[:4] == [
        "== 3. SKIP-TRIGRAMS AT WORK IN THE WHOLE MODEL (probability of the next token)",
        r"""  'My friend Ralph called me today.\n"R'     p('alph') = 0.8278   |   """
        r"""'My friend Bob called me today.\n"R'     p('alph') = 0.0203""",
        r"""  'We visited Ralph and his dog.\n"R'        p('alph') = 0.7899   |   """
        r"""'We visited Tom and his dog.\n"R'        p('alph') = 0.0154""",
        """  'The perfect gift for her. It looks'       p(' perfect') = 0.0492   |   """
        """'The nice gift for her. It looks'        p(' perfect') = 0.0030"""]
    assert lines[5:8] == [
        r"""  tokens: ['<|BOS|>', 'My', '\n', '"', 'R']""",
        "  each head's push on the logit of \"alph\" at the last token: 0.0: +8.18, 0.1: +1.60, "
        "0.2: -0.18, 0.3: +0.16, 0.4: +0.27, 0.5: +0.60, 0.6: +1.67, 0.7: -0.24",
        '  head 0.0 at "R" puts 0.59 of its attention on " Ralph"']


def test_lines_of_positions():
    section = {"query": 200, "from_positions": [[0.91321, 0.0868, 0.0], [0.88, 0.1191, 0.0009]],
               "lean": [0, 1], "on_text": [[0.1, 0.2, 0.3]] * 2,
               "ov": [{"head": 5, "source": " corresponding", "out": [" to", "rians"]},
                      {"head": 5, "source": " couldn", "out": ["t"]},
                      {"head": 1, "source": " couldn", "out": ["って"]}]}
    lines = lines_of(part4.print_positional, section)
    assert lines[1:4] == [
        "  attention from the position embeddings alone (query at position 200; weight on the "
        "same token, 1 back, 2 back):",
        "    head 0.0: [0.913, 0.087, 0.0]", "    head 0.1: [0.88, 0.119, 0.001]"]
    assert lines[-4:-1] == [
        "  OV of head 0.5, source ' corresponding' -> [' to', 'rians']",
        "  OV of head 0.5, source ' couldn'       -> ['t']",
        "  OV of head 0.1, source ' couldn'       -> ['って']"]


def test_lines_of_the_bug():
    at = {"prompt": "You need to keep this in", "attention": 0.27,
          "through": {" mind": 1.78, " bay": 5.28}, "ratio": 2.96,
          "whole": {" mind": 3.17, " bay": 4.76}, "p": {" mind": 0.6416, " bay": 0.000014},
          "top3": [" mind", " the", " your"], "other_head": 7, "push_of_other": 4.45}
    section = {"head": 2, "source": " keep", "pair": [" mind", " bay"], "ov": {" mind": 3.641},
               "ov_median": -0.09, "ov_top": [" forefront", "\n      "], "qk": {" in": 1.78},
               "qk_median": 0.12, "qk_top": [" looking"], "no_token": [], "prompts": [at]}
    assert lines_of(part4.print_keep, section)[:5] == [
        '== 5. A SKIP-TRIGRAM BUG: head 0.2 and " keep"',
        "  OV column \" keep\": {' mind': 3.64}  (median over all tokens -0.09); top "
        r"[' forefront', '\n      ']",
        "  QK column \" keep\": {' in': 1.78}  (median 0.12); top destinations [' looking']",
        "  'You need to keep this in': head 0.2 puts 0.27 on \" keep\"; through \" keep\" it "
        "pushes mind +1.78, bay +5.28  (ratio bay/mind 2.96); whole head: mind +3.17, bay +4.76",
        "      whole model: p(mind) = 0.6416, p(bay) = 0.000014; top 3 [' mind', ' the', "
        "' your']; head 0.7 pushes mind +4.45"]


def test_lines_of_eigenvalues_and_copying():
    head = {"copy_score": 0.9984, "positive": 64, "real_positive": 26, "complex": 38,
            "trace": 353117.2, "diagonal_sum": 353117.2}
    random = {"copy_score": [-0.035, 0.07], "mean": -0.002, "positive": [29, 35],
              "complex": [54, 60]}
    eigen = {"check": {"match": 3.8e-13, "rest": 6.8e-14, "n_tokens": 300}, "heads": [head],
             "random": random}
    sizes = {"rank": 64, "d_vocab": 48262}
    assert lines_of(part4.print_eigen, eigen, sizes=sizes)[1] == (
        "  check on a 300-token piece of head 0.0: 300 x 300 has 300 eigenvalues; the 64 largest "
        "match the 64 x 64 ones to 3.8e-13; the other 236 are at most 6.8e-14")
    section = [{"diagonal_positive": 0.99, "top1": 0.37, "top5": 0.51, "sources": [1000, 2999]}]
    lines = lines_of(part4.print_copying, section, eigen=eigen, sizes=sizes)
    assert lines[1:3] == [
        "  head 0.0: copy score sum(l)/sum(|l|) = +0.998; 64/64 with positive real part (26 real "
        "and positive, 38 complex); trace 353,117 = sum of diagonal 353,117",
        "  2 random Gaussian heads of the same shapes: copy score from -0.035 to +0.070 (mean "
        "-0.002); positive real part 29 to 35 of 64; complex 54 to 60 of 64"]
    assert lines[4].split() == ["0.0", "+0.998", "0.99", "0.37", "0.51"]
    assert "tokens 1,000 to 2,999" in lines[5]


# ------------------------------------------------------------------ words that are no token


def test_words_that_are_not_one_token_are_skipped_with_their_pieces(results):
    s = results["sections"]
    rows = {(r["head"], r["source"]): r for r in s["skip_trigrams"]}
    paris = rows[7, " Paris"]
    assert "".join(paris["pieces"]) == " Paris" and len(paris["pieces"]) > 1
    assert paris["skipped"] == "' Paris' is not one token here" and "out" not in paris
    assert rows[7, " Paris"]["skipped"] and "dest" in rows[0, " perfect"]
    assert [w["word"] for w in s["keep"]["no_token"]] == [" forefront"]
    assert " forefront" not in s["keep"]["ov"] and len(s["keep"]["ov"]) == 4
    lines = lines_of(part4.print_skip_trigrams, s["skip_trigrams"])
    assert f"  head 0.7  source ' Paris'    skipped: ' Paris' is not one token here " \
           f"{paris['pieces']}" in lines
    assert any("' forefront' is not one token here" in line
               for line in lines_of(part4.print_keep, s["keep"]))


def test_a_model_without_the_words_the_heads_or_the_context_goes_on():
    """The letters of tiny.py, 3 heads, 17 positions: nearly every row is skipped, none fails."""
    sizes = tiny.SIZES | {"n_layers": 1}
    m = tiny.model(tiny.state_dict(sizes), sizes)
    run = common.freeze(m, tiny.tokens(1, 17, 23))
    a = part4.Analysis(run, m.W_E @ m.W_V[0], m.W_O[0] @ m.W_U, part4.CHOICES,
                       asked(["a", " b"], "ab", "c"))
    results, log = compute(a), report.Log()
    with contextlib.redirect_stdout(io.StringIO()):
        for name, _, show, *_ in part4.SECTIONS:
            show(results["sections"][name], results, log)
    s = results["sections"]
    assert all("skipped" in r for r in s["skip_trigrams"]) and "skipped" in s["keep"]
    assert len(s["eigen"]["heads"]) == 3 and s["positional"]["query"] == 16
    assert s["reader"]["sources"][0]["out"] and s["reader"]["prompt"]["p"] > 0
    assert any("not one token here" in line for line in log.lines)


def test_the_loss_without_a_head_on_one_sequence(model, oracle, results):
    """As the text of the public model is: the standard error is over tokens then."""
    a, runs = analyse(model), oracle.runs[:1]
    one = dataclasses.replace(a, run=common.freeze(model, a.run.tokens[:1]))
    found, whole = part4.compute_beyond(one, results), naive4.loss(oracle.w, runs)
    assert (found["n"], found["n_of"]) == (30, "tokens")
    assert found["loss_model"] == pytest.approx(whole, abs=1e-11)
    for h, x in enumerate(found["heads"]):
        increase, error = (f(oracle.w, runs, h) for f in (naive4.loss, naive4.loss_error))
        assert x["loss_increase"] == pytest.approx(increase - whole, abs=1e-11)
        assert x["loss_increase_se"] == pytest.approx(error, abs=1e-11)
        assert x["matters"] == (increase - whole - 2 * error > part4.MATTERS)


def test_missing_head_and_long_prompt_are_named(model):
    a = analyse(model)
    assert part4.row({}, part4.skip_trigram, a, 8, " Ralph") == {
        "skipped": "no head 0.8 here", "pieces": []}
    long = part4.row({}, part4.probability, a, " keep" * 70, " mind")
    assert long["skipped"] == "71 tokens, the context has 67"
    twice = part4.row({}, part4.probability, a, "a<|BOS|>b", " mind")
    assert twice["skipped"] == "the start token stands in the text"


# ------------------------------------------------------------------ the script


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A one-layer model folder."""
    path = tiny.folder(tmp_path_factory.mktemp("models") / "mini-1l", SIZES)
    TOKENIZER.save_pretrained(path)
    (path / "text.txt").write_text(text_of_all_words() * 3, encoding="utf-8")
    return path


def run_main(folder, out, *more) -> tuple[dict, str]:
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        results = part4.main(["--model", str(folder), "--text", str(folder / "text.txt"),
                              "--out", str(out), "--no-figures", *more])
    return results, stdout.getvalue()


HEADINGS = ["== 1. HOW BIG", "== 2. SKIP-TRIGRAMS READ", "== 3. SKIP-TRIGRAMS AT WORK",
            "== 4. HEADS THAT LOOK AT POSITION", "== 5. A SKIP-TRIGRAM BUG", "== 6. EIGENVALUES",
            "== 7. COPY SCORES", "== WHAT THE TEXT DERIVES", "== BEYOND THE ARTICLE",
            "== AGAINST WHAT THE ARTICLE PRINTS"]
KEYS = {
    "sizes": ["d_vocab", "n_heads", "entries_per_circuit", "entries_all", "weights", "ratio"],
    "at_work": ["ralph", "pairs"], "positional": ["from_positions", "on_text"],
    "keep": ["ov", "ov_median", "ov_top", "qk", "qk_median", "qk_top", "prompts"],
    "eigen": ["check", "heads", "random"], "beyond": ["heads", "loss_model"],
}


def test_main_end_to_end_and_twice_the_same(folder, tmp_path):
    results, stdout = run_main(folder, tmp_path / "1")
    run_main(folder, tmp_path / "2")
    for name in ("part4.json", "part4_stdout.txt"):
        first, second = ((tmp_path / d / name).read_bytes() for d in "12")
        assert first == second
    assert (tmp_path / "1" / "part4_stdout.txt").read_text(encoding="utf-8") == stdout
    headings = [line for line in stdout.splitlines() if line.startswith("==")]
    assert len(headings) == len(HEADINGS)
    assert all(h.startswith(w) for h, w in zip(headings, HEADINGS))
    saved = json.loads((tmp_path / "1" / "part4.json").read_text(encoding="utf-8"))
    assert saved == results
    for section, keys in KEYS.items():
        assert set(keys) <= set(saved["sections"][section]), section
    s, meta = saved["sections"], saved["meta"]
    assert {"head", "source", "dest", "out"} <= set(s["skip_trigrams"][0])
    assert {"tokens", "pushes", "attention"} <= set(s["at_work"]["ralph"])
    assert {"attention", "through", "ratio", "whole", "p", "top3", "push_of_other"} <= set(
        s["keep"]["prompts"][0])
    assert (meta["n_tokens"], meta["seq_len"]) == (67, 67)
    assert meta["processing"] == loading.PROCESSING | {"center_unembed": False}
    assert meta["choices"] == part4.CHOICES
    assert meta["script"] == "circuits_part4.py"


def test_readers_words_and_prompt_leave_the_article_alone(folder, tmp_path):
    plain, _ = run_main(folder, tmp_path / "1")
    results, stdout = run_main(
        folder, tmp_path / "2", "--source", " keep", "--source", " London", "--prompt",
        part4.PAIRS[0][0], "--next", "alph")
    reader = results["sections"].pop("reader")
    plain["sections"].pop("reader")
    lines = [r["meta"]["log_lines"].pop("reader") for r in (results, plain)]
    assert results == plain and lines[0] > lines[1] == 0
    assert [r["source"] for r in reader["sources"]] == [" keep"] * 8 + [" London"]
    assert all("out" in r for r in reader["sources"][:8])
    assert all(len(r["pieces"]) > 1 for r in reader["sources"][8:])
    prompt, word = reader["prompt"], plain["sections"]["at_work"]
    assert prompt["p"] == word["pairs"][0]["p"] and prompt["pushes"] == word["ralph"]["pushes"]
    np.testing.assert_allclose(np.sum(prompt["through"], 1), prompt["pushes"], rtol=1e-5)
    assert "== YOUR OWN WORDS" in stdout and "' London' is not one token here" in stdout
    assert f"p('alph') = {prompt['p']:.6f}" in stdout


def test_tokens_and_seq_len(folder, tmp_path):
    results, _ = run_main(folder, tmp_path / "1", "--tokens", "60", "--seq-len", "20")
    assert (results["meta"]["n_tokens"], results["meta"]["seq_len"]) == (60, 20)
    results, _ = run_main(folder, tmp_path / "2", "--tokens", "30")
    assert (results["meta"]["n_tokens"], results["meta"]["seq_len"]) == (30, 30)


def test_the_text_is_a_thousand_tokens(tmp_path):
    sizes = SIZES | dict(n_ctx=1100)
    folder = tiny.folder(tmp_path / "long", sizes)
    TOKENIZER.save_pretrained(folder)
    (folder / "text.txt").write_text(text_of_all_words() * 30, encoding="utf-8")
    meta = run_main(folder, tmp_path / "out")[0]["meta"]
    assert meta["n_tokens"] == meta["seq_len"] == 1000


def test_seed_and_dtype_reach_the_numbers(folder, tmp_path):
    drawn = [run_main(folder, tmp_path / seed, "--seed", seed)[0]["sections"]["eigen"]["random"]
             for seed in "01"]
    assert drawn[0]["copy_score"] != drawn[1]["copy_score"]
    runs = (run_main(folder, tmp_path / d, "--dtype", d)[0] for d in ("float32", "float64"))
    single, double = (results["sections"]["at_work"]["ralph"] for results in runs)
    pushes = np.array(double["pushes"])
    np.testing.assert_allclose(single["pushes"], pushes, rtol=1e-3, atol=1e-4)
    assert all(np.float32(x) == x for x in single["pushes"])
    assert any(np.float32(x) != x for x in pushes)


def test_value_biases_are_a_loading_choice(folder, tmp_path, monkeypatch):
    plain, _ = run_main(folder, tmp_path / "1")
    monkeypatch.setitem(part4.CHOICES, "fold_value_biases", False)
    other, _ = run_main(folder, tmp_path / "2")
    assert other["meta"]["processing"]["fold_value_biases"] is False
    a, b = (r["sections"]["at_work"] for r in (plain, other))
    assert not np.allclose(a["ralph"]["pushes"], b["ralph"]["pushes"], rtol=1e-3)
    assert a["pairs"][0]["p"] == pytest.approx(b["pairs"][0]["p"], rel=1e-4)


@pytest.mark.parametrize("options", [("--prompt", "a"), ("--next", "a")])
def test_prompt_and_next_belong_together(options):
    with pytest.raises(common.UserError, match="--prompt TEXT and --next WORD"):
        part4.main(list(options))


def test_centring_the_unembedding_moves_what_softmax_and_rank_do_not_see(folder, tmp_path,
                                                                        monkeypatch):
    """Probabilities, attention, top lists and losses stay; copy scores and pushes move."""
    found = {}
    for centred in (False, True):
        monkeypatch.setitem(part4.CHOICES, "center_unembed", centred)
        found[centred] = run_main(folder, tmp_path / str(centred), "--dtype", "float64")[0]
        assert found[centred]["meta"]["processing"]["center_unembed"] is centred
    plain, centred = (found[c]["sections"] for c in (False, True))
    for of_model in (
            lambda s: [p["p"] for p in s["at_work"]["pairs"]] + s["at_work"]["ratios"],
            lambda s: s["positional"]["from_positions"], lambda s: s["positional"]["on_text"],
            lambda s: [x["loss_increase"] for x in s["beyond"]["heads"]]):
        np.testing.assert_allclose(of_model(plain), of_model(centred), atol=1e-5)
    for of_ranks in (
            lambda s: [r.get("out") for r in s["positional"]["ov"]],
            lambda s: [p["top3"] for p in s["keep"]["prompts"]],
            lambda s: [(c["top1"], c["top5"]) for c in s["copying"]]):
        assert of_ranks(plain) == of_ranks(centred)
    same_head = [(t["out"], u["out"]) for t, u in zip(plain["skip_trigrams"],
                 centred["skip_trigrams"]) if "out" in t and t["head"] == u["head"]]
    assert len(same_head) > 2 and all(t == u for t, u in same_head)  # the rule sees the tables
    scores = [[h["copy_score"] for h in s["eigen"]["heads"]] for s in (plain, centred)]
    assert np.abs(np.subtract(*scores)).min() > 1e-6
