"""Train the bundled models, mini-1l and mini-2l: attention-only transformers on books.

    python tests/mini/train.py CORPUS --layers 2                  # CORPUS: a folder of .txt files
    python tests/mini/train.py CORPUS --layers 2                  # again: resumes where it stopped
    python tests/mini/train.py CORPUS --layers 2 --evaluate-only  # the figures of what it exported

One text file is one book. Every 48th book of the sorted list is held out whole, and a book that
shares more than 2 % of its sentences with a held-out one (another edition, a collected volume) is
left out of training. The work files (tokens, checkpoint) lie in --work, the result in
tests/mini/mini-<layers>l/: config.json in the keys of the public attention-only models,
model.safetensors in float16 under TransformerLens parameter names, the tokenizer, and the log.

The recipe is that of a model made for teaching, not for text: three things help it along, and the
log says so. Position embeddings start as sinusoids (random ones stay without structure for tens of
millions of tokens), the attention matrices learn by Muon, and one row in ten repeats a segment of
text, half of those with the segment's tokens shuffled, so that copying from context pays.

Needs what requirements.txt installs, and a C++ compiler for torch.compile (--no-compile without).
"""

import argparse
import json
import math
import pathlib
import re
import sys
import time

import numpy as np
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
from torch import nn

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import common  # noqa: E402
from results import loading  # noqa: E402

D_MODEL, N_HEADS, D_HEAD, N_CTX, D_VOCAB = 256, 8, 32, 256, 4096
EOS, BOS, PAD = 0, 1, 2
BATCH = 32  # rows of N_CTX tokens a step
HELD_OUT_EVERY = 48  # of the sorted list of books
LR, LR_MUON, BETAS, WARMUP, CLIP = 3e-3, 0.02, (0.9, 0.98), 200, 1.0
REPEATED_ROWS = 0.1  # share of rows that repeat a segment; half of them shuffled
POS_AMPLITUDE = 0.03
# The words of part 4 that are more than one token of the trained BPE, for the one-layer model.
WORDS = ["alph", " Ralph", " corresponding", " bay", " toes", " wraps", " forefront", " Bob",
         " today", " visited"]
WORD_ROWS = 0.05  # share of the one-layer model's rows that hold one of these words


# ---------------------------------------------------------------- corpus and tokenizer


def sentences(text: str) -> set[int]:
    """Hashes of the sentences of 40 characters and more, white space folded."""
    parts = re.split(r"[.!?]\s", re.sub(r"\s+", " ", text))
    return {hash(p) for p in parts if len(p) >= 40}


def split_books(books: list[pathlib.Path]) -> tuple[list, list, list]:
    """The books to train on, the held-out ones, and those dropped for sharing their sentences."""
    every = min(HELD_OUT_EVERY, len(books))
    held_out = books[every // 2 :: every]
    kept_apart = set().union(*(sentences(b.read_text(encoding="utf-8")) for b in held_out))
    train, dropped = [], []
    for book in books:
        if book in held_out:
            continue
        own = sentences(book.read_text(encoding="utf-8"))
        (dropped if len(own & kept_apart) > 0.02 * len(own) else train).append(book)
    return train, held_out, dropped


def train_tokenizer(books: list[pathlib.Path]) -> tokenizers.Tokenizer:
    """Byte-level BPE of D_VOCAB tokens, the public models' kind; digits stay single."""
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre = tokenizers.pre_tokenizers
    tok.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=D_VOCAB,
        special_tokens=["<|EOS|>", "<|BOS|>", "<|PAD|>"],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator((b.read_text(encoding="utf-8") for b in books), trainer)
    return tok


def add_words(tok: tokenizers.Tokenizer, words: list[str]) -> tokenizers.Tokenizer:
    """The tokenizer with merges, after all others, that make each word one token."""
    for word in words:
        state = json.loads(tok.to_str())
        merges, vocab = state["model"]["merges"], state["model"]["vocab"]
        first, *pieces = tok.encode(word).tokens
        for piece in pieces:
            merges.append([first, piece])
            first += piece
            vocab.setdefault(first, len(vocab))
        tok = tokenizers.Tokenizer.from_str(json.dumps(state))
    return tok


def prepare(corpus: pathlib.Path, work: pathlib.Path, words: list[str]) -> dict:
    """Tokenise the corpus once into work/; later calls read what is there."""
    listing = work / "corpus.json"
    if not listing.exists():
        books = sorted(corpus.glob("*.txt"))
        if len(books) < 2:
            sys.exit(f"train.py: {corpus} has {len(books)} .txt files; it takes 2, one to hold out")
        train, held_out, dropped = split_books(books)
        tok = add_words(train_tokenizer(train[::2]), words)
        tok.save(str(work / "tokenizer.json"))
        for name, part in (("train", train), ("held_out", held_out)):
            ids = []
            for book in part:
                ids.append(np.array(tok.encode(book.read_text(encoding="utf-8")).ids, np.uint16))
                ids.append(np.array([EOS], np.uint16))
            np.save(work / f"{name}.npy", np.concatenate(ids))
        names = {k: [b.stem for b in v] for k, v in
                 dict(train=train, held_out=held_out, dropped=dropped).items()}
        listing.write_text(json.dumps(names))
    names, ids = json.loads(listing.read_text()), np.load(work / "train.npy")
    tok = tokenizers.Tokenizer.from_file(str(work / "tokenizer.json"))
    places = [np.flatnonzero(ids == tok.encode(word).ids[0]) for word in words]
    return names | {"train_ids": ids, "held_out_ids": np.load(work / "held_out.npy"),
                    "d_vocab": tok.get_vocab_size(), "places": [p for p in places if len(p)]}


def batch(ids: np.ndarray, rng: np.random.Generator, repeated: float = 0.0,
          places: list[np.ndarray] | None = None) -> torch.Tensor:
    """[BATCH, N_CTX] rows of BOS and 255 tokens.

    A share `repeated` of them is one segment again and again; WORD_ROWS of them hold one of the
    places, which lists the positions of each word in the ids.
    """
    rows = np.full((BATCH, N_CTX), BOS, np.int64)
    for row in rows:
        start = rng.integers(0, len(ids) - N_CTX)
        if places and rng.random() < WORD_ROWS:
            word = places[rng.integers(len(places))]
            start = word[rng.integers(len(word))] - rng.integers(1, N_CTX - 1)
            start = int(np.clip(start, 0, len(ids) - N_CTX - 1))
        row[1:] = ids[start : start + N_CTX - 1]
        if rng.random() < repeated:
            segment = row[1 : 1 + rng.integers(8, N_CTX // 2)].copy()
            if rng.random() < 0.5:
                rng.shuffle(segment)
            row[1:] = np.resize(segment, N_CTX - 1)
    return torch.from_numpy(rows)


# ---------------------------------------------------------------- the model


class Attention(nn.Module):
    """One layer of heads; matrices kept [d_model, n_heads * d_head], as Muon wants them."""

    def __init__(self):
        super().__init__()
        new = lambda: nn.Parameter(torch.randn(D_MODEL, D_MODEL) / math.sqrt(D_MODEL) / 2)  # noqa: E731
        self.W_Q, self.W_K, self.W_V, self.W_O = new(), new(), new(), new()
        zero = lambda: nn.Parameter(torch.zeros(D_MODEL))  # noqa: E731
        self.b_Q, self.b_K, self.b_V, self.b_O = zero(), zero(), zero(), zero()
        self.ln = nn.LayerNorm(D_MODEL, eps=1e-5)

    def forward(self, x):
        b, n, _ = x.shape
        y = self.ln(x)
        heads = lambda W, bias: (y @ W + bias).view(b, n, N_HEADS, D_HEAD).transpose(1, 2)  # noqa: E731
        z = F.scaled_dot_product_attention(
            heads(self.W_Q, self.b_Q), heads(self.W_K, self.b_K), heads(self.W_V, self.b_V),
            is_causal=True,
        )
        return x + z.transpose(1, 2).reshape(b, n, D_MODEL) @ self.W_O + self.b_O


def sinusoids() -> torch.Tensor:
    """[N_CTX, D_MODEL]: sines and cosines of wavelengths from 2 pi to 10,000 x 2 pi."""
    rate = torch.exp(-math.log(10_000) * torch.arange(0, D_MODEL, 2) / D_MODEL)
    angle = torch.arange(N_CTX)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class Model(nn.Module):
    def __init__(self, n_layers: int, d_vocab: int):
        super().__init__()
        self.W_E = nn.Parameter(torch.randn(d_vocab, D_MODEL) * 0.02)
        self.W_pos = nn.Parameter(sinusoids() * POS_AMPLITUDE)
        self.blocks = nn.ModuleList(Attention() for _ in range(n_layers))
        self.ln_final = nn.LayerNorm(D_MODEL, eps=1e-5)
        self.W_U = nn.Parameter(torch.randn(D_MODEL, d_vocab) * 0.02)

    def forward(self, ids):
        x = self.W_E[ids] + self.W_pos
        for block in self.blocks:
            x = block(x)
        logits = self.ln_final(x[:, :-1]) @ self.W_U
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def transformer_lens_state(self) -> dict[str, torch.Tensor]:
        """The parameters under TransformerLens names and shapes, float16."""
        state = {"embed.W_E": self.W_E, "pos_embed.W_pos": self.W_pos,
                 "unembed.W_U": self.W_U, "unembed.b_U": torch.zeros(len(self.W_E)),
                 "ln_final.w": self.ln_final.weight, "ln_final.b": self.ln_final.bias}
        for layer, block in enumerate(self.blocks):
            at = f"blocks.{layer}."
            state |= {at + "ln1.w": block.ln.weight, at + "ln1.b": block.ln.bias,
                      at + "attn.W_O": block.W_O.view(N_HEADS, D_HEAD, D_MODEL),
                      at + "attn.b_O": block.b_O}
            for k in "QKV":
                W = getattr(block, f"W_{k}").view(D_MODEL, N_HEADS, D_HEAD)
                state |= {at + f"attn.W_{k}": W.transpose(0, 1),
                          at + f"attn.b_{k}": getattr(block, f"b_{k}").view(N_HEADS, D_HEAD)}
        return {k: v.detach().to(torch.float16).contiguous() for k, v in state.items()}


# ---------------------------------------------------------------- training


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by five Newton-Schulz steps (Jordan et al., 2024).

    torch.optim.Muon takes those steps in bfloat16, which a CPU without bfloat16 units does a
    hundred times slower than float32; this one takes them in float32, all matrices in one batch.
    """

    def __init__(self, matrices, lr: float, momentum: float):
        super().__init__(matrices, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            moved = []
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("momentum", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                moved.append(p.grad.lerp(mean, group["momentum"]))
            x = torch.stack(moved)
            x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
            for _ in range(5):
                gram = x @ x.mT
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            for p, update in zip(group["params"], x):
                p.sub_(update, alpha=group["lr"])


def optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """Muon for the four attention matrices of a layer, AdamW for everything else."""
    matrices = [p for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [Muon(matrices, lr=LR_MUON, momentum=0.95),
            torch.optim.AdamW(others, lr=LR, betas=BETAS, weight_decay=0.01)]


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


@torch.no_grad()
def held_out_loss(loss_of, ids: np.ndarray, n_batches: int) -> float:
    rng = np.random.default_rng(1)
    return float(np.mean([loss_of(batch(ids, rng)).item() for _ in range(n_batches)]))


def train(args, data: dict, log) -> Model:
    torch.manual_seed(args.seed)
    model = Model(args.layers, data["d_vocab"])
    opts = optimizers(model)
    rng = np.random.default_rng(args.seed)
    step, seconds, checkpoint = 0, 0.0, args.work / f"checkpoint-{args.layers}l.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        for opt, state in zip(opts, saved["opts"]):
            opt.load_state_dict(state)
        rng.bit_generator.state = saved["rng"]
        step, seconds = saved["step"], saved["seconds"]
        log(f"resumed at step {step}")
    loss_of = model if args.no_compile else torch.compile(model)
    running, since = [], time.perf_counter()
    while step < args.steps:
        for opt, peak in zip(opts, (LR_MUON, LR)):
            opt.param_groups[0]["lr"] = peak * lr_factor(step, args.steps)
            opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = loss_of(batch(data["train_ids"], rng, REPEATED_ROWS, data["places"]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for opt in opts:
            opt.step()
        step += 1
        running.append(loss.item())
        if step % args.report == 0 or step == args.steps:
            seconds, since = seconds + time.perf_counter() - since, time.perf_counter()
            log(f"step {step:6d}  {step * BATCH * N_CTX / 1e6:6.1f}M tokens  {seconds / 60:5.1f} "
                f"min  loss {np.mean(running):.3f}"
                f"  held-out {held_out_loss(loss_of, data['held_out_ids'], 4):.3f}")
            running = []
            part = checkpoint.with_suffix(".part")
            torch.save({"model": model.state_dict(), "opts": [o.state_dict() for o in opts],
                        "rng": rng.bit_generator.state, "step": step, "seconds": seconds}, part)
            part.replace(checkpoint)
    return model


def export(model: Model, n_layers: int, work: pathlib.Path, out: pathlib.Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    config = dict(n_layers=n_layers, d_model=D_MODEL, d_mlp=4 * D_MODEL, d_head=D_HEAD,
                  n_heads=N_HEADS, n_ctx=N_CTX, d_vocab=len(model.W_E), act_fn="solu_ln",
                  attn_only=True, normalization="LN", shortformer_pos=False)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    safetensors.torch.save_file(model.transformer_lens_state(), out / "model.safetensors")
    (out / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
    special = dict(bos_token="<|BOS|>", eos_token="<|EOS|>", pad_token="<|PAD|>")
    (out / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
    (out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | special, indent=2) + "\n")


# ---------------------------------------------------------------- evaluation


def evaluate(folder: pathlib.Path, n_layers: int, held_out: np.ndarray) -> list[str]:
    """The figures that the bundled models are there for, of the exported float16 weights."""
    model, _ = loading.load_model(str(folder), n_layers=n_layers)
    rng = np.random.default_rng(2)
    runs = (common.freeze(model, batch(held_out, rng)) for _ in range(32))
    found = [(common.unembed(r, {"model": r.final}).losses["model"].mean(), r.patterns[0])
             for r in runs]
    loss = torch.stack([x for x, _ in found]).mean().item()
    lines = [f"loss on {32 * BATCH * N_CTX:,} held-out tokens: {loss:.3f} nats"]
    if n_layers == 1:
        eigenvalues, _ = common.circuit_eigenvalues(
            model.W_E @ model.W_V[0], model.W_O[0] @ model.W_U)
        score = common.copy_score(eigenvalues)
        copying = int((score > 0.7).sum())
        return lines + ["copy scores: " + by_head(score, 0),
                        f"heads with a copy score above 0.7: {copying} of {N_HEADS}"]
    previous = torch.stack([common.mean_attention(p, 1) for _, p in found]).mean(0)
    tokens = common.repeated_tokens(model, 100, 32, seed=3)
    run = common.freeze(model, tokens)
    induction = common.induction_scores(run).mean(-1)
    nll = -model(tokens).log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    scores = common.composition_scores(model.W_V[0], model.W_O[0], model.W_K[1], model.W_Q[1])
    baseline = common.random_baseline(D_MODEL, D_HEAD, 200, seed=0)[0].mean().item()
    h2, h1 = divmod(int(scores.argmax()), N_HEADS)
    return lines + [
        "induction scores on 32 x 100 repeated random tokens:",
        *(by_head(row, layer) for layer, row in enumerate(induction)),
        f"loss of the first copy {nll[:, :100].mean():.2f} nats, of the second "
        f"{nll[:, 100:].mean():.2f}",
        "mean attention to the previous token: " + by_head(previous, 0),
        f"largest K-composition: {scores.max():.3f} (head 1.{h2} reads head 0.{h1}), "
        f"random baseline {baseline:.4f}",
    ]


def by_head(values: torch.Tensor, layer: int) -> str:
    return ", ".join(f"{layer}.{h} {v:.2f}" for h, v in enumerate(values.tolist()))


def training_log(args, data: dict, progress: list[str], figures: list[str]) -> str:
    """What made the weights, and what they do."""
    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, tokenizers, np))
    return "\n".join([
        f"mini-{args.layers}l: {args.layers} layer(s), d_model {D_MODEL}, {N_HEADS} heads of "
        f"{D_HEAD}, context {N_CTX}, {data['d_vocab']} tokens",
        f"made by: python tests/mini/train.py CORPUS --layers {args.layers} --steps {args.steps} "
        f"--seed {args.seed} --report {args.report}{' --bf16' if args.bf16 else ''}"
        + "".join(f"; {line}" for line in progress if line.startswith("resumed")),
        f"tokens seen: {args.steps * BATCH * N_CTX:,}; the corpus has {len(data['train_ids']):,}; "
        f"batches of {BATCH} x {N_CTX}; {versions}; {'bfloat16' if args.bf16 else 'float32'}",
        f"learning rates: AdamW {LR} (betas {BETAS}), Muon {LR_MUON} (attention matrices); warm-up "
        f"{WARMUP} steps, cosine decay; gradients clipped at {CLIP}",
        "three things help these models along: position embeddings start as sinusoids of amplitude "
        f"{POS_AMPLITUDE}, Muon trains the attention matrices, and {REPEATED_ROWS:.0%} of the rows "
        "repeat a segment, half of those shuffled",
        *([f"the words {WORDS} are tokens of their own, and {WORD_ROWS:.0%} of the rows hold one"]
          if args.layers == 1 else []),
        "", "FIGURES", *figures, *(["", "NOTES", args.notes] if args.notes else []),
        "", "PROGRESS", *progress,
        "", f"CORPUS: {len(data['train'])} public-domain books", *data["train"],
        "", f"HELD OUT: {len(data['held_out'])} books", *data["held_out"],
        "", f"LEFT OUT, sharing sentences with a held-out book: {len(data['dropped'])}",
        *data["dropped"], ""])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("corpus", type=pathlib.Path)
    p.add_argument("--layers", type=int, required=True, choices=(1, 2))
    p.add_argument("--steps", type=int, default=3600)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--report", type=int, default=250, help="steps between log lines, checkpoints")
    p.add_argument("--work", type=pathlib.Path, default=pathlib.Path("mini-work"))
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--bf16", action="store_true", help="bfloat16 autocast, for CPUs that have it")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--evaluate-only", action="store_true")
    p.add_argument("--notes", help="what else the log should say")
    args = p.parse_args()
    out = args.out or HERE / f"mini-{args.layers}l"
    args.work.mkdir(parents=True, exist_ok=True)
    progress = args.work / f"progress-{args.layers}l.txt"

    def log(line: str) -> None:
        print(line, flush=True)
        with progress.open("a") as f:
            f.write(line + "\n")

    data = prepare(args.corpus, args.work, WORDS if args.layers == 1 else [])
    if not args.evaluate_only:
        log(f"{args.layers} layer(s), {len(data['train_ids']):,} training tokens, "
            f"{len(data['held_out_ids']):,} held out")
        export(train(args, data, log), args.layers, args.work, out)
    figures = evaluate(out, args.layers, data["held_out_ids"])
    print("\n".join(figures))
    if args.evaluate_only:  # the log tells of the run that made the weights, not of this one
        return
    (out / "training_log.txt").write_text(
        training_log(args, data, progress.read_text().splitlines(), figures), encoding="utf-8")


if __name__ == "__main__":
    main()
