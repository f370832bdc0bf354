"""circuits_part5.py and the kernels under it, held against the loops of naive.py.

The models are tiny and random: sizes that differ from each other, every bias and every LayerNorm
parameter non-zero. Where a number is compared in float32 the oracle still computes in float64 from
the same float32 weights, so a difference is the implementation's rounding error.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import re
import types

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import circuits_part5 as part5
import common
import naive
import staged
import tiny
from results import report

SIZES = {
    "tiny": tiny.SIZES,
    "smaller": dict(n_layers=2, n_heads=4, d_head=3, d_model=10, n_ctx=9, d_vocab=29),
    "deeper": tiny.SIZES | {"n_layers": 3},
    "one layer": tiny.SIZES | {"n_layers": 1},
    "four layers": dict(n_layers=4, n_heads=2, d_head=3, d_model=10, n_ctx=9, d_vocab=19),
}
SEED = 7  # of the composition baseline and the induction sequences
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5}  # measured: 6e-15 and 3e-6
OTHERS = dict(bias_is_moved=True, median="lower", distinct_places=True)
WEIGHTS = ("W_E", "W_pos", "W_U", "b_U", "W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")


# ------------------------------------------------------------------ helpers


def weights_of(model) -> dict:
    """The weights of a TransformerLens model, for naive.py."""
    return {k: getattr(model, k).double().numpy() for k in WEIGHTS} | {"eps": model.cfg.eps}


def raw_weights(state: dict, n_layers: int, eps: float = 1e-5) -> dict:
    """The weights of an unprocessed state dict, for naive.py: LayerNorm parameters not folded."""
    state = {k: v.double().numpy() for k, v in state.items()}

    def layers(name):
        return np.stack([state[f"blocks.{i}.{name}"] for i in range(n_layers)])

    return {"W_E": state["embed.W_E"], "W_pos": state["pos_embed.W_pos"], "eps": eps,
            "W_U": state["unembed.W_U"], "b_U": state["unembed.b_U"],
            "ln_final_w": state["ln_final.w"], "ln_final_b": state["ln_final.b"],
            "ln_w": layers("ln1.w"), "ln_b": layers("ln1.b"),
            **{k: layers(f"attn.{k}") for k in WEIGHTS if k[2:] in tuple("QKVO")}}


@functools.cache
def model_of(sizes: str = "tiny", dtype: torch.dtype = torch.float64, scale: float = 1.0):
    """A processed model of one of SIZES, every parameter times `scale`; made once."""
    return tiny.model(tiny.state_dict(SIZES[sizes], scale=scale), SIZES[sizes], dtype)


@functools.cache
def uncentred_model():
    """All weights moved at random after the processing: nothing is centred, b_V is not zero.

    On a processed model most of cen(x) changes nothing, since what is written and what is read
    is centred already; here each one counts.
    """
    model = tiny.model(tiny.state_dict())
    g = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter += 0.3 * torch.rand(parameter.shape, generator=g, dtype=parameter.dtype)
    return model


def tokens_of(model) -> torch.Tensor:
    """Rows two shorter than the context: 3 x 15, and 2 x 7 for the smaller one."""
    cfg = model.cfg
    return tiny.tokens(2 if cfg.n_heads % 2 == 0 else 3, cfg.n_ctx - 2, cfg.d_vocab)


def frozen(model) -> common.FrozenRun:
    return common.freeze(model, tokens_of(model))


@functools.cache
def naive_runs(model) -> tuple:
    """The oracle's weights and its own run of every sequence."""
    w = weights_of(model)
    return w, [naive.forward(w, ids) for ids in tokens_of(model).tolist()]


def analysis_of(run: common.FrozenRun, choices: dict) -> part5.Analysis:
    choices = part5.CHOICES | choices
    text = {"n_tokens": run.tokens.numel(), "seq_len": run.tokens.shape[1]}
    return part5.Analysis(run, text, choices, SEED)


def found_numbers(model, choices: dict | None = None) -> dict:
    """All sections of circuits_part5, as its main computes them."""
    analysis = analysis_of(frozen(model), choices or {})
    results: dict = {"meta": {}, "sections": {}}
    for name, compute, *_ in part5.SECTIONS:
        results["sections"][name] = compute(analysis, results)
    return results["sections"]


def gaussian_factors(d_model: int, d_head: int, n: int, seed: int) -> list:
    """The draws of random_baseline: four factors a pair, from a private generator."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(4, d_model, d_head, dtype=torch.float64, generator=g).numpy()
            for _ in range(n)]


@functools.cache
def wanted_numbers(model, **choices) -> dict:
    """The same by the oracle."""
    n_ids = (model.cfg.n_ctx - 1) // 2
    repeated = common.repeated_tokens(model, n_ids, part5.N_INDUCTION_ROWS, SEED)
    draws = gaussian_factors(model.cfg.d_model, model.cfg.d_head, part5.N_BASELINE, SEED)
    return naive.sections(weights_of(model), tokens_of(model).tolist(), draws, repeated.tolist(),
                          **choices)


def differences(found, wanted, at: str = "") -> dict:
    """{key: difference} of every number of `wanted`; infinite where it is missing or NaN.

    Relative where the oracle's number is larger than 1.
    """
    if isinstance(wanted, dict | list):
        keys = wanted if isinstance(wanted, dict) else range(len(wanted))
        out = {}
        for k in keys:
            name = f"{at}[{k}]" if isinstance(wanted, list) else f"{at}.{k}".lstrip(".")
            try:
                out |= differences(found[k], wanted[k], name)
            except (KeyError, IndexError, TypeError):
                out[name] = float("inf")
        return out
    if isinstance(wanted, str | None):
        return {at: 0.0 if found == wanted else float("inf")}
    difference = abs(found - wanted) / max(1, abs(wanted))
    return {at: float("inf") if difference != difference else float(difference)}


def misses(found, wanted, *, tolerance: float) -> dict:
    return {k: d for k, d in differences(found, wanted).items() if d > tolerance}


def close(found, wanted, *, tolerance: float) -> None:
    """Assert that two arrays agree, relative to the largest entry where that is above 1."""
    found, wanted = np.asarray(found, dtype=float), np.asarray(wanted, dtype=float)
    assert found.shape == wanted.shape
    assert abs(found - wanted).max() <= tolerance * max(1, abs(wanted).max())


def stack(runs: list, pick) -> np.ndarray:
    """[batch, ...] of what `pick` takes from each of the oracle's runs."""
    return np.stack([pick(run) for run in runs])


@pytest.fixture(autouse=True)
def quiet_progress(monkeypatch):
    monkeypatch.setattr(common, "progress", lambda items, what: items)


# ------------------------------------------------------------------ the oracle is the model


@pytest.mark.parametrize("sizes", SIZES)
def test_oracle_on_raw_weights_is_the_processed_model(sizes):
    """Folding and centring leave log softmax(logits) alone."""
    model = model_of(sizes)
    raw = raw_weights(tiny.state_dict(SIZES[sizes]), model.cfg.n_layers)
    logits = stack([naive.forward(raw, ids) for ids in tokens_of(model).tolist()],
                   lambda run: run.logits)
    close(torch.tensor(logits).log_softmax(-1), model(tokens_of(model)).log_softmax(-1),
          tolerance=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
def test_oracle_on_processed_weights_is_the_processed_model(sizes):
    model = model_of(sizes)
    w, runs = naive_runs(model)
    assert not w["b_V"].any() and w["b_O"].any()
    close(model(tokens_of(model)), stack(runs, lambda run: run.logits), tolerance=1e-11)


def test_frozen_run_is_the_oracles_run():
    """Streams, scales, patterns, and scores where the mask lets them through."""
    run, (_, runs) = frozen(model_of()), naive_runs(model_of())
    close(run.streams.transpose(0, 1), stack(runs, lambda r: r.streams), tolerance=1e-11)
    close(run.scales[..., 0].transpose(0, 1), stack(runs, lambda r: r.scales), tolerance=1e-11)
    close(run.patterns.movedim(2, 0), stack(runs, lambda r: r.patterns), tolerance=1e-11)
    seen = np.tril(np.ones(run.scores.shape[-2:], dtype=bool))
    close(run.scores.movedim(2, 0)[..., torch.tensor(seen)],
          stack(runs, lambda r: r.scores)[..., seen], tolerance=1e-11)


# ------------------------------------------------------------------ every number


@pytest.mark.parametrize("choices", [{}, OTHERS], ids=["our choices", "other choices"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", ["tiny", "smaller"])
def test_every_number(sizes, dtype, choices):
    model = model_of(sizes, dtype)
    wanted = wanted_numbers(model, **choices)
    assert len(differences(wanted, wanted)) > 350
    assert not misses(found_numbers(model, choices), wanted, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("choices", [{}, OTHERS], ids=["our choices", "other choices"])
@pytest.mark.parametrize("sizes, n", [("one layer", 20), ("deeper", 800), ("four layers", 400)])
def test_every_number_at_another_depth(sizes, n, choices):
    model = model_of(sizes)
    wanted = wanted_numbers(model, **choices)
    assert len(differences(wanted, wanted)) > n
    found = found_numbers(model, choices)
    assert not misses(found, wanted, tolerance=TOLERANCE[torch.float64])
    for section in {*found} - {*wanted} - {"claims"}:  # those that need two layers
        assert found[section] == {} or sizes != "one layer"


@pytest.mark.parametrize("choices", [{}, OTHERS], ids=["our choices", "other choices"])
def test_every_number_where_each_centring_counts(choices):
    model = uncentred_model()
    assert not misses(found_numbers(model, choices), wanted_numbers(model, **choices),
                      tolerance=TOLERANCE[torch.float64])


def test_choices_change_what_they_name_and_nothing_else():
    """Each open choice moves its own numbers, so that the oracle can tell the settings apart."""
    model, moved = model_of("smaller"), {}
    for name, value in OTHERS.items():
        missed = misses(found_numbers(model, {name: value}), wanted_numbers(model), tolerance=1e-6)
        moved[name] = {re.match(r"\w+\.\w+", key)[0] for key in missed}
    assert moved["median"] == {"term_importance.virtual_median"}
    assert moved["distinct_places"] <= {f"virtual_heads.{k}" for k in
                                        ("all", "most_important", "most_two_back")}
    assert "virtual_heads.all" in moved["distinct_places"]
    assert {"term_importance.loss_by_order", "attention_groups.tv"} <= moved["bias_is_moved"]
    assert not any(k.startswith(("composition", "induction")) for k in moved["bias_is_moved"])


@pytest.mark.parametrize("rows, columns", [(11, 4), (1, 23), (42, 1)])
def test_tiles_change_nothing(monkeypatch, rows, columns):
    """45 rows and 23 columns of logits: whole in one tile, or in ragged ones."""
    whole = found_numbers(model_of())
    monkeypatch.setattr(common, "TILE_ROWS", rows)
    monkeypatch.setattr(common, "TILE_COLUMNS", columns)
    assert not misses(found_numbers(model_of()), whole, tolerance=1e-12)


def test_standard_error_over_sequences():
    mean, se = part5.mean_se(torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 0.0]]))
    close(mean, [3, 0], tolerance=1e-6)
    close(se, [naive.standard_deviation([1, 2, 6]) / 3**0.5, 0], tolerance=1e-6)
    assert part5.mean_se(torch.tensor([[4.0]])) == ([4.0], None)


# ------------------------------------------------------------------ the expansion is exact


def per_head_terms(run: common.FrozenRun, paths: common.Paths) -> dict:
    """The direct path, and every term of order 1 and 2 written out, z W_O, under the oracle's
    names."""
    W_O = run.model.W_O
    single = {((layer, h),): z @ W_O[layer, h] for layer, of_layer in enumerate(paths.z_single)
              for h, z in enumerate(of_layer)}
    virtual = {(writer, reader): z @ W_O[reader] for (reader, writer), z in
               zip(common.virtual_pairs(run.model), paths.z_virtual, strict=True)}
    return {(): paths.sums[-1, 0]} | single | virtual


DEPTHS = ["one layer", "tiny", "deeper", "four layers"]


@pytest.mark.parametrize("moved", [False, True], ids=["ours", "bias is moved"])
@pytest.mark.parametrize("sizes", DEPTHS)
def test_each_term(sizes, moved):
    """Each term of order 0, 1 and 2 by itself, among (1 + heads)^layers paths; where b_O counts as
    moved it has paths of its own."""
    run, (w, runs) = frozen(model_of(sizes)), naive_runs(model_of(sizes))
    wanted = [naive.terms(w, r, moved) for r in runs]
    of_bias = {path for path in wanted[0] if path and path[0][1] == "bias"}
    n_layers, n_heads = run.model.cfg.n_layers, run.model.cfg.n_heads
    assert len(wanted[0]) - len(of_bias) == (1 + n_heads) ** n_layers
    assert bool(of_bias) == (moved and n_layers > 1)
    found = per_head_terms(run, common.expand(run, moved))
    assert found.keys() == {path for path in wanted[0] if len(path) <= 2} - of_bias
    for path, term in found.items():
        close(term, np.stack([t[path] for t in wanted]), tolerance=1e-12)


@pytest.mark.parametrize("moved", [False, True], ids=["ours", "bias is moved"])
@pytest.mark.parametrize("sizes", DEPTHS)
def test_each_sum_by_order(sizes, moved):
    """The sum of all paths of an order, before every layer and at the end; and the single heads of
    every layer."""
    run, (w, runs) = frozen(model_of(sizes)), naive_runs(model_of(sizes))
    paths, terms = common.expand(run, moved), [naive.terms(w, r, moved) for r in runs]
    layers = range(run.model.cfg.n_layers)

    def wanted(is_wanted):
        return np.stack([naive.found_sum(t, is_wanted) for t in terms])

    for before, order in itertools.product(range(1, len(layers) + 1), range(1, len(layers) + 1)):
        close(paths.sums[before, order], wanted(
            lambda path, n=order, m=before: len(path) == n and path[-1][0] < m), tolerance=1e-12)
    for before in range(len(layers) + 1):
        direct = [naive.unmoved(w, r, before, moved) for r in runs]
        close(paths.sums[before, 0], np.stack(direct), tolerance=1e-12)
    for layer in layers:
        close(paths.heads(layer), wanted(
            lambda path, m=layer: len(path) == 1 and path[0][0] == m), tolerance=1e-12)


def read_out(run: common.FrozenRun, stream, **more) -> common.Unembedded:
    return common.unembed(run, {"model": run.final, "stream": run.final_norm(stream)}, **more)


def removals(run: common.FrozenRun, paths: common.Paths):
    """[pair, batch]."""
    everything, of = paths.stream(run.model.cfg.n_layers), common.virtual_pairs(run.model)
    found = read_out(run, everything, z=paths.z_virtual, heads=[reader for reader, _ in of])
    return found.loss_increase.mean(-1)


@pytest.mark.parametrize("moved", [False, True], ids=["ours", "bias is moved"])
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_terms_rebuild_stream_and_logits(dtype, tolerance, scale, moved):
    """Absolute in the logits at the usual size; relative to their range with large weights."""
    run = frozen(model_of("tiny", dtype, scale))
    paths = common.expand(run, moved)
    logits = read_out(run, paths.stream(2))
    size = max(1, run.streams.abs().max().item())
    assert (paths.stream(2) - run.streams[2]).abs().max() <= tolerance * size
    before_1 = paths.sums[1].sum(0)
    assert (before_1 - run.streams[1]).abs().max() <= tolerance * size
    allowed = tolerance * (1 if scale == 1 else logits.max - logits.min)
    assert logits.max_abs_diff <= allowed
    model = run.model(run.tokens)
    close([logits.min, logits.max], [model.min(), model.max()], tolerance=1e-6)


def test_value_biases_that_were_not_folded_count_as_constants():
    """b_V != 0: the rows of a pattern add up to 1, so b_V W_O is one more constant."""
    model = tiny.model(tiny.state_dict(), flags=tiny.FLAGS | {"fold_value_biases": False})
    run = frozen(model)
    assert model.b_V.abs().max() > 0.1
    for moved in (False, True):
        paths = common.expand(run, moved)
        assert read_out(run, paths.stream(2)).max_abs_diff < 1e-12
        w, runs = naive_runs(model)
        wanted = [naive.terms(w, r, moved) for r in runs]
        for order in range(3):
            close(paths.stream(order), np.stack([naive.up_to(order, t) for t in wanted]),
                  tolerance=1e-12)


@pytest.mark.parametrize("moved", [False, True], ids=["ours", "bias is moved"])
@pytest.mark.parametrize("sizes", DEPTHS)
def test_virtual_heads_split_by_source(sizes, moved):
    run, (w, runs) = frozen(model_of(sizes)), naive_runs(model_of(sizes))
    paths = common.expand(run, moved)
    halves = [common.virtual_from(paths, source) for source in (slice(0, 1), slice(1, None))]
    for half, is_read in zip(halves, (lambda j: j == 0, lambda j: j > 0)):
        wanted = [naive.virtual_from(w, r, is_read, moved) for r in runs]
        close(half, np.stack(wanted), tolerance=1e-12)
    of_bias = common.virtual_from(paths, slice(0, 0), bias=True)
    assert of_bias.any() == (moved and len(runs[0].patterns) > 1)
    if len(runs[0].patterns) > 1:
        close(sum(halves) + of_bias, paths.sums[-1, 2], tolerance=1e-12)


@pytest.mark.parametrize("moved", [False, True], ids=["ours", "bias is moved"])
@pytest.mark.parametrize("sizes", ["tiny", "deeper"])
def test_score_groups(sizes, moved):
    """none + Q + K + Q-and-K, each [query, key] without the mask; and K by writing head."""
    run, (w, runs) = frozen(model_of(sizes)), naive_runs(model_of(sizes))
    paths = common.expand(run, moved)
    for reader in common.readers(run.model):
        found = common.score_groups(paths, *reader)
        wanted = [naive.score_groups(w, r, reader, moved) for r in runs]
        for name in ("none", "Q", "K", "QK"):
            close(getattr(found, name), np.stack([g[name] for g in wanted]), tolerance=1e-12)
        writers = [writer for r, writer in common.virtual_pairs(run.model) if r == reader]
        for writer, K in zip(writers, found.K_of_head, strict=True):
            close(K, np.stack([g["K of", writer] for g in wanted]), tolerance=1e-12)


# ------------------------------------------------------------------ the paper's staged algorithm


@pytest.mark.parametrize("sizes", DEPTHS)
def test_staged_algorithm_is_the_path_expansion(sizes):
    """Frozen patterns, head outputs from the stage before: every order, and then no more."""
    run = frozen(model_of(sizes))
    n_layers, paths = run.model.cfg.n_layers, common.expand(run)
    streams = staged.staged_streams(run, n_layers + 1)
    orders = torch.stack([paths.stream(n) for n in range(n_layers + 1)])
    close(streams[:-1], orders, tolerance=1e-12)
    close(streams[-1], streams[-2], tolerance=1e-12)
    close(streams[0], run.x0 + run.b_O.sum(0), tolerance=1e-12)
    close(streams[-1], run.streams[-1], tolerance=1e-12)
    assert (streams[-2] - streams[-3]).abs().max() > 0.1
    for by_stage, by_path in zip(streams, orders):
        close(*(read_out(run, y).losses["stream"] for y in (by_stage, by_path)), tolerance=1e-12)


# ------------------------------------------------------------------ losses


def naive_removals(w: dict, runs: list) -> np.ndarray:
    """[pair, batch] by the oracle."""
    losses = [naive.sequence_losses(w, run, bias_is_moved=False)[0] for run in runs]
    return np.array([[s[pair] - s[f"order {len(w['W_O'])}"] for s in losses]
                     for pair in naive.pairs(w)])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", ["tiny", "deeper"])
def test_removals_per_sequence(sizes, dtype):
    model = model_of(sizes, dtype)
    run = frozen(model)
    close(removals(run, common.expand(run)), naive_removals(*naive_runs(model)),
          tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("size, n_unsafe", [(300, 100), (1000, 200)])
def test_removals_where_the_shared_shift_is_unsafe(monkeypatch, size, n_unsafe, dtype, tolerance):
    """Logits so large that exp(logit - L) over- or underflows once a term is removed.

    At size 300 a removal moves a row's loss by up to a few hundred nats, at 1000 by more than the
    709 that exp can hold even in float64.
    """
    state = tiny.state_dict()
    state["unembed.W_U"] *= size
    model = tiny.model(state, dtype=dtype)
    run = frozen(model)
    again, original = [], common._log

    def counted(total, *args):
        again.append(int((~((total > 1e-30) & (total < 1e30))).sum()))
        return original(total, *args)

    monkeypatch.setattr(common, "_log", counted)
    found = removals(run, common.expand(run))
    assert sum(again[2:]) > n_unsafe, "the rows are safe: the case is too tame"
    close(found, naive_removals(*naive_runs(model)), tolerance=tolerance)


@pytest.mark.parametrize("size", [1, 1000])
def test_removals_are_from_the_last_readout(size):
    """Not from the first, be the rows safe or not; and of the heads that z has."""
    state = tiny.state_dict()
    state["unembed.W_U"] *= size
    run = frozen(tiny.model(state))
    paths = common.expand(run)
    some, stream = [6, 5, 4, 3], paths.stream(1)
    z, heads = paths.z_virtual[some], [common.virtual_pairs(run.model)[i][0] for i in some]
    found = read_out(run, stream, z=z, heads=heads)
    wanted = torch.stack([
        read_out(run, stream - term @ run.model.W_O[head]).losses["stream"] - found.losses["stream"]
        for term, head in zip(z, heads)])
    close(found.loss_increase, wanted, tolerance=1e-12)


def test_many_rows_whose_sum_is_no_safe_number():
    """More than are done again at a time, each with its own shift, between rows that are safe."""
    g = torch.Generator().manual_seed(0)
    x, shift, W_U, b_U = (torch.randn(*n, dtype=torch.float64, generator=g)
                          for n in ((300, 11), (300,), (11, 23), (23,)))
    wanted = (x @ W_U + b_U - shift[:, None]).logsumexp(-1)
    for unsafe in (0, torch.inf):
        total = wanted.exp()
        total[::2] = unsafe
        close(common._log(total, shift, x, W_U, b_U), wanted, tolerance=1e-14)


@pytest.mark.parametrize("rows, columns", [(common.TILE_ROWS, common.TILE_COLUMNS), (11, 4)])
def test_losses_of_the_model_and_of_a_partial_stream(monkeypatch, rows, columns):
    """Token by token, and the logits of the two compared, in one tile or over many."""
    monkeypatch.setattr(common, "TILE_ROWS", rows)
    monkeypatch.setattr(common, "TILE_COLUMNS", columns)
    run, (w, runs) = frozen(model_of()), naive_runs(model_of())
    logits = [[r.logits for r in runs],
              [naive.partial_logits(w, r, naive.up_to(1, naive.terms(w, r))) for r in runs]]
    found = read_out(run, common.expand(run).stream(1))
    for loss, rows in zip(found.losses.values(), logits):
        assert loss.dtype == torch.float64 and loss.shape == (len(runs), len(runs[0].ids) - 1)
        close(loss.mean(-1), [naive.loss_of_logits(y, r.ids) for y, r in zip(rows, runs)],
              tolerance=1e-12)
        close(loss[1, 3], naive.loss_of_logits(rows[1][3:5], runs[1].ids[3:5]), tolerance=1e-12)
    model, partial = np.array(logits)
    wanted = [abs(model - partial).max(), model.min(), model.max()]
    close([found.max_abs_diff, found.min, found.max], wanted, tolerance=1e-12)
    turned = common.unembed(run, {"stream": run.final_norm(common.expand(run).stream(1)),
                                  "model": run.final})
    wanted[1:] = partial.min(), partial.max()
    close([turned.max_abs_diff, turned.min, turned.max], wanted, tolerance=1e-12)
    assert found.loss_increase.numel() == 0


def test_combined_normed_are_what_they_would_be_unembedded():
    run = frozen(model_of())
    a, b, c = (run.final_norm(common.expand(run).stream(order)) for order in range(3))
    once = common.unembed(run, {"a": a, "b": b, "c": c}, {"x": ("c", "a", "b"),
                                                          "y": ("a", "a", "c")}).losses
    wanted = common.unembed(run, {"x": c + a - b, "y": a + a - c}).losses
    for name in ("x", "y"):
        close(once[name], wanted[name], tolerance=1e-12)
    assert (once["x"] - once["y"]).abs().max() > 0.01


# ------------------------------------------------------------------ composition from the weights


def random_heads(d_model: int = 11, d_head: int = 5, n: int = 3, seed: int = 3) -> list:
    """W_V, W_O, read, other of n heads each."""
    g = torch.Generator().manual_seed(seed)
    W_V, W_O_T, read, other = torch.randn(4, n, d_model, d_head, dtype=torch.float64, generator=g)
    return [W_V, W_O_T.mT, read, other]


FORMS = [(common.composition_scores, naive.composition_score),
         (common.first_published_scores, naive.first_published_score)]


@pytest.mark.parametrize("found, wanted", FORMS, ids=["corrected", "first published"])
def test_scores_against_dense_products(found, wanted):
    W_V, W_O, read, other = random_heads()
    dense = [[wanted(W_V[h1].numpy(), W_O[h1].numpy(), read[h2].numpy(), other[h2].numpy().T)
              for h1 in range(3)] for h2 in range(3)]
    close(found(W_V, W_O, read, other), dense, tolerance=1e-13)


@pytest.mark.parametrize("form", [f for f, _ in FORMS], ids=["corrected", "first published"])
def test_scores_belong_to_the_circuits_not_to_their_factors(form):
    """A B = (A R)(R^-1 B); and size does not count. The first published form moves a factor that
    stands alone, so of the later head only the size may change there."""
    W_V, W_O, read, other = random_heads()
    R, S = torch.randn(2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    plain = form(W_V, W_O, read, other)
    close(form(W_V @ R, R.inverse() @ W_O, read, other), plain, tolerance=1e-12)
    close(form(30 * W_V, W_O / 7, -2 * read, other * 1e-3), plain, tolerance=1e-12)
    changed = form(W_V, W_O, read @ S, other @ S.inverse().mT)
    if form is common.composition_scores:
        close(changed, plain, tolerance=1e-12)
    else:
        assert (changed - plain).abs().max() > 0.01


def test_norm_of_a_permuted_product():
    """u = [[1], [0]], v = [[0, 1]]: ||uv|| = 1, ||vu|| = 0. So 1 corrected and 0 as published."""
    u, v = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0, 1.0]])
    assert naive.frobenius((u @ v).numpy()) == 1
    assert naive.frobenius((v @ u).numpy()) == 0
    heads = [m[None] for m in (u, u.T, u, v.T)]  # W_V W_O = u u^T, read other^T = u v
    assert common.composition_scores(*heads).item() == 1
    assert common.first_published_scores(*heads).item() == 0


def test_random_baseline():
    """Near 1 / sqrt(d_model), and 1 / d_head as first published, at the article's sizes."""
    state = torch.get_rng_state()
    corrected, published = common.random_baseline(512, 64, 6, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert corrected.mean().item() == pytest.approx(512**-0.5, rel=0.01)
    assert published.mean().item() == pytest.approx(1 / 64, rel=0.02)
    again, other = (common.random_baseline(11, 5, 4, seed)[0] for seed in (0, 1))
    assert torch.equal(again, common.random_baseline(11, 5, 4, 0)[0])
    assert not torch.equal(again, other)
    draws = gaussian_factors(11, 5, 23, 0)  # twice as many as are made at a time, and three
    for found, (_, wanted) in zip(common.random_baseline(11, 5, 23, 0), FORMS):
        close(found, [wanted(A, B.T, C, D.T) for A, B, C, D in draws], tolerance=1e-13)


# ------------------------------------------------------------------ virtual heads, induction


def virtual_head_of(A1: torch.Tensor, A0: torch.Tensor) -> dict:
    """What compute_virtual_heads says of the pair when every head has these patterns."""
    run = frozen(model_of())
    patterns = torch.stack([A0, A1])[:, None, None].expand(2, 3, 1, *A0.shape)
    other = types.SimpleNamespace(**vars(run) | {"patterns": patterns})
    a = part5.Analysis(other, {}, part5.CHOICES, SEED)
    nothing = [[0.0] * 3] * 3
    return part5.compute_virtual_heads(a, {"sections": {
        "term_importance": {"virtual_removed": nothing},
        "composition": {"V": {"scores": nothing}}}})["most_important"]


PREVIOUS = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]])


def test_two_previous_token_heads_look_two_back():
    """The article's four tokens: start 1, 1, 1, 0; self 1, 0, 0, 0; 1 back 1, 0, 0; 2 back 1, 1."""
    found = virtual_head_of(PREVIOUS, PREVIOUS)
    assert found["pattern"] == pytest.approx([3 / 4, 1 / 4, 1 / 3, 1])
    assert found["row_sum_error"] == found["future_max"] == 0


def test_the_map_of_a_virtual_head_is_cut_to_its_first_positions(monkeypatch):
    """5 of 15 positions, and whole where there are no more; with the tokens' own text."""
    model, (w, runs) = model_of(), naive_runs(model_of())
    for n in (5, 15, 16):
        monkeypatch.setattr(part5, "N_MAP", n)
        s = found_numbers(model)
        wanted = naive.virtual_heads(w, runs, s["term_importance"]["virtual_removed"],
                                     s["composition"]["V"]["scores"], n_map=n)
        vocab = {i: t.replace("Ġ", " ") for t, i in model.tokenizer.get_vocab().items()}
        for name in ("most_important", "most_two_back"):
            found = s["virtual_heads"][name]
            close(found["map"], wanted[name]["map"], tolerance=1e-12)
            assert found["map_tokens"] == [vocab[i] for i in tokens_of(model)[0, :n].tolist()]


def test_a_product_that_is_no_pattern_is_reported():
    """One entry just above the diagonal, which is too much for its row as well."""
    leaks = torch.eye(4)
    leaks[1, 2] = -0.25
    for A1, A0 in ((torch.eye(4), leaks), (leaks, torch.eye(4))):
        found = virtual_head_of(A1, A0)
        assert found["row_sum_error"] == found["future_max"] == 0.25


def test_repeated_tokens():
    """BOS and n different ids, twice; no special tokens; the same for the same seed."""
    model = model_of()
    rows = common.repeated_tokens(model, 6, 5, seed=0).tolist()
    for bos, *ids in rows:
        assert bos == model.tokenizer.bos_token_id == 1
        assert ids[:6] == ids[6:] and len(set(ids)) == 6
        assert not set(ids) & set(model.tokenizer.all_special_ids)
    assert len({tuple(row) for row in rows}) == 5
    assert rows == common.repeated_tokens(model, 6, 5, seed=0).tolist()
    assert rows != common.repeated_tokens(model, 6, 5, seed=1).tolist()


@pytest.mark.parametrize("asked, n_ids", [(1, 1), (5, 5), (8, 8), (50, 8)])
def test_induction_score(asked, n_ids):
    """Twice 8 ids and the start token are what the context of 17 holds."""
    run = frozen(model_of())
    found = part5.compute_induction(analysis_of(run, {"induction_ids": asked}), {})
    assert found["n_ids"] == n_ids
    rows = common.repeated_tokens(run.model, n_ids, part5.N_INDUCTION_ROWS, SEED).tolist()
    assert {len(row) for row in rows} == {1 + 2 * n_ids}
    for name, wanted in naive.induction(weights_of(run.model), rows).items():
        close(found[name], wanted, tolerance=1e-12)


# ------------------------------------------------------------------ a circuit of three layers

N = 8  # tokens of the vocabulary, positions, and numbers of a head
TWICE = [0, 1, 2, 3, 0, 1, 2, 3]


def three_layer_circuit():
    """0.0 writes the previous token, 1.0 copies what 0.0 wrote one back, so that each position
    holds the token two back; 2.0 looks for a position that holds its own token there. The heads
    x.1 are dead.

    The stream has four rooms of N numbers: token, previous token, token two back, position. It
    stands in it twice, once negated, so that centring changes nothing.
    """
    token, previous, two_back, position = (torch.eye(4 * N, dtype=torch.float64)[i * N:(i + 1) * N]
                                           for i in range(4))
    sizes = dict(n_layers=3, n_heads=2, d_head=N, d_model=8 * N, n_ctx=N, d_vocab=N)
    state = {k: torch.zeros_like(v) for k, v in tiny.state_dict(sizes).items()}
    state |= {"embed.W_E": torch.cat([token, -token], 1), "unembed.W_U": reading(token),
              "pos_embed.W_pos": torch.cat([position, -position], 1)}
    one_back = torch.eye(N, dtype=torch.float64).roll(1, 0)  # the key of position j is query j + 1
    one_back[0] = 0
    one_back[0, 0] = 1
    for layer, (Q, K, V, out) in enumerate([
            (position, one_back @ position, token, previous),
            (position, one_back @ position, previous, two_back),
            (token, two_back, token, token)]):
        for name, W in dict(Q=1e4 * reading(Q), K=reading(K), V=reading(V),
                            O=torch.cat([out, -out], 1)).items():
            state[f"blocks.{layer}.attn.W_{name}"][0] = W
    for name in state:
        if name.endswith(("ln1.w", "ln_final.w")):
            state[name] = torch.ones_like(state[name])
    return tiny.model(state, sizes, flags={})


def reading(room: torch.Tensor) -> torch.Tensor:
    return torch.cat([room.T, torch.zeros_like(room.T)])


def test_a_circuit_of_three_layers():
    model = three_layer_circuit()
    run = common.freeze(model, torch.tensor([TWICE]))
    one_back = torch.eye(N, dtype=torch.float64).roll(1, 0)
    one_back[0] = torch.eye(N)[0]
    assert torch.equal(run.patterns[0, 0, 0], one_back)
    assert torch.equal(run.patterns[1, 0, 0], one_back)
    matches = torch.tensor([[TWICE[max(j - 2, 0)] == TWICE[i] and j <= i for j in range(N)]
                            for i in range(N)]).double()
    past = torch.ones(N, N, dtype=torch.float64).tril()
    rows = torch.where(matches.any(1, keepdim=True), matches, past)
    close(run.patterns[2, 0, 0], rows / rows.sum(1, keepdim=True), tolerance=1e-12)

    paths = common.expand(run)
    tokens_2_back = torch.eye(N)[[TWICE[max(i - 2, 0)] for i in range(N)]].double()
    s0, s1 = (run.scales[layer, 0, [max(i - back, 0) for i in range(N)]]
              for layer, back in ((0, 2), (1, 1)))
    room = slice(2 * N, 3 * N)
    close(paths.sums[2, 2, 0, :, room], tokens_2_back / s0 / s1, tolerance=1e-12)
    assert torch.equal(paths.sums[3, 2], paths.sums[2, 2]) and not paths.sums[3, 3].any()


@functools.cache
def circuit_numbers() -> dict:
    """All sections of the circuit; they can be printed too."""
    run = common.freeze(three_layer_circuit(), torch.tensor([TWICE, TWICE]))
    analysis, log = analysis_of(run, {}), report.Log()
    results: dict = {"meta": {"model": ""}, "sections": {}}
    for name, compute, show in part5.SECTIONS:
        results["sections"][name] = compute(analysis, results)
        show(results["sections"][name], results, log)
    report.check_finite(results)
    assert not any("nan" in line.lower() for line in log.lines)
    return results["sections"]


def test_the_composition_of_the_circuit_of_three_layers():
    """1/4 is the score of two circuits of rank N on the same room, one of them written twice; the
    dead heads have none."""
    s, dead = circuit_numbers(), [None] * 4
    assert s["model"]["readers"] == ["1.0", "1.1", "2.0", "2.1"]
    assert s["model"]["writers"] == ["0.0", "0.1", "1.0", "1.1"]
    wanted = {"Q": (0, 0, 0), "K": (0, 0, 1 / 4), "V": (1 / 4, 0, 0)}
    for kind, (first, far, second) in wanted.items():
        found = s["composition"][kind]
        assert found["scores"] == [
            [pytest.approx(first, abs=1e-9), None, None, None], dead,
            [pytest.approx(far, abs=1e-9), None, pytest.approx(second, abs=1e-9), None], dead]
        assert found["mean"] == pytest.approx((first + far + second) / 3)
        assert found["mean_by_writer"] == [pytest.approx((first + far) / 2, abs=1e-9), None,
                                           pytest.approx(second, abs=1e-9), None]
    assert s["composition"]["K"]["max_pair"] == {"reader": "2.0", "writer": "1.0"}


def test_the_virtual_head_of_the_circuit_of_three_layers():
    two_back = circuit_numbers()["virtual_heads"]["most_two_back"]
    assert (two_back["reader"], two_back["writer"]) == ("1.0", "0.0")
    assert two_back["pattern"] == pytest.approx([3 / 8, 1 / 8, 1 / 7, 1])
    assert two_back["loss_increase"] == pytest.approx(0, abs=1e-12)  # nothing unembeds it


def test_the_scores_of_the_circuit_of_three_layers():
    """The key two back is a path of order 2: without all K terms 2.0 is lost, without those of
    order 1 it is not."""
    s = circuit_numbers()
    tv = s["attention_groups"]["tv"]
    assert tv["without_K"][2] == pytest.approx((2 / 5 + 5 / 6 + 6 / 7 + 7 / 8) / 8)
    assert s["attention_groups"]["tv_without_K_of_head"][2] == pytest.approx([0] * 4, abs=1e-9)
    assert tv["without_Q"][2] == pytest.approx(0, abs=1e-9)


# ------------------------------------------------------------------ deliberate faults

# Each fault is a mistake that people make. It is put into the kernel, all numbers are computed
# again, and the oracle has to see it in the numbers that are named: FAULTS holds (fault, names).
FAULTS = []


def seen_in(*names: str):
    """Register a fault, and the keys in which the oracle must see it."""
    def register(fault):
        FAULTS.append(pytest.param(fault, names, id=fault.__name__))
        return fault
    return register


def put_in(monkeypatch, name: str, change, module=common) -> None:
    """Pass what module.name returns through change(result, *arguments)."""
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: change(original(*args), *args))


def put_in_removed(monkeypatch, change) -> None:
    """The same for the losses of all removals."""
    put_in(monkeypatch, "unembed", lambda found, run, *_: dataclasses.replace(
        found, loss_increase=change(found.loss_increase, run)))


@seen_in("term_importance.loss_by_order[0]", "term_importance.loss_by_order[1]",
         "term_importance.virtual_removed[0][0]", "term_importance.start_delta")
def final_scale_recomputed_for_a_partial_stream(monkeypatch):
    def final_norm(run, stream):
        centred = common.cen(stream)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + run.model.cfg.eps).sqrt()
    monkeypatch.setattr(common.FrozenRun, "final_norm", final_norm)

    def change(removed, run):
        paths = common.expand(run)
        loss = lambda stream: unembed(run, {"": run.final_norm(stream)}).losses[""]  # noqa: E731
        return torch.stack([loss(paths.stream(2) - z @ run.model.W_O[reader])
                            - loss(paths.stream(2)) for (reader, _), z in
                            zip(common.virtual_pairs(run.model), paths.z_virtual)])
    unembed = common.unembed
    put_in_removed(monkeypatch, change)


@seen_in("path_expansion.logits_max_abs_diff", "term_importance.loss_by_order[2]",
         "term_importance.split_check")
def scale_before_layer_1_recomputed_for_each_layer_0_head(monkeypatch):
    def change(paths, run, *_):
        o0 = common.cen(paths.z_single[0] @ run.model.W_O[0][:, None])
        own = (o0.pow(2).mean(-1, keepdim=True) + run.model.cfg.eps).sqrt()
        z = torch.cat([A @ (o0 / own @ W_V)
                       for A, W_V in zip(run.patterns[1], run.model.W_V[1])])
        sums, W_O = paths.sums.clone(), run.model.W_O[1].repeat_interleave(3, 0)
        sums[-1, 2] = common.write(z, W_O)
        return dataclasses.replace(paths, z_virtual=z, sums=sums)
    put_in(monkeypatch, "expand", change)


@seen_in("path_expansion.logits_max_abs_diff", "term_importance.loss_by_order[1]")
def b_O_of_layer_0_left_out_of_what_layer_1_reads(monkeypatch):
    original = common.expand

    def change(paths, run, *_):
        x0_read, sums = original(run, True), paths.sums.clone()
        sums[-1, 1] = paths.heads(0) + x0_read.heads(1)
        return dataclasses.replace(paths, sums=sums, z_single=x0_read.z_single)
    put_in(monkeypatch, "expand", change)


@seen_in("path_expansion.logits_max_abs_diff", "term_importance.loss_by_order[1]",
         "term_importance.virtual_removed[0][0]")
def pattern_transposed_when_it_moves_values(monkeypatch):
    put_in(monkeypatch, "attend", lambda z, A, x, W_V: z if A.shape[-1] < A.shape[-2] else
           A.mT @ (x @ W_V[:, None]))


@seen_in("composition.prev_token[0]", "composition.start_token[0]", "induction.score[0][0]",
         "virtual_heads.all[0].pattern[0]", "virtual_heads.all[0].future_max",
         "virtual_heads.all[0].row_sum_error", "virtual_heads.most_important.map[0][1]",
         "attention_groups.tv.without_K[0]")
def pattern_transposed_in_the_run(monkeypatch):
    put_in(monkeypatch, "freeze",
           lambda run, *_: dataclasses.replace(run, patterns=run.patterns.mT))


@seen_in("term_importance.start_delta", "term_importance.real_delta")
def start_column_of_the_wrong_axis(monkeypatch):
    """The row of query 0 instead of the column of key 0. The halves still add up to the whole."""
    def change(_, paths, source):
        run = paths.run
        W_V, W_O, (s0, s1, _) = run.model.W_V, run.model.W_O, run.scales
        A = run.patterns[0].clone()
        others = slice(1, None) if source.start == 0 else slice(0, 1)
        A[..., others, :] = 0
        moved = common.write(common.attend(A, common.cen(run.x0) / s0, W_V[0]), W_O[0])
        return common.write(common.attend(run.patterns[1], common.cen(moved) / s1, W_V[1]), W_O[1])
    put_in(monkeypatch, "virtual_from", change)


@seen_in("composition.Q.scores[0][0]", "composition.K.scores[0][0]", "composition.V.scores[0][0]",
         "composition.baseline.mean", "composition.K.z[0][0]")
def composition_factors_cyclically_permuted(monkeypatch):
    """The bug that the paper corrected."""
    monkeypatch.setattr(common, "composition_scores", common.first_published_scores)


@seen_in("composition.Q.scores[0][0]", "composition.K.scores[0][0]", "composition.V.scores[0][0]")
def composition_of_the_later_head_with_the_earlier(monkeypatch):
    """||read other^T W_V W_O||: whole circuits in the wrong order."""
    original = common.composition_scores
    monkeypatch.setattr(common, "composition_scores", lambda W_V, W_O, read, other:
                        original(read, other.mT, W_V, W_O.mT).mT)


@seen_in("composition.Q.scores[0][1]", "composition.K.max", "composition.K.mean_by_writer[0]",
         "composition.first_published.K.scores[0][1]")
def Q_and_K_swapped_in_the_scores(monkeypatch):
    for name in ("composition_scores", "first_published_scores"):
        original = getattr(common, name)
        monkeypatch.setattr(common, name, lambda W_V, W_O, read, other, score=original:
                            score(W_V, W_O, other, read))


@seen_in("attention_groups.tv.without_K[0]", "attention_groups.tv.without_Q[0]")
def Q_and_K_swapped_in_the_groups(monkeypatch):
    put_in(monkeypatch, "score_groups",
           lambda g, *_: dataclasses.replace(g, Q=g.K, K=g.Q))


@seen_in("attention_groups.max_abs_diff", "attention_groups.tv.none_alone[0]")
def scores_not_divided_by_the_root_of_d_head(monkeypatch):
    def change(g, paths, *_):
        return common.ScoreGroups(*(value * paths.run.model.cfg.attn_scale
                                    for value in vars(g).values()))
    put_in(monkeypatch, "score_groups", change)


def mask_before_subtraction(monkeypatch, hidden: float) -> None:
    """Every group is masked, and the sums of groups go into the softmax as they are."""
    def change(g, *_):
        future = torch.ones_like(g.none[0], dtype=torch.bool).triu(1)
        return common.ScoreGroups(*(v.masked_fill(future, hidden) for v in vars(g).values()))
    put_in(monkeypatch, "score_groups", change)
    monkeypatch.setattr(common, "softmax_causal", lambda scores: scores.softmax(-1))


@seen_in("attention_groups.tv.without_K[0]", "attention_groups.tv_without_K_of_head[0][0]")
def mask_of_minus_infinity_before_subtraction(monkeypatch):
    """-inf minus -inf is not a number."""
    mask_before_subtraction(monkeypatch, -torch.inf)


@seen_in("attention_groups.tv.without_K[0]", "attention_groups.tv_without_K_of_head[0][0]")
def mask_of_zeros_before_subtraction(monkeypatch):
    """A score of 0 does not hide a key."""
    mask_before_subtraction(monkeypatch, 0.0)


@seen_in("term_importance.virtual_removed[0][1]", "term_importance.virtual_largest[0].reader",
         "virtual_heads.most_important.reader", "virtual_heads.all[1].loss_increase")
def h1_and_h2_swapped_in_the_removals(monkeypatch):
    put_in_removed(monkeypatch, lambda removed, run: removed.unflatten(0, (3, 3)).transpose(
        0, 1).flatten(0, 1))


@seen_in("term_importance.real_delta", "term_importance.layer1.vs_direct")
def combined_normed_with_the_wrong_sign(monkeypatch):
    original = common.unembed
    monkeypatch.setattr(common, "unembed", lambda run, normed, combined, *rest: original(
        run, normed, {name: (k, j, i) for name, (i, j, k) in combined.items()}, *rest))


@seen_in("composition.Q.scores[0][1]", "composition.K.max_pair.reader",
         "composition.V.mean_by_writer[0]", "virtual_heads.all[1].v_composition")
def h1_and_h2_swapped_in_composition(monkeypatch):
    put_in(monkeypatch, "composition_scores", lambda scores, *_: scores.mT)


@seen_in("term_importance.virtual_removed[0][1]", "term_importance.virtual_largest[0].reader")
def h1_and_h2_swapped_in_the_virtual_terms(monkeypatch):
    put_in(monkeypatch, "expand", lambda paths, *_: dataclasses.replace(
        paths, z_virtual=paths.z_virtual.unflatten(0, (3, 3)).transpose(0, 1).flatten(0, 1)))


@seen_in("attention_groups.tv_without_K_of_head[0][0]")
def K_terms_of_the_layer_0_heads_in_another_order(monkeypatch):
    put_in(monkeypatch, "score_groups",
           lambda g, *_: dataclasses.replace(g, K_of_head=g.K_of_head.flip(0)))


@seen_in("composition.constant_share[0]")
def values_in_place_of_outputs_in_the_constant_share(monkeypatch):
    put_in(monkeypatch, "constant_share", lambda _, z, W_O: (
        z.flatten(1, -2).mean(1).square().sum(-1) / z.flatten(1, -2).square().sum(-1).mean(-1)))


@seen_in("term_importance.logit_sd_by_order[0]", "term_importance.logit_sd_by_order[2]")
def the_bias_left_out_of_the_spread_of_the_logits(monkeypatch):
    put_in(monkeypatch, "logit_deviation", lambda _, model, normed: (
        normed @ model.W_U).std(-1, correction=0).mean((-1, -2)))


@seen_in("composition.prev_token[0]", "composition.two_back[0]")
def previous_token_counted_from_the_future_side(monkeypatch):
    put_in(monkeypatch, "mean_attention",
           lambda _, A, back: A.diagonal(back, -2, -1).mean((-1, -2)))


@pytest.mark.parametrize("fault, names", FAULTS)
def test_the_oracle_catches(monkeypatch, fault, names):
    wanted = wanted_numbers(model_of())
    assert set(names) <= set(differences(wanted, wanted)), "no such number"
    fault(monkeypatch)
    missed = misses(found_numbers(model_of()), wanted, tolerance=TOLERANCE[torch.float32])
    assert set(names) <= set(missed)


def test_the_models_loss_is_its_own(monkeypatch):
    """And not that of all terms, which differs from it where a term is wrong."""
    scale_before_layer_1_recomputed_for_each_layer_0_head(monkeypatch)
    missed = misses(found_numbers(model_of()), wanted_numbers(model_of()), tolerance=1e-9)
    assert "term_importance.loss_by_order[2]" in missed
    assert not any("loss_model" in name for name in missed)


# ------------------------------------------------------------------ properties


def patterns(seed: int, n: int, size: float) -> torch.Tensor:
    """Two random causal patterns [2, 1, n, n], flat to one-hot as `size` grows."""
    g = torch.Generator().manual_seed(seed)
    return common.softmax_causal(size * torch.randn(2, 1, n, n, dtype=torch.float64, generator=g))


few = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 10**6)


@few
@hypothesis.given(seeds, st.integers(1, 7), st.sampled_from([0.0, 1.0, 30.0, 3000.0]))
def test_total_variation_is_a_distance_in_0_1(seed, n, size):
    p, q = patterns(seed, n, size)
    distance = common.total_variation(p, q).item()
    rows = naive.mean(naive.total_variation_rows(p[0].numpy(), q[0].numpy()))
    assert 0 <= distance <= 1 + 1e-12
    assert distance == common.total_variation(q, p).item()
    assert common.total_variation(p, p) == 0
    assert distance == pytest.approx(rows, abs=1e-12)


@few
@hypothesis.given(seeds, st.integers(1, 7), st.sampled_from([0.0, 1.0, 30.0, 3000.0]))
def test_softmax_causal_gives_patterns(seed, n, size):
    """Rows add up to 1, the future is exactly 0; and so it is for a product of two patterns."""
    p, q = patterns(seed, n, size)
    for A in (p, q, p @ q):
        assert (A >= 0).all()
        assert (A.sum(-1) - 1).abs().max() < 1e-12
        assert not A.triu(1).any()


@few
@hypothesis.given(seeds, st.integers(1, 9), st.integers(1, 9))
def test_composition_is_in_0_1(seed, d_model, d_head):
    W_V, W_O, read, other = random_heads(d_model, d_head, 2, seed)
    scores = common.composition_scores(W_V, W_O, read, other)
    assert ((scores >= 0) & (scores <= 1 + 1e-9)).all()
    dense = naive.composition_score(W_V[1].numpy(), W_O[1].numpy(), read[0].numpy(),
                                    other[0].numpy().T)
    assert scores[0, 1].item() == pytest.approx(dense, rel=1e-6, abs=1e-9)


# ------------------------------------------------------------------ the article's lines

# What the article prints of each section. Lists over heads are cut there to what it shows.
ARTICLE_LINES = {
    "path_expansion": """\
== 2. PATH EXPANSION OF THE LOGITS ON REAL TEXT (patterns and layer-norm scales frozen)
  stream before layer 1 rebuilt from the terms: max |diff| = 5.7e-06
  logits rebuilt as direct + 16 head terms + 64 virtual heads: max |diff| from the model = 4.2e-05 \
(logits range -18.2 .. 25.8)""",
    "term_importance": """\
== 3. TERM IMPORTANCE: LOSS WHEN ONLY SOME TERMS ARE KEPT (nats per token, lower is better)
  uniform guess over 48,262 tokens: ln(48262) = 10.78
  order 0 (direct path only):                 10.11   marginal -0.68  (-0.68 per term, 1 term)
  order <= 1 (+ 16 single-head terms):         6.06   marginal -4.04  (-0.253 per term)
  order <= 2 (+ 64 virtual heads):            4.93   marginal -1.13  (-0.0177 per term)
  the model itself:                           4.93
    largest virtual heads (h2 o h1): 1.7 o 0.7 +0.723, 1.7 o 0.3 +0.334, 1.7 o 0.4 +0.298, \
1.7 o 0.5 +0.288, 1.7 o 0.2 +0.200
    virtual heads: 51 of 64 above +0.01; median +0.0364
  virtual heads split by what the layer-0 head read (check 1.0e-05): from the start token -0.90, \
from real tokens -0.07 (each added alone to order <= 1)
  head terms split by layer:
    layer-0 heads: -0.26 vs direct path only, -0.26 vs direct path + layer-1 heads
    layer-1 heads: -3.78 vs direct path only, -3.78 vs direct path + layer-0 heads""",
    "composition": """\
== 4. COMPOSITION SCORES  ||W_A W_B||_F / (||W_A||_F ||W_B||_F)  (paper shapes, layer-0 head h1 -> \
layer-1 head h2)
  random baseline (two random rank-64 512 x 512 matrices, mean of 200): 0.0442
  Q-composition: max 0.084 (head 1.3 reads head 0.4), mean 0.042, pairs \
above baseline + 0.05: 0 of 64
  K-composition: max 0.124 (head 1.6 reads head 0.3), mean 0.040, pairs \
above baseline + 0.05: 1 of 64
  V-composition: max 0.055 (head 1.1 reads head 0.5), mean 0.029, pairs \
above baseline + 0.05: 0 of 64
  layer-0 heads, mean attention to the previous token: 0.0 0.19, 0.1 0.06, 0.2 0.04, 0.3 0.49, \
0.4 0.02, 0.5 0.15, 0.6 0.08, 0.7 0.01
  Q-composition, mean over the 8 layer-1 heads, per layer-0 head: 0.0 0.029, 0.1 0.041, 0.2 0.040, \
0.3 0.029, 0.4 0.069, 0.5 0.046, 0.6 0.040, 0.7 0.044
  K-composition, mean over the 8 layer-1 heads, per layer-0 head: 0.0 0.027, 0.1 0.035, 0.2 0.034, \
0.3 0.035, 0.4 0.068, 0.5 0.037, 0.6 0.038, 0.7 0.041""",
    "attention_groups": """\
  no-composition + Q + K + Q-and-K terms vs the model's scores: max |diff| = 6.5e-05
    head 1.6: without K terms 0.75, without Q terms 0.20, without Q-and-K 0.23; no-composition \
term alone 0.58
    head 1.7: without K terms 0.45, without Q terms 0.24, without Q-and-K 0.15; no-composition \
term alone 0.38""",
    "virtual_heads": """\
  most important: 1.7 o 0.7: pattern [0.76, 0.0, 0.0, 0.0]; rows add up to 1 (max |sum - 1| 4.8e-07\
); future entries 0; V-composition score 0.036; removing it: loss +0.723
  most two-back: 1.4 o 0.0: pattern [0.35, 0.03, 0.09, 0.12]; rows add up to 1 (max |sum - 1| \
7.2e-07); future entries 0; V-composition score 0.015; removing it: loss +0.021""",
}


def article_results() -> dict:
    """The article's numbers, as far as it prints them; 0 where a line of ours needs more."""
    zeros = [0.0] * 8

    def pair(h2, h1):
        return {"reader": f"1.{h2}", "writer": f"0.{h1}"}

    def kind(largest, h2, h1, mean, n_above, mean_by_writer=zeros):
        return {"max": largest, "max_pair": pair(h2, h1), "mean": mean,
                "n_above": n_above, "mean_by_writer": mean_by_writer}

    def virtual(h2, h1, pattern, row_sum_error, v_composition, loss_increase):
        return pair(h2, h1) | {"pattern": pattern, "row_sum_error": row_sum_error,
                "future_max": 0.0, "v_composition": v_composition, "loss_increase": loss_increase}

    largest = [(7, 7, 0.723), (7, 3, 0.334), (7, 4, 0.298), (7, 5, 0.288), (7, 2, 0.200)]
    unknown = kind(0.0, 0, 0, 0.0, 0)
    return {"meta": {"model": "attn-only-2l"}, "sections": {
        "model": {"n_layers": 2, "n_heads": 8, "d_head": 64, "d_model": 512, "d_vocab": 48262,
                  "ratio": 0.125, "n_single": 16, "n_virtual": 64, "n_terms": 81,
                  "n_tokens": 3072, "n_sequences": 12, "seq_len": 256, "n_by_order": [1, 16, 64],
                  "readers": [f"1.{h}" for h in range(8)],
                  "writers": [f"0.{h}" for h in range(8)]},
        "path_expansion": {"n_terms": 81, "stream_max_abs_diff": 5.7e-6,
                           "logits_max_abs_diff": 4.2e-5, "logits_min": -18.2,
                           "logits_max": 25.8},
        "term_importance": {
            "uniform": 10.784, "loss_by_order": [10.11, 6.06, 4.93], "loss_model": 4.93,
            "marginal": [-0.68, -4.04, -1.13], "per_term": [-0.68, -0.253, -0.0177],
            "virtual_largest": [pair(a, b) | {"loss_increase": c} for a, b, c in largest],
            "virtual_above_0_01": 51, "virtual_median": 0.0364, "split_check": 1.0e-5,
            "start_delta": -0.90, "real_delta": -0.07,
            "layer0": {"vs_direct": -0.26, "given_other": -0.26},
            "layer1": {"vs_direct": -3.78, "given_other": -3.78}},
        "composition": {
            "baseline": {"mean": 0.0442, "sd": 0.0, "n": 200, "margin": 0.05},
            "Q": kind(0.084, 3, 4, 0.042, 0,
                      [0.029, 0.041, 0.040, 0.029, 0.069, 0.046, 0.040, 0.044]),
            "K": kind(0.124, 6, 3, 0.040, 1,
                      [0.027, 0.035, 0.034, 0.035, 0.068, 0.037, 0.038, 0.041]),
            "V": kind(0.055, 1, 5, 0.029, 0),
            "first_published": {"Q": unknown, "K": unknown, "V": unknown,
                                "baseline": {"mean": 0.0156, "sd": 0.0, "n": 200,
                                             "margin": 0.0177}},
            "prev_token": [0.19, 0.06, 0.04, 0.49, 0.02, 0.15, 0.08, 0.01],
            "start_token": zeros, "two_back": zeros},
        "attention_groups": {
            "max_abs_diff": 6.5e-5,
            "tv": {"without_K": [0.0] * 6 + [0.75, 0.45], "without_Q": [0.0] * 6 + [0.20, 0.24],
                   "without_QK": [0.0] * 6 + [0.23, 0.15],
                   "none_alone": [0.0] * 6 + [0.58, 0.38]},
            "tv_without_K_of_head": [zeros] * 8},
        "virtual_heads": {
            "most_important": virtual(7, 7, [0.76, 0.0, 0.0, 0.0], 4.8e-7, 0.036, 0.723),
            "most_two_back": virtual(4, 0, [0.35, 0.03, 0.09, 0.12], 7.2e-7, 0.015, 0.021)},
    }}


@pytest.mark.parametrize("section", ARTICLE_LINES)
def test_the_log_has_the_articles_lines(section):
    """Given the article's numbers, each print_x prints the article's lines, in its order."""
    wanted = ARTICLE_LINES[section].splitlines()
    printed = reprinted(article_results(), section)
    assert [line for line in printed if line in wanted] == wanted


def test_each_form_is_counted_and_printed_with_its_own_margin():
    """Model and random matrices of a size at which the two margins part."""
    found = found_numbers(model_of("smaller"))["composition"]
    margins = set()
    for form in found, found["first_published"]:
        least = form["baseline"]["mean"] + form["baseline"]["margin"]
        margins.add(round(form["baseline"]["margin"], 3))
        for kind in "QKV":
            assert form[kind]["n_above"] == sum(v > least for row in form[kind]["scores"]
                                                for v in row)
    assert len(margins) == 2 and 0.05 in margins
    results = article_results()
    unknown = results["sections"]["composition"]["first_published"]["Q"]
    results["sections"]["composition"]["first_published"]["K"] = unknown | {"n_above": 9}
    assert ("    K-composition: max 0.000 (head 1.0 reads head 0.0), mean 0.000, pairs above "
            "baseline + 0.018: 9 of 64") in reprinted(results, "composition")


# ------------------------------------------------------------------ the script as a whole

PAIR = {"reader": None, "writer": None}
KIND = dict.fromkeys(("scores", "max", "mean", "n_above", "mean_by_writer")) | {"max_pair": PAIR}
BASELINE = dict.fromkeys(("mean", "sd", "n", "margin"))
VIRTUAL = PAIR | dict.fromkeys(("pattern", "row_sum_error", "future_max", "v_composition",
                                "loss_increase", "map", "map_tokens"))
LAYER = dict.fromkeys(("vs_direct", "given_other"))
KEYS = {
    "meta": dict.fromkeys((
        "script", "model", "revision", "weights_sha256", "processing", "dtype", "device", "seed",
        "n_tokens", "seq_len", "text_sha256", "token_ids_sha256", "versions"))
    | {"choices": dict.fromkeys(part5.CHOICES)},
    "sections": {
        "path_expansion": dict.fromkeys(("n_terms", "stream_max_abs_diff", "logits_max_abs_diff",
                                         "logits_min", "logits_max")),
        "term_importance": dict.fromkeys((
            "uniform", "loss_by_order", "loss_model", "marginal", "per_term", "virtual_removed",
            "virtual_above_0_01", "virtual_median", "start_delta", "real_delta", "split_check"))
        | {"virtual_largest": [PAIR | {"loss_increase": None}] * 5, "layer0": LAYER,
           "layer1": LAYER},
        "composition": {"Q": KIND, "K": KIND, "V": KIND, "baseline": BASELINE, "first_published": {
            "Q": KIND, "K": KIND, "V": KIND, "baseline": BASELINE}}
        | dict.fromkeys(("prev_token", "start_token", "two_back")),
        "attention_groups": dict.fromkeys(("max_abs_diff", "tv_without_K_of_head"))
        | {"tv": dict.fromkeys(("without_K", "without_Q", "without_QK", "none_alone"))},
        "virtual_heads": {"most_important": VIRTUAL, "most_two_back": VIRTUAL},
        "induction": {"score": None},
        "counting": dict.fromkeys(("heads", "layer_pairs", "virtual_order_2")),
    },
}
TEXT = "a cab had a bad egg and a big dog did dig a fine bed of red peas " * 3


def missing_keys(value, keys, at: str = "") -> list[str]:
    if isinstance(keys, dict):
        return [m for k in keys for m in (missing_keys(value[k], keys[k], f"{at}.{k}")
                                          if k in value else [f"{at}.{k}"])]
    if isinstance(keys, list):
        return [m for v, k in itertools.zip_longest(value, keys) for m in missing_keys(v, k, at)]
    return []


@dataclasses.dataclass
class MainRun:
    """What one call of main left behind."""

    results: dict
    printed: str
    json_text: str
    stdout_file: str


@pytest.fixture(scope="module")
def main_run(tmp_path_factory):
    """main() on a tiny model folder and a text of three rows of 13 tokens."""
    home = tmp_path_factory.mktemp("main")
    text = home / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    folder = tiny.folder(home / "tiny")

    @functools.cache
    def call(name, *more):
        out = home / name
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            results = part5.main(["--model", str(folder), "--text", str(text), "--tokens", "39",
                                  "--seq-len", "13", "--out", str(out), "--no-figures", *more])
        return MainRun(results, printed.getvalue(), (out / "part5.json").read_text("utf-8"),
                       (out / "part5_stdout.txt").read_text("utf-8"))
    return call


def test_main_prints_and_writes_the_same(main_run):
    first, second = main_run("first"), main_run("second")
    assert re.findall(r"^== (\d)\.", first.printed, re.MULTILINE) == list("123456")
    assert first.stdout_file == first.printed
    assert first.json_text == second.json_text and first.printed == second.printed
    assert "NaN" not in first.json_text and "Infinity" not in first.json_text
    assert json.loads(first.json_text) == json.loads(json.dumps(first.results))
    assert not missing_keys(first.results, KEYS)
    meta = first.results["meta"]
    assert meta["choices"]["seq_len"] == meta["seq_len"] == 13 and meta["n_tokens"] == 39
    assert not any("nan" in line.split() for line in first.printed.splitlines())


def reprinted(results: dict, only: str | None = None) -> list[str]:
    """The log of a results dict: all sections, or one."""
    log = report.Log()
    for name, _, show, *_ in part5.SECTIONS:
        if only in (None, name):
            show(results["sections"][name], results, log)
    return log.lines


AGAINST = "== AGAINST WHAT THE ARTICLE PRINTS (--diff shows every number)"


def test_the_log_can_be_printed_again_from_the_json(main_run):
    run = main_run("first")
    log = run.stdout_file.splitlines()  # its end compares with what the article prints
    assert reprinted(json.loads(run.json_text)) == log[: log.index(AGAINST)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_main_on_a_folder_is_the_oracle_on_its_weights(main_run, dtype):
    """From files and text to the results, the oracle on the float16 weights that the folder holds.

    The tokenizer knows single letters only, so the ids are known without it.
    """
    found = main_run("oracle", "--dtype", str(dtype)[6:], "--seed", str(SEED)).results
    state = {k: v.to(torch.float16) for k, v in tiny.state_dict().items()}
    model = tiny.model(state, dtype=dtype)
    vocab = model.tokenizer.get_vocab()
    ids = [vocab.get(c.replace(" ", "Ġ"), vocab["a"]) for c in TEXT]
    rows = [[1, *ids[12 * i : 12 * i + 12]] for i in range(3)]
    repeated = common.repeated_tokens(model, 8, part5.N_INDUCTION_ROWS, SEED)
    draws = gaussian_factors(11, 5, part5.N_BASELINE, SEED)
    wanted = naive.sections(weights_of(model), rows, draws, repeated.tolist())
    assert not misses(found["sections"], wanted, tolerance=TOLERANCE[dtype])


def test_main_on_a_single_sequence(main_run):
    """No spread over one sequence: null, and not NaN."""
    run = main_run("single", "--tokens", "13")
    assert run.results["sections"]["term_importance"]["loss_model_se"] is None
    assert "NaN" not in run.json_text


@pytest.mark.parametrize("n_layers", [1, 3])
def test_main_at_another_depth(n_layers, tmp_path, capsys):
    """From files to files; the sections that need two layers say so, and the article's claims are
    left out."""
    folder = tiny.folder(tmp_path / "model", tiny.SIZES | {"n_layers": n_layers})
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    options = ["--model", str(folder), "--tokens", "39", "--seq-len", "13", "--no-figures"]
    results = part5.main([*options, "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert re.findall(r"^== (\d)\.", printed, re.MULTILINE) == list("123456")
    assert "WHAT THE TEXT DERIVES" not in printed and "0 disagree" in printed
    assert printed.count("  no pairs of heads in one layer") == (5 if n_layers == 1 else 0)
    assert f"order <= {n_layers} (+" in printed and f"order <= {n_layers + 1}" not in printed
    assert ("2.2 o 1.0" in printed) == ("1.0 o 0.2" in printed) == (n_layers == 3)
    written = json.loads((tmp_path / "part5.json").read_text("utf-8"))
    assert written == json.loads(json.dumps(results))
    log = (tmp_path / "part5_stdout.txt").read_text("utf-8").splitlines()
    assert reprinted(written) == log[: log.index(AGAINST)]
    if n_layers == 3:
        table = written["sections"]["term_importance"]["virtual_removed"]
        assert [[v is None for v in row] for row in table] == [[False] * 3 + [True] * 3] * 3 + [
            [False] * 6] * 3
