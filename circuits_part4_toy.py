"""Part 4, one-layer models: every hand-sized example, small enough to check with a pencil.

    python circuits_part4_toy.py

Writes results/part4_toy.json (every number), results/part4_toy_stdout.txt (the log) and
figures/part4_toy_*. It reads no model and no text, and takes about three seconds, nearly all of
them for starting PyTorch and for the figures.

Each example goes through the kernels of common.py that the real model goes through. The article
writes M = P Q [out, source] for an OV circuit; the kernels take the factors of M^T [source, out].
All is written to nine decimals, so that 0.8 x 6 is 4.8 here as with a pencil.
"""

from __future__ import annotations

import math
import sys

import torch
from jaxtyping import Float
from torch import Tensor

import common
from common import tensor
from figures import part4 as pictures
from figures.charts import number, plain, vector
from figures.part4 import NAMES
from results import report, runner
from results.report import Section

KEEP = dict(entries={"mind": 2, "bay": 6}, weights={"in": 0.5, "at": 0.8})  # (section 1)
MATRICES = {  # M of a head on two tokens, and vectors to try (section 2)
    "copy": (((2, 1), (1, 2)), ((1, 1), (1, -1))),
    "swap": (((0, 1), (1, 0)), ((1, 1), (1, -1))),
    "rotation": (((0, -1), (1, 0)), ()),
    "pathological": (((-1, 6), (-1, 4)), ((2, 1), (3, 1))),
    "negative": (((-2, -1), (-1, -2)), ()),  # ours: the first with all its signs turned
}
P, Q = (1, 2, 0), (1, 1, 1)  # a column and a row (section 3)
PUSH = dict(entry=4, weights=(0.5, 0.1))  # (section 4)
# A one-layer model of four dimensions, tokens a, b, c, no positions and one head (section 5).
# The tokens stand at right angles to each other and to (1, 1, 1, 1); LayerNorm leaves them alone.
TOKENS = ((1, 1, -1, -1), (1, -1, 1, -1), (1, -1, -1, 1))
# Two rotations, times 5: the first turns a towards b, the second turns (1, 1, 1, 1) towards a.
TURN_AB = ((4, -2, 2, 1), (2, 4, 1, -2), (-2, 1, 4, 2), (1, 2, -2, 4))
TURN_ONES = ((4, -1, -2, -2), (-1, 4, -2, -2), (2, 2, 4, -1), (2, 2, -1, 4))


def tidy(x: Tensor):
    """A tensor as plain numbers, to nine decimals, without -0."""
    return (x.double().round(decimals=9) + 0.0).tolist()


def head_pushes(weights, entries) -> Float[Tensor, "destination out"]:
    """What one head adds to each logit through one source, by the kernels that run real heads.

    push[b, c] = A[b, source] M[c, source] ("Skip-trigrams"); the source's value is one number, 1.
    """
    A = tensor(weights)[None, None, :, None]
    M, one = tensor(entries), tensor([[[1]]])
    return common.write(common.attend(A, one, one), M[None, None])[0]


# ------------------------------------------------------------------ 1. keep


def compute_keep() -> dict:
    """("Skip-trigram bugs".) The destination sets the volume, the source alone sets the ratio."""
    entries, weights = KEEP["entries"], KEEP["weights"]
    pushes = head_pushes(list(weights.values()), list(entries.values()))
    return {"entries": entries, "weights": weights,
            "pushes": {b: dict(zip(entries, tidy(p))) for b, p in zip(weights, pushes)},
            "ratio": dict(zip(weights, tidy(pushes[:, 1] / pushes[:, 0])))}


def print_keep(r: dict, log: report.Log) -> None:
    log("== 1. THE FACTORED FORM: ONE HEAD READS \"keep\" (weight x entry of the OV column)")
    for b, weight in r["weights"].items():
        terms = ", ".join(f"{c} {weight:g} x {entry:g} = {r['pushes'][b][c]:.1f}"
                          for c, entry in r["entries"].items())
        log(f"  after \"{b}\": {terms}; ratio bay/mind {r['ratio'][b]:g}")


# ------------------------------------------------------------------ 2. eigenvalues


def angle(M: Float[Tensor, "2 2"]) -> float:
    """The angle between the two eigenvectors, in degrees."""
    v = torch.linalg.eig(M)[1]
    return tidy(torch.rad2deg((v[:, 0].conj() @ v[:, 1]).abs().clamp(max=1).acos()))


def describe(M: Float[Tensor, "2 2"], vectors) -> dict:
    """The measures of copying of an OV circuit on two tokens, as of a real head's."""
    A, B = M.mT, torch.eye(2, dtype=M.dtype)
    values, trace = common.circuit_eigenvalues(A, B)
    counts = [int(n) for n in common.eigenvalue_counts(values)]
    pairs = tidy(torch.view_as_real(values))
    return {"M": tidy(M), "columns": tidy(M.mT),
            "eigenvalues": sorted(pairs, reverse=True), "sum": tidy(values.sum().real),
            "copy_score": tidy(common.copy_score(values)),
            **dict(zip(("positive", "real_positive", "complex"), counts)),
            "diagonal": tidy(common.circuit_diagonal(A, B)), "trace": tidy(trace),
            "self_rank": common.self_rank(A[None], B[None], torch.arange(2))[0].tolist(),
            "angle": angle(M), "condition": tidy(common.eigenvector_condition(A, B)),
            "vectors": [eigenvector(M, v) for v in vectors]}


def eigenvector(M: Float[Tensor, "2 2"], v: tuple[float, float]) -> dict:
    """M v, and the factor by which it is longer than v."""
    x = tensor(v)
    return {"v": list(v), "Mv": tidy(M @ x), "factor": tidy(x @ M @ x / (x @ x))}


def compute_matrices() -> dict:
    """("Detecting copying with eigenvalues" to "Other ways to measure copying".)"""
    return {name: describe(tensor(M), vectors) for name, (M, vectors) in MATRICES.items()}


def print_matrices(r: dict, log: report.Log) -> None:
    log("== 2. EIGENVALUES OF FIVE HEADS ON TWO TOKENS (rows: out tokens; columns: tokens read)")
    log(f"  {'':<20}{'rows of M':<18}{'eigenvalues':<13}{'copy score':>10}   diagonal    sums")
    for name, m in r.items():
        values = ", ".join(number(v) for v in m["eigenvalues"])
        log(f"  {NAMES[name]:<20}{plain(m['M']):<18}{values:<13}{m['copy_score']:>10g}   "
            f"{vector(m['diagonal']):<10}{m['trace']:>3g} ={m['sum']:>3g}")
    log("  sums: of the diagonal (the trace) = of the eigenvalues")
    for name, m in r.items():
        for t in m["vectors"]:
            log(f"  {NAMES[name]}: M {vector(t['v'])} = {vector(t['Mv'])} = {t['factor']:g} "
                f"{vector(t['v'])}")
    log(f"  {'':<20}angle of the eigenvectors   their condition   token 1, 2 read: its own place")
    for name, m in r.items():
        log(f"  {NAMES[name]:<20}{m['angle']:>17.1f} degrees{m['condition']:>18.1f}   "
            f"{m['self_rank'][0]:>14}, {m['self_rank'][1]}")
    log(f"  the pathological one, reading token 1: logits {vector(r['pathological']['columns'][0])}"
        ", so token 1 lowers itself")


# ------------------------------------------------------------------ 3. AB and BA


def compute_products() -> dict:
    """("A trick to get the eigenvalues".) The large side P Q against the small side Q P."""
    p, q = tensor(P)[:, None], tensor(Q)[None]
    products = {"PQ": p @ q, "QP": q @ p}
    small, trace = common.circuit_eigenvalues(q.mT, p.mT)
    values = {"PQ": torch.linalg.eigvals(p @ q), "QP": small}
    return {"P": list(P), "Q": list(Q), "rows": {k: tidy(m) for k, m in products.items()},
            "eigenvalues": {k: sorted(tidy(v.real), reverse=True) for k, v in values.items()},
            "imaginary_max": tidy(values["PQ"].imag.abs().max()),
            "trace": {"PQ": tidy(products["PQ"].trace()), "QP": tidy(trace)},
            "norm": {k: tidy(m.norm()) for k, m in products.items()}}


def print_products(r: dict, log: report.Log) -> None:
    log("== 3. AB VERSUS BA: THE SAME NON-ZERO EIGENVALUES AND TRACE, NOT THE SAME NORM")
    log(f"  P = {vector(r['P'])} as a column, Q = {vector(r['Q'])} as a row")
    for k, label in (("PQ", "P Q"), ("QP", "Q P")):
        n = len(r["rows"][k])
        log(f"  {label}, {n} x {n}, rows {plain(r['rows'][k])}")
        log(f"    eigenvalues {', '.join(f'{v:g}' for v in r['eigenvalues'][k])}; trace "
            f"{r['trace'][k]:g}; norm {r['norm'][k]:.3f}")


# ------------------------------------------------------------------ 4. a push


def compute_push() -> dict:
    """("Skip-trigrams".) The volume changes, the song does not."""
    return PUSH | {"weights": list(PUSH["weights"]),
                   "pushes": tidy(head_pushes(PUSH["weights"], [PUSH["entry"]])[:, 0])}


def print_push(r: dict, log: report.Log) -> None:
    log("== 4. A PUSH IS THE WEIGHT TIMES THE OV ENTRY")
    log("  " + "; ".join(f"{weight:g} x {r['entry']:g} = {push:g}"
                         for weight, push in zip(r["weights"], r["pushes"])))


# ------------------------------------------------------------------ 5. a rotated stream


def toy_model() -> dict[str, Tensor]:
    """The head reads a, writes 2 a + 4 c, and b looks back at a with the score log 3."""
    E = tensor(TOKENS)
    a, b, c = E[:, :, None] / 4  # reading a token: 1 on itself, 0 on the others
    return {"E": E, "Q": b * math.log(3), "K": a, "V": a, "O": (8 * a + 16 * c).mT, "U": E.mT / 4}


def turned(model: dict, R: Float[Tensor, "4 4"], only: str = "EQKVOU") -> dict:
    """The matrices of a model, those named in `only` rotated: writers x R, readers R^T x."""
    writers = {k: model[k] @ R for k in "EO" if k in only}
    readers = {k: R.mT @ model[k] for k in "QKVU" if k in only}
    return model | writers | readers


def measures(m: dict) -> dict:
    """Tables, eigenvalue, pattern and logits of the text a b. No positions, no biases."""
    def layer_norm(x):
        return common.cen(x) / common.cen(x).square().mean(-1, keepdim=True).sqrt()

    x, (A, B) = m["E"][:2], (m["E"] @ m["V"], m["O"] @ m["U"])
    read = layer_norm(x)
    pattern = common.softmax_causal(read @ m["Q"] @ (read @ m["K"]).mT)
    head = common.write(common.attend(pattern[None, None], read[None], m["V"][None]), m["O"][None])
    return {"OV": tidy(A @ B), "QK": tidy(m["E"] @ m["Q"] @ (m["E"] @ m["K"]).mT),
            "eigenvalue": tidy(common.circuit_eigenvalues(A, B)[0].real[0]),
            "diagonal": tidy(common.circuit_diagonal(A, B)), "pattern": tidy(pattern),
            "logits": tidy(layer_norm(x + head[0]) @ m["U"])}


def compute_stream_rotation() -> dict:
    """The stream has no privileged basis: rotate it with all that reads or writes it.

    LayerNorm centres, so only a rotation that keeps the direction (1, 1, 1, 1) changes nothing;
    tables and eigenvalues, which leave LayerNorm out, stay the same under any other too.
    """
    model, R, other = toy_model(), tensor(TURN_AB) / 5, tensor(TURN_ONES) / 5
    found = {"before": measures(model), "after": measures(turned(model, R)),
             "embedding_only": measures(turned(model, R, "E")),
             "ones_moved": measures(turned(model, other))}
    changes = [(tensor(v) - tensor(found["after"][k])).abs().max()
               for k, v in found["before"].items()]
    return {"R": tidy(R), "max_change": tidy(torch.stack(changes).max()), **found}


def short(rows: list[list[float]]) -> str:
    """Rows to three decimals, without -0."""
    return plain([[round(v, 3) + 0.0 for v in row] for row in rows])


def print_stream_rotation(r: dict, log: report.Log) -> None:
    log("== 5. A ROTATED STREAM: NO TABLE ENTRY, EIGENVALUE, PATTERN OR LOGIT CHANGES")
    log(f"  tokens a, b, c {plain(TOKENS)}; the text is: a b")
    five = [[round(5 * v, 3) for v in x] for x in r["R"]]
    log(f"  rows of the rotation, times 5: {plain(five)}")
    for name, label in (("before", "as it was"), ("after", "all rotated"),
                        ("embedding_only", "only the embedding rotated"),
                        ("ones_moved", "all rotated, and (1, 1, 1, 1) moved")):
        m = r[name]
        log(f"  {label}: eigenvalue {m['eigenvalue']:g}")
        log(f"    OV {short(m['OV'])}; QK {short(m['QK'])}")
        log(f"    pattern {short(m['pattern'])}; logits {short(m['logits'])}")
    log(f"  largest change with all rotated: {r['max_change']:g}")


# ------------------------------------------------------------------ 6. size


def compute_sizes() -> dict:
    return {"d_vocab": 50_000, "entries_per_circuit": 50_000**2}


def print_sizes(r: dict, log: report.Log) -> None:
    log("== 6. HOW BIG AN EXPANDED CIRCUIT IS")
    log(f"  {r['d_vocab']:,} x {r['d_vocab']:,} tokens: {r['entries_per_circuit'] / 1e9:g} billion "
        "entries")


SECTIONS = [
    Section("keep", compute_keep, print_keep),
    Section("matrices", compute_matrices, print_matrices),
    Section("products", compute_products, print_products),
    Section("push", compute_push, print_push),
    Section("stream_rotation", compute_stream_rotation, print_stream_rotation),
    Section("sizes", compute_sizes, print_sizes),
]
SCRIPT = report.Script("circuits_part4_toy.py", SECTIONS, pictures.TOY_FIGURES)


def main(argv: list[str] | None = None) -> dict:
    return runner.run_toy(SCRIPT, __doc__, argv)


if __name__ == "__main__":
    sys.exit(runner.run_script(main))
