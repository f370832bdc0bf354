"""Part 5, two-layer models: every hand-sized example, small enough to check with a pencil.

    python circuits_part5_toy.py

Writes results/part5_toy.json (every number), results/part5_toy_stdout.txt (the log) and
figures/part5_toy_*.png and .svg. It reads no model and no text, and takes about three seconds,
most of them for starting PyTorch.

Each example goes through the kernels of common.py that the real model goes through. The article
writes column vectors, the kernels take row vectors: its W is W^T here, and a head that reads
dimension 1 and writes 2 into dimension 3 has W_V = e1 (a column) and W_O = 2 e3 (a row).
"""

from __future__ import annotations

import sys

import torch
from jaxtyping import Float
from torch import Tensor

import common
from common import tensor
from figures import part5 as pictures
from figures.charts import plain, vector
from results import report, runner
from results.report import Section

X0 = (1, 2, 3)  # the stream of one number a token (sections 1 and 8)
W_1, W_2 = 0.5, 2  # the OV "matrices" of the two heads
A_1 = ((1, 0, 0), (1, 0, 0), (0, 1, 0))  # each token reads the one before it, token 1 itself
A_2 = ((1, 0, 0), (0.5, 0.5, 0), (0, 0, 1))  # token 2 reads tokens 1 and 2 half each
Q_DIRECT, Q_MOVED, K_DIRECT, K_MOVED = (1, 0), (0, 1), (2, 1), (1, 3)
LATER_HEADS = {  # the dimensions that query and key read (section 4)
    "head_2": (1, 3),
    "third_head": (1, 2),  # the article names only its key
    "other_query": (2, 3),  # ours, to tell the first published score from the corrected one
}
MODELS = {"ours": (2, 8), "paper": (2, 12), "larger": (12, 12)}  # layers, heads of a layer


def run_head(
    A: Float[Tensor, "pos pos"], x: Float[Tensor, "pos d"], W: Float[Tensor, "d d"]
) -> Float[Tensor, "pos d"]:
    """What one head adds to a stream x: A x W^T, by the kernels that run the real model's heads."""
    W_V = torch.eye(x.shape[1], dtype=x.dtype)[None]
    return common.write(common.attend(A[None, None], x[None], W_V), W.mT[None])[0]


def row(label: str, values, width: int = 9) -> str:
    return f"  {label:<36}" + "".join(f"{v:>{width}g}" for v in values)


# ------------------------------------------------------------------ 1. paths


def compute_path_expansion() -> dict:
    """("The logits as a sum of paths".) The heads' terms one by one, and the model run normally."""
    x0, A1, A2 = tensor(X0)[:, None], tensor(A_1), tensor(A_2)
    w1, w2 = tensor([[W_1]]), tensor([[W_2]])
    head_1 = run_head(A1, x0, w1)
    paths = {"direct": x0, "head_1": head_1, "head_2": run_head(A2, x0, w2),
             "virtual": run_head(A2, head_1, w2)}
    x1 = x0 + run_head(A1, x0, w1)
    x2 = x1 + run_head(A2, x1, w2)
    total = torch.stack(list(paths.values())).sum(0)
    return {"x0": flat(x0), "A1": A1.tolist(), "A2": A2.tolist(), "w1": W_1, "w2": W_2,
            "paths": {k: flat(v) for k, v in paths.items()}, "sum": flat(total),
            "token_3": [v[2].item() for v in paths.values()],
            "x1": flat(x1), "x2": flat(x2), "max_abs_diff": (total - x2).abs().max().item()}


def flat(x: Float[Tensor, "pos 1"]) -> list[float]:
    return x[:, 0].tolist()


def print_path_expansion(r: dict, log: report.Log) -> None:
    log("== 1. FOUR PATHS ADD UP TO A TWO-LAYER OUTPUT (a stream of one number per token)")
    log("  " + " " * 36 + "".join(f"{f'token {i}':>9}" for i in (1, 2, 3)))
    for name, label in pictures.path_labels(r).items():
        log(row(label, r["paths"][name]))
    log(row("sum of the four paths", r["sum"]))
    log(row("run the normal way, after layer 1", r["x1"]))
    log(row("run the normal way, after layer 2", r["x2"]))
    log(f"  token 3: {' + '.join(f'{v:g}' for v in r['token_3'])} = {r['sum'][2]:g}; "
        f"max |diff| over all tokens = {r['max_abs_diff']:g}")


# ------------------------------------------------------------------ 2. patterns


def compute_previous_tokens() -> dict:
    """("Virtual attention heads".) Two previous-token patterns on four tokens, multiplied."""
    A = tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]])
    product = A @ A
    return {"pattern": A.tolist(), "product": product.tolist(),
            "pattern_reads": (A.argmax(1) + 1).tolist(),
            "product_reads": (product.argmax(1) + 1).tolist(),
            "row_sums": product.sum(1).tolist(), "future_max": product.triu(1).max().item(),
            "pattern_back": one_and_two_back(A), "product_back": one_and_two_back(product)}


def one_and_two_back(pattern: Float[Tensor, "query key"]) -> list[float]:
    """The mean attention 1 back and 2 back."""
    return [common.mean_attention(pattern[None], back).item() for back in (1, 2)]


def print_previous_tokens(r: dict, log: report.Log) -> None:
    log("== 2. TWO PREVIOUS-TOKEN PATTERNS MULTIPLIED: A VIRTUAL HEAD THAT LOOKS TWO BACK")
    log("    each of the two, and their product (rows: the token that reads):")
    for left, right in zip(r["pattern"], r["product"]):
        log("  " + "".join(f"{v:>5g}" for v in left) + "     " + "".join(f"{v:>5g}" for v in right))
    for name, label in (("pattern", "one pattern"), ("product", "the product")):
        one, two = r[f"{name}_back"]
        log(f"  {label}: tokens 1 to 4 read {r[f'{name}_reads']}; mean weight 1 back {one:.2f}, "
            f"2 back {two:.2f}")
    log(f"  rows of the product add up to {[round(v, 2) for v in r['row_sums']]}; future entries "
        f"{r['future_max']:g}")


# ------------------------------------------------------------------ 3. one score


def compute_score_terms() -> dict:
    """("The attention scores as a sum of paths".) (q_d + q_h) . (k_d + k_h), multiplied out."""
    q, k = tensor([Q_DIRECT, Q_MOVED]), tensor([K_DIRECT, K_MOVED])
    (none, by_key), (by_query, both) = (q @ k.mT).tolist()
    return {"q_d": q[0].tolist(), "q_h": q[1].tolist(), "k_d": k[0].tolist(), "k_h": k[1].tolist(),
            "terms": {"none": none, "Q": by_query, "K": by_key, "QK": both},
            "sum": none + by_query + by_key + both, "q": q.sum(0).tolist(), "k": k.sum(0).tolist(),
            "score": (q.sum(0) @ k.sum(0)).item()}


def print_score_terms(r: dict, log: report.Log) -> None:
    log("== 3. ONE ATTENTION SCORE AS FOUR TERMS (d: direct, h: moved by a head)")
    for name, label, a, b in (("none", "no composition", "q_d", "k_d"),
                              ("Q", "Q-composition", "q_h", "k_d"),
                              ("K", "K-composition", "q_d", "k_h"), ("QK", "both", "q_h", "k_h")):
        log(f"  {label:<15} {a} . {b} = {vector(r[a])} . {vector(r[b])} = {r['terms'][name]:g}")
    log(f"  sum of the four {r['sum']:g}; the score itself {vector(r['q'])} . {vector(r['k'])} = "
        f"{r['score']:g}")


# ------------------------------------------------------------------ 4. composition


def basis(*dimensions: int) -> Float[Tensor, "head 3 1"]:
    """For each dimension, counted from 1, the matrix that reads it: a column of W_Q, W_K or W_V."""
    return torch.eye(3, dtype=torch.float64)[[d - 1 for d in dimensions]][..., None]


def scores(W_V: Tensor, W_O: Tensor, W_Q: Tensor, W_K: Tensor) -> dict:
    """K- and Q-composition of every later head with head 1, as defined and as first published."""
    return {name: {kind: score(W_V, W_O, *pair)[:, 0].tolist()
                   for kind, pair in (("K", (W_K, W_Q)), ("Q", (W_Q, W_K)))}
            for name, score in (("corrected", common.composition_scores),
                                ("first_published", common.first_published_scores))}


def compute_composition() -> dict:
    """("Measuring composition from the weights".) Head 1 reads 1 and writes it, doubled, into 3."""
    W_V, W_O = basis(1), 2 * basis(3).mT
    W_Q, W_K = (basis(*d) for d in zip(*LATER_HEADS.values()))
    W_OV, W_QK = (W_V @ W_O).mT[0], (W_Q @ W_K.mT)[0]  # the article's, for column vectors
    example = tensor([[1, 2], [2, 0]])
    found = scores(W_V, W_O, W_Q, W_K)
    heads = {name: {"query": q, "key": k} | {
        f"{kind}{end}": found[form][kind][i] for kind in "KQ"
        for form, end in (("corrected", ""), ("first_published", "_first_published"))}
        for i, (name, (q, k)) in enumerate(LATER_HEADS.items())}
    return {"example": example.tolist(), "example_norm": example.norm().item(),
            "W_OV": W_OV.tolist(), "W_QK": W_QK.tolist(), "product": (W_QK @ W_OV).tolist(),
            "norm_product": (W_QK @ W_OV).norm().item(), "norm_QK": W_QK.norm().item(),
            "norm_OV": W_OV.norm().item(), "heads": heads}


def print_composition(r: dict, log: report.Log) -> None:
    log("== 4. COMPOSITION SCORES ON A THREE-DIMENSIONAL STREAM (head 1 writes dimension 1, "
        "doubled, into 3)")
    log(f"  the norm of the matrix with rows {plain(r['example'])}: {r['example_norm']:g}")
    for name, label, norm in (("W_OV", "W_OV of head 1", "norm_OV"),
                              ("W_QK", "W_QK of head 2", "norm_QK"),
                              ("product", "W_QK W_OV", "norm_product")):
        log(f"  {label}, norm {r[norm]:g}:")
        for entries in r[name]:
            log("    " + "".join(f"{v:>6g}" for v in entries))
    log(f"  K-composition of head 2: {r['norm_product']:g} / ({r['norm_QK']:g} x {r['norm_OV']:g}) "
        f"= {r['heads']['head_2']['K']:g}")
    log(f"    {'':<45}corrected   as first published")
    log(f"    {'the later head':<45}  K    Q       K    Q")
    labels = {"head_2": "head 2", "third_head": "a third head", "other_query": "a fourth (ours)"}
    for name, h in r["heads"].items():
        what = f"{labels[name]}: query reads {h['query']}, key reads {h['key']}"
        log(f"    {what:<45}{h['K']:>3g}  {h['Q']:>3g}     {h['K_first_published']:>3g}  "
            f"{h['Q_first_published']:>3g}")


# ------------------------------------------------------------------ 5. the correction


def compute_norms() -> dict:
    """("The correction".) u v and v u: the same trace and eigenvalues, not the same norm."""
    u, v = tensor([[1], [0]]), tensor([[0, 1]])
    products = {"uv": u @ v, "vu": v @ u}
    return {"u": u.tolist(), "v": v.tolist(),
            "norm": {k: m.norm().item() for k, m in products.items()},
            "trace": {k: m.trace().item() for k, m in products.items()}}


def print_norms(r: dict, log: report.Log) -> None:
    log("== 5. THE NORM OF A PRODUCT DEPENDS ON ITS ORDER (u a column, v a row)")
    log(f"  u has rows {plain(r['u'])}, v has the row {plain(r['v'])}")
    for name, label in (("uv", "u v"), ("vu", "v u")):
        log(f"  {label}: norm {r['norm'][name]:g}, trace {r['trace'][name]:g}")


# ------------------------------------------------------------------ 6. counting


def compute_counting() -> dict:
    """("Virtual attention heads".) Pairs of layers times pairs of heads, one from each."""
    return {name: {"layers": layers, "heads_per_layer": heads, "heads": layers * heads,
                   "layer_pairs": layers * (layers - 1) // 2,
                   "virtual_order_2": layers * (layers - 1) // 2 * heads**2}
            for name, (layers, heads) in MODELS.items()}


def print_counting(r: dict, log: report.Log) -> None:
    log("== 6. COUNTING VIRTUAL HEADS OF TWO HEADS")
    labels = {"ours": "our model", "paper": "the paper's", "larger": "a larger one"}
    for name, m in r.items():
        log(f"  {labels[name]:<13}{m['layers']:>2} layers of {m['heads_per_layer']:>2} heads: "
            f"{m['heads']:>3} heads; pairs of layers {m['layer_pairs']:>2} x "
            f"{m['heads_per_layer'] ** 2:>3} = {m['virtual_order_2']:>5,} virtual heads")


# ------------------------------------------------------------------ 7. identities


def compute_sum_of_heads() -> dict:
    """Concatenate the heads' results and project once, or project each and add: the same."""
    z = tensor([[[1, 0], [2, 1]], [[0, 3], [1, 1]]])  # [head, pos, d_head]
    W_O = tensor([[[1, 0, 2], [0, 1, 0]], [[0, 1, 1], [2, 0, 0]]])  # [head, d_head, d_model]
    heads = z @ W_O
    concatenated = torch.cat(list(z), 1) @ torch.cat(list(W_O), 0)
    kernel = common.write(z[:, None], W_O)[0]
    return {"z": z.tolist(), "W_O": W_O.tolist(), "heads": heads.tolist(),
            "sum": heads.sum(0).tolist(), "concatenated": concatenated.tolist(),
            "kernel": kernel.tolist()}


def print_sum_of_heads(r: dict, log: report.Log) -> None:
    log("== 7. CONCATENATE AND PROJECT, OR ADD THE HEADS (two heads, two tokens, three dimensions)")
    for h, rows in enumerate(r["heads"], 1):
        log(f"  head {h}: z = {plain(r['z'][h - 1])}, z W_O = {plain(rows)}")
    log(f"  the heads added: {plain(r['sum'])}; concatenated and projected: "
        f"{plain(r['concatenated'])}")


def compute_mixed_product() -> dict:
    """(A2 x W2)(A1 x W1) = (A2 A1) x (W2 W1), x the tensor product ("The derivation")."""
    A1, A2 = tensor(A_1), tensor(A_2)
    W1, W2 = tensor([[1, 2], [0, 1]]), tensor([[0, 1], [1, 0]])
    x = tensor([[1, 0], [0, 1], [1, 1]])
    two_steps = run_head(A2, run_head(A1, x, W1), W2)
    one_step = run_head(A2 @ A1, x, W2 @ W1)
    left = torch.kron(A2, W2) @ torch.kron(A1, W1)
    right = torch.kron(A2 @ A1, W2 @ W1)
    return {"W1": W1.tolist(), "W2": W2.tolist(), "A2A1": (A2 @ A1).tolist(),
            "W2W1": (W2 @ W1).tolist(), "x": x.tolist(), "two_steps": two_steps.tolist(),
            "one_step": one_step.tolist(), "kronecker": right.tolist(),
            "max_abs_diff": (left - right).abs().max().item()}


def print_mixed_product(r: dict, log: report.Log) -> None:
    log("== 8. TWO HEADS IN A ROW ARE ONE: (A2 x W2)(A1 x W1) = (A2 A1) x (W2 W1)")
    log(f"  rows of W1 {plain(r['W1'])}, of W2 {plain(r['W2'])}, of W2 W1 {plain(r['W2W1'])}")
    log(f"  rows of A2 A1 {plain(r['A2A1'])}, with A1 and A2 of section 1")
    log(f"  three tokens {plain(r['x'])}: head 1, then head 2 {plain(r['two_steps'])}")
    log(f"    the virtual head at once {plain(r['one_step'])}; the two sides as 6 x 6 matrices: "
        f"max |diff| = {r['max_abs_diff']:g}")


def compute_rotation() -> dict:
    """The stream has no privileged basis: rotate it with all that reads or writes it.

    R turns dimension 1 into 2, 2 into 3, 3 into 1. It keeps the direction (1, 1, 1), since
    LayerNorm centres: cen(x R) = cen(x) R.
    """
    R = tensor([[0, 1, 0], [0, 0, 1], [1, 0, 0]])
    W_V, W_O = basis(1), 2 * basis(3).mT
    W_Q, W_K = (basis(*d) for d in zip(*LATER_HEADS.values()))
    x = tensor([[1, 2, 6]])
    return {"R": R.tolist(), "before": scores(W_V, W_O, W_Q, W_K),
            "after": scores(R.mT @ W_V, W_O @ R, R.mT @ W_Q, R.mT @ W_K),
            "one_side_only": scores(W_V, W_O, R.mT @ W_Q, R.mT @ W_K),
            "centre_then_rotate": (common.cen(x) @ R).tolist(),
            "rotate_then_centre": common.cen(x @ R).tolist()}


def print_rotation(r: dict, log: report.Log) -> None:
    log("== 9. A ROTATED STREAM: NO COMPOSITION SCORE CHANGES (dimensions 1, 2, 3 become 2, 3, 1)")
    for name, label in (("before", "as it was"), ("after", "all matrices rotated"),
                        ("one_side_only", "only the later heads rotated")):
        s = r[name]["corrected"]
        log(f"  {label:<29} K {vector(s['K'])}, Q {vector(s['Q'])}")
    log(f"  (1, 2, 6): centred, then rotated {plain(r['centre_then_rotate'])}; rotated, then "
        f"centred {plain(r['rotate_then_centre'])}")


def compute_sizes() -> dict:
    """Parameters of a layer in units of d_model^2, an MLP with 4 d_model hidden units."""
    attention, mlp, widening, layer = 4, 2 * 4, 4, 25
    return {"attention": attention, "mlp": mlp, "mlp_share": mlp / (attention + mlp),
            "layer": layer, "layers": 50, "neurons_per_dimension": widening * layer}


def print_sizes(r: dict, log: report.Log) -> None:
    log("== 10. WHERE THE PARAMETERS AND THE NEURONS OF A MODEL WITH MLPS ARE")
    log(f"  a layer: attention {r['attention']} d^2, MLP {r['mlp']} d^2: MLPs have "
        f"{r['mlp_share']:.3f} of the parameters")
    log(f"  layer {r['layer']} of {r['layers']}: {r['neurons_per_dimension']} neurons before it "
        "for every dimension of the stream")


SECTIONS = [
    Section("path_expansion", compute_path_expansion, print_path_expansion),
    Section("previous_tokens", compute_previous_tokens, print_previous_tokens),
    Section("score_terms", compute_score_terms, print_score_terms),
    Section("composition", compute_composition, print_composition),
    Section("norms", compute_norms, print_norms),
    Section("counting", compute_counting, print_counting),
    Section("sum_of_heads", compute_sum_of_heads, print_sum_of_heads),
    Section("mixed_product", compute_mixed_product, print_mixed_product),
    Section("rotation", compute_rotation, print_rotation),
    Section("sizes", compute_sizes, print_sizes),
]
SCRIPT = report.Script("circuits_part5_toy.py", SECTIONS, pictures.TOY_FIGURES)


def main(argv: list[str] | None = None) -> dict:
    return runner.run_toy(SCRIPT, __doc__, argv)


if __name__ == "__main__":
    sys.exit(runner.run_script(main))
