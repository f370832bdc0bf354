"""A slow oracle: every number of part 4 from its definition, in float64 numpy.

It shares nothing with the scripts. Where they keep a circuit factored, here it is a dense
d_vocab x d_vocab matrix; where they go through the d_head x d_head side, here all d_vocab
eigenvalues are taken and the d_head largest kept; the model itself runs as loops.

`w` is a dict of arrays under TransformerLens names, of a one-layer model:

    W_E [d_vocab, d_model]   W_pos [n_ctx, d_model]   W_U [d_model, d_vocab]   b_U [d_vocab]
    W_Q, W_K, W_V [head, d_model, d_head]             b_Q, b_K, b_V [head, d_head]
    W_O [head, d_head, d_model]                       b_O [d_model]            eps

Vectors are rows; circuits are [source, out] and [destination, source].
"""

import math

import numpy as np

NAMES = ("W_E", "W_pos", "W_U", "b_U", "W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "W_O", "b_O")
PER_HEAD = NAMES[4:]


def weights(model) -> dict:
    """The arrays of a one-layer TransformerLens model, its layer axis taken off."""
    w = {k: getattr(model, k).detach().cpu().double().numpy() for k in NAMES}
    return {k: v[0] if k in PER_HEAD else v for k, v in w.items()} | {"eps": model.cfg.eps}


def centred(x):
    return x - sum(x) / len(x)


def norm_scale(x, eps):
    """LayerNorm's scale of one vector: sqrt(mean of cen(x)^2 + eps)."""
    return math.sqrt(sum(v * v for v in centred(x)) / len(x) + eps)


def layer_norm(x, eps):
    return centred(x) / norm_scale(x, eps)


def softmax(scores):
    e = np.exp(np.array(scores) - max(scores))
    return e / e.sum()


# ------------------------------------------------------------------ the model


def forward(w: dict, ids: list[int]) -> dict:
    """One sequence, position by position and head by head.

    Returns patterns [head][i][j] (0 above the diagonal), values [head][j], what every head adds
    [head][i], the final scales [i] and the logits [i].
    """
    n, heads = len(ids), len(w["W_Q"])
    x = [w["W_E"][t] + w["W_pos"][i] for i, t in enumerate(ids)]
    read = [layer_norm(v, w["eps"]) for v in x]
    pattern = np.zeros((heads, n, n))
    values = [[read[j] @ w["W_V"][h] + w["b_V"][h] for j in range(n)] for h in range(heads)]
    added = [[None] * n for _ in range(heads)]
    scales, logits = [], []
    for i in range(n):
        final = x[i] + w["b_O"]
        for h in range(heads):
            q = read[i] @ w["W_Q"][h] + w["b_Q"][h]
            scores = [q @ (read[j] @ w["W_K"][h] + w["b_K"][h]) / math.sqrt(len(q))
                      for j in range(i + 1)]
            pattern[h, i, : i + 1] = softmax(scores)
            z = sum(pattern[h, i, j] * values[h][j] for j in range(i + 1))
            added[h][i] = z @ w["W_O"][h]
            final = final + added[h][i]
        scales.append(norm_scale(final, w["eps"]))
        logits.append(layer_norm(final, w["eps"]) @ w["W_U"] + w["b_U"])
    return {"ids": ids, "pattern": pattern, "values": values, "added": added, "x": x,
            "scales": scales, "logits": logits}


def push(w: dict, run: dict, head: int, out: int, source: int | None = None) -> float:
    """The head's push on the logit of `out` at the last position; through one position alone."""
    last = len(run["ids"]) - 1
    total = 0.0
    for j in range(last + 1) if source is None else [source]:
        term = run["pattern"][head, last, j] * run["values"][head][j] @ w["W_O"][head]
        total += centred(term) @ w["W_U"][:, out] / run["scales"][last]
    return total


def direct_push(w: dict, run: dict, out: int) -> float:
    """The push of embedding + position on the logit of `out` at the last position."""
    return centred(run["x"][-1]) @ w["W_U"][:, out] / run["scales"][-1]


def mean_on_start(runs: list[dict], head: int) -> float:
    """Mean of A[i, 0] over all rows of all sequences."""
    seen = [run["pattern"][head, i, 0] for run in runs for i in range(len(run["ids"]))]
    return sum(seen) / len(seen)


def mean_attention(runs: list[dict], head: int, back: int) -> float:
    """Mean of A[i, i - back] over the rows i >= back of all sequences."""
    seen = [run["pattern"][head, i, i - back]
            for run in runs for i in range(back, len(run["ids"]))]
    return sum(seen) / len(seen)


def loss(w: dict, runs: list[dict], without: int | None = None) -> float:
    """Mean of -log p(next token); one head's term taken away, the run's scales kept."""
    return sum(map(sum, token_losses(w, runs, without))) / sum(len(r["ids"]) - 1 for r in runs)


def loss_error(w: dict, runs: list[dict], without: int) -> float:
    """Standard error of the loss without a head minus the loss: over runs, or one run's tokens."""
    pairs = zip(token_losses(w, runs, without), token_losses(w, runs))
    change = [[a - b for a, b in zip(*pair)] for pair in pairs]
    samples = [sum(c) / len(c) for c in change] if len(change) > 1 else change[0]
    mean = sum(samples) / len(samples)
    variance = sum((x - mean) ** 2 for x in samples) / (len(samples) - 1)
    return math.sqrt(variance / len(samples))


def token_losses(w: dict, runs: list[dict], without: int | None = None) -> list[list[float]]:
    """-log p(next token) of every run and position."""
    found = []
    for run in runs:
        total: list[float] = []
        found.append(total)
        for i in range(len(run["ids"]) - 1):
            logits = run["logits"][i]
            if without is not None:
                term = centred(run["added"][without][i] - w["b_V"][without] @ w["W_O"][without])
                logits = logits - term @ w["W_U"] / run["scales"][i]
            total.append(-math.log(softmax(logits)[run["ids"][i + 1]]))
    return found


# ------------------------------------------------------------------ the two circuits, dense


def ov_circuit(w: dict, head: int) -> np.ndarray:
    """[source, out]"""
    return w["W_E"] @ w["W_V"][head] @ w["W_O"][head] @ w["W_U"]


def qk_circuit(w: dict, head: int, scaled: bool = False, normed: bool = False) -> np.ndarray:
    """[destination, source]"""
    E = np.array([layer_norm(e, w["eps"]) for e in w["W_E"]]) if normed else w["W_E"]
    dense = E @ w["W_Q"][head] @ w["W_K"][head].T @ E.T
    return dense / math.sqrt(w["W_Q"].shape[-1]) if scaled else dense


def top(values, k: int) -> list[int]:
    """Ids of the k largest, of equal ones the lower first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def median(values) -> float:
    s = sorted(values)
    n = len(s)
    return (s[(n - 1) // 2] + s[n // 2]) / 2


def self_rank(row, token: int) -> int:
    """1 + the number of other tokens with an entry at least as large."""
    return 1 + sum(1 for t, v in enumerate(row) if t != token and v >= row[token])


def position_weights(w: dict, head: int, query: int, normed=True, scaled=True, biases=True):
    """Softmax over the keys 0 .. query, from the position embeddings alone."""
    x = [layer_norm(p, w["eps"]) if normed else p for p in w["W_pos"][: query + 1]]
    q = x[query] @ w["W_Q"][head] + (w["b_Q"][head] if biases else 0)
    keys = [v @ w["W_K"][head] + (w["b_K"][head] if biases else 0) for v in x]
    return softmax([q @ k / (math.sqrt(len(q)) if scaled else 1) for k in keys])


# ------------------------------------------------------------------ eigenvalues of dense matrices


def largest_eigenvalues(dense: np.ndarray, k: int) -> np.ndarray:
    """The k largest in size, of all."""
    values = np.linalg.eigvals(dense)
    return values[np.argsort(-np.abs(values))][:k]


def copy_score(values) -> float:
    return sum(v.real for v in values) / sum(abs(v) for v in values)


def counts(values, threshold: float) -> tuple[int, int, int]:
    """Positive real part; real and positive; complex."""
    positive = [v.real > threshold * abs(v) for v in values]
    is_complex = [abs(v.imag) > threshold * abs(v) for v in values]
    return (sum(positive), sum(p and not c for p, c in zip(positive, is_complex)),
            sum(is_complex))


def eigenvector_condition(dense: np.ndarray, k: int) -> float:
    """Of the unit eigenvectors of the k largest eigenvalues of dense^T ([out, source])."""
    values, vectors = np.linalg.eig(dense.T)
    v = vectors[:, np.argsort(-np.abs(values))[:k]]
    s = np.linalg.svd(v / np.sqrt((np.abs(v) ** 2).sum(0)), compute_uv=False)
    return s[0] / s[-1]


def same_numbers(a, b, atol: float) -> bool:
    """Two lists of complex numbers, whatever their order: each takes the nearest that is left."""
    left = list(b)
    for v in sorted(a, key=abs, reverse=True):
        nearest = min(left, key=lambda u: abs(u - v))
        if abs(nearest - v) > atol:
            return False
        left.remove(nearest)
    return not left
