"""Part 4, one-layer models: the two circuits of every head, skip-trigrams, their bugs, copying.

    python circuits_part4.py                 # attn-only-1l: every real-model number of the article
    python circuits_part4.py --model mini    # the bundled one-layer model
    python circuits_part4.py --source " London" --prompt "My friend Ralph called." --next " Ralph"

Writes results/part4.json (every number, full precision), results/part4_stdout.txt (the log) and
figures/part4_*; for another model results/<model>/ and figures/<model>/. Half a minute on two CPU
cores at the public size. The text (--text, default the WikiText-2 test split) is one sequence of
1,000 tokens, or of the model's context where that is shorter; --tokens and --seq-len ask for more
of it, or for less.

Each section of the article is a compute_x that returns plain numbers and a print_x that prints the
article's lines from them; figures/part4.py draws their pictures. Expanded circuits stay factored: a
row or a column at a time.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

import common
from common import cen
from figures import part4 as pictures
from results import claims, loading, report, runner, sweep
from results.claims import number
from results.report import Section
from results.words import Skip, prompt_run, prompt_tokens, row, skipped, token_id, top_tokens

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

PUBLISHED_MODEL = "attn-only-1l"
TEXT_TOKENS = 1000  # of the text, for the patterns on text (section 4)
POSITION = 200  # the query position of the positional patterns (section 4)
POSITIONAL_SHARE = 0.5  # of the weight within 2 back: a head leans on position (our rule)
PIECE = 300  # tokens of the piece that is decomposed both ways (section 6)
RANKED = range(1000, 3000)  # source tokens of "top-1 self" and "top-5 self" (section 7)
N_RANDOM = 20  # random heads (section 7)
COPIES, MATTERS = 0.7, 0.01  # copy score, nats: where "copies" and "matters" begin (after 7)
SUM_TOLERANCE = 1e-9  # of sum |l|: trace, eigenvalues and diagonal are the same sum (section 7)
# What the article leaves open; the first value is ours (--sweep tries the others).
OPEN = {
    # Two sources agree on the composition scores of attn-only-2l, but of five copy scores of
    # attn-only-1l the article prints lower ones than an analysis with a centred unembedding finds.
    # Centring moves copy scores up, so the article most likely did not centre.
    "center_unembed": [False, True],
    "fold_value_biases": [True, False],  # False leaves b_V in the values, and in the pushes
    "tables_from": ["processed", "stored"],  # the weights that tables and eigenvalues are read from
    "table_layernorm": ["none", "QK", "QK and OV"],  # LayerNorm of W_E in the tables
    "qk_scaled": [False, True],  # 1 / sqrt(d_head) in the QK tables
    "position_layernorm": [True, False],  # of W_pos
    "position_scaled": [True, False],  # 1 / sqrt(d_head)
    "position_biases": [True, False],  # b_Q and b_K
    "random_heads": ["factors", "all", "head"],  # what of a random head is Gaussian
}
CHOICES = {name: values[0] for name, values in OPEN.items()}
# The rows of the article; " two" is ours, after the paper's. The heads are those of attn-only-1l;
# on any other model a rule finds the head, and the log says which.
TABLE_ROWS = [
    (0, " perfect"), (0, " Ralph"), (0, " large"), (6, " couldn"), (7, " Paris"), (0, " two"),
]
WORD = dict(prompt='My friend Ralph called me today.\n"R', source=" Ralph", next="alph", head=0)
PAIRS = [  # with the word, without it, what comes next
    ('My friend Ralph called me today.\n"R', 'My friend Bob called me today.\n"R', "alph"),
    ('We visited Ralph and his dog.\n"R', 'We visited Tom and his dog.\n"R', "alph"),
    ("The perfect gift for her. It looks", "The nice gift for her. It looks", " perfect"),
]
# Head, its place among the heads that lean on position most, source (section 4).
OV_ROWS = [(5, 0, " corresponding"), (5, 0, " couldn"), (1, 1, " couldn")]
BUG = dict(
    head=2, source=" keep", out=[" mind", " bay", " toes", " wraps", " forefront"],
    dest=[" in", " at", " on", " under", " going"], pair=(" mind", " bay"), other=7,
    prompts=["You need to keep this in", "You need to keep the dogs at"],
)

@dataclass(frozen=True)
class Analysis:
    """What every section reads. The OV circuit of head h is A[h] B[h], [source, out]."""

    run: common.FrozenRun  # of the text
    A: Float[Tensor, "head d_vocab d_head"]  # W_E W_V, float64
    B: Float[Tensor, "head d_head d_vocab"]  # W_O W_U, float64
    choices: dict
    args: argparse.Namespace  # --seed, and the reader's own --source, --prompt and --next
    tables: HookedTransformer | None = None  # the stored weights, if tables are read from them
    heads_by_rule: bool = False  # not the article's model, so its head numbers mean nothing

    @property
    def model(self) -> HookedTransformer:
        return self.run.model

    @property
    def weights(self) -> HookedTransformer:
        """The model that tables and eigenvalues are read from."""
        return self.model if self.tables is None else self.tables

    def head(self, article: int, rule: Callable[[], int]) -> int:
        """The article's head; Skip if there is none. On another model: the rule's."""
        if self.heads_by_rule:
            return rule()
        if article >= self.model.cfg.n_heads:
            raise Skip(f"no head 0.{article} here", [])
        return article

    @cached_property
    def ranked(self) -> Int[Tensor, " source"]:
        """The source tokens whose rank in their own row counts; all in a small vocabulary."""
        d_vocab = self.model.cfg.d_vocab
        return torch.tensor(RANKED if d_vocab >= RANKED.stop else range(d_vocab))

    @cached_property
    def ranks(self) -> Int[Tensor, "head source"]:
        return common.self_rank(self.A, self.B, self.ranked)

    @cached_property
    def diagonal(self) -> Float[Tensor, "head d_vocab"]:
        return common.circuit_diagonal(self.A, self.B).cpu()


# ------------------------------------------------------------------ tables and positions


def ov_row(a: Analysis, head: int, source: int) -> Float[Tensor, " d_vocab"]:
    """W_E[source] W_V W_O W_U: what reading the source token does to every logit, in float64.

    Row `source` of the OV circuit ("Skip-trigrams"; the article's column M_c,a). A table entry:
    position, LayerNorm and attention are left out. One vector of d_vocab, never the table.
    """
    if a.choices["table_layernorm"] == "QK and OV":
        x = common.layer_norm(a.weights, a.weights.W_E[source]) @ a.weights.W_V[0, head]
        return x.double() @ a.B[head]
    return a.A[head, source] @ a.B[head]


def qk_column(a: Analysis, head: int, source: int) -> Float[Tensor, " d_vocab"]:
    """W_E W_Q W_K^T W_E[source]: how much every destination token wants the source token.

    Column `source` of the QK circuit, [destination, source] ("The two circuits of every head");
    no position, no biases, no 1/sqrt(d_head). The scores of two destinations never meet in one
    softmax, so their order is a hint. One vector; cost d_vocab x d_model.
    """
    m = a.weights
    x = m.W_E if a.choices["table_layernorm"] == "none" else common.layer_norm(m, m.W_E)
    column = x @ (m.W_Q[0, head] @ (x[source] @ m.W_K[0, head]))
    return column / m.cfg.attn_scale if a.choices["qk_scaled"] else column


def next_probabilities(run: common.FrozenRun) -> Float[Tensor, " d_vocab"]:
    """p(next token) after the last position, of the whole model."""
    return (run.final[0, -1] @ run.model.W_U + run.model.b_U).double().softmax(-1)


def position_weights(a: Analysis, query: int) -> Float[Tensor, "head key"]:
    """Attention of one query from the position embeddings alone, over the keys 0 .. query.

    softmax(q k^T / sqrt(d_head)), q and k from LayerNorm(W_pos) with their biases and no token in
    them ("Heads that look at position").
    """
    m, choices = a.model, a.choices
    x = m.W_pos[: query + 1]
    x = common.layer_norm(m, x) if choices["position_layernorm"] else x
    q, k = x[-1:] @ m.W_Q[0], x @ m.W_K[0]
    if choices["position_biases"]:
        q, k = q + m.b_Q[0][:, None], k + m.b_K[0][:, None]
    scores = (k @ q.mT)[..., 0]
    return (scores / m.cfg.attn_scale if choices["position_scaled"] else scores).softmax(-1)


# ------------------------------------------------------------------ 1. sizes


def compute_sizes(a: Analysis, results: dict) -> dict:
    cfg = a.model.cfg
    weights = sum(p.numel() for p in a.model.parameters())
    entries_all = 2 * cfg.n_heads * cfg.d_vocab**2
    return {"d_vocab": cfg.d_vocab, "n_heads": cfg.n_heads, "rank": cfg.d_head,
            "entries_per_circuit": cfg.d_vocab**2, "entries_all": entries_all,
            "entries_three_tokens": cfg.d_vocab**3, "weights": weights,
            "ratio": entries_all / weights}


def print_sizes(r: dict, results: dict, log: report.Log) -> None:
    n = f"{r['d_vocab']:,}"
    log(f"== 1. HOW BIG THE EXPANDED CIRCUITS ARE ({results['meta']['model']})")
    log(f"  vocabulary {n} tokens, {r['n_heads']} heads; one expanded circuit is {n} x {n} = "
        f"{r['entries_per_circuit'] / 1e9:.2f} billion numbers")
    log(f"  QK + OV for all {r['n_heads']} heads: {r['entries_all'] / 1e9:.1f} billion numbers; "
        f"the model stores {r['weights'] / 1e6:.1f} million weights")
    log(f"  {r['ratio']:.1f} times as many, each circuit of rank at most {r['rank']}; a table of "
        f"all three tokens would have {n}^3 = {r['entries_three_tokens']:.1e} entries")


# ------------------------------------------------------------------ 2. skip-trigrams


def log_rule(results: dict, rule: str, log: report.Log) -> None:
    """Say how heads were found, on a model that is not the article's."""
    if results["meta"].get("heads_by_rule"):
        log(f"  heads found by rule, since this is not the article's model: {rule}")


def skip_trigram_line(t: dict) -> str:
    """A row of the table, as the article prints it."""
    head = "" if t["head"] is None else f"head 0.{t['head']}  "
    lists = skipped(t) if "skipped" in t else f"dest {t['dest']}  out {t['out']}"
    return f"  {head}source {t['source']!r:10}  {lists}"


def skip_trigram(a: Analysis, head: int, word: str) -> dict:
    """Top destinations and out tokens of a source. By rule: in the head that raises it most."""
    source = token_id(a.model, word)
    head = a.head(head, lambda: int((a.A[:, source] * a.B[:, :, source]).sum(-1).argmax()))
    return lists(a, head, source)


def lists(a: Analysis, head: int, source: int) -> dict:
    """The five highest destinations and out tokens of a source in one head."""
    return {"head": head, "dest": top_tokens(a.model, qk_column(a, head, source), 5),
            "out": top_tokens(a.model, ov_row(a, head, source), 5)}


def compute_skip_trigrams(a: Analysis, results: dict) -> list[dict]:
    return [row({"head": None if a.heads_by_rule else head, "source": word}, skip_trigram, a, head,
                word) for head, word in TABLE_ROWS]


def print_skip_trigrams(r: list[dict], results: dict, log: report.Log) -> None:
    log("== 2. SKIP-TRIGRAMS READ FROM THE WEIGHTS: fix a source, top destinations (QK) and top "
        "out tokens (OV)")
    for t in r:
        log(skip_trigram_line(t))
    log_rule(results, "each source in the head that raises it most", log)
    log("  each list ranks the entries of one head's table and is not a prediction: position, "
        "LayerNorm, biases and every other path are left out")


# ------------------------------------------------------------------ 3. at work


def word_at_work(a: Analysis, prompt: str, source: str, next: str, head: int) -> dict:
    """Every head's push on the next token, and one head's attention on the source. By rule: the
    head that pushes most through the source."""
    tokens = [loading.token_text(a.model, i) for i in prompt_tokens(a.model, prompt)]
    base = dict(prompt=prompt, source=source, next=next, head=head, tokens=tokens)
    return row(base, word_pushes, a, prompt, source, next, head)


def word_pushes(a: Analysis, prompt: str, source: str, next: str, head: int) -> dict:
    run, out = prompt_run(a.model, prompt), token_id(a.model, next)
    here = run.tokens[0] == token_id(a.model, source)
    by_source = common.pushes(run, out)
    through_source = by_source[:, here].sum(-1)
    h = a.head(head, lambda: int(through_source.argmax()))
    return {"head": h, "pushes": by_source.sum(-1).tolist(),
            "pushes_through_source": through_source.tolist(),
            "attention": run.patterns[0, h, 0, -1, here].sum().item()}


def probability(a: Analysis, prompt: str, next: str) -> dict:
    run = prompt_run(a.model, prompt)
    return {"p": next_probabilities(run)[token_id(a.model, next)].item()}


def prompt_pairs(a: Analysis, pairs: list[tuple]) -> dict:
    rows = [row({"prompt": prompt, "next": out}, probability, a, prompt, out)
            for *two, out in pairs for prompt in two]
    ratios = [p["p"] / q["p"] if "p" in p and q.get("p") else None
              for p, q in zip(rows[::2], rows[1::2])]
    return {"pairs": rows, "ratios": ratios}


def compute_at_work(a: Analysis, results: dict) -> dict:
    return prompt_pairs(a, PAIRS) | {"ralph": word_at_work(a, **WORD)}


def print_at_work(r: dict, results: dict, log: report.Log) -> None:
    log("== 3. SKIP-TRIGRAMS AT WORK IN THE WHOLE MODEL (probability of the next token)")
    _print_pairs(r, log)
    _print_word(r["ralph"], log)
    log_rule(results, "the one that pushes most through the source", log)
    log("  pushes are a run's own, with its attention, positions and LayerNorm scales; the "
        "entries of a table (sections 2 and 5) have none of the three")


def _print_pairs(r: dict, log: report.Log) -> None:
    for t, u in zip(r["pairs"][::2], r["pairs"][1::2]):
        log(f"  {t['prompt']!r:42} {_p_next(t)}   |   {u['prompt']!r:40} {_p_next(u)}")
    ratios = ", ".join(number(x, ".1f") for x in r["ratios"])
    log(f"  the first over the second, pair by pair: {ratios}")


def _p_next(t: dict) -> str:
    return f"p({t['next']!r}) " + (skipped(t) if "skipped" in t else f"= {t['p']:.4f}")


def _print_word(w: dict, log: report.Log) -> None:
    log(f"  tokens: {w['tokens']}")
    what = f"each head's push on the logit of \"{w['next']}\" at the last token"
    if "skipped" in w:
        log(f"  {what}: {skipped(w)}")
        return
    log(f"  {what}: " + ", ".join(f"0.{h}: {x:+.2f}" for h, x in enumerate(w["pushes"])))
    log(f"  head 0.{w['head']} at \"{w['tokens'][-1]}\" puts {w['attention']:.2f} of its attention "
        f"on \"{w['source']}\"")


# ------------------------------------------------------------------ 4. position


def compute_positional(a: Analysis, results: dict) -> dict:
    query, n_text = min(POSITION, a.model.cfg.n_ctx - 1), a.run.tokens.shape[1]
    near = position_weights(a, query).flip(-1)[:, :3]  # 0, 1, 2 back
    on_text = [common.mean_attention(a.run.patterns[0], k) for k in range(min(3, n_text))]
    weight = near.sum(-1)
    leaning = weight.argsort(descending=True).tolist()
    return {"query": query, "from_positions": near.tolist(),
            "lean": [h for h, x in enumerate(weight.tolist()) if x > POSITIONAL_SHARE],
            "on_text": torch.stack(on_text, -1).tolist(),
            "start_token": a.run.patterns[0, ..., 0].mean((-1, -2)).tolist(),
            "ov": [row({"head": None if a.heads_by_rule else head, "source": word}, top_out, a,
                       head, place, word, leaning) for head, place, word in OV_ROWS]}


def top_out(a: Analysis, head: int, place: int, word: str, leaning: list[int]) -> dict:
    """The top out tokens of a source in one head. By rule: by its place among the leaning heads."""
    source = token_id(a.model, word)
    head = a.head(head, lambda: leaning[min(place, len(leaning) - 1)])
    return {"head": head, "out": top_tokens(a.model, ov_row(a, head, source), 5)}


def print_positional(r: dict, results: dict, log: report.Log) -> None:
    meta = results["meta"]
    log("== 4. HEADS THAT LOOK AT POSITION")
    log(f"  attention from the position embeddings alone (query at position {r['query']}; weight "
        "on the same token, 1 back, 2 back):")
    for h, x in enumerate(r["from_positions"]):
        log(f"    head 0.{h}: {[round(v, 3) for v in x]}")
    heads = ", ".join(f"0.{h}" for h in r["lean"]) or "none"
    log(f"  more than {POSITIONAL_SHARE} of this weight within 2 back, our rule for leaning on "
        f"position: {heads}")
    log(f"  mean attention on text at the same distances ({meta['n_tokens']:,} tokens of "
        f"{meta['text']}; the article's text is not public, so it has nothing to compare with):")
    for h, x in enumerate(r["on_text"]):
        log(f"    head 0.{h}: {[round(v, 3) for v in x]}")
    for t in r["ov"]:
        log(f"  OV of head 0.{t['head']}, source {t['source']!r:15} -> "
            f"{skipped(t) if 'skipped' in t else t['out']}")
    log_rule(results, "the two that lean on position most", log)
    log("  (these too rank inside one head and are not predictions)")


# ------------------------------------------------------------------ 5. the bug


def entries(a: Analysis, values: Tensor, words: list[str]) -> tuple[dict, list]:
    """The values at the words that are one token, and the rows of those that are not."""
    rows = [row({"word": w}, entry, a, values, w) for w in words]
    return ({r["word"]: r["value"] for r in rows if "value" in r},
            [r for r in rows if "skipped" in r])


def entry(a: Analysis, values: Tensor, word: str) -> dict:
    return {"value": values[token_id(a.model, word)].item()}


def bug_entries(a: Analysis) -> dict:
    """OV row and QK column of the source in one head, and the prompts. By rule: the head whose
    smaller entry of the pair is largest."""
    source, pair = token_id(a.model, BUG["source"]), [token_id(a.model, w) for w in BUG["pair"]]
    head = a.head(BUG["head"], lambda: strongest(a, source, pair))
    ov, qk = ov_row(a, head, source), qk_column(a, head, source)
    ov_at, no_out = entries(a, ov, BUG["out"])
    qk_at, no_dest = entries(a, qk, BUG["dest"])
    prompts = [row({"prompt": p}, bug_prompt, a, head, source, p) for p in BUG["prompts"]]
    return {"head": head, "ov": ov_at, "ov_median": ov.quantile(0.5).item(),
            "ov_top": top_tokens(a.model, ov, 6), "qk": qk_at,
            "qk_median": qk.quantile(0.5).item(), "qk_top": top_tokens(a.model, qk, 6),
            "no_token": no_out + no_dest, "prompts": prompts}


def strongest(a: Analysis, source: int, out: list[int]) -> int:
    """The head whose smallest entry of a source for these out tokens is the largest."""
    columns = torch.stack([a.B[:, :, token] for token in out], -1)
    return int((a.A[:, None, source] @ columns).amin((-1, -2)).argmax())


def bug_prompt(a: Analysis, head: int, source: int, prompt: str) -> dict:
    """A prompt that holds the source: one head's pushes on the pair, whole and through it, and
    another head's. By rule: the one that pushes most on the first of the pair."""
    run, pair = prompt_run(a.model, prompt), BUG["pair"]
    here = run.tokens[0] == source
    ids = {w: token_id(a.model, w) for w in pair}
    by_source = {w: common.pushes(run, i) for w, i in ids.items()}
    through = {w: x[head, here].sum().item() for w, x in by_source.items()}
    p, on_first = next_probabilities(run), by_source[pair[0]].sum(-1).tolist()
    others = [h for h in range(len(on_first)) if h != head]
    other = a.head(BUG["other"], lambda: max(others, key=on_first.__getitem__))
    return {"attention": run.patterns[0, head, 0, -1, here].sum().item(), "through": through,
            "ratio": through[pair[1]] / through[pair[0]] if through[pair[0]] else None,
            "whole": {w: x[head].sum().item() for w, x in by_source.items()},
            "direct": {w: common.direct_push(run, i) for w, i in ids.items()},
            "p": {w: p[i].item() for w, i in ids.items()}, "top3": top_tokens(a.model, p, 3),
            "other_head": other, "push_of_other": on_first[other]}


def compute_keep(a: Analysis, results: dict) -> dict:
    base = {"head": None if a.heads_by_rule else BUG["head"], "source": BUG["source"],
            "pair": list(BUG["pair"])}
    return row(base, bug_entries, a)


def print_keep(r: dict, results: dict, log: report.Log) -> None:
    log(f"== 5. A SKIP-TRIGRAM BUG: head 0.{r['head']} and \"{r['source']}\"")
    _print_bug(r, log)
    log_rule(results, "the one whose smaller entry of the pair is the largest of all heads, and of "
             "the others the one that pushes most on the first of the pair", log)
    log("  columns rank table entries inside one head and are not predictions; pushes are the "
        "runs' own, so their ratio is not that of two entries, yet it is one ratio in both prompts "
        "where the source stands at one position")


def _print_bug(r: dict, log: report.Log) -> None:
    if "skipped" in r:
        log(f"  {skipped(r)}")
        return
    ov, qk = ({w: round(x, 2) for w, x in r[circuit].items()} for circuit in ("ov", "qk"))
    log(f"  OV column \"{r['source']}\": {ov}  (median over all tokens "
        f"{r['ov_median']:z.2f}); top {r['ov_top']}")
    log(f"  QK column \"{r['source']}\": {qk}  (median {r['qk_median']:z.2f}); top "
        f"destinations {r['qk_top']}")
    for w in r["no_token"]:
        log(f"    {skipped(w)}")
    one, two = (w.strip() for w in r["pair"])
    for p in r["prompts"]:
        if "skipped" in p:
            log(f"  {p['prompt']!r}: {skipped(p)}")
            continue
        (t1, t2), (w1, w2), (p1, p2) = ([p[key][w] for w in r["pair"]]
                                        for key in ("through", "whole", "p"))
        ratio = number(p["ratio"], ".2f")
        other = p["other_head"]
        log(f"  {p['prompt']!r}: head 0.{r['head']} puts {p['attention']:.2f} on "
            f"\"{r['source']}\"; through \"{r['source']}\" it pushes {one} {t1:+.2f}, {two} "
            f"{t2:+.2f}  (ratio {two}/{one} {ratio}); whole head: {one} {w1:+.2f}, {two} {w2:+.2f}")
        log(f"      whole model: p({one}) = {p1:.4f}, p({two}) = {p2:.6f}; top 3 {p['top3']}; head "
            f"0.{other} pushes {one} {p['push_of_other']:+.2f}")


# ------------------------------------------------------------------ 6. eigenvalues


def complex_list(x: Tensor) -> list[list[float]]:
    """[real, imaginary] of each, the largest |l| first."""
    return sorted(([v.real, v.imag] for v in x.tolist()), key=lambda v: (-math.hypot(*v), -v[1]))


def compute_eigen(a: Analysis, results: dict) -> dict:
    piece = min(PIECE, a.model.cfg.d_vocab)
    A, B = a.A[0, :piece], a.B[0, :, :piece]
    match, rest = common.match_eigenvalues(torch.linalg.eigvals((A @ B).cpu()),
                                           common.circuit_eigenvalues(A, B)[0])
    values, trace = common.circuit_eigenvalues(a.A, a.B)
    score, counts = common.copy_score(values), common.eigenvalue_counts(values)
    diagonal_sum = a.diagonal.sum(-1)
    for name, total in (("eigenvalues", values.sum(-1).real), ("diagonal", diagonal_sum)):
        bad = (total - trace).abs() > SUM_TOLERANCE * values.abs().sum(-1)
        if bad.any():
            raise common.UserError(f"head 0.{int(bad.nonzero()[0])}: the sum of the {name} is not "
                                   "the trace: the numbers cannot be trusted (try --device cpu)")
    heads = [{"copy_score": common.listed(score[h]), "trace": trace[h].item(),
              "diagonal_sum": diagonal_sum[h].item(), "eigenvalues": complex_list(values[h])}
             | {k: int(c[h]) for k, c in zip(("positive", "real_positive", "complex"), counts)}
             for h in range(len(values))]
    drawn = common.random_heads(a.weights, a.choices["random_heads"], N_RANDOM, a.args.seed)
    scores = common.copy_score(drawn)
    positive, _, is_complex = common.eigenvalue_counts(drawn)
    return {"check": {"match": match, "rest": rest, "n_tokens": piece}, "heads": heads,
            "copy_score_centred": centred_copy_scores(a),
            "random": {"copy_score": common.listed(scores), "mean": common.listed(scores.nanmean()),
                       "positive": positive.tolist(), "complex": is_complex.tolist(),
                       "eigenvalues": complex_list(drawn[0])}}


def centred_copy_scores(a: Analysis) -> list[float | None]:
    """The copy scores with a centred unembedding, whatever the run's is, for a second source.

    W_U minus its mean over the vocabulary makes A B into A (B - m 1^T), m the mean of B's columns:
    B A changes by the rank-one m (1^T A).
    """
    small = a.B @ a.A - a.B.mean(-1, keepdim=True) @ a.A.sum(-2, keepdim=True)
    scores = common.copy_score(torch.linalg.eigvals(small.cpu()))
    return common.listed(scores)


def print_eigen(r: dict, results: dict, log: report.Log) -> None:
    c, rank = r["check"], results["sections"]["sizes"]["rank"]
    n = c["n_tokens"]
    log("== 6. EIGENVALUES OF THE OV CIRCUITS THROUGH THE SMALL SIDE (float64)")
    log(f"  check on a {n}-token piece of head 0.0: {n} x {n} has {n} eigenvalues; the {rank} "
        f"largest match the {rank} x {rank} ones to {c['match']:.1e}; the other {n - rank} are at "
        f"most {c['rest']:.1e}")


# ------------------------------------------------------------------ 7. copying


def compute_copying(a: Analysis, results: dict) -> list[dict]:
    sources = [int(a.ranked[0]), int(a.ranked[-1])]
    return [{"diagonal_positive": share(diagonal > 0), "top1": share(ranks <= 1),
             "top5": share(ranks <= 5), "sources": sources}
            for diagonal, ranks in zip(a.diagonal, a.ranks)]


def share(yes: Tensor) -> float:
    """The share of True."""
    return yes.double().mean().item()


def print_copying(r: list[dict], results: dict, log: report.Log) -> None:
    heads, random = results["sections"]["eigen"]["heads"], results["sections"]["eigen"]["random"]
    sizes = results["sections"]["sizes"]
    n, (first, last) = sizes["rank"], r[0]["sources"]
    log("== 7. COPY SCORES OF THE OV CIRCUITS, AND THE OTHER MEASURES OF COPYING")
    for h, e in enumerate(heads):
        log(f"  head 0.{h}: copy score sum(l)/sum(|l|) = {number(e['copy_score'], '+.3f')}; "
            f"{e['positive']}/{n} with positive real part ({e['real_positive']} real and "
            f"positive, {e['complex']} complex); trace {e['trace']:,.0f} = sum of diagonal "
            f"{e['diagonal_sum']:,.0f}")
    s, p, c = random["copy_score"], random["positive"], random["complex"]
    known = [score for score in s if score is not None]
    low, high, mean = (number(x, "+.3f") for x in (
        min(known, default=None), max(known, default=None), random["mean"]))
    log(f"  {len(s)} random Gaussian heads of the same shapes: copy score from {low} to {high} "
        f"(mean {mean}); positive real part {min(p)} to {max(p)} of {n}; complex {min(c)} to "
        f"{max(c)} of {n}")
    log("  Head  Copy score  Diagonal > 0  Top-1 self  Top-5 self")
    for h, (e, m) in enumerate(zip(heads, r)):
        log(f"  0.{h:<4}  {number(e['copy_score'], '+.3f'):>10}  {m['diagonal_positive']:12.2f}  "
            f"{m['top1']:10.2f}  {m['top5']:10.2f}")
    all_tokens = last - first + 1 == sizes["d_vocab"]
    some = "all tokens" if all_tokens else f"tokens {first:,} to {last:,}"
    log(f"  (diagonal: of all {sizes['d_vocab']:,} tokens; self: of {some}, a tie is not first; "
        f"real or complex, positive or not: to {common.REAL:g} of |l|)")


# ------------------------------------------------------------------ what the text derives


def compute_claims(a: Analysis, results: dict) -> dict:
    return claims.part_4(results["sections"], results["meta"]["n_tokens"], a.model.cfg.d_model,
                         BUG["dest"])


def print_claims(r: dict, results: dict, log: report.Log) -> None:
    claims.print_claims(r, claims.PART_4, log)


# ------------------------------------------------------------------ beyond the article


@dataclass(frozen=True)
class Disagreement:
    """Two measures of copying that say different things of a head."""

    measures: str
    applies: Callable[[dict], bool]  # to the measures of a head
    tokens: str  # those that show it: "outranked", "among five" or "lowered" (telling_tokens)


DISAGREEMENTS = [
    Disagreement("score above 0.9 but top-5 self below 0.05",
                 lambda m: m["copy_score"] > 0.9 and m["top5"] < 0.05, "outranked"),
    Disagreement("score above 0.9 but more than 5% of tokens lower themselves",
                 lambda m: m["copy_score"] > 0.9 and m["diagonal_positive"] < 0.95, "lowered"),
    Disagreement("more than 90% of tokens raise themselves but top-5 self below 0.05",
                 lambda m: m["diagonal_positive"] > 0.9 and m["top5"] < 0.05, "outranked"),
    Disagreement("score below 0.5 but top-5 self above 0.05",
                 lambda m: m["copy_score"] < 0.5 and m["top5"] > 0.05, "among five"),
    Disagreement("score below 0 but more than half of the tokens raise themselves",
                 lambda m: m["copy_score"] < 0 and m["diagonal_positive"] > 0.5, "outranked"),
]


def telling_tokens(a: Analysis, head: int, kind: str) -> list[dict]:
    """Three source tokens that show a disagreement, the clearest first.

    outranked: they raise themselves, but five others more; among five: they raise themselves as one
    of five; lowered: they lower themselves. Each has its diagonal entry, its rank in its own row
    and the token that it raises most.
    """
    ids, rank = a.ranked, a.ranks[head]
    own = a.diagonal[head, ids]
    if kind == "lowered":
        clear, shows = -own, own < 0
    elif kind == "outranked":
        clear, shows = own, (own > 0) & (rank > 5)
    else:
        clear, shows = own, (own > 0) & (rank <= 5)
    best = [i for i in clear.sort(descending=True, stable=True).indices.tolist() if shows[i]]
    return [{"source": loading.token_text(a.model, int(ids[i])), "diagonal": own[i].item(),
             "rank": int(rank[i]),
             "first": top_tokens(a.model, a.A[head, ids[i]] @ a.B[head], 1)[0]} for i in best[:3]]


def worth(change: Float[Tensor, " sample"]) -> dict:
    """What the loss rises by without a head, and its standard error; None for one sample."""
    increase, se = change.mean().item(), None
    if len(change) > 1:
        se = change.std().item() / len(change) ** 0.5
    return {"loss_increase": increase, "loss_increase_se": se,
            "matters": se is not None and increase - 2 * se > MATTERS}


def copies(a: Analysis, head: int, measures: dict) -> dict:
    """Whether a head copies, and where the measures of it disagree; a dead one has no score."""
    if measures["copy_score"] is None:
        return {"copies": None, "disagree": []}
    return {"copies": measures["copy_score"] > COPIES,
            "disagree": [{"measures": d.measures, "tokens": telling_tokens(a, head, d.tokens)}
                         for d in DISAGREEMENTS if d.applies(measures)]}


def compute_beyond(a: Analysis, results: dict) -> dict:
    run, m = a.run, a.model
    z = common.attend(run.patterns[0], cen(run.x0) / run.scales[0], m.W_V[0])
    found = common.unembed(run, {"model": run.final}, z=z,
                           heads=[(0, h) for h in range(len(z))])
    increases = found.loss_increase  # [head, batch, next]
    change = increases.mean(-1) if len(run.tokens) > 1 else increases[:, 0]
    condition = common.eigenvector_condition(a.A, a.B).tolist()
    s = results["sections"]
    heads = [{"condition": condition[h] if math.isfinite(condition[h]) else None,
              **worth(change[h]), **copies(a, h, eigen | copying)}
             for h, (eigen, copying) in enumerate(zip(s["eigen"]["heads"], s["copying"]))]
    return {"heads": heads, "loss_model": found.losses["model"].mean().item(),
            "n": change.shape[-1], "n_of": "sequences" if len(run.tokens) > 1 else "tokens"}


def print_beyond(r: dict, results: dict, log: report.Log) -> None:
    meta = results["meta"]
    log("== BEYOND THE ARTICLE: WHERE THE MEASURES OF COPYING DISAGREE, AND WHAT A HEAD IS WORTH")
    log(f"  loss of the model on the text ({meta['n_tokens']:,} tokens): {r['loss_model']:.3f} "
        "nats per token; a head is removed with patterns and scales kept (+- standard error over "
        f"{r['n']:,} {r['n_of']})")
    for h, x in enumerate(r["heads"]):
        _print_worth(h, x, log)
    log(f"  copies: score above {COPIES}; matters: loss without it more than {MATTERS} up, by two "
        "standard errors")
    for text, copies, matters in (
            ("copies and matters", True, True), ("copies, not shown to matter", True, False),
            ("matters, does not copy", False, True)):
        heads = [f"0.{h}" for h, x in enumerate(r["heads"])
                 if (x["copies"], x["matters"]) == (copies, matters)]
        log(f"    {text}: {', '.join(heads) or 'none'}")


def _print_worth(h: int, x: dict, log: report.Log) -> None:
    condition = number(x["condition"], ",.0f")
    if x["condition"] is None and x["copies"] is not None:  # a dead head has none
        condition = "infinite"
    log(f"  head 0.{h}: condition number of the eigenvectors {condition} (1 if orthogonal); loss "
        f"without it {x['loss_increase']:+.3f} +- {number(x['loss_increase_se'], '.3f')}")
    for d in x["disagree"]:
        shown = ", ".join(f"{t['source']!r} {t['diagonal']:+.2f} (its own place {t['rank']:,}, "
                          f"first {t['first']!r})" for t in d["tokens"]) or "none tested"
        log(f"    {d['measures']}: {shown}")


# ------------------------------------------------------------------ the reader's own


def compute_reader(a: Analysis, results: dict) -> dict:
    rows = []
    for word in a.args.source:
        try:
            token_id(a.model, word)
        except Skip:
            rows.append(row({"head": None, "source": word}, skip_trigram, a, 0, word))
            continue
        rows += [{"source": word} | lists(a, h, token_id(a.model, word))
                 for h in range(a.model.cfg.n_heads)]
    prompt = None if a.args.next is None else reader_prompt(a, a.args.prompt, a.args.next)
    return {"sources": rows, "prompt": prompt}


def reader_prompt(a: Analysis, prompt: str, next: str) -> dict:
    """Every head's push on the next token, the sources it goes through, and the probability."""
    tokens = [loading.token_text(a.model, i) for i in prompt_tokens(a.model, prompt)]
    base = {"prompt": prompt, "next": next, "tokens": tokens}
    return row(base, prompt_pushes, a, prompt, next)


def prompt_pushes(a: Analysis, prompt: str, next: str) -> dict:
    run, out = prompt_run(a.model, prompt), token_id(a.model, next)
    by_source = common.pushes(run, out)
    return {"p": next_probabilities(run)[out].item(), "pushes": by_source.sum(-1).tolist(),
            "through": by_source.tolist(), "attention": run.patterns[0, :, 0, -1].tolist()}


def print_reader(r: dict, results: dict, log: report.Log) -> None:
    if r["sources"] or r["prompt"]:
        log("== YOUR OWN WORDS (rankings inside one head, not predictions; pushes are the run's)")
    for t in r["sources"]:
        log(skip_trigram_line(t))
    p = r["prompt"]
    if not p:
        return
    value = skipped(p) if "skipped" in p else f"= {p['p']:.6f}"
    log(f"  {p['prompt']!r} p({p['next']!r}) {value}")
    log(f"  tokens: {p['tokens']}")
    for h, push in enumerate(p.get("pushes", [])):
        x, weight = p["through"][h], p["attention"][h]
        best = sorted(range(len(x)), key=lambda j: -abs(x[j]))[:3]
        log(f"    head 0.{h}: {push:+.2f}; through " + ", ".join(
            f"{p['tokens'][j]!r} at {j}: {x[j]:+.2f} (attention {weight[j]:.2f})" for j in best))

SECTIONS = [
    Section("sizes", compute_sizes, print_sizes),
    Section("skip_trigrams", compute_skip_trigrams, print_skip_trigrams),
    Section("at_work", compute_at_work, print_at_work),
    Section("positional", compute_positional, print_positional),
    Section("keep", compute_keep, print_keep),
    Section("eigen", compute_eigen, print_eigen),
    Section("copying", compute_copying, print_copying),
    Section("claims", compute_claims, print_claims),
    Section("beyond", compute_beyond, print_beyond),
    Section("reader", compute_reader, print_reader),
]
TABLES = {"skip_trigrams", "positional", "keep"}
FROM_WEIGHTS = TABLES | {"eigen", "copying", "beyond"}
PROCESSING_CHOICES = ("center_unembed", "fold_value_biases", "tables_from")
SWEEPS = [  # in this order; the choices of one line jointly, each with the sections it changes
    {"center_unembed": FROM_WEIGHTS | {"at_work"},
     "fold_value_biases": {"sizes", "at_work", "positional", "keep", "beyond"},
     "tables_from": FROM_WEIGHTS},
    {"table_layernorm": TABLES, "qk_scaled": TABLES},
    dict.fromkeys(("position_layernorm", "position_scaled", "position_biases"), {"positional"}),
    {"random_heads": {"eigen"}},
]
SCRIPT = report.Script("circuits_part4.py", SECTIONS, pictures.FIGURES, PUBLISHED_MODEL, SWEEPS)


def parse(argv: list[str] | None):
    p = report.parser(__doc__, PUBLISHED_MODEL, TEXT_TOKENS, TEXT_TOKENS)
    p.add_argument("--source", action="append", default=[], metavar="WORD",
                   help="add this word's row for every head (repeatable)")
    p.add_argument("--prompt", metavar="TEXT", help="add the pushes on --next after this text")
    p.add_argument("--next", metavar="WORD", help="the next token that --prompt asks about")
    args = p.parse_args(argv)
    if (args.prompt is None) != (args.next is None):
        raise common.UserError("--prompt TEXT and --next WORD belong together: give both")
    return args


class Setup:
    """Loads and runs the model once for every processing that the choices ask for in turn."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.models: dict = {}  # {processing: (model, source)}
        self.prepared: dict = {}  # {choices of the weights: (fields of an Analysis, meta)}

    def load(self, processing: dict) -> tuple[HookedTransformer, dict]:
        key = tuple(processing.values())
        if key not in self.models:
            self.models[key] = loading.load_model(
                self.args.model, self.args.device, loading.DTYPES[self.args.dtype], 1, processing)
        return self.models[key]

    def prepare(self, center_unembed: bool, fold_value_biases: bool, tables_from: str) -> tuple:
        """What no other choice changes: the run and the factors of the circuits, and the meta."""
        args = self.args
        processing = loading.PROCESSING | {"center_unembed": center_unembed,
                                           "fold_value_biases": fold_value_biases}
        model, source = self.load(processing)
        tables = None
        if tables_from == "stored":
            tables = self.load(dict.fromkeys(loading.PROCESSING, False))[0]
        one_row = min(TEXT_TOKENS, model.cfg.n_ctx) if args.seq_len is None else args.seq_len
        n_tokens = one_row if args.tokens is None else args.tokens
        tokens, text = loading.load_tokens(model, args.model, args.text, n_tokens, args.seq_len,
                                           default_len=min(TEXT_TOKENS, n_tokens))
        by_rule = source["model"] != PUBLISHED_MODEL or source["revision"] is None
        meta = report.run_meta(SCRIPT.file, source, text, args, {}) | {
            "processing": processing, "heads_by_rule": by_rule}
        weights = tables or model
        fields = dict(run=common.freeze(model, tokens), tables=tables, args=args,
                      A=weights.W_E.double() @ weights.W_V[0].double(),
                      B=weights.W_O[0].double() @ weights.W_U.double(), heads_by_rule=by_rule)
        return fields, meta

    def analyse(self, choices: dict) -> tuple[Analysis, dict]:
        """The analysis under these choices, and the meta of its results."""
        key = tuple(choices[name] for name in PROCESSING_CHOICES)
        if key not in self.prepared:
            self.prepared = {key: self.prepare(*key)}
        fields, meta = self.prepared[key]
        return Analysis(choices=choices, **fields), meta | {"choices": choices}


@torch.no_grad()
def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    done = runner.from_files(SCRIPT, args)
    if done:
        return done
    setup = Setup(args)
    if args.sweep:
        return sweep.try_settings(SCRIPT, args, setup.analyse, OPEN)
    with common.status(f"loading and running {args.model}"):
        analysis, meta = setup.analyse(CHOICES)
    return runner.run_analysis(SCRIPT, meta, args, analysis)


if __name__ == "__main__":
    sys.exit(runner.run_script(main))
