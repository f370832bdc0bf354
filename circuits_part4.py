"""Part 4, one-layer models: the two circuits of every head, skip-trigrams, their bugs, copying.

    python circuits_part4.py                 # attn-only-1l: every real-model number of the article
    python circuits_part4.py --model mini    # the bundled one-layer model
    python circuits_part4.py --source " London" --prompt "My friend Ralph called." --next " Ralph"

Writes results/part4.json (every number, full precision), results/part4_stdout.txt (the log) and
figures/part4_*; for another model results/<model>/ and figures/<model>/. Half a minute on two CPU
cores at the public size. The text (--text, default the WikiText-2 test split) is one sequence of
1,000 tokens, or of the model's context where that is shorter; --tokens and --seq-len ask for more
of it, or for less.

Each section of the article is a compute_x that returns plain numbers, a print_x that prints the
article's lines from them and a plot_x that draws its picture from them alone. Expanded circuits
stay factored: a row or a column at a time.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
from dataclasses import dataclass
from functools import cached_property

import common
from common import cen, label, token_text

# isort: split
import torch
from jaxtyping import Float, Int
from torch import Tensor

PUBLISHED_MODEL = "attn-only-1l"
TEXT_TOKENS = 1000  # of the text, for the patterns on text (section 4)
POSITION = 200  # the query position of the positional patterns (section 4)
LEANS = 0.5  # of the weight within 2 back: a head leans on position (our rule)
PIECE = 300  # tokens of the piece that is decomposed both ways (section 6)
RANKED = range(1000, 3000)  # source tokens of "top-1 self" and "top-5 self" (section 7)
N_RANDOM = 20  # random heads (section 7)
DECADES = 3  # of |l| below a head's largest that its picture shows (section 6)
COPIES, MATTERS = 0.7, 0.01  # copy score, nats: where "copies" and "matters" begin (after 7)
AGREE = 1e-9  # of sum |l|: trace, eigenvalues and diagonal are the same sum (section 7)

# What the article leaves open; the first value is ours (--sweep tries the others).
OPEN = {
    "table_layernorm": ["none", "QK", "QK and OV"],  # LayerNorm of W_E in the tables
    "qk_scaled": [False, True],  # 1 / sqrt(d_head) in the QK tables
    "position_layernorm": [True, False],  # of W_pos
    "position_scaled": [True, False],  # 1 / sqrt(d_head)
    "position_biases": [True, False],  # b_Q and b_K
    "fold_value_biases": [True, False],  # False leaves b_V in the values, and in the pushes
    "random_heads": ["factors", "all", "head"],  # what of a random head is Gaussian
}
CHOICES = {name: values[0] for name, values in OPEN.items()}

# The rows of the article; " two" is ours, after the paper's.
ROWS = [(0, " perfect"), (0, " Ralph"), (0, " large"), (6, " couldn"), (7, " Paris"), (0, " two")]
WORD = dict(prompt='My friend Ralph called me today.\n"R', source=" Ralph", next="alph", head=0)
PAIRS = [  # with the word, without it, what comes next
    ('My friend Ralph called me today.\n"R', 'My friend Bob called me today.\n"R', "alph"),
    ('We visited Ralph and his dog.\n"R', 'We visited Tom and his dog.\n"R', "alph"),
    ("The perfect gift for her. It looks", "The nice gift for her. It looks", " perfect"),
]
OV_ROWS = [(5, " corresponding"), (5, " couldn"), (1, " couldn")]
BUG = dict(
    head=2, source=" keep", out=[" mind", " bay", " toes", " wraps", " forefront"],
    dest=[" in", " at", " on", " under", " going"], pair=(" mind", " bay"), other=7,
    prompts=["You need to keep this in", "You need to keep the dogs at"],
)

# The same for the vocabulary of the bundled model, fixed from its sample text before it was run.
# No head is named: a rule finds it, and the log says which.
SAMPLE_ROWS = [" hand", " water", " steps", " Captain"]
SAMPLE_WORD = dict(prompt='The Captain took the letter.\n"C', source=" Captain", next="aptain",
                   head=None)
SAMPLE_PAIRS = [
    ('The Captain took the letter.\n"C', 'The boy took the letter.\n"C', "aptain"),
    ("On the one hand it is plain, and on the other",
     "On the one side it is plain, and on the other", " hand"),
    ("The water was cold, and he looked at the", "The night was cold, and he looked at the",
     " water"),
]
SAMPLE_BUG = dict(
    head=None, source=" keep", out=[" mind", " dry", " civil", " light"],
    dest=[" in", " feet", " tongue", " at", " and"], pair=(" mind", " dry"), other=None,
    prompts=["You must keep the tide in", "You must keep your feet"],
)


@dataclass(frozen=True)
class Analysis:
    """What every section reads. The OV circuit of head h is A[h] B[h], [source, out]."""

    run: common.FrozenRun  # of the text
    A: Float[Tensor, "head d_vocab d_head"]  # W_E W_V, float64
    B: Float[Tensor, "head d_head d_vocab"]  # W_O W_U, float64
    meta: dict
    choices: dict
    seed: int
    sample: bool = False  # the bundled model: rows of its own vocabulary too
    sources: tuple = ()  # --source
    prompt: tuple | None = None  # --prompt and --next

    @property
    def model(self):
        return self.run.model

    @cached_property
    def ranked(self) -> Int[Tensor, " source"]:
        """The source tokens whose place in their own row counts; all in a small vocabulary."""
        d_vocab = self.model.cfg.d_vocab
        return torch.tensor(RANKED if d_vocab >= RANKED.stop else range(d_vocab))

    @cached_property
    def ranks(self) -> Int[Tensor, "head source"]:
        return common.self_rank(self.A, self.B, self.ranked)

    @cached_property
    def diagonal(self) -> Float[Tensor, "head d_vocab"]:
        return common.circuit_diagonal(self.A, self.B).cpu()


# ------------------------------------------------------------------ words, prompts, rows


class Skip(Exception):
    """A row that this model has not: the reason, and the pieces of the word that is no token."""


def row(base: dict, compute) -> dict:
    """A row of results: `base` and what compute() gives, or why there is none."""
    try:
        return base | compute()
    except Skip as skip:
        return base | {"skipped": skip.args[0], "pieces": skip.args[1]}


def skipped(r: dict) -> str:
    """Why a row was skipped, for the log."""
    return f"skipped: {r['skipped']}" + (f" {r['pieces']}" if r["pieces"] else "")


def token_id(model, word: str) -> int:
    """The id of a word that is one token."""
    ids = common.encode(model, word)
    pieces = [token_text(model, i) for i in ids]
    if pieces != [word]:
        raise Skip(f"{word!r} is not one token here", pieces)
    return ids[0]


def head_here(model, head: int) -> int:
    """The head, if the model has it."""
    if head >= model.cfg.n_heads:
        raise Skip(f"no head 0.{head} here", [])
    return head


def prompt_tokens(model, text: str) -> list[int]:
    """BOS and the ids of a text."""
    return [model.tokenizer.bos_token_id, *common.encode(model, text)]


def prompt_run(model, text: str) -> common.FrozenRun:
    """The run of BOS and a prompt."""
    ids = prompt_tokens(model, text)
    if len(ids) > model.cfg.n_ctx:
        raise Skip(f"{len(ids)} tokens, the context has {model.cfg.n_ctx}", [])
    if ids[0] in ids[1:]:
        raise Skip("the start token stands in the text", [])
    return common.freeze(model, torch.tensor([ids], device=model.cfg.device))


def top_tokens(model, values: Float[Tensor, " d_vocab"], k: int) -> list[str]:
    """The k tokens with the largest values; of equal ones the lower id first."""
    order = values.cpu().sort(descending=True, stable=True).indices[:k]
    return [token_text(model, i) for i in order.tolist()]


# ------------------------------------------------------------------ table entries and pushes


def layer_norm(model, x: Float[Tensor, "... d_model"]) -> Tensor:
    """cen(x) / scale, the scale x's own: for embeddings outside any run."""
    x = cen(x)
    return x / (x.pow(2).mean(-1, keepdim=True) + model.cfg.eps).sqrt()


def ov_row(a: Analysis, head: int, source: int) -> Float[Tensor, " d_vocab"]:
    """W_E[source] W_V W_O W_U: what reading the source token does to every logit, in float64.

    Row `source` of the OV circuit ("Skip-trigrams"; the article's column M_c,a). A table entry:
    position, LayerNorm and attention are left out. One vector of d_vocab, never the table.
    """
    if a.choices["table_layernorm"] == "QK and OV":
        x = layer_norm(a.model, a.model.W_E[source]) @ a.model.W_V[0, head]
        return x.double() @ a.B[head]
    return a.A[head, source] @ a.B[head]


def qk_column(a: Analysis, head: int, source: int) -> Float[Tensor, " d_vocab"]:
    """W_E W_Q W_K^T W_E[source]: how much every destination token wants the source token.

    Column `source` of the QK circuit, [destination, source] ("The two circuits of every head");
    no position, no biases, no 1/sqrt(d_head). The scores of two destinations never meet in one
    softmax, so their order is a hint. One vector; cost d_vocab x d_model.
    """
    m = a.model
    x = m.W_E if a.choices["table_layernorm"] == "none" else layer_norm(m, m.W_E)
    column = x @ (m.W_Q[0, head] @ (x[source] @ m.W_K[0, head]))
    return column / m.cfg.attn_scale if a.choices["qk_scaled"] else column


def pushes(run: common.FrozenRun, out: int) -> Float[Tensor, "head source"]:
    """The push of every head on one logit at the last position, through each source position.

    push[h, j] = A^h[last, j] cen(v_j W_O) W_U[:, out] / s_final, v_j = cen(x_j) / s_0 W_V + b_V

    with the pattern, positions and scales of the run ("How much does a source push an out
    token?"). Summed over the sources it is the head's push, and with those of all heads, the
    direct path, b_O and b_U it is the logit, exactly.

    Args:
        run: of a prompt, one sequence.
        out: the token whose logit it is.
    """
    m = run.model
    v = (cen(run.x0) / run.scales[0])[0] @ m.W_V[0] + m.b_V[0][:, None]
    direction = cen(m.W_O[0]) @ m.W_U[:, out] / run.scales[-1, 0, -1]
    return run.patterns[0, :, 0, -1] * (v @ direction[..., None])[..., 0]


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
    x = layer_norm(m, x) if choices["position_layernorm"] else x
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


def print_sizes(r: dict, results: dict, log: common.Log) -> None:
    n = f"{r['d_vocab']:,}"
    log(f"== 1. HOW BIG THE EXPANDED CIRCUITS ARE ({results['meta']['model']})")
    log(f"  vocabulary {n} tokens, {r['n_heads']} heads; one expanded circuit is {n} x {n} = "
        f"{r['entries_per_circuit'] / 1e9:.2f} billion numbers")
    log(f"  QK + OV for all {r['n_heads']} heads: {r['entries_all'] / 1e9:.1f} billion numbers; "
        f"the model stores {r['weights'] / 1e6:.1f} million weights")
    log(f"  {r['ratio']:.1f} times as many, each circuit of rank at most {r['rank']}; a table of "
        f"all three tokens would have {n}^3 = {r['entries_three_tokens']:.1e} entries")


# ------------------------------------------------------------------ 2. skip-trigrams


def skip_trigram_line(t: dict) -> str:
    """A row of the table, as the article prints it."""
    head = "" if t["head"] is None else f"head 0.{t['head']}  "
    lists = skipped(t) if "skipped" in t else f"dest {t['dest']}  out {t['out']}"
    return f"  {head}source {t['source']!r:10}  {lists}"


def skip_trigram(a: Analysis, head: int | None, word: str) -> dict:
    """Top destinations and out tokens of a source. No head: the one that raises it most."""
    source = token_id(a.model, word)
    if head is None:
        head = int((a.A[:, source] * a.B[:, :, source]).sum(-1).argmax())
    head_here(a.model, head)
    return {"head": head, "dest": top_tokens(a.model, qk_column(a, head, source), 5),
            "out": top_tokens(a.model, ov_row(a, head, source), 5)}


def compute_skip_trigrams(a: Analysis, results: dict) -> list[dict]:
    rows = [(h, w, "article") for h, w in ROWS]
    rows += [(None, w, "sample") for w in SAMPLE_ROWS] if a.sample else []
    return [row({"head": h, "source": w, "words": kind}, lambda h=h, w=w: skip_trigram(a, h, w))
            for h, w, kind in rows]


def print_skip_trigrams(r: list[dict], results: dict, log: common.Log) -> None:
    log("== 2. SKIP-TRIGRAMS READ FROM THE WEIGHTS: fix a source, top destinations (QK) and top "
        "out tokens (OV)")
    for t in r:
        if t["words"] == "article":
            log(skip_trigram_line(t))
    if any(t["words"] == "sample" for t in r):
        log("  words of the sample text, each with the head that raises it most:")
    for t in r:
        if t["words"] == "sample":
            log(skip_trigram_line(t))
    log("  each list ranks the entries of one head's table and is not a prediction: position, "
        "LayerNorm, biases and every other path are left out")


def plot_skip_trigrams(r: list[dict], results: dict):
    """The table: a row per source, the largest entry of each list first."""
    shown, size = [t for t in r if "skipped" not in t], 9
    if not shown:
        return None
    four = [""] * 4
    rows = [["head", "source", "top destinations (QK)", *four, "top out tokens (OV)", *four]]
    rows += [[f"0.{t['head']}", label(t["source"]), *map(label, t["dest"] + t["out"])]
             for t in shown]
    widths = [max(common.text_width(x, size) for x in column[i > 1:]) + 0.2 + 0.2 * (i in (1, 6))
              for i, column in enumerate(zip(*rows))]
    lefts = list(itertools.accumulate(widths, initial=0))
    figure, ax = common.new_figure(max(lefts[-1], 8) + 0.2, 0.25 * len(rows) + 1.35)
    shade = dict(facecolor=common.COLOURS[4], alpha=0.4, linewidth=0, pad=2)
    word = lambda cell: cell.strip("' ").lower()  # noqa: E731
    for i, row in enumerate(rows):
        for j, (x, cell) in enumerate(zip(lefts, row)):
            own = j > 1 and word(cell) == word(row[1])
            ax.text(x, i, cell, fontsize=size, va="center", bbox=shade if own else None)
    ax.hlines((-0.6, 0.5, len(rows) - 0.4), 0, lefts[-1], color="black", linewidth=(1.2, 0.6, 1.2))
    ax.set(xlim=(0, max(lefts[-1], 8)), ylim=(len(rows) - 0.3, -0.7))
    ax.set_axis_off()
    missing = ", ".join(label(t["source"]) for t in r if "skipped" in t)
    figure.supxlabel(
        "A row reads [source] … [destination] → [out]; the largest entry of each list is first. "
        "Shaded: the source's own word.\nA list ranks the entries of one head and is no prediction."
        + f"\nSkipped, not in this model: {missing}." * bool(missing), fontsize=size)
    common.headline(figure, results, "skip-trigrams read from the weights, head by head")
    return figure


# ------------------------------------------------------------------ 3. at work


def word_at_work(a: Analysis, prompt: str, source: str, next: str, head: int | None) -> dict:
    """Every head's push on the next token, and one head's attention on the source.

    No head: the one that pushes most through the source."""
    tokens = [token_text(a.model, i) for i in prompt_tokens(a.model, prompt)]
    base = dict(prompt=prompt, source=source, next=next, head=head, tokens=tokens)

    def compute() -> dict:
        run, out = prompt_run(a.model, prompt), token_id(a.model, next)
        here, by_source = run.tokens[0] == token_id(a.model, source), pushes(run, out)
        h = int(by_source[:, here].sum(-1).argmax()) if head is None else head
        return {"head": head_here(a.model, h), "pushes": by_source.sum(-1).tolist(),
                "pushes_through_source": by_source[:, here].sum(-1).tolist(),
                "attention": run.patterns[0, h, 0, -1, here].sum().item()}

    return row(base, compute)


def probability(a: Analysis, prompt: str, next: str) -> dict:
    return row({"prompt": prompt, "next": next}, lambda: {
        "p": next_probabilities(prompt_run(a.model, prompt))[token_id(a.model, next)].item()})


def prompt_pairs(a: Analysis, pairs: list[tuple]) -> dict:
    rows = [probability(a, prompt, out) for *two, out in pairs for prompt in two]
    ratios = [p["p"] / q["p"] if "p" in p and q.get("p") else None
              for p, q in zip(rows[::2], rows[1::2])]
    return {"pairs": rows, "ratios": ratios}


def compute_at_work(a: Analysis, results: dict) -> dict:
    sample = prompt_pairs(a, SAMPLE_PAIRS) | {"word": word_at_work(a, **SAMPLE_WORD)}
    return prompt_pairs(a, PAIRS) | {"ralph": word_at_work(a, **WORD),
                                     "sample": sample if a.sample else None}


def print_at_work(r: dict, results: dict, log: common.Log) -> None:
    log("== 3. SKIP-TRIGRAMS AT WORK IN THE WHOLE MODEL (probability of the next token)")
    _print_pairs(r, log)
    _print_word(r["ralph"], log)
    if r["sample"]:
        log("  words of the sample text; the head named is the one that pushes most through them:")
        _print_pairs(r["sample"], log)
        _print_word(r["sample"]["word"], log)
    log("  pushes are a run's own, with its attention, positions and LayerNorm scales; the "
        "entries of a table (sections 2 and 5) have none of the three")


def _print_pairs(r: dict, log: common.Log) -> None:
    p = lambda t: (f"p({t['next']!r}) " + (f"= {t['p']:.4f}" if "p" in t  # noqa: E731
                                           else skipped(t)))
    for t, u in zip(r["pairs"][::2], r["pairs"][1::2]):
        log(f"  {t['prompt']!r:42} {p(t)}   |   {u['prompt']!r:40} {p(u)}")
    ratios = ", ".join("-" if x is None else f"{x:.1f}" for x in r["ratios"])
    log(f"  the first over the second, pair by pair: {ratios}")


def _print_word(w: dict, log: common.Log) -> None:
    log(f"  tokens: {w['tokens']}")
    what = f"each head's push on the logit of \"{w['next']}\" at the last token"
    if "skipped" in w:
        log(f"  {what}: {skipped(w)}")
        return
    log(f"  {what}: " + ", ".join(f"0.{h}: {x:+.2f}" for h, x in enumerate(w["pushes"])))
    log(f"  head 0.{w['head']} at \"{w['tokens'][-1]}\" puts {w['attention']:.2f} of its attention "
        f"on \"{w['source']}\"")


def plot_at_work(r: dict, results: dict):
    """What one head reads in a prompt, and every head's push on the next token."""
    sample = r["sample"]["word"] if r["sample"] else r["ralph"]
    word = sample if "skipped" in r["ralph"] else r["ralph"]
    if "skipped" in word:
        return None
    out, source, n = label(word["next"]), label(word["source"]), len(word["pushes"])
    widths = [common.text_width(label(t), 9) + 0.2 for t in [*word["tokens"], word["next"]]]
    figure, (strip, ax) = common.new_figure(max(8, sum(widths) + 1, min(n + 1, 13)), 4.8, 2,
                                            height_ratios=(1, 2.6))
    draw_prompt(strip, word, widths)
    series = {"whole head": word["pushes"],
              f"through {source} alone": word["pushes_through_source"]}
    common.bars(ax, [f"0.{h}" for h in range(n)], series, "{:+.2f}")
    ax.set(xlabel="head", ylabel=f"push on the logit of {out} (logits)")
    kind = f" (sample text; {label(r['ralph']['next'])} was skipped)" * (word is not r["ralph"])
    common.headline(figure, results,
                    f"each head's push on {out} after {label(word['tokens'][-1])}{kind}")
    return figure


def draw_prompt(ax, word: dict, widths: list[float]) -> None:
    """The tokens of a prompt and the next one, `widths` inches each, an arrow to what is read."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    ends = list(itertools.accumulate(widths))
    x = [end - width / 2 for end, width in zip(ends, widths)]
    x[-1] += 0.5
    for i, (at, token) in enumerate(zip(x, [*word["tokens"], word["next"]])):
        read, last = token == word["source"], i == len(x) - 1
        box = dict(facecolor=common.COLOURS[0 if last else 1] if read or last else "0.8", alpha=0.4,
                   linewidth=0, boxstyle="round,pad=0.25")
        ax.text(at, 0, label(token), ha="center", va="center", fontsize=9, bbox=box)
        if read and not last:
            curve = Path([(x[-2], 0.3), (x[-2], 1.1), (at, 1.1), (at, 0.3)], [1, 4, 4, 4])
            ax.add_patch(FancyArrowPatch(path=curve, arrowstyle="-|>", mutation_scale=12,
                                         color="black"))
            ax.text((at + x[-2]) / 2, 1, f"head 0.{word['head']} reads {label(token)} with weight "
                    f"{word['attention']:.2f}", ha="center", va="bottom", fontsize=9)
    push = word["pushes_through_source"][word["head"]]
    ax.text(x[-1], 0.38, f"{push:+.2f} logits", ha="center", va="bottom", fontsize=9)
    ax.annotate("", (x[-1] - widths[-1] / 2, 0), (ends[-2], 0),
                arrowprops={"arrowstyle": "-|>", "color": "black"})
    middle, half = (ends[-1] + 0.5) / 2, max(ends[-1] + 0.9, 0.95 * ax.figure.get_figwidth()) / 2
    ax.set(xlim=(middle - half, middle + half), ylim=(-0.4, 1.4))
    ax.set_axis_off()


# ------------------------------------------------------------------ 4. position


def compute_positional(a: Analysis, results: dict) -> dict:
    query, n_text = min(POSITION, a.model.cfg.n_ctx - 1), a.run.tokens.shape[1]
    near = position_weights(a, query).flip(-1)[:, :3]  # 0, 1, 2 back
    on_text = [common.mean_attention(a.run.patterns[0], k) for k in range(min(3, n_text))]
    ov = lambda h, w: {"out": top_tokens(  # noqa: E731
        a.model, ov_row(a, head_here(a.model, h), token_id(a.model, w)), 5)}
    return {"query": query, "from_positions": near.tolist(),
            "lean": [h for h, x in enumerate(near.sum(-1).tolist()) if x > LEANS],
            "on_text": torch.stack(on_text, -1).tolist(),
            "ov": [row({"head": h, "source": w}, lambda h=h, w=w: ov(h, w)) for h, w in OV_ROWS]}


def print_positional(r: dict, results: dict, log: common.Log) -> None:
    meta = results["meta"]
    log("== 4. HEADS THAT LOOK AT POSITION")
    log(f"  attention from the position embeddings alone (query at position {r['query']}; weight "
        "on the same token, 1 back, 2 back):")
    for h, x in enumerate(r["from_positions"]):
        log(f"    head 0.{h}: {[round(v, 3) for v in x]}")
    heads = ", ".join(f"0.{h}" for h in r["lean"]) or "none"
    log(f"  more than {LEANS} of this weight within 2 back, our rule for leaning on position: "
        f"{heads}")
    log(f"  mean attention on text at the same distances ({meta['n_tokens']:,} tokens of "
        f"{meta['text']}; the article's text is not public, so it has nothing to compare with):")
    for h, x in enumerate(r["on_text"]):
        log(f"    head 0.{h}: {[round(v, 3) for v in x]}")
    for t in r["ov"]:
        log(f"  OV of head 0.{t['head']}, source {t['source']!r:15} -> "
            f"{skipped(t) if 'skipped' in t else t['out']}")
    log("  (these too rank inside one head and are not predictions)")


def names_of_heads(results: dict) -> list[str]:
    """0.0, 0.1, ..., with a star at those that lean on position."""
    r = results["sections"]["positional"]
    return [f"0.{h}" + "*" * (h in r["lean"]) for h in range(len(r["from_positions"]))]


def plot_positional(r: dict, results: dict):
    """Attention by distance, from the position embeddings alone and on text, on one scale."""
    heads, meta = names_of_heads(results), results["meta"]
    figure, axes = common.new_figure(min(max(len(heads) + 1, 9), 12), 5.6, 2, sharex=True,
                                     sharey=True)
    titles = (f"from the position embeddings alone (query at {r['query']})",
              f"on text, the mean over {meta['n_tokens']:,} tokens")
    distances = ("on the token itself", "1 back", "2 back")
    for ax, rows, title in zip(axes, (r["from_positions"], r["on_text"]), titles):
        series = {d: list(values) for d, values in zip(distances, zip(*rows))}
        common.bars(ax, heads, series)
        ax.set_title(title, loc="left")
        ax.set_ylabel("share of attention")
    if len(series) > 1:
        axes[1].get_legend().remove()
    axes[1].set_xlabel(f"head (* leans on position: more than {LEANS} in the upper panel)")
    common.headline(figure, results, "attention of every head 0, 1 and 2 tokens back")
    return figure


# ------------------------------------------------------------------ 5. the bug


def entries(a: Analysis, values: Tensor, words: list[str]) -> tuple[dict, list]:
    """The values at the words that are one token, and the rows of those that are not."""
    rows = [row({"word": w}, lambda w=w: {"value": values[token_id(a.model, w)].item()})
            for w in words]
    return ({r["word"]: r["value"] for r in rows if "value" in r},
            [r for r in rows if "skipped" in r])


def compute_bug(a: Analysis, head: int | None, source: str, out: list[str], dest: list[str],
                pair: tuple, prompts: list[str], other: int | None) -> dict:
    """OV row and QK column of the source in one head, and the prompts. No head: the one whose
    smaller entry of the pair is largest."""
    def compute() -> dict:
        s, h = token_id(a.model, source), head
        if h is None:
            two = torch.tensor([token_id(a.model, w) for w in pair], device=a.B.device)
            h = int((a.A[:, None, s] @ a.B[:, :, two]).amin((-1, -2)).argmax())
        ov, qk = ov_row(a, head_here(a.model, h), s), qk_column(a, h, s)
        (ov_at, no_out), (qk_at, no_dest) = entries(a, ov, out), entries(a, qk, dest)
        return {"head": h, "ov": ov_at, "ov_median": ov.quantile(0.5).item(),
                "ov_top": top_tokens(a.model, ov, 6), "qk": qk_at,
                "qk_median": qk.quantile(0.5).item(), "qk_top": top_tokens(a.model, qk, 6),
                "no_token": no_out + no_dest,
                "prompts": [bug_prompt(a, h, s, pair, p, other) for p in prompts]}

    return row({"head": head, "source": source, "pair": list(pair)}, compute)


def bug_prompt(a: Analysis, head: int, source: int, pair: tuple, prompt: str,
               other: int | None) -> dict:
    """A prompt that holds the source: one head's pushes on the pair, whole and through it.

    No other head: the one besides `head` that pushes most on the first of the pair."""
    def compute() -> dict:
        run = prompt_run(a.model, prompt)
        here = run.tokens[0] == source
        ids = {w: token_id(a.model, w) for w in pair}
        by_source = {w: pushes(run, i) for w, i in ids.items()}
        through = {w: x[head, here].sum().item() for w, x in by_source.items()}
        p, first = next_probabilities(run), by_source[pair[0]].sum(-1)
        rest = [h for h in range(len(first)) if h != head]
        o = max(rest, key=first.tolist().__getitem__) if other is None else other
        return {"attention": run.patterns[0, head, 0, -1, here].sum().item(), "through": through,
                "ratio": through[pair[1]] / through[pair[0]] if through[pair[0]] else None,
                "whole": {w: x[head].sum().item() for w, x in by_source.items()},
                "p": {w: p[i].item() for w, i in ids.items()}, "top3": top_tokens(a.model, p, 3),
                "other_head": head_here(a.model, o), f"push_0_{o}": first[o].item()}

    return row({"prompt": prompt}, compute)


def compute_keep(a: Analysis, results: dict) -> dict:
    return compute_bug(a, **BUG) | {"sample": compute_bug(a, **SAMPLE_BUG) if a.sample else None}


def print_keep(r: dict, results: dict, log: common.Log) -> None:
    log(f"== 5. A SKIP-TRIGRAM BUG: head 0.{r['head']} and \"{r['source']}\"")
    _print_bug(r, log)
    s = r["sample"]
    if s:
        log("  words of the sample text: " + (skipped(s) if "skipped" in s else
            f"head 0.{s['head']} (of its entries for {' and '.join(map(repr, s['pair']))} the "
            f"smaller is the largest of all heads) and \"{s['source']}\""))
        if "skipped" not in s:
            _print_bug(s, log)
    log("  columns rank table entries inside one head and are not predictions; pushes are the "
        "runs' own, so their ratio is not that of two entries, yet it is one ratio in both prompts "
        "where the source stands at one position")


def _print_bug(r: dict, log: common.Log) -> None:
    if "skipped" in r:
        log(f"  {skipped(r)}")
        return
    rounded = lambda d: {w: round(x, 2) for w, x in d.items()}  # noqa: E731
    log(f"  OV column \"{r['source']}\": {rounded(r['ov'])}  (median over all tokens "
        f"{r['ov_median']:z.2f}); top {r['ov_top']}")
    log(f"  QK column \"{r['source']}\": {rounded(r['qk'])}  (median {r['qk_median']:z.2f}); top "
        f"destinations {r['qk_top']}")
    for w in r["no_token"]:
        log(f"    {skipped(w)}")
    one, two = (w.strip() for w in r["pair"])
    for p in r["prompts"]:
        if "skipped" in p:
            log(f"  {p['prompt']!r}: {skipped(p)}")
            continue
        (t1, t2), (w1, w2), (p1, p2) = ([p[k][w] for w in r["pair"]]
                                        for k in ("through", "whole", "p"))
        ratio = "-" if p["ratio"] is None else f"{p['ratio']:.2f}"
        log(f"  {p['prompt']!r}: head 0.{r['head']} puts {p['attention']:.2f} on "
            f"\"{r['source']}\"; through \"{r['source']}\" it pushes {one} {t1:+.2f}, {two} "
            f"{t2:+.2f}  (ratio {two}/{one} {ratio}); whole head: {one} {w1:+.2f}, {two} {w2:+.2f}")
        log(f"      whole model: p({one}) = {p1:.4f}, p({two}) = {p2:.6f}; top 3 {p['top3']}; head "
            f"0.{p['other_head']} pushes {one} {p['push_0_' + str(p['other_head'])]:+.2f}")


def plot_keep(r: dict, results: dict):
    """The pushes of one head through one source after two prompts: one ratio. Beside them, on the
    same scale, the article's example by hand."""
    bugs = [b for b in (r, r["sample"]) if b and "skipped" not in b]
    found = [(b, [p for p in b["prompts"] if "skipped" not in p]) for b in bugs]
    bug, prompts = next((x for x in found if x[1]), (None, None))
    if not bug:
        return None
    source, (one, two) = label(bug["source"]), bug["pair"]
    ratio = lambda p: "-" if p["ratio"] is None else f"{p['ratio']:.2f}"  # noqa: E731
    groups = [f"{label(p['prompt'], 40)}\nreads {source} with weight {p['attention']:.2f}\n"
              f"{label(two)} / {label(one)} = {ratio(p)}" for p in prompts]
    toy = {e["key"]: e["value"] for e in common.read_published("part4_toy")["entries"]}
    figure, (hand, ax) = common.new_figure(12, 4.2, 1, 2, sharey=True, width_ratios=[2, 3])
    common.bars(hand, [f"after '{b}'\nreads 'keep' with weight {toy[f'keep.weights.{b}']}"
                       for b in ("in", "at")],
                {f"'{c}'": [toy[f"keep.pushes.{b}.{c}"] for b in ("in", "at")]
                 for c in ("mind", "bay")}, "{:+.1f}")
    hand.set_title("by hand", loc="left")
    hand.set_ylabel("push (logits)")
    common.bars(ax, groups, {label(w): [p["through"][w] for p in prompts] for w in (one, two)},
                "{:+.2f}")
    ax.set_title(f"measured: head 0.{bug['head']}, through {source}", loc="left")
    common.headline(figure, results, f"the bug of head 0.{bug['head']}: one ratio after {source}, "
                    "whatever the destination")
    return figure


# ------------------------------------------------------------------ 6. eigenvalues


def match_eigenvalues(large: Tensor, small: Tensor) -> tuple[float, float]:
    """The eigenvalues of a large matrix against those of its small side, each with the nearest
    that is left: exact as long as the differences are smaller than the gaps.

    Returns:
        the largest difference, and the largest |l| of the large matrix that is left over.
    """
    distance, left = (small[:, None] - large).abs(), torch.ones(len(large), dtype=torch.bool)
    worst = 0.0
    for i in small.abs().argsort(descending=True).tolist():
        j = int(distance[i].where(left, torch.inf).argmin())
        worst, left[j] = max(worst, distance[i, j].item()), False
    return worst, large[left].abs().max().item() if left.any() else 0.0


def random_heads(model, reading: str, seed: int) -> Float[Tensor, "draw d_head"]:
    """The eigenvalues of N_RANDOM random heads of a model's shapes ("What the paper found").

    Drawn on the CPU from a private generator, afresh for each head. At the shapes of attn-only-1l
    "factors" with seed 0 draws every figure that the article prints of its random heads.

    Args:
        reading: "factors": both factors of the circuit are Gaussian; "all": W_E, W_V, W_O and W_U
            are; "head": W_V and W_O are, between the model's own W_E and W_U.
    """
    cfg = model.cfg
    n, d, e = cfg.d_vocab, cfg.d_model, cfg.d_head
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    core = (model.W_U.double() @ model.W_E.double()).cpu() if reading == "head" else None
    found = []
    for _ in common.progress(range(N_RANDOM), "random heads"):
        if reading == "factors":
            A, B = draw(n, e), draw(e, n)
        elif reading == "all":
            A, B = draw(n, d) @ draw(d, e), draw(e, d) @ draw(d, n)
        else:  # B A is W_O W_U W_E W_V however it is bracketed
            A, B = core @ draw(d, e), draw(e, d)
        found.append(common.circuit_eigenvalues(A, B)[0])
    return torch.stack(found)


def complex_list(x: Tensor) -> list[list[float]]:
    """[real, imaginary] of each, the largest |l| first."""
    return sorted(([v.real, v.imag] for v in x.tolist()), key=lambda v: (-math.hypot(*v), -v[1]))


def compute_eigen(a: Analysis, results: dict) -> dict:
    piece = min(PIECE, a.model.cfg.d_vocab)
    A, B = a.A[0, :piece], a.B[0, :, :piece]
    match, rest = match_eigenvalues(torch.linalg.eigvals((A @ B).cpu()),
                                    common.circuit_eigenvalues(A, B)[0])
    values, trace = common.circuit_eigenvalues(a.A, a.B)
    score, counts = common.copy_score(values), common.eigenvalue_counts(values)
    diagonal_sum = a.diagonal.sum(-1)
    for name, total in (("eigenvalues", values.sum(-1).real), ("diagonal", diagonal_sum)):
        bad = (total - trace).abs() > AGREE * values.abs().sum(-1)
        if bad.any():
            raise common.UserError(f"head 0.{int(bad.nonzero()[0])}: the sum of the {name} is not "
                                   "the trace: the numbers cannot be trusted (try --device cpu)")
    heads = [{"copy_score": score[h].item(), "trace": trace[h].item(),
              "diagonal_sum": diagonal_sum[h].item(), "eigenvalues": complex_list(values[h])}
             | {k: int(c[h]) for k, c in zip(("positive", "real_positive", "complex"), counts)}
             for h in range(len(values))]
    drawn = random_heads(a.model, a.choices["random_heads"], a.seed)
    scores = common.copy_score(drawn)
    positive, _, is_complex = common.eigenvalue_counts(drawn)
    return {"check": {"match": match, "rest": rest, "n_tokens": piece}, "heads": heads,
            "random": {"copy_score": scores.tolist(), "mean": scores.mean().item(),
                       "positive": positive.tolist(), "complex": is_complex.tolist(),
                       "eigenvalues": complex_list(drawn[0])}}


def print_eigen(r: dict, results: dict, log: common.Log) -> None:
    c, rank = r["check"], results["sections"]["sizes"]["rank"]
    n = c["n_tokens"]
    log("== 6. EIGENVALUES OF THE OV CIRCUITS THROUGH THE SMALL SIDE (float64)")
    log(f"  check on a {n}-token piece of head 0.0: {n} x {n} has {n} eigenvalues; the {rank} "
        f"largest match the {rank} x {rank} ones to {c['match']:.1e}; the other {n - rank} are at "
        f"most {c['rest']:.1e}")


def plot_eigenvalues(r: dict, results: dict):
    """The eigenvalues of every head and of one random head: direction, and size on a log scale."""
    panels = [(f"head 0.{h}", x["eigenvalues"], x["copy_score"])
              for h, x in enumerate(r["heads"])]
    panels.append(("a random head", r["random"]["eigenvalues"], r["random"]["copy_score"][0]))
    columns = math.ceil(len(panels) ** 0.5)
    rows = math.ceil(len(panels) / columns)
    figure, axes = common.new_figure(max(7, 2.3 * columns), 2.4 * rows + 1, rows, columns,
                                     squeeze=False, subplot_kw={"projection": "polar"})
    for ax in axes.flat[len(panels):]:
        ax.remove()
    for ax, (name, values, score) in zip(axes.flat, panels):
        size = [math.hypot(*v) for v in values]
        radius = [max(0, math.log10(s / max(size)) + DECADES) if s else 0 for s in size]
        ax.plot((0, 0), (0, DECADES), color="black", linewidth=1.2)  # the positive real axis
        ax.scatter([math.atan2(im, re) for re, im in values], radius, s=16, alpha=0.7, linewidth=0,
                   c=[common.COLOURS[0 if re > 0 else 5] for re, _ in values], clip_on=False,
                   zorder=3)
        ax.set(rlim=(0, DECADES), rticks=range(1, DECADES))
        ax.set_yticklabels([])
        ax.set_thetagrids((0, 90, 180, 270), ("+", "+i", "−", "−i"))
        ax.tick_params(pad=0)
        largest = f"{max(size):,.0f}" if max(size) >= 100 else f"{max(size):.3g}"
        ax.set_title(f"{name}: copy score {score:+.2f}\nlargest |λ| {largest}", fontsize=9)
    figure.supxlabel(
        "Distance from the centre: |λ| on a log scale, a factor of 10 from ring to ring, the\n"
        f"largest of the head at the rim, 1/{10**DECADES:,} of it or less at the centre.\n"
        "Black: the positive real axis. Blue: real part above 0, orange: below.",
        fontsize=9)
    common.headline(figure, results, f"the {len(panels[0][1])} non-zero eigenvalues λ of every OV "
                    "circuit")
    return figure


def plot_copy_scores(r: dict, results: dict):
    """The copy score of every head, the largest first, and the band of the random heads."""
    heads, random = names_of_heads(results), r["random"]["copy_score"]
    scores = [x["copy_score"] for x in r["heads"]]
    order = sorted(range(len(heads)), key=lambda h: -scores[h])
    figure, ax = common.new_figure(max(8, 0.6 * len(heads) + 1), 4.2)
    common.bars(ax, [heads[h] for h in order], {"copy score": [scores[h] for h in order]},
                "{:+.2f}")
    ax.axhspan(min(random), max(random), -0.01, 1.01, facecolor="0.85", edgecolor="black",
               linestyle="--", linewidth=0.8, zorder=0, label=f"{len(random)} random heads: "
               f"{min(random):+.3f} to {max(random):+.3f}")
    for text in ax.texts:
        text.set_bbox(dict(facecolor="white", linewidth=0, pad=0.8))
    ax.set(ylim=(-1.15, 1.15), ylabel="copy score  Σλ / Σ|λ|  (dimensionless)",
           xlabel="head (* leans on position)")
    ax.legend(handles=ax.patches[-1:], frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    common.headline(figure, results, "the copy score of every head, against random heads")
    return figure


# ------------------------------------------------------------------ 7. copying


def compute_copying(a: Analysis, results: dict) -> list[dict]:
    share = lambda yes: yes.double().mean().item()  # noqa: E731
    sources = [int(a.ranked[0]), int(a.ranked[-1])]
    return [{"diagonal_positive": share(diagonal > 0), "top1": share(ranks <= 1),
             "top5": share(ranks <= 5), "sources": sources}
            for diagonal, ranks in zip(a.diagonal, a.ranks)]


def print_copying(r: list[dict], results: dict, log: common.Log) -> None:
    heads, random = results["sections"]["eigen"]["heads"], results["sections"]["eigen"]["random"]
    sizes = results["sections"]["sizes"]
    n, (first, last) = sizes["rank"], r[0]["sources"]
    log("== 7. COPY SCORES OF THE OV CIRCUITS, AND THE OTHER MEASURES OF COPYING")
    for h, e in enumerate(heads):
        log(f"  head 0.{h}: copy score sum(l)/sum(|l|) = {e['copy_score']:+.3f}; {e['positive']}/"
            f"{n} with positive real part ({e['real_positive']} real and positive, {e['complex']} "
            f"complex); trace {e['trace']:,.0f} = sum of diagonal {e['diagonal_sum']:,.0f}")
    s, p, c = random["copy_score"], random["positive"], random["complex"]
    log(f"  {len(s)} random Gaussian heads of the same shapes: copy score from {min(s):+.3f} to "
        f"{max(s):+.3f} (mean {random['mean']:+.3f}); positive real part {min(p)} to {max(p)} of "
        f"{n}; complex {min(c)} to {max(c)} of {n}")
    log("  Head  Copy score  Diagonal > 0  Top-1 self  Top-5 self")
    for h, (e, m) in enumerate(zip(heads, r)):
        log(f"  0.{h:<4}  {e['copy_score']:+10.3f}  {m['diagonal_positive']:12.2f}  "
            f"{m['top1']:10.2f}  {m['top5']:10.2f}")
    every = last - first + 1 == sizes["d_vocab"]
    log(f"  (diagonal: of all {sizes['d_vocab']:,} tokens; self: of "
        f"{'all tokens' if every else f'tokens {first:,} to {last:,}'}, a tie is not first; real "
        f"or complex, positive or not: to {common.REAL:g} of |l|)")


def plot_copying(r: list[dict], results: dict):
    """The measures of copying side by side, one unit equally high in all."""
    heads, s = names_of_heads(results), results["sections"]
    first, last = r[0]["sources"]
    scores, some = [x["copy_score"] for x in s["eigen"]["heads"]], f"tokens {first:,} to {last:,}"
    all_tokens = f"all {s['sizes']['d_vocab']:,} tokens"
    measures = {"copy score": scores,
                f"diagonal > 0: share of {all_tokens} that raise themselves":
                    [x["diagonal_positive"] for x in r],
                f"top-1 self: share of {some} that raise no token more": [x["top1"] for x in r],
                f"top-5 self: share of {some} that are among the five they raise most":
                    [x["top5"] for x in r]}
    low = min(0, *scores) - 0.25
    figure, axes = common.new_figure(max(8, 0.6 * len(heads) + 1), 6.4, 4, sharex=True,
                                     height_ratios=(1.25 - low, 1.25, 1.25, 1.25))
    for ax, (name, values) in zip(axes, measures.items()):
        score = values is scores
        common.bars(ax, heads, {name: values}, "{:+.2f}" if score else "{:.2f}")
        ax.set(ylim=(low if score else 0, 1.25), ylabel="Σλ / Σ|λ|" if score else "share")
        ax.set_title(name, loc="left", fontsize=10)
    axes[-1].set_xlabel("head (* leans on position)")
    common.headline(figure, results, "the measures of copying side by side")
    return figure


# ------------------------------------------------------------------ what the text derives

RESTS = (0, 3, 4)  # the copying heads whose weight on near tokens the text bounds (section 4)
NEARLY_ALL = 7 / 8  # of the eigenvalues on the right: our reading of "nearly all" (section 7)


def compute_claims(a: Analysis, results: dict) -> dict:
    """What the article's sentences derive from the sections before; None where a row was skipped.
    Heads are found by rule, but for RESTS."""
    s = results["sections"]
    return {"d_model": a.model.cfg.d_model, "text_tokens": results["meta"]["n_tokens"],
            **word_claims(s), **head_claims(s)}


def word_claims(s: dict) -> dict:
    ralph, keep = s["at_work"]["ralph"], s["keep"]
    tokens, source, pushes = ralph["tokens"], ralph["source"], ralph.get("pushes", [])
    others = [x for h, x in enumerate(pushes) if h != ralph["head"]]
    out = {t["source"]: t.get("out") for t in s["skip_trigrams"] if t["words"] == "article"}
    large, paris = out[" large"], out[" Paris"]
    ratios = [p["ratio"] for p in keep.get("prompts", []) if p.get("ratio") is not None]
    ov, qk, (*rest, going) = keep.get("ov"), keep.get("qk", {}), BUG["dest"]
    return {
        "ralph": {"other_heads": s["sizes"]["n_heads"] - 1, "others_min": min(others, default=None),
                  "others_max": max(others, default=None), "tokens_back":
                  len(tokens) - 1 - tokens.index(source) if source in tokens else None},
        "large_raises": large and [w for w in ("large", "small") if w in large],
        "paris_raises_itself": paris and sum(w.strip() == "Paris" for w in paris),
        "keep": {"ratio_difference": ratios[0] - ratios[1] if len(ratios) == 2 else None,
                 "lowest_above_median": min(ov.values()) - keep["ov_median"] if ov else None,
                 "going_above_others": qk[going] - max(qk[w] for w in rest)
                 if len(qk) == len(BUG["dest"]) else None}}


def head_claims(s: dict) -> dict:
    position, heads = s["positional"], s["eigen"]["heads"]
    weights, text, lean = position["from_positions"], position["on_text"], position["lean"]
    name = lambda heads: [f"0.{h}" for h in heads]  # noqa: E731
    near = [h for h, x in enumerate(weights) if round(x[0] + x[1], 2) == 1]
    same = [weights[h][0] for h in near]
    right = [x["positive"] / s["sizes"]["rank"] for x in heads]
    scores, drawn = [x["copy_score"] for x in heads], s["eigen"]["random"]["copy_score"]
    negative = [h for h, x in enumerate(scores) if x < 0]
    others = [max(x) for h, x in enumerate(text) if h not in lean]
    return {
        "positional": {"n_lean": len(lean), "present_or_previous": name(near),
                       "same_min": min(same, default=None), "same_max": max(same, default=None)},
        "on_text": {"one_back": name(h for h in lean if max(text[h]) == text[h][1]),
                    "others_max": max(others, default=None),
                    "copying_max": max(max(x[:2]) for h, x in enumerate(text) if h in RESTS)},
        "eigen": {"rest": s["eigen"]["check"]["n_tokens"] - s["sizes"]["rank"],
                  "above_0_7": sum(x > 0.7 for x in scores),
                  "at_least_0_97": sum(round(x, 3) >= 0.97 for x in scores),
                  "nearly_all_right": name(h for h, x in enumerate(right) if x >= NEARLY_ALL),
                  "most_right": name(h for h, x in enumerate(right) if 0.5 < x < NEARLY_ALL),
                  "negative": name(negative), "negative_positional": len({*negative} & {*lean}),
                  "sums_differ": max(abs(x["trace"] - x["diagonal_sum"]) for x in heads)},
        "random": {"n": len(drawn), "copy_score_sd": statistics.stdev(drawn)}}


def print_claims(r: dict, results: dict, log: common.Log) -> None:
    w, p, t, k, e = (r[name] for name in ("ralph", "positional", "on_text", "keep", "eigen"))
    form = lambda x, spec: "-" if x is None else format(x, spec)  # noqa: E731
    heads = lambda names: ", ".join(names) or "none"  # noqa: E731
    named = heads([f"0.{h}" for h in RESTS])
    log(f"== WHAT THE TEXT DERIVES FROM THESE NUMBERS (heads found by rule, but for {named})")
    log(f"  at work: the other {w['other_heads']} heads add between {form(w['others_min'], '+.2f')}"
        f" and {form(w['others_max'], '+.2f')}; the name stands {form(w['tokens_back'], 'd')} "
        "tokens back")
    log(f"  of \"large\" and \"small\" the row of ' large' has {heads(r['large_raises'] or [])}; "
        f"its own word in the row of ' Paris': {form(r['paris_raises_itself'], 'd')} times")
    log(f"  {p['n_lean']} heads lean on position; with all weight on the token itself and the one "
        f"before: {heads(p['present_or_previous'])} (itself "
        f"{form(p['same_min'], '.2f')} to {form(p['same_max'], '.2f')})")
    log(f"  on text: leaning heads that put the most one back {heads(t['one_back'])}; heads that "
        f"do not lean at most {form(t['others_max'], '.3f')}; {named} "
        f"at most {t['copying_max']:.3f} on the token itself and the one before")
    log(f"  \"keep\": one ratio minus the other {form(k['ratio_difference'], '.1e')}; lowest word "
        f"minus median {form(k['lowest_above_median'], '+z.2f')}; going minus the other "
        f"destinations {form(k['going_above_others'], '+.2f')}")
    log(f"  copy score above 0.7: {e['above_0_7']} heads, 0.97 or more: {e['at_least_0_97']}, "
        f"below 0: {heads(e['negative'])} ({e['negative_positional']} of them lean on position); "
        f"standard deviation of the random heads {r['random']['copy_score_sd']:.3f}")
    log(f"  eigenvalues on the right, nearly all: {heads(e['nearly_all_right'])}, most: "
        f"{heads(e['most_right'])}; trace minus sum of diagonal at most {e['sums_differ']:.1e}; "
        f"{e['rest']} eigenvalues of the piece are left over")


# ------------------------------------------------------------------ beyond the article

# Two measures that say different things, and the tokens that show it: those that raise
# themselves but others more (rank > 5), those that do not (rank <= 5), those that lower themselves.
DISAGREE = [
    ("score above 0.9 but top-5 self below 0.05", "outranked",
     lambda m: m["copy_score"] > 0.9 and m["top5"] < 0.05),
    ("score above 0.9 but more than 5% of tokens lower themselves", "lowered",
     lambda m: m["copy_score"] > 0.9 and m["diagonal_positive"] < 0.95),
    ("more than 90% of tokens raise themselves but top-5 self below 0.05", "outranked",
     lambda m: m["diagonal_positive"] > 0.9 and m["top5"] < 0.05),
    ("score below 0.5 but top-5 self above 0.05", "among five",
     lambda m: m["copy_score"] < 0.5 and m["top5"] > 0.05),
    ("score below 0 but more than half of the tokens raise themselves", "outranked",
     lambda m: m["copy_score"] < 0 and m["diagonal_positive"] > 0.5),
]


def telling_tokens(a: Analysis, head: int, kind: str) -> list[dict]:
    """Three source tokens that show a disagreement, the clearest first, each with the diagonal
    entry, its own place in its row and the token that it raises most."""
    ids, rank = a.ranked, a.ranks[head]
    own = a.diagonal[head, ids]
    if kind == "lowered":
        clear, shows = -own, own < 0
    else:
        clear, shows = own, (own > 0) & ((rank > 5) if kind == "outranked" else (rank <= 5))
    best = [i for i in clear.sort(descending=True, stable=True).indices.tolist() if shows[i]]
    return [{"source": token_text(a.model, int(ids[i])), "diagonal": own[i].item(),
             "rank": int(rank[i]),
             "first": top_tokens(a.model, a.A[head, ids[i]] @ a.B[head], 1)[0]} for i in best[:3]]


def compute_beyond(a: Analysis, results: dict) -> dict:
    run, m = a.run, a.model
    z = common.attend(run.patterns[0], cen(run.x0) / run.scales[0], m.W_V[0])
    found = common.unembed(run, {"model": run.final}, z=z[:, None])
    removed = found.removed[:, 0]  # [head, batch, pos - 1]
    change = removed.mean(-1) if len(run.tokens) > 1 else removed[:, 0]
    increase, se = change.mean(-1).tolist(), (change.std(-1) / change.shape[-1] ** 0.5).tolist()
    condition = common.eigenvector_condition(a.A, a.B).tolist()
    heads = []
    for h, both in enumerate(zip(results["sections"]["eigen"]["heads"],
                                 results["sections"]["copying"])):
        heads.append({
            "condition": condition[h] if math.isfinite(condition[h]) else None,
            "loss_increase": increase[h], "loss_increase_se": se[h],
            "copies": both[0]["copy_score"] > COPIES, "matters": increase[h] - 2 * se[h] > MATTERS,
            "disagree": [{"measures": what, "tokens": telling_tokens(a, h, kind)}
                         for what, kind, applies in DISAGREE if applies(both[0] | both[1])]})
    return {"heads": heads, "loss_model": found.losses["model"].mean().item(),
            "n": change.shape[-1], "n_of": "sequences" if len(run.tokens) > 1 else "tokens"}


def print_beyond(r: dict, results: dict, log: common.Log) -> None:
    meta = results["meta"]
    log("== BEYOND THE ARTICLE: WHERE THE MEASURES OF COPYING DISAGREE, AND WHAT A HEAD IS WORTH")
    log(f"  loss of the model on the text ({meta['n_tokens']:,} tokens): {r['loss_model']:.3f} "
        "nats per token; a head is removed with patterns and scales kept (+- standard error over "
        f"{r['n']:,} {r['n_of']})")
    for h, x in enumerate(r["heads"]):
        condition = "infinite" if x["condition"] is None else f"{x['condition']:,.0f}"
        log(f"  head 0.{h}: condition number of the eigenvectors {condition} (1 if orthogonal); "
            f"loss without it {x['loss_increase']:+.3f} +- {x['loss_increase_se']:.3f}")
        for d in x["disagree"]:
            shown = ", ".join(f"{t['source']!r} {t['diagonal']:+.2f} (its own place {t['rank']:,}, "
                              f"first {t['first']!r})" for t in d["tokens"]) or "none tested"
            log(f"    {d['measures']}: {shown}")
    log(f"  copies: score above {COPIES}; matters: loss without it more than {MATTERS} up, by two "
        "standard errors")
    for text, copies, matters in (
            ("copies and matters", True, True), ("copies, not shown to matter", True, False),
            ("matters, does not copy", False, True)):
        heads = [f"0.{h}" for h, x in enumerate(r["heads"])
                 if (x["copies"], x["matters"]) == (copies, matters)]
        log(f"    {text}: {', '.join(heads) or 'none'}")


# ------------------------------------------------------------------ the reader's own


def compute_reader(a: Analysis, results: dict) -> dict:
    rows = []
    for w in a.sources:
        one = row({"head": None, "source": w}, lambda w=w: {"id": token_id(a.model, w)})
        rows += [one] if "skipped" in one else [
            {"head": h, "source": w} | skip_trigram(a, h, w) for h in range(a.model.cfg.n_heads)]
    return {"sources": rows, "prompt": reader_prompt(a, *a.prompt) if a.prompt else None}


def reader_prompt(a: Analysis, prompt: str, next: str) -> dict:
    """Every head's push on the next token, the sources it goes through, and the probability."""
    tokens = [token_text(a.model, i) for i in prompt_tokens(a.model, prompt)]

    def compute() -> dict:
        run, out = prompt_run(a.model, prompt), token_id(a.model, next)
        by_source = pushes(run, out)
        return {"p": next_probabilities(run)[out].item(), "pushes": by_source.sum(-1).tolist(),
                "through": by_source.tolist(), "attention": run.patterns[0, :, 0, -1].tolist()}

    return row({"prompt": prompt, "next": next, "tokens": tokens}, compute)


def print_reader(r: dict, results: dict, log: common.Log) -> None:
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
    ("sizes", compute_sizes, print_sizes),
    ("skip_trigrams", compute_skip_trigrams, print_skip_trigrams),
    ("at_work", compute_at_work, print_at_work),
    ("positional", compute_positional, print_positional),
    ("keep", compute_keep, print_keep),
    ("eigen", compute_eigen, print_eigen),
    ("copying", compute_copying, print_copying),
    ("claims", compute_claims, print_claims),
    ("beyond", compute_beyond, print_beyond),
    ("reader", compute_reader, print_reader),
]

FIGURES = [  # file name, section, plot
    ("part4_skip_trigrams", "skip_trigrams", plot_skip_trigrams),
    ("part4_at_work", "at_work", plot_at_work),
    ("part4_positional", "positional", plot_positional),
    ("part4_keep", "keep", plot_keep),
    ("part4_eigenvalues", "eigen", plot_eigenvalues),
    ("part4_copy_scores", "eigen", plot_copy_scores),
    ("part4_copying", "copying", plot_copying),
]
TABLES = {"skip_trigrams", "positional", "keep"}
SWEEPS = [  # in this order; the choices of one line jointly, each with the sections it changes
    {"table_layernorm": TABLES, "qk_scaled": TABLES},
    dict.fromkeys(("position_layernorm", "position_scaled", "position_biases"), {"positional"}),
    {"fold_value_biases": {"sizes", "at_work", "positional", "keep"}},
    {"random_heads": {"eigen"}},
]
SCRIPT = common.Script("circuits_part4.py", SECTIONS, FIGURES, PUBLISHED_MODEL, SWEEPS)


def parse(argv: list[str] | None):
    p = common.parser(__doc__, PUBLISHED_MODEL, TEXT_TOKENS, TEXT_TOKENS)
    p.add_argument("--source", action="append", default=[], metavar="WORD",
                   help="add this word's row for every head (repeatable)")
    p.add_argument("--prompt", metavar="TEXT", help="add the pushes on --next after this text")
    p.add_argument("--next", metavar="WORD", help="the next token that --prompt asks about")
    args = p.parse_args(argv)
    if (args.prompt is None) != (args.next is None):
        raise common.UserError("--prompt TEXT and --next WORD belong together: give both")
    words = "".join((*args.source, args.prompt or "", args.next or ""))
    if any("\ud800" <= c <= "\udfff" for c in words):  # bytes that the shell could not decode
        raise common.UserError("--source, --prompt and --next take UTF-8: mend the encoding")
    return args


@torch.no_grad()
def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    if done := common.without_model(SCRIPT, args):
        return done

    @functools.lru_cache(maxsize=1)
    def prepare(fold_value_biases: bool) -> dict:
        """What no other choice changes."""
        processing = common.PROCESSING | {"fold_value_biases": fold_value_biases}
        model, source = common.load_model(args.model, args.device, common.DTYPES[args.dtype], 1,
                                          processing)
        one = min(TEXT_TOKENS, model.cfg.n_ctx) if args.seq_len is None else args.seq_len
        n_tokens = one if args.tokens is None else args.tokens
        tokens, text = common.load_tokens(model, args.model, args.text, n_tokens, args.seq_len,
                                          default_len=min(TEXT_TOKENS, n_tokens))
        meta = common.run_meta(SCRIPT.file, source, text, args, {}) | {"processing": processing}
        return dict(
            run=common.freeze(model, tokens), A=model.W_E.double() @ model.W_V[0].double(),
            B=model.W_O[0].double() @ model.W_U.double(), meta=meta, seed=args.seed,
            sample=source["model"] == "mini-1l", sources=tuple(args.source),
            prompt=(args.prompt, args.next) if args.next is not None else None)

    def analyse(choices: dict) -> tuple[Analysis, dict]:
        a = Analysis(choices=choices, **prepare(choices["fold_value_biases"]))
        return a, a.meta | {"choices": choices}

    if args.sweep:
        return common.sweep(SCRIPT, args, analyse, OPEN)
    a, meta = analyse(CHOICES)
    return common.run_sections(SCRIPT, meta, args, a)


if __name__ == "__main__":
    sys.exit(common.run_script(main))
