"""Speed and memory, measured by hand: every cost as a ratio of two things run in one process.

    python tests/benchmark.py              # the public models' sizes; about 50 minutes on two cores
    python tests/benchmark.py --only a,e   # some of the measures
    python tests/benchmark.py --small      # sizes that take seconds: whether it runs, not how fast

The models have the sizes of attn-only-2l and attn-only-1l and random weights; all biases and
LayerNorm parameters are random too. A ratio is the median over --pairs pairs, with their smallest
and largest beside it. The two sides of a pair run one after the other, and take turns in being
first, so that what else the machine does falls on both: let it be little. Nothing is asserted about
time; that two ways to one result agree, is. Prints a Markdown table:

a. Part 5 after loading (freeze, expand, every section) over one forward pass with its loss, on the
   same tokens.
b. Removing every virtual head as the article has it, each with a stream of d_model, an unembedding
   and a softmax of its own, over common.unembed. The first is timed on a few removals,
   others in every pair, and scaled to all.
c. The floor of the composition scores for Q, K and V, the bare products of W_O with W_Q, W_K and
   W_V in float64, over common.composition_scores; and TransformerLens' all_composition_scores over
   the same, which has no goal.
d. Eigenvalues, copy scores, diagonal and places of part 4, from W_E W_V and W_O W_U on: with
   TransformerLens' FactoredMatrix and dense blocks of 256 rows, over ours. The first is timed on
   one head, another in every pair, and scaled to all. Both in float64, for the places to agree.
e. The floor of the removals over their time. Floor: their multiplications at the rate of a large
   float32 product, and their exponentials at the faster of exp and exp2 on a tile in the cache,
   both measured in the same pair. The full logits, made once and shared, are not counted.
f. Growth of part 5 with the tokens, in sequences of one length, and with the heads of one d_model.
   Linear: no more time per token than with the fewest, but for a tenth.
g. Part 5 of three and of four layers over that of two: 192 and 384 removals for 64.
h. The removals on one thread over those on all cores, divided by the cores: 1 is linear.
j. The removals beside one busy process over those alone. The goal is for two cores.

Peak memory is that of the whole process during each side, weights and all, the most of all pairs
(on Linux; 0 elsewhere).
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from jaxtyping import Float, Int  # noqa: E402
from torch import Tensor  # noqa: E402
from transformer_lens import FactoredMatrix  # noqa: E402

import circuits_part4 as part4  # noqa: E402
import circuits_part5 as part5  # noqa: E402
import common  # noqa: E402
import tiny  # noqa: E402
from results import report, runner  # noqa: E402

PUBLIC = dict(sizes=dict(d_model=512, n_ctx=1024, d_vocab=48262), heads=8, rows=12, length=256,
              square=2048)
SMALL = dict(sizes=dict(d_model=32, n_ctx=64, d_vocab=600), heads=4, rows=4, length=16, square=64)
WEIGHTS = 0.2  # times tiny.state_dict's: a loss of 13 nats at the public sizes
SOME = 8  # removals of a virtual head by the article's way in one pair (b)
BLOCK = 256  # rows of a dense block (d)
LINEAR = 1.1  # times the time per token of the fewest (f)


@dataclass(frozen=True)
class Bench:
    """The sizes, and how many pairs."""

    sizes: dict
    heads: int
    rows: int  # sequences
    length: int  # tokens of one
    square: int  # sides of the float32 product that gives the rate
    pairs: int

    def model(self, n_layers: int = 2, heads: int | None = None):
        """A model of these sizes; other heads share the same d_model."""
        heads = heads or self.heads
        sizes = self.sizes | dict(n_layers=n_layers, n_heads=heads,
                                  d_head=self.sizes["d_model"] // heads)
        return tiny.model(tiny.state_dict(sizes, scale=WEIGHTS), sizes, torch.float32)

    def tokens(self, rows: int | None = None) -> Int[Tensor, "batch pos"]:
        return tiny.tokens(rows or self.rows, self.length, self.sizes["d_vocab"])

    @cached_property
    def two_layers(self):
        return self.model()

    @cached_property
    def run(self) -> common.FrozenRun:
        return common.freeze(self.two_layers, self.tokens())

    @cached_property
    def paths(self) -> common.Paths:
        return common.expand(self.run)


# ------------------------------------------------------------------ measuring


def reset_peak() -> None:
    """Let peak_memory() begin anew."""
    file = pathlib.Path("/proc/self/clear_refs")
    if os.access(file, os.W_OK):
        file.write_text("5")


def proc(file: str, pattern: str) -> str | None:
    """What Linux says in a file under /proc, and other systems nowhere."""
    path = pathlib.Path("/proc", file)
    found = re.search(pattern, path.read_text()) if path.exists() else None
    return found and found[1]


def peak_memory() -> float:
    """The most memory this process has held since reset_peak(), in GB."""
    return int(proc("self/status", r"VmHWM:\s+(\d+) kB") or 0) * 1024 / 1e9


def timed(f, *args) -> tuple:
    """(seconds, what f returns)."""
    start = time.perf_counter()
    result = f(*args)
    return time.perf_counter() - start, result


def in_turns(sides: list, rounds: int) -> Iterator[list[tuple]]:
    """Round by round [(seconds, result, peak memory)] of all sides; every other round runs them
    backwards. A side is called with the round; where its result is a float, it is the seconds."""
    for i in range(rounds):
        found = {}
        for side in sides[:: -1 if i % 2 else 1]:
            reset_peak()
            took, result = timed(side, i)
            found[side] = (result if isinstance(result, float) else took, result, peak_memory())
        yield [found[side] for side in sides]


@cache
def machine() -> str:
    """What a time depends on: processor, cores, version, threads."""
    name = proc("cpuinfo", r"model name\s*: (.+)") or platform.processor() or platform.machine()
    return (f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, "
            f"{torch.get_num_threads()} threads")


def print_row(what: str, seconds: list[float], ratio: str, goal: str, met: bool | None,
              peaks: list[float], note: str) -> None:
    cells = [what, " / ".join(f"{t:.3g}" for t in seconds), ratio, goal,
             "-" if met is None else "yes" if met else "no",
             " / ".join(f"{p:.2f}" for p in peaks), note, machine()]
    print("| " + " | ".join(cells) + " |", flush=True)


def print_ratio(bench: Bench, what: str, first, second, goal: str, *, scale: float = 1,
                note: str = "", check=None, tolerance: float = 0) -> None:
    """The row of first / second, the first's time multiplied by `scale`. check(first's result,
    second's) is a difference of the two, in every pair at most `tolerance`."""
    pairs, worst = [], 0.0
    for a, b in in_turns([first, second], bench.pairs):
        pairs.append((scale * a[0], b[0], a[2], b[2]))
        if check:
            worst = max(worst, difference := check(a[1], b[1]))
            assert difference <= tolerance, f"{what}: the two differ by {difference:.1e}"
    ratios = [a / b for a, b, *_ in pairs]
    a, b, *peaks = zip(*pairs)
    ratio = median(ratios)
    note += f"; largest difference {worst:.1e}" if check else ""
    print_row(what, [median(a), median(b)], f"{ratio:.3g} ({min(ratios):.3g}..{max(ratios):.3g})",
              goal if goal == "none" else f"at {goal}", meets(ratio, goal),
              [max(p) for p in peaks], note)


def meets(ratio: float, goal: str) -> bool | None:
    """Of "most 2", "least 2" or "none"."""
    if goal == "none":
        return None
    kind, limit = goal.split()
    return ratio >= float(limit) if kind == "least" else ratio <= float(limit)


# ------------------------------------------------------------------ part 5


def analyse(model, tokens: Int[Tensor, "batch pos"]) -> None:
    """All that circuits_part5's main does between loading and printing."""
    run = common.freeze(model, tokens)
    text = {"n_tokens": tokens.numel(), "seq_len": tokens.shape[1]}
    analysis = part5.Analysis(run, text, part5.CHOICES, 0)
    results: dict = {"meta": text, "sections": {}}
    for name, compute, _ in part5.SECTIONS:
        results["sections"][name] = compute(analysis, results)


def whole_part(bench: Bench) -> None:
    model, tokens = bench.two_layers, bench.tokens()
    print_ratio(bench, "a. part 5's analysis / one forward pass with loss",
                lambda i: analyse(model, tokens), lambda i: model(tokens, return_type="loss"),
                "most 10", note=f"{tokens.numel():,} tokens")


def sequence_losses(run: common.FrozenRun, stream: Tensor) -> Float[Tensor, " batch"]:
    log_p = (run.final_norm(stream) @ run.model.W_U + run.model.b_U).log_softmax(-1)
    return -log_p[:, :-1].gather(-1, run.tokens[:, 1:, None]).mean((1, 2))


def reading(run: common.FrozenRun) -> list[common.Head]:
    """The head that writes each virtual head's term."""
    return [reader for reader, _ in common.virtual_pairs(run.model)]


def all_removed(bench: Bench) -> Float[Tensor, "pair batch"]:
    readout = bench.run.final_norm(bench.paths.stream(2))
    found = common.unembed(bench.run, {"two": readout}, z=bench.paths.z_virtual,
                           heads=reading(bench.run))
    return found.loss_increase.mean(-1)


def removals(bench: Bench) -> None:
    run, paths = bench.run, bench.paths
    heads, stream, n = reading(run), paths.stream(2), len(paths.z_virtual)
    some, before = min(SOME, n), sequence_losses(run, stream)

    def one_by_one(i: int) -> dict:
        chosen = [(i * some + k) % n for k in range(some)]
        return {pair: sequence_losses(
            run, stream - paths.z_virtual[pair] @ run.model.W_O[heads[pair]]) - before
            for pair in chosen}

    print_ratio(bench, f"b. {n} removals one by one / common.unembed", one_by_one,
                lambda i: all_removed(bench), "least 8", scale=n / some,
                note=f"{some} of {n} one by one, scaled", tolerance=1e-4,
                check=lambda few, ours: max((ours[p] - x).abs().max().item()
                                            for p, x in few.items()))


def floor(bench: Bench) -> None:
    n, batch, pos, d_head = bench.paths.z_virtual.shape
    logits = n * batch * (pos - 1) * bench.sizes["d_vocab"]

    def least(i: int) -> float:
        a = torch.randn(bench.square, bench.square)
        tile, out = torch.randn(2, common.TILE_ROWS, common.TILE_COLUMNS)
        product = min(timed(torch.mm, a, a)[0] for _ in range(9)) / bench.square**3
        power = min(timed(lambda f: f(tile, out=out), f)[0]
                    for f in (torch.exp, torch.exp2) for _ in range(99)) / tile.numel()
        return logits * (d_head * product + power)

    print_ratio(bench, f"e. floor of {n} removals / common.unembed", least,
                lambda i: all_removed(bench), "least 0.5",
                note=f"{logits * d_head:.2g} multiplications, {logits:.2g} exponentials")


def growth(bench: Bench) -> None:
    def row(what: str, cases: dict, goal: str, verdict) -> None:
        rounds = [*in_turns([lambda i, c=c: analyse(*c) for c in cases.values()], bench.pairs)]
        times, peaks = ([[case[k] for case in r] for r in rounds] for k in (0, 2))
        ratios = [median(t[k] / t[0] for t in times) for k in range(len(cases))]
        print_row(f"f. part 5's analysis, {what} " + " / ".join(f"{c:,}" for c in cases),
                  [median(x) for x in zip(*times)], " / ".join(f"{r:.3g}" for r in ratios), goal,
                  verdict(ratios), [max(x) for x in zip(*peaks)], "times over the first")

    rows = [bench.rows * k // 4 for k in (1, 2, 4, 8)]
    tokens = {r * bench.length: (bench.two_layers, bench.tokens(r)) for r in rows}
    row("tokens", tokens, f"linear in tokens, but for {LINEAR - 1:.0%}",
        lambda ratios: all(x <= LINEAR * r / rows[0] for x, r in zip(ratios, rows)))
    heads = [bench.heads // 2, bench.heads, 2 * bench.heads]
    row("heads", {h: (bench.model(heads=h), bench.tokens()) for h in heads}, "none", lambda _: None)


def depth(bench: Bench) -> None:
    tokens = bench.tokens()

    def analysis_of(model):
        return lambda i: analyse(model, tokens)

    for n_layers, limit in (3, 3.5), (4, 7):
        print_ratio(bench, f"g. part 5's analysis, {n_layers} layers / 2 layers",
                    analysis_of(bench.model(n_layers)), analysis_of(bench.two_layers),
                    f"most {limit}", note=f"{tokens.numel():,} tokens")


def cores_used(bench: Bench) -> None:
    cores = os.cpu_count() or 1

    def removals_on(n_threads: int) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        try:
            return all_removed(bench)
        finally:
            torch.set_num_threads(before)

    print_ratio(bench, f"h. removals on one thread, by {cores} / on {cores} cores",
                lambda i: removals_on(1), lambda i: removals_on(cores), "least 0.85",
                scale=1 / cores, tolerance=1e-4,
                check=lambda one, many: (one - many).abs().max().item())


def busy(bench: Bench) -> None:
    def beside(i: int) -> float:
        command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                process.stdout.readline()  # it runs
                return timed(all_removed, bench)[0]
            finally:
                process.kill()

    print_ratio(bench, "j. removals beside a busy process / alone", beside,
                lambda i: all_removed(bench), "most 2.2")


# ------------------------------------------------------------------ weights


def composition(bench: Bench) -> None:
    m = bench.two_layers
    W_Q, W_K, W_V, W_O = (w[1] for w in (m.W_Q, m.W_K, m.W_V, m.W_O))
    read = {"Q": (W_Q, W_K), "K": (W_K, W_Q), "V": (W_V, W_O.mT)}
    writing = m.W_O[0].double().flatten(0, 1)
    reads = [w.double().transpose(0, 1).flatten(1) for w in (W_Q, W_K, W_V)]

    def ours() -> list[Tensor]:
        return [common.composition_scores(m.W_V[0], m.W_O[0], *two) for two in read.values()]

    def least_time(f) -> float:
        return min(timed(f)[0] for _ in range(9))

    print_ratio(bench, "c. floor of the scores / common.composition_scores",
                lambda i: least_time(lambda: [writing @ w for w in reads]),
                lambda i: least_time(ours), "least 0.5", note="Q, K and V; the least of 9 times")
    print_ratio(bench, "c. TransformerLens all_composition_scores / common.composition_scores",
                lambda i: [m.all_composition_scores(kind)[0, :, 1].T for kind in read],
                lambda i: ours(), "none", note="Q, K and V", tolerance=1e-5,
                check=lambda theirs, ours: max(
                    (a - b).abs().max().item() for a, b in zip(theirs, ours)))


def copying(bench: Bench) -> None:
    m, n = bench.model(n_layers=1), bench.heads
    A, B = m.W_E.double() @ m.W_V[0].double(), m.W_O[0].double() @ m.W_U.double()
    one = common.freeze(m, bench.tokens(1))

    def dense(i: int) -> tuple:
        circuit = FactoredMatrix(A[i % n], B[i % n])
        values, diagonal, ranks, ranked = circuit.eigenvalues, [], [], fresh().ranked
        for ids in torch.arange(len(A[0])).split(BLOCK):
            rows = circuit[ids].AB
            own = rows.gather(1, ids[:, None])
            asked = torch.isin(ids, ranked)
            diagonal.append(own[:, 0])
            ranks.append((rows[asked] >= own[asked]).sum(1))
        score = values.sum().real / values.abs().sum()
        return i % n, values, score, torch.cat(diagonal), torch.cat(ranks)

    def fresh() -> part4.Analysis:
        return part4.Analysis(one, A, B, part4.CHOICES, argparse.Namespace())

    def ours(i: int) -> tuple:
        a, values = fresh(), common.circuit_eigenvalues(A, B)[0]
        return values, common.copy_score(values), a.diagonal, a.ranks

    def difference(theirs: tuple, ours: tuple) -> float:
        h, values, score, diagonal, ranks = theirs
        size = values.abs().max()
        return max(common.match_eigenvalues(values / size, ours[0][h] / size)[0],
                   (score - ours[1][h]).abs().item(),
                   ((diagonal - ours[2][h]).abs().max() / diagonal.abs().max()).item(),
                   float((ranks != ours[3][h]).sum()))

    print_ratio(bench, "d. FactoredMatrix and dense blocks / part 4's measures of copying", dense,
                ours, "least 5", scale=n, note=f"1 of {n} heads dense, scaled", check=difference,
                tolerance=1e-9)


MEASURES = dict(a=whole_part, b=removals, c=composition, d=copying, e=floor, f=growth,
                g=depth, h=cores_used, j=busy)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    p = report.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pairs", type=report.whole_number, default=5, help="of each ratio (default 5)")
    p.add_argument("--only", default=",".join(MEASURES), metavar="a,b", help="default all")
    p.add_argument("--small", action="store_true", help="small sizes: whether it runs")
    args = p.parse_args(argv)
    letters = args.only.split(",")
    if not args.pairs or not set(letters) <= set(MEASURES):
        raise common.UserError(f"--pairs is at least 1, --only names some of {','.join(MEASURES)}")
    bench = Bench(**(SMALL if args.small else PUBLIC), pairs=args.pairs)
    columns = ("measure", "seconds", f"ratio: median of {args.pairs} (min..max)", "goal", "met",
               "peak memory, GB", "how", "machine")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
    for letter in letters:
        MEASURES[letter](bench)


if __name__ == "__main__":
    sys.exit(runner.run_script(main))
