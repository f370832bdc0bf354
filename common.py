"""Kernels and house-keeping shared by the circuits_part*.py scripts.

Top to bottom, as the data goes: loading, the frozen run, path expansion, losses, attention
patterns, composition, eigenvalues and copying, comparison, open choices, figures, report. A kernel
takes tensors and gives tensors; it knows nothing of the article's sentences, and a script knows
nothing of tiles.

Notation: row vectors, TransformerLens shapes. A head reads x [batch, pos, d_model] as x W_Q,
x W_K, x W_V (W: [d_model, d_head]) and writes z W_O ([d_head, d_model]). Axes stand in the order
layer, head, batch, query (or pos), key, then d_head, d_model or d_vocab; h2 (layer 1) before h1
(layer 0) for pairs. `cen(x)` is x minus its mean over d_model, and LayerNorm is cen(x) / scale,
its weight and bias folded into the next matrices. Losses are in nats per token.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import shutil
import signal
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING


def interrupted(*_) -> None:
    """Ctrl-C ends a script here and now: libraries swallow an exception while they are imported."""
    with contextlib.suppress(OSError):
        line = f"{pathlib.Path(sys.argv[0]).name}: interrupted; no file was left half written\n"
        os.write(2, b"\n" * os.isatty(2) + line.encode())
    os._exit(130)


if pathlib.Path(sys.argv[0]).name.startswith("circuits_part") and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler):
    signal.signal(signal.SIGINT, interrupted)  # a script imports this module first

import torch  # noqa: E402
from jaxtyping import Float, Int  # noqa: E402
from torch import Tensor  # noqa: E402

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

HERE = pathlib.Path(__file__).resolve().parent
MINI = HERE / "tests" / "mini"  # the bundled models and their sample text
BUNDLED = ("mini", "mini-1l", "mini-2l")
SIZES = ("n_layers", "d_model", "d_head", "n_heads", "n_ctx", "d_vocab")  # in config.json
EPS = 1e-5  # of LayerNorm, where config.json does not say
PROCESSING = dict(fold_ln=True, center_writing_weights=True, center_unembed=True,
                  fold_value_biases=True, refactor_factored_attn_matrices=False)
WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
WIKITEXT_ROWS = 4358
WIKITEXT_SHA256 = "bbf94c53a05abe9ee670d3b6343608095822c85e26de37c70b24fc571964574a"
PUBLIC = {f"attn-only-{n}l": f"NeelNanda/Attn_Only_{n}L512W_C4_Code" for n in (1, 2)}
HELLO_IDS = [11765, 14, 1499, 3]  # "Hello, world!" in the public models' tokenizer, without BOS
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class UserError(Exception):
    """A mistake in the input or the surroundings: one line that names cause and remedy, exit 2."""


def notice(line: str) -> None:
    """Say something beside the log: stderr, so that stdout stays the article's."""
    if sys.stderr:
        print(line, file=sys.stderr, flush=True)


# ==================================================================================== Loading


def load_model(
    name: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    n_layers: int | None = None,
    processing: dict = PROCESSING,
) -> tuple[HookedTransformer, dict]:
    """Load an attention-only model, its weights folded and centred as `processing` says.

    Args:
        name: a TransformerLens name ("attn-only-2l"), "mini" (the bundled model of `n_layers`
            layers), "mini-1l", "mini-2l", or a folder with config.json, model.safetensors or
            model_final.pth, and tokenizer files.
        device: "cpu", "cuda", ... Never chosen by itself.
        dtype: of all that is computed. TransformerLens folds in float32 whatever it is.
        n_layers: the number of layers the caller can work with; None for any.
        processing: the flags of HookedTransformer.from_pretrained, by name.

    A public model comes through TransformerLens when the hub answers, and from the files in the
    Hugging Face cache when it does not (TransformerLens alone fails there, even with every file
    cached: it asks the hub for the list of files).

    Returns:
        the model, and where it came from: {model, revision, weights_sha256}.

    Raises:
        UserError: unknown name, not attention-only, positions not standard, another number of
            layers, no such device, unreadable weights, or nothing cached and no network.
    """
    _prepare_torch(device)
    name = f"mini-{n_layers or 2}l" if name == "mini" else name
    folder = MINI / name if name in BUNDLED else pathlib.Path(name)
    build = functools.partial(_model_from_files, n_layers=n_layers, device=device, dtype=dtype,
                              processing=processing)
    if folder.is_dir() and name not in PUBLIC:
        weights = folder / "model.safetensors"
        if not weights.exists():
            weights = folder / "model_final.pth"
        for file, what in ((folder / "config.json", "config.json"),
                           (weights, "model.safetensors or model_final.pth")):
            if not file.is_file():
                raise UserError(f"{folder} has no {what}: a model folder holds config.json, "
                                "model.safetensors or model_final.pth, and tokenizer files")
        model = build(folder / "config.json", weights, folder)
        source = {"model": folder.resolve().name, "revision": None}
    else:
        online, repo = hub_answers(), _official_name(name)
        config_file = _fetch(repo, "config.json", online)
        config = _read_config(config_file, name, n_layers)
        public = {official: short for short, official in PUBLIC.items()}
        source = {"model": public.get(repo, name), "revision": config_file.parent.name}
        weights = _fetch(repo, "model_final.pth", online)
        tokenizer = _fetch(str(config.get("tokenizer_name")), "tokenizer.json", online)
        model = build(config_file, weights, tokenizer.parent)
        if online:  # only now: TransformerLens fills in what is missing, and runs pickled code
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    model = _hooked_transformer().from_pretrained(
                        name, device=device, dtype=dtype, **processing)
            except Exception as e:
                raise UserError(f"TransformerLens cannot load {repo} ({_cause(e)}): try again with "
                                "HF_HUB_OFFLINE=1, its files are cached now") from None
        if repo in PUBLIC.values() and encode(model, "Hello, world!") != HELLO_IDS:
            raise UserError(f"the tokenizer of {name} gives other ids than it used to for 'Hello, "
                            "world!': install the versions that requirements.txt pins")
    return model.eval().requires_grad_(False), source | {"weights_sha256": sha256(weights)}


def _prepare_torch(device: str) -> None:
    """Full float32 precision, repeatable kernels; UserError if there is no such device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        torch.zeros(1, device=device).item()  # fails on "meta", which holds no numbers
    except Exception as e:
        raise UserError(f"no device {device!r} here ({_cause(e)}): take --device cpu") from None
    if device.startswith("cuda"):  # the call alone imports two seconds of compiler
        torch.use_deterministic_algorithms(True)


def _cause(e: BaseException) -> str:
    return next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)[:120]


def _hooked_transformer() -> type[HookedTransformer]:
    """The class, imported late: it costs seconds that reading a results file should not."""
    version = importlib.metadata.version("transformer_lens")
    if int(version.split(".")[0]) >= 4:
        raise UserError(f"transformer_lens {version} has no HookedTransformer: "
                        'pip install "transformer_lens<4"')
    from transformer_lens import HookedTransformer

    return HookedTransformer


def _official_name(name: str) -> str:
    if name in PUBLIC:  # without the seconds that importing TransformerLens takes
        return PUBLIC[name]
    _hooked_transformer()
    from transformer_lens.loading_from_pretrained import get_official_model_name

    try:
        return get_official_model_name(name)
    except ValueError:
        raise UserError(f"no model {name!r}: it is neither a TransformerLens name (attn-only-1l, "
                        "attn-only-2l, ...) nor mini, mini-1l, mini-2l, nor a folder") from None


def hub_answers() -> bool:
    """Whether the Hugging Face hub answers; where it does not, its libraries are told so, before
    they are imported: they read the setting then, and try for long what cannot succeed."""
    import huggingface_hub.constants

    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        try:
            huggingface_hub.HfApi().dataset_info(WIKITEXT[0], timeout=4)
            return True
        except Exception:
            notice("the Hugging Face hub does not answer: using what its cache holds")
    os.environ["HF_HUB_OFFLINE"] = "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    return False


def _fetch(repo: str, file: str, online: bool) -> pathlib.Path:
    """A file of a hub repository, from the cache if it is there."""
    from huggingface_hub import constants, hf_hub_download

    try:
        return pathlib.Path(hf_hub_download(repo, file, local_files_only=not online))
    except Exception as e:
        raise UserError(f"{file} of {repo} is not in the Hugging Face cache "
                        f"{constants.HF_HUB_CACHE} and {_not_given(e, online)}: connect once, or "
                        f"run python {pathlib.Path(sys.argv[0]).name} --model mini") from None


def _not_given(e: Exception, online: bool) -> str:
    if online:
        return f"the hub did not give it ({_cause(e)})"
    return "the hub does not answer, or HF_HUB_OFFLINE is set"


def _read_config(file: pathlib.Path, name: str, n_layers: int | None) -> dict:
    """config.json; UserError unless the model is one that the kernels are exact for."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        normalization = config.get("normalization", config.get("normalization_type"))
        positions = config.get("positional_embedding_type",
                               "shortformer" if config.get("shortformer_pos") else "standard")
        layers = config.get("n_layers")
    except (ValueError, AttributeError, OSError, RecursionError) as e:
        raise UserError(f"cannot read {file} ({_cause(e)}): a model folder holds config.json, "
                        "model.safetensors or model_final.pth, and tokenizer files") from None
    other = None
    if not config.get("attn_only"):
        other = "is not attention-only"
    elif positions != "standard":
        other = (f"has {positions!s:.40} position embeddings, not standard ones that are added to "
                 "the stream once")
    elif normalization not in ("LN", "LNPre"):
        other = f"has {normalization!s:.40} for normalization, not LayerNorm"
    elif n_layers and layers != n_layers:
        other = f"has {layers!s:.40} layer(s), this script reads models of {n_layers}"
    if other:
        raise UserError(f"{name} {other}: take attn-only-{n_layers or 2}l or mini")
    for size in SIZES:
        if type(config.get(size)) is not int or not 0 < config[size] < 2**31:
            raise UserError(f"{file} has {config.get(size)!r:.40} for {size}, not a whole number "
                            "above 0: fetch it again")
    eps = config.setdefault("eps", EPS)
    if type(eps) is not float or not 0 < eps < 1:
        raise UserError(f"{file} has {eps!r:.40} for eps, not a number between 0 and 1: fetch it "
                        "again")
    return config


def _model_from_files(
    config_file, weights_file, tokenizer_dir, n_layers, device, dtype, processing
) -> HookedTransformer:
    """A model from config.json and weights as the public attention-only models store them."""
    config = _read_config(config_file, config_file.parent.name, n_layers)
    state = _read_weights(weights_file)
    HookedTransformer = _hooked_transformer()
    from transformer_lens import HookedTransformerConfig
    from transformers import AutoTokenizer

    try:
        cfg = HookedTransformerConfig(  # no MLP, so act_fn is never used; any name will do
            **{k: config[k] for k in (*SIZES, "eps")}, attn_only=True, act_fn="relu",
            normalization_type="LN", device=device, dtype=dtype, init_weights=False)
        with torch.device("meta"):  # sizes that do not fit never take memory
            empty = HookedTransformer(cfg, move_to_device=False).state_dict()
        state = _fitting(empty, state, cfg.n_layers, weights_file)
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir), trust_remote_code=False)
        with contextlib.redirect_stdout(sys.stderr):
            model = HookedTransformer(cfg, tokenizer, move_to_device=False)
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{config_file} or the tokenizer beside it is not usable ({_cause(e)!r}): "
                        "fetch them again") from None
    n_ids = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if n_ids > cfg.d_vocab:
        raise UserError(f"{weights_file} does not fit the files beside it: the tokenizer has "
                        f"{n_ids:,} tokens, the model {cfg.d_vocab:,}; fetch them again")
    with contextlib.redirect_stdout(sys.stderr):
        model.load_and_process_state_dict({k: v.to(dtype) for k, v in state.items()}, **processing)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(f"{weights_file}: {name} overflows in {dtype}: fetch it again")
    return model.to(device, print_details=False)


def _fitting(empty: dict, state: dict, n_layers: int, file: pathlib.Path) -> dict[str, Tensor]:
    """What a model takes of a state dict; UserError if that is not what an empty model has."""
    wanted = {k: v.shape for k, v in empty.items() if not k.endswith(("mask", "IGNORE"))}
    bad = [k for k in wanted if k not in state and not k.endswith("b_U")]
    bad += [k for k in wanted if k in state and (
        state[k].shape != wanted[k] or not state[k].is_floating_point())]
    bad += [k for k in state if k.startswith(f"blocks.{n_layers}.")]
    if bad:
        raise UserError(f"{file} does not fit the files beside it: {bad[0]} is missing, too much, "
                        "or of another shape or type; fetch them again")
    return {k: state[k] for k in wanted if k in state}


def _read_weights(file: pathlib.Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            import safetensors.torch

            state = safetensors.torch.load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        bad = [k for k, v in state.items()
               if not k.endswith("IGNORE") and not bool(torch.isfinite(v).all())]
    except Exception as e:
        raise UserError(f"{file} is not a readable state dict of weights ({_cause(e)}): "
                        "delete it and fetch it again") from None
    if bad:
        raise UserError(f"{file}: {bad[0]} has values that are not finite: fetch it again")
    return state


def sha256(data: pathlib.Path | str) -> str:
    """Hex digest of a file's bytes, or of a string in UTF-8."""
    if isinstance(data, str):
        return hashlib.sha256(data.encode("utf-8")).hexdigest()
    with data.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def encode(model: HookedTransformer, text: str) -> list[int]:
    """Token ids of a text, without BOS."""
    try:
        return model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as e:
        raise UserError(f"the tokenizer fails on {text[:20]!r} ({_cause(e)}): fetch "
                        "its files again") from None


def token_text(model: HookedTransformer, token: int) -> str:
    """A token as text, its space with it; bytes that are no whole character, by their name."""
    text = model.tokenizer.decode([token], clean_up_tokenization_spaces=False)
    return model.tokenizer.convert_ids_to_tokens(token) if text == "\ufffd" else text


def wikitext(join: str = "\n\n", keep_blank: bool = True) -> tuple[str, str]:
    """The WikiText-2 test split, its rows joined, and the SHA-256 of the rows alone: that of the
    split's known content, WIKITEXT_SHA256, or there is a warning."""
    online = hub_answers()
    import datasets

    try:
        rows = datasets.load_dataset(WIKITEXT[0], WIKITEXT[1], split=WIKITEXT[2])["text"]
        rows = list(rows)
    except Exception as e:
        raise UserError(f"{WIKITEXT[0]} {WIKITEXT[1]} is not in the cache "
                        f"{datasets.config.HF_DATASETS_CACHE} and {_not_given(e, online)}: "
                        "connect once, or name a text with --text FILE") from None
    rows_sha256 = sha256("".join(rows))
    if len(rows) != WIKITEXT_ROWS or rows_sha256 != WIKITEXT_SHA256:
        notice("warning: the WikiText-2 test split here is not the one this was made with; "
               "the losses cannot be compared with the published ones")
    return join.join(r for r in rows if keep_blank or r.strip()), rows_sha256


def load_tokens(
    model: HookedTransformer,
    name: str,
    text_file: str | None = None,
    n_tokens: int = 3072,
    seq_len: int | None = None,
    bos_counted: bool = True,
    join: str = "\n\n",
    keep_blank: bool = True,
    default_len: int = 256,
) -> tuple[Int[Tensor, "batch pos"], dict]:
    """Rows of a text, each BOS and the next stretch of it: [n_tokens // seq_len, seq_len].

    The text is `text_file`, or the bundled sample for the bundled models, or else the WikiText-2
    test split. It is tokenised once, no further than needed, and BOS is added here, once.

    Args:
        name: the model's name as it was asked for.
        n_tokens: tokens in all, BOS counted.
        seq_len: tokens of a row; None for default_len, or the context where that is shorter.
        bos_counted: False puts BOS before seq_len tokens of text instead of seq_len - 1.
        join, keep_blank: how the rows of WikiText become one text.

    Returns:
        the ids, and {n_tokens, seq_len, text, text_sha256, rows_sha256 (None for a file),
        token_ids_sha256}.

    Raises:
        UserError: text too short, rows longer than the context, unreadable file.
    """
    longest = model.cfg.n_ctx - (not bos_counted)
    seq_len = min(default_len, longest) if seq_len is None else seq_len
    if seq_len > longest:
        besides = "" if bos_counted else " with a start token besides"
        raise UserError(f"--seq-len {seq_len}{besides} is longer than the context of {name}, "
                        f"{model.cfg.n_ctx} tokens: take --seq-len {longest} or less")
    if seq_len < 3 or n_tokens < seq_len:
        raise UserError(f"--tokens {n_tokens} in sequences of {seq_len} makes none: a sequence has "
                        "3 tokens or more (--seq-len), and --tokens has room for at least one")
    n_rows, per_row = n_tokens // seq_len, seq_len - bos_counted
    if n_rows * seq_len != n_tokens:
        notice(f"using {n_rows * seq_len:,} of {n_tokens:,} tokens: whole sequences of {seq_len}")
    if text_file is None and name in BUNDLED:
        text_file = str(MINI / "sample.txt")
    ids, hashes = _encode_enough(model, n_rows * per_row, text_file, join, keep_blank)
    if len(ids) < n_rows * per_row:
        enough = len(ids) // per_row * seq_len
        raise UserError(f"{text_file or 'WikiText-2'} has {len(ids):,} tokens, {n_rows:,} "
                        f"sequences take {n_rows * per_row:,}: take "
                        + (f"--tokens {enough} or " if enough else "") + "a longer text")
    bos = model.tokenizer.bos_token_id
    if bos is None:
        raise UserError(f"the tokenizer of {name} has no start token: add bos_token to its files")
    if bos in ids:
        raise UserError(f"{text_file or 'WikiText-2'} contains the start token of {name} as text: "
                        "take another text")
    rows = [[bos, *ids[i * per_row : (i + 1) * per_row]] for i in range(n_rows)]
    flat = " ".join(str(i) for row in rows for i in row)
    meta = {"n_tokens": n_rows * len(rows[0]), "seq_len": len(rows[0]),
            "text": pathlib.Path(text_file).name if text_file else "/".join(WIKITEXT),
            "token_ids_sha256": sha256(flat), **hashes}
    return torch.tensor(rows, device=model.cfg.device), meta


def _encode_enough(model, n_needed, text_file, join, keep_blank) -> tuple[list[int], dict]:
    """At least n_needed ids from the start of the text if it has them, and the text's hashes.

    A tokenizer decides word by word: a prefix has the ids of the whole but for its last word."""
    text, rows_sha256 = wikitext(join, keep_blank) if text_file is None else (None, None)
    n_chars = 16 * n_needed + 4096
    while True:
        if text_file is None:
            part = text[:n_chars]
        else:
            try:
                if os.path.exists(text_file) and not os.path.isfile(text_file):
                    raise UserError(f"--text {text_file} is not a regular file: save it as one")
                with open(text_file, encoding="utf-8-sig", newline="") as f:
                    part = f.read(n_chars)
            except (OSError, UnicodeDecodeError) as e:
                cause = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
                raise UserError(f"cannot read --text {text_file}: {cause}") from None
        ids = encode(model, part)
        if len(part) < n_chars or len(ids) >= n_needed + 64:
            whole = sha256(pathlib.Path(text_file) if text is None else text)
            return ids[:n_needed], {"text_sha256": whole, "rows_sha256": rows_sha256}
        n_chars *= 4


# ================================================================================= Frozen run


def cen(x: Tensor) -> Tensor:
    """x minus its mean over the last axis (d_model), the centring of LayerNorm."""
    return x - x.mean(-1, keepdim=True)


@dataclass(frozen=True)
class FrozenRun:
    """One normal run, kept: what the expansion holds fixed, and what it is checked against."""

    model: HookedTransformer
    tokens: Int[Tensor, "batch pos"]
    streams: Float[Tensor, "layers+1 batch pos d_model"]  # before each layer, and at the end
    scales: Float[Tensor, "layers+1 batch pos 1"]  # of each layer's LayerNorm and the final one
    patterns: Float[Tensor, "layer head batch query key"]
    scores: Float[Tensor, "layer head batch query key"]  # masked, before the softmax
    final: Float[Tensor, "batch pos d_model"]  # what the unembedding reads

    @property
    def x0(self) -> Float[Tensor, "batch pos d_model"]:
        """Embedding + position."""
        return self.streams[0]

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        """What each layer adds whatever it reads: b_O, and b_V W_O where b_V was not folded."""
        m = self.model
        return m.b_O + torch.einsum("lhe,lhed->ld", m.b_V, m.W_O)

    def readout(self, stream: Float[Tensor, "batch pos d_model"]) -> Tensor:
        """cen(stream) / s_final, with the scale of the full run: what W_U reads. Same shape."""
        return cen(stream) / self.scales[-1]


@torch.no_grad()
def freeze(model: HookedTransformer, tokens: Int[Tensor, "batch pos"]) -> FrozenRun:
    """Run the model once and keep patterns, scales and streams. The logits are never made."""
    layers = range(model.cfg.n_layers)
    end = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    kept = {"hook_resid_pre", "hook_resid_post", "hook_scale", "hook_pattern", "hook_attn_scores",
            "hook_normalized"}
    _, cache = model.run_with_cache(
        tokens, return_type=None, names_filter=lambda n: n.rsplit(".", 1)[-1] in kept
    )
    per_head = lambda hook: torch.stack(  # noqa: E731
        [cache[f"blocks.{i}.attn.{hook}"].transpose(0, 1) for i in layers]
    )
    return FrozenRun(
        model=model,
        tokens=tokens,
        streams=torch.stack([*(cache[f"blocks.{i}.hook_resid_pre"] for i in layers), cache[end]]),
        scales=torch.stack([*(cache[f"blocks.{i}.ln1.hook_scale"] for i in layers),
                            cache["ln_final.hook_scale"]]),
        patterns=per_head("hook_pattern"),
        scores=per_head("hook_attn_scores"),
        final=cache["ln_final.hook_normalized"],
    )


# ============================================================================= Path expansion


@dataclass(frozen=True)
class Paths:
    """The terms of a two-layer model: 1 direct, 2 x heads single, heads x heads virtual.

    A head's term is z W_O with z [..., d_head] wide; only z is kept, so a virtual head costs
    d_head numbers a position and never d_model.
    """

    run: FrozenRun
    direct: Float[Tensor, "batch pos d_model"]
    bias: Float[Tensor, "batch pos d_model"]  # zero, unless b_O(0) counts as moved
    bias_moved: Float[Tensor, "batch pos d_model"]  # layer 1 reading b_O(0), likewise
    z_single: Float[Tensor, "layer head batch pos d_head"]
    z_virtual: Float[Tensor, "h2 h1 batch pos d_head"]

    def heads(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The sum of one layer's single-head terms."""
        return write(self.z_single[layer], self.run.model.W_O[layer])

    def virtual(self) -> Float[Tensor, "batch pos d_model"]:
        """The sum of all virtual-head terms."""
        return write(self.z_virtual.sum(1), self.run.model.W_O[1])

    def stream(self, order: int) -> Float[Tensor, "batch pos d_model"]:
        """The sum of all terms that run through at most `order` heads."""
        y = self.direct
        if order >= 1:
            y = y + self.bias + self.heads(0) + self.heads(1)
        if order >= 2:
            y = y + self.bias_moved + self.virtual()
        return y


def write(
    z: Float[Tensor, "head batch pos d_head"], W_O: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, "batch pos d_model"]:
    """sum over heads of z W_O: what these heads add to the stream."""
    head, batch, pos, d_head = z.shape
    flat = z.permute(1, 2, 0, 3).reshape(batch, pos, head * d_head)
    return flat @ W_O.reshape(head * d_head, -1)


def attend(
    pattern: Float[Tensor, "head batch query key"],
    x: Float[Tensor, "batch pos d_model"],
    W_V: Float[Tensor, "head d_model d_head"],
) -> Float[Tensor, "head batch pos d_head"]:
    """z = A (x W_V) for every head, x already centred and scaled."""
    return pattern @ (x @ W_V[:, None])


@torch.no_grad()
def expand(run: FrozenRun, bias_is_moved: bool = False) -> Paths:
    """All terms of the two-layer path expansion, patterns and scales frozen.

    T = Id x W_E W_U + sum_h A^h x W_E W_OV^h W_U
        + sum_{h2,h1} (A^h2 A^h1) x W_E W_OV^h1 W_OV^h2 W_U
    ("The logits as a sum of paths"), with LayerNorm as a fixed scale:
        direct           x0 + b_O(0) + b_O(1)
        layer-0 head h   o0[h] = A0[h] (cen(x0) / s0 W_V) W_O
        layer-1 head h   A1[h] (cen(x0 + b_O(0)) / s1 W_V) W_O
        virtual h2 o h1  A1[h2] (cen(o0[h1]) / s1 W_V[h2]) W_O[h2]

    Exact up to rounding: the terms add up to the run's final stream, since with A and s held
    every step is linear. cen(z W_O) = z cen(W_O), so o0 is never written out per head.

    Args:
        bias_is_moved: count b_O(0) with what layer 0 moves instead of with the direct path.

    Cost: heads^2 x batch x pos^2 x d_head multiplications for the virtual heads.
    """
    W_V, W_O = run.model.W_V, run.model.W_O
    if len(W_V) != 2:
        raise ValueError(f"expand is for two layers, the model has {len(W_V)}")
    s0, s1, _ = run.scales
    A0, A1 = run.patterns
    b0, b1 = run.b_O
    read_by_1 = run.x0 if bias_is_moved else run.x0 + b0
    z0 = attend(A0, cen(run.x0) / s0, W_V[0])
    z1 = attend(A1, cen(read_by_1) / s1, W_V[1])
    W_OV = cen(W_O[0]) @ W_V[1][:, None]  # [h2, h1, d_head, d_head]
    z_virtual = torch.stack([A1[h2] @ (z0 / s1 @ W_OV[h2][:, None]) for h2 in range(len(A1))])
    nothing = torch.zeros_like(run.x0)
    if bias_is_moved:
        direct, bias = run.x0 + b1, nothing + b0
        bias_moved = write(attend(A1, cen(bias) / s1, W_V[1]), W_O[1])
    else:
        direct, bias, bias_moved = run.x0 + b0 + b1, nothing, nothing
    return Paths(run, direct, bias, bias_moved, torch.stack([z0, z1]), z_virtual)


@torch.no_grad()
def virtual_by_source(run: FrozenRun) -> tuple[Tensor, Tensor]:
    """The virtual heads' sum, split by what the layer-0 heads read.

    Every layer-0 pattern is split into its column of source position 0 and the rest, and layer 1
    moves the two on apart: (start, real) [batch, pos, d_model], adding up to Paths.virtual().
    """
    W_V, W_O = run.model.W_V, run.model.W_O
    start = run.patterns[0].clone()
    start[..., 1:] = 0
    halves = []
    for A0 in (start, run.patterns[0] - start):
        moved = write(attend(A0, cen(run.x0) / run.scales[0], W_V[0]), W_O[0])
        halves.append(write(attend(run.patterns[1], cen(moved) / run.scales[1], W_V[1]), W_O[1]))
    return halves[0], halves[1]


# ===================================================================================== Losses

ROWS, COLUMNS = 3072, 512  # a tile of logits: 6 MB in float32, two fit the cache that cores share
BITS = 1.4426950408889634  # in a nat: exp(x) is 2^(BITS x), and exp2 takes half of exp's time


def _tiles(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


@dataclass(frozen=True)
class Unembedded:
    """What one pass over the logits of a text finds. Losses are in nats, summed in float64."""

    losses: dict[str, Float[Tensor, "batch pos-1"]]  # -log p(next token)
    removed: Float[Tensor, "head term batch pos-1"]  # loss without a term less the last readout's
    max_abs_diff: float  # between the logits of the first and the last readout, at all positions
    min: float  # of the first readout's logits; infinite, as max, where it is the only one
    max: float


@torch.no_grad()
def unembed(
    run: FrozenRun,
    readouts: dict[str, Float[Tensor, "batch pos d_model"]],
    combined: dict[str, tuple[str, str, str]] | None = None,
    z: Float[Tensor, "head term batch pos d_head"] | None = None,
) -> Unembedded:
    """All that needs logits, in one pass over the vocabulary that makes those of a readout once.

        loss = log sum_v exp(x W_U[:, v] + b_U[v]) - (x W_U[:, t] + b_U[t]), t the next token

    Logits are linear in what is read, so two kinds of losses need no unembedding of their own:

        combined: (i, j, k)  of the readouts' x_i + x_j - x_k, from the logits of the three
        z[h, i]              of the last readout without the term z[h, i] W_O[h] of the last layer's
                             head h, a rank-d_head update: logit_v - u W_OU[:, v] with
                             u = z[h, i] / s_final and W_OU = cen(W_O[h]) W_U

    The next token's own logit, before a removal, is the shift of all exponentials. A row whose sum
    leaves the range that this is safe for is done again by itself. Exact up to rounding.

    Args:
        readouts: run.readout(stream), or run.final for the model itself.
        combined: under names that no readout has.

    Returns:
        losses of the readouts and the combined ones, under their names; removed, of every z[h, i].

    Cost: an unembedding a readout, an exponential a logit and loss, d_head multiplications a logit
    and removal. Of a readout's logits one tile of ROWS x COLUMNS exists at a time.
    """
    W_U, b_U, (batch, pos) = run.model.W_U, run.model.b_U, run.tokens.shape
    combined, names = combined or {}, list(readouts)
    first, last = names[0], names[-1]
    x = {name: readout.flatten(0, 1) for name, readout in readouts.items()}  # [n, d_model]
    x |= {name: x[i] + x[j] - x[k] for name, (i, j, k) in combined.items()}
    z = run.model.W_O.new_zeros(0, 0, batch, pos, run.model.W_O.shape[2]) if z is None else z
    u, W_O = (z / run.scales[-1]).flatten(2, 3), cen(run.model.W_O[-1, : len(z)])
    # A row's last token predicts nothing; it stands in for its next one here, and is dropped below.
    targets = torch.cat([run.tokens[:, 1:], run.tokens[:, -1:]], 1).flatten()
    to_target = W_U[:, targets]
    shift = {name: (y * to_target.T).sum(-1) + b_U[targets] for name, y in x.items()}
    kept = {name: torch.zeros_like(y, dtype=torch.float64) for name, y in shift.items()}
    left = kept[last].new_zeros(u.shape[:3])
    low, high, worst = torch.inf, -torch.inf, 0.0
    for columns in progress(_tiles(W_U.shape[1], COLUMNS), "unembedding"):
        W, b = W_U[:, columns], b_U[columns]
        W_OU = W_O @ W
        for rows in _tiles(batch * pos, ROWS):
            bits = {name: torch.addmm(b, x[name][rows], W, beta=BITS, alpha=BITS)
                    for name in names}
            if first != last:
                worst = max(worst, (bits[last] - bits[first]).abs_().max().item())
                low, high = min(low, bits[first].min().item()), max(high, bits[first].max().item())
            bits |= {name: (bits[i] + bits[j]).sub_(bits[k])
                     for name, (i, j, k) in combined.items()}
            out = torch.empty_like(bits[last])
            for name, full in bits.items():
                full.sub_(shift[name][rows, None], alpha=BITS)
                kept[name][rows] += torch.exp2(full, out=out).sum(1)
            for h, i in pairs(u):
                torch.addmm(bits[last], u[h, i, rows], W_OU[h], alpha=-BITS, out=out)
                left[h, i, rows] += out.exp2_().sum(1)

    for name, y in x.items():
        kept[name] = _log(kept[name], shift[name], lambda some, y=y: y[some], W_U, b_U)
    for h, i in pairs(u):
        without = lambda some, h=h, i=i: x[last][some] - u[h, i, some] @ W_O[h]  # noqa: E731
        left[h, i] = _log(left[h, i], shift[last], without, W_U, b_U) - kept[last]
    left += torch.einsum("hind,hdn->hin", u, W_O @ to_target)
    predicting = lambda loss: loss.unflatten(-1, (batch, pos))[..., :-1]  # noqa: E731
    return Unembedded({name: predicting(loss) for name, loss in kept.items()}, predicting(left),
                      worst / BITS, low / BITS, high / BITS)


def _log(total: Float[Tensor, " n"], shift: Tensor, read, W_U: Tensor, b_U: Tensor) -> Tensor:
    """log of total, the sum of exp(logit - shift) of each row. Where it is no safe number, anew
    from the logits of the rows: read(mask) is what they unembed, [rows, d_model]."""
    unsafe = ~((total > 1e-30) & (total < 1e30))
    normalizer = [(x @ W_U + b_U).logsumexp(-1) for x in read(unsafe).split(64)]
    again = torch.cat(normalizer) - shift[unsafe]
    return total.log().masked_scatter(unsafe, again.double())


def pairs(x: Tensor) -> list[tuple[int, int]]:
    """The indices of a tensor's first two axes, (h2, h1) of virtual heads."""
    return [(h2, h1) for h2 in range(x.shape[0]) for h1 in range(x.shape[1])]


# ========================================================================= Attention patterns


def mean_attention(pattern: Float[Tensor, "... query key"], back: int) -> Float[Tensor, "..."]:
    """Mean of A[i, i - back] over the rows i >= back; batch is averaged too if it is axis -3."""
    return pattern.diagonal(-back, -2, -1).mean(-1).mean(-1)


def softmax_causal(scores: Float[Tensor, "... query key"]) -> Float[Tensor, "... query key"]:
    """Mask the future, then softmax over the keys."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)


def total_variation(
    p: Float[Tensor, "... query key"], q: Float[Tensor, "... query key"]
) -> Float[Tensor, "..."]:
    """1/2 sum over keys of |p - q|, mean over rows and over the batch axis -3. In [0, 1]."""
    return (p - q).abs().sum(-1).mean((-1, -2)) / 2


# ================================================================================ Composition


def composition_scores(
    W_V: Float[Tensor, "h1 d_model d_head"],
    W_O: Float[Tensor, "h1 d_head d_model"],
    read: Float[Tensor, "h2 d_model d_head"],
    other: Float[Tensor, "h2 d_model d_head"],
) -> Float[Tensor, "h2 h1"]:
    """||W_V W_O read other^T||_F / (||W_V W_O||_F ||read other^T||_F), dimensionless, in [0, 1].

    ("Measuring composition from the weights".) K-composition: read = W_K, other = W_Q; Q: the two
    the other way round; V: read = W_V and other = W_O^T of the later head.

    With X = W_O read [d_head, d_head] the squared norm is tr(W_V^T W_V X other^T other X^T): Gram
    matrices of d_head x d_head, in float64. The order of the factors matters, ||AB|| is not ||BA||;
    only the trace survives a cyclic permutation.

    Cost: heads^2 x d_head^3 + heads^2 x d_model x d_head^2; no d_model x d_model matrix.
    """
    W_V, W_O, read, other = (w.double() for w in (W_V, W_O, read, other))
    gram = lambda w: w.mT @ w  # noqa: E731
    gram_V, gram_other = gram(W_V), gram(other)
    X = torch.tensordot(W_O, read, ([2], [1])).permute(2, 0, 1, 3)  # [h2, h1, d_head, d_head]
    product = (gram_V @ X * (X @ gram_other[:, None])).sum((-1, -2))
    size_1 = (gram_V * gram(W_O.mT)).sum((-1, -2))
    size_2 = (gram(read) * gram_other).sum((-1, -2))
    return (product / (size_2[:, None] * size_1)).sqrt()


def first_published_scores(W_V: Tensor, W_O: Tensor, read: Tensor, other: Tensor) -> Tensor:
    """The score as first published, before the authors' correction: ||other^T W_V W_O read||_F
    over the same norms. The first factor has moved to the end. Shapes as composition_scores."""
    W_V, W_O, read, other = (w.double() for w in (W_V, W_O, read, other))
    norm = lambda w: w.norm(dim=(-1, -2))  # noqa: E731
    product = norm((other.mT[:, None] @ W_V) @ (W_O @ read[:, None]))
    size_1 = ((W_V.mT @ W_V) * (W_O @ W_O.mT)).sum((-1, -2)).sqrt()
    size_2 = ((read.mT @ read) * (other.mT @ other)).sum((-1, -2)).sqrt()
    return product / (size_2[:, None] * size_1)


def random_baseline(d_model: int, d_head: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scores of n pairs of random rank-d_head d_model x d_model matrices.

    Products of Gaussian factors, drawn on the CPU from a private generator. Returns (corrected
    [n], first published [n]), of the same matrices, float64.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for some in _tiles(n, 10):
        drawn = [torch.randn(4, 1, d_model, d_head, dtype=torch.float64, generator=generator)
                 for _ in range(n)[some]]
        V, O_T, read, other = torch.stack(drawn, 1)
        found.append([torch.vmap(score)(V, O_T.mT, read, other)[:, 0, 0]
                      for score in (composition_scores, first_published_scores)])
    corrected, published = zip(*found)
    return torch.cat(corrected), torch.cat(published)


# ======================================================================== Eigenvalues and copying

REAL = 1e-6  # an eigenvalue l is real, or without real part, if that part is within REAL |l| of 0
TIE = 1e-12  # of ||a|| ||b||: two entries of a row that differ by less are a tie, whatever the tile

# A circuit is a product A B, [source, out]: for an OV circuit A = W_E W_V and B = W_O W_U. The
# article's M = P Q is its transpose, [out, source], so P = B^T and Q = A^T; the eigenvalues, the
# diagonal and the trace of the two are the same. [n, n] is never built; every kernel is float64.


@torch.no_grad()
def circuit_eigenvalues(
    A: Float[Tensor, "... n d_head"], B: Float[Tensor, "... d_head n"]
) -> tuple[Tensor, Tensor]:
    """The eigenvalues of A B, but for n - d_head zeros, and its trace, from the small side B A.

    Non-zero eigenvalues of P Q = those of Q P ("A trick to get the eigenvalues").

    Returns:
        (eigenvalues [..., d_head] complex, trace of B A [...]), on the CPU, no order promised.

    Exact up to rounding, for n >= d_head. Cost: n d_head^2 + d_head^3, one call for all heads.
    """
    small = (B.double() @ A.double()).cpu()
    return torch.linalg.eigvals(small), small.diagonal(0, -2, -1).sum(-1)


def copy_score(eigenvalues: Tensor) -> Float[Tensor, "..."]:
    """Re(sum l) / sum |l| over the last axis, in [-1, 1] ("One number for each head")."""
    return eigenvalues.sum(-1).real / eigenvalues.abs().sum(-1)


def eigenvalue_counts(eigenvalues: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many eigenvalues [..., d_head] have a positive real part, are real and positive, are
    complex: three times [...]. What is real and what is positive, REAL tells relative to |l|."""
    near_zero = REAL * eigenvalues.abs()
    positive, is_complex = eigenvalues.real > near_zero, eigenvalues.imag.abs() > near_zero
    return positive.sum(-1), (positive & ~is_complex).sum(-1), is_complex.sum(-1)


@torch.no_grad()
def eigenvector_condition(
    A: Float[Tensor, "... n d_head"], B: Float[Tensor, "... d_head n"]
) -> Float[Tensor, "..."]:
    """Condition number of the unit eigenvectors of the article's M = (A B)^T: 1 if orthogonal.

    ("Where the score can fool you".) M B^T w = l B^T w where w is an eigenvector of (B A)^T. With
    B^T = Q R the columns R w have the lengths and angles of B^T w. The same for A S, S^-1 B.
    Large or infinite where M has no full set of eigenvectors. On the CPU; cost as the eigenvalues.
    """
    w = torch.linalg.eig((B.double() @ A.double()).mT.cpu())[1]
    v = torch.linalg.qr(B.mT.double().cpu(), mode="r")[1].to(w.dtype) @ w
    return torch.linalg.cond(v / v.norm(dim=-2, keepdim=True))


def circuit_diagonal(
    A: Float[Tensor, "... n d_head"], B: Float[Tensor, "... d_head n"]
) -> Float[Tensor, "... n"]:
    """What reading each token does to its own logit, M_tt ("Other ways to measure copying")."""
    return (A.double() * B.double().mT).sum(-1)


@torch.no_grad()
def self_rank(
    A: Float[Tensor, "head n d_head"], B: Float[Tensor, "head d_head n"],
    sources: Int[Tensor, " source"], block: int = 256,
) -> Int[Tensor, "head source"]:
    """The place of each source token among all n out tokens of its row, 1 for the most raised.

    1 + the number of other tokens with an entry at least as large: a tie is not first, and neither
    is one of rounding (TIE), so the block size changes nothing ("top-1 self" is rank 1, "top-5
    self" rank <= 5). Cost: head x source x n x d_head; a tile of `block` rows at a time.
    """
    ranks = torch.zeros(len(A), len(sources), dtype=torch.int64, device=A.device)
    ids = sources.to(A.device)
    for a, b, rank in progress([*zip(A, B.double(), ranks)], "places of tokens"):
        x = a[ids].double()
        own = (x * b[:, ids].T).sum(1) - TIE * b.norm(dim=0).max() * x.norm(dim=1)
        for columns in _tiles(b.shape[1], 4 * COLUMNS):
            for rows in _tiles(len(x), block):  # the token itself is one of those it counts
                rank[rows] += (x[rows] @ b[:, columns]).ge_(own[rows, None]).sum(1).long()
    return ranks.cpu()


# ================================================================================= Comparison

PUBLISHED = HERE / "results" / "published"
ROUNDING = 4  # units of relative rounding of its dtype that a run may be off beside a printed digit
AGREES, DIFFERS, MISSING = "agrees", "DIFFERS", "MISSING"
EXPLAINED, STALE, NOT_COMPARED = "explained", "EXPLAINED, BUT AGREES", "not compared"
DISAGREE = (DIFFERS, MISSING, STALE)
OTHER_MODEL, OTHER_TEXT = "of another model", "of another text"


def read_published(stem: str) -> dict:
    """What the article prints: {source, model, rows_sha256 of its text, on_text (the keys that
    depend on it), entries, paper, explained}. Data: no run writes it."""
    try:
        published, explained = (json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
                                for name in (stem, "explained"))
        explained = {e["key"]: e for e in explained.get(stem, [])}
        return {**published, "entries": published["entries"], "explained": explained}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise UserError(f"cannot read {stem}.json and explained.json in {PUBLISHED} ({_cause(e)}): "
                        "fetch them again with the scripts") from None


def look_up(results: dict, key: str):
    """The value under a dotted key of a results file's sections; None where there is none."""
    value = results["sections"]
    for part in key.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (LookupError, TypeError, ValueError):
            return None
    return value


def is_number(x) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _leaves(value, key: str = ""):
    """(key, value) of everything in a results tree that is no table or list."""
    items = value.items() if isinstance(value, dict) else (
        [*enumerate(value)] if isinstance(value, list) else None)
    if items is None:
        yield key, value
    elif not items:
        yield key, value  # nothing in it, which is something to compare
    for k, v in items or ():
        yield from _leaves(v, f"{key}.{k}" if key else str(k))


def miss(entry: dict, ours, results: dict) -> float:
    """By how much ours misses a published entry, in units of the last printed digit; 0 where the
    two agree, 1 for a wrong word or a value of another type.

    exact    the same; to 1e-9 where it is computed (toys)
    rounded  within half a unit, and the rounding error of the run's dtype
    bound    at most 4 times what is printed
    range    every value within the two ends, rounded as they are
    sampled  draws that overlap the published range; one value within 4 standard errors of it
    """
    kind, value, decimals = entry["kind"], entry["value"], entry["decimals"]
    unit = 10.0 ** -(decimals or 0)
    half = 0.0 if decimals is None else unit / 2
    error = ROUNDING * torch.finfo(DTYPES[results["meta"]["dtype"]]).eps
    found = dict(_leaves(ours))
    if kind in ("exact", "rounded"):
        wanted = dict(_leaves(value))
        if wanted.keys() != found.keys():
            return 1.0
        slack = (lambda x: half + error * abs(x)) if kind == "rounded" else (
            lambda x: 1e-9 * max(1, abs(x)) if isinstance(x, float) else 0)
        off = max(_off(wanted[k], x, slack(x) if is_number(x) else 0, unit)
                  for k, x in found.items())
        return min(off, 1.0) if decimals is None else off  # a wrong head is a wrong word
    if not found or not all(map(is_number, found.values())):
        return 1.0
    low, high = min(found.values()), max(found.values())
    if kind == "bound":
        high = max(high, -low)
        return 0.0 if high <= 4 * value else high / unit
    if kind == "sampled" and is_number(value):
        sd = look_up(results, entry["spread"])
        return _off(value, low, half + 4 * sd / entry["n"]**0.5, unit) if is_number(sd) else 1.0
    first, last = (v if v is not None else end for v, end in zip(value, (-torch.inf, torch.inf)))
    if kind == "sampled":
        low, high = high, low
    beyond = max(first - low, high - last, 0.0)
    return beyond / unit if beyond > half + error * max(abs(low), abs(high)) else 0.0


def _off(wanted, ours, slack: float, unit: float) -> float:
    if not (is_number(wanted) and is_number(ours)):
        return float(wanted != ours or is_number(wanted) != is_number(ours))
    return 0.0 if abs(ours - wanted) <= slack else max(1.0, round(abs(ours - wanted) / unit))


def shown(entry: dict, ours) -> str:
    """Our value as the article would print it."""
    decimals = entry["decimals"]
    if ours is None:
        return "-"
    if isinstance(ours, list) and ours != entry["value"]:  # its sentence has room for no other list
        entry = {k: v for k, v in entry.items() if k != "format"}
    if "format" in entry:
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            return entry["format"].format(ours, **ours if isinstance(ours, dict) else {})
    if isinstance(ours, list):
        return "[" + ", ".join(shown(entry, x) for x in ours) + "]"
    if not is_number(ours) or decimals is None:
        return ours if isinstance(ours, str) else f"{ours:.3g}" if is_number(ours) else repr(ours)
    if entry["kind"] == "bound":
        return f"{ours:.1e}"
    sign = "+" if entry["printed"].startswith("+") else ""
    return f"{round(ours, decimals):{sign},.{max(decimals, 0)}f}"


def compare(published: dict, results: dict) -> list[dict]:
    """Every published entry against a run's results, in the article's order.

    Returns:
        a row each: {key, section, printed, ours, difference, verdict, miss, why}. What belongs to
        another model or text than the run's, or is marked as not comparable, is not compared.
    """
    meta, rows = results["meta"], []
    # of a public name, the hub's model alone and no folder of that name
    same_model = meta.get("model") == published.get("model") and (
        meta.get("revision") is not None or published.get("model") not in PUBLIC)
    same_text = meta.get("rows_sha256") == published.get("rows_sha256")
    for e in published["entries"]:
        ours = look_up(results, e["key"])
        on_text = e["key"].startswith(tuple(published.get("on_text", ())))
        why = e.get("reason") or (OTHER_MODEL if not same_model else
                                  OTHER_TEXT if on_text and not same_text else "")
        if e["kind"] != "not comparable" and (e.get("model_independent") or not why):
            off, known = miss(e, ours, results), published["explained"].get(e["key"])
            verdict, why = MISSING if ours is None else DIFFERS if off else AGREES, ""
            if known and verdict == AGREES or known and ours == known["ours"]:
                verdict, why = EXPLAINED if off else STALE, known["reason"]
        else:
            off, verdict = 0.0, NOT_COMPARED
        both = is_number(ours) and is_number(e["value"])
        small = (e["decimals"] or -1) >= 0 and e["kind"] != "bound"
        digits = f"+.{e['decimals'] + 1}f" if small else "+.3g"
        rows.append({"key": e["key"], "section": e["section"], "printed": e["printed"],
                     "ours": shown(e, ours), "verdict": verdict, "miss": off, "why": why,
                     "difference": format(ours - e["value"], digits) if both else ""})
    return rows


def compare_results(a: dict, b: dict, rtol: float) -> list[dict]:
    """Two results files: every value of the one against the other's, rows as compare gives them.
    Numbers that are no counts agree within rtol, relative above 1 and absolute below."""
    ours, theirs = (dict(_leaves(r["sections"])) for r in (a, b))
    rows = []
    for key in sorted(ours.keys() | theirs.keys()):
        x, y = ours.get(key), theirs.get(key)
        close = key in ours and key in theirs and type(x) is type(y) and (
            abs(x - y) <= rtol * max(1, abs(x), abs(y)) if isinstance(x, float) else x == y)
        missing = key not in ours or key not in theirs
        both = is_number(x) and is_number(y)
        rows.append({"key": key, "section": "", "printed": repr(x), "ours": repr(y), "miss": 0.0,
                     "verdict": AGREES if close else MISSING if missing else DIFFERS, "why": "",
                     "difference": f"{y - x:+.3g}" if both else ""})
    return rows


def print_comparison(rows: list[dict], log: Log, every: bool) -> None:
    """The summary of a comparison, and its rows: every one, or only what does not agree."""
    count = {v: sum(r["verdict"] == v for r in rows) for v in (AGREES, *DISAGREE, EXPLAINED)}
    compared = sum(count.values())
    log(f"  {compared} of {len(rows)} compared: {count[AGREES]} agree, "
        f"{sum(count[v] for v in DISAGREE)} disagree, {count[EXPLAINED]} explained")
    for why in sorted({r["why"] for r in rows if r["verdict"] == NOT_COMPARED}):
        log(f"  {sum(r['why'] == why for r in rows)} not compared: {why}")
    section = ""  # the rows of two results files have none
    for r in rows:
        if r["verdict"] in (*DISAGREE, EXPLAINED) or (
                every and r["why"] not in (OTHER_MODEL, OTHER_TEXT)):
            if r["section"] != section:
                section = r["section"]
                log(f"  {section}")
            log(f"    {r['key']:<44} {r['printed']:>14} {r['ours']:>14} {r['difference']:>8}  "
                f"{r['verdict']}" + (f": {r['why']}" if r["why"] else ""))


def print_context(published: dict, results: dict, log: Log) -> None:
    """The paper's own figures beside ours: other models, never compared."""
    log("== THE PAPER'S OWN FIGURES, OF OTHER MODELS: FOR CONTEXT, NEVER COMPARED")
    for p in published["paper"]:
        ours = look_up(results, p["beside"]) if p.get("beside") else None
        ours = f"{ours:.4g}" if isinstance(ours, float) else "-" if ours is None else str(ours)
        log(f"    {p['what']:<52} paper {p['printed']:>12}   ours {ours}")


def diff(script: Script, args: argparse.Namespace) -> dict:
    """--diff: the published numbers against a results file, or one results file against another.

    Raises:
        SystemExit: with 1 if anything disagrees. UserError: a file cannot be read.
    """
    files = [pathlib.Path(f) for f in args.diff]
    files = files or [output_dirs(args, script.model)[0] / f"{script.stem}.json"]
    if len(files) > 2:
        raise UserError("--diff takes a results file, or two: python "
                        f"{script.file} --diff A.json B.json")
    results, log = [read_results(f, script) for f in files], Log()
    if len(files) == 2:
        log(f"== {files[0]} AGAINST {files[1]} (to {args.rtol:g}, relative above 1)")
        a, b = (dict(_leaves(r["meta"])) for r in results)
        for key in sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k)):
            log(f"  meta.{key}: {a.get(key)} | {b.get(key)}")
        rows = compare_results(*results, args.rtol)
        print_comparison(rows, log, every=False)
    else:
        published = read_published(script.stem)
        name = files[0].relative_to(HERE) if files[0].is_relative_to(HERE) else files[0]
        log(f"== WHAT THE ARTICLE PRINTS AGAINST {name}: printed, ours, ours - printed")
        rows = compare(published, results[0])
        print_comparison(rows, log, every=True)
        if published["paper"]:
            print_context(published, results[0], log)
    if any(r["verdict"] in DISAGREE for r in rows):
        raise SystemExit(1)
    return results[0]


# ================================================================================ Open choices


def sweep(
    script: Script, args: argparse.Namespace, analyse, alternatives: dict[str, list]
) -> dict:
    """Try every setting of what the article leaves open, and see which one its numbers speak for.

    The groups of script.sweeps are tried in turn, the choices of a group jointly and the earlier
    winners kept. A setting's merit is how many published numbers it reproduces, then the sum of
    misses; where equal settings differ in a choice, that choice is not identifiable.

    Args:
        analyse: analyse(choices) gives (analysis, meta); a UserError rules the setting out.
        alternatives: the values of each choice, the default first.

    Writes sweep_{stem}.json and its log.
    """
    published, log, groups = read_published(script.stem), Log(), []
    choices = {name: values[0] for name, values in alternatives.items()}
    analysis, meta = analyse(choices)
    results = {"meta": meta, "sections": {}}
    _recompute(script, analysis, results, {name for name, *_ in script.sections})
    log(f"== WHICH OPEN CHOICES THE PUBLISHED NUMBERS SPEAK FOR ({meta['model']})")
    log("  * no other setting of the group does better")
    for affects in script.sweeps:
        group = _sweep_group(script, published, results, analyse, choices, alternatives, affects)
        choices, results = choices | group["winner"], group.pop("results")
        _print_group(group, log)
        groups.append(group)
    log("  the defaults stay as they are until somebody who has the weights changes them")
    found = {"meta": meta, "groups": groups, "winner": choices}
    wrote = write_results(results_dir(args, script.model), f"sweep_{script.stem}", found, log)
    notice("wrote " + ", ".join(map(str, wrote)))
    return found


def _recompute(script: Script, analysis, results: dict, names: set[str]) -> None:
    for name, compute, _ in script.sections:
        if name in names:
            results["sections"][name] = compute(analysis, results)


def _sweep_group(script, published, results, analyse, choices, alternatives, affects) -> dict:
    """All settings of one group of choices; `affects` maps each to the sections that it changes."""
    names, settings, best = list(affects), [], None
    touched = {"claims"}.union(*affects.values())
    now, results = choices, {"meta": results["meta"], "sections": dict(results["sections"])}
    for values in progress([*itertools.product(*(alternatives[n] for n in names))], "settings"):
        one = dict(zip(names, values))
        try:
            analysis, _ = analyse(choices | one)
        except UserError as e:
            settings.append({"setting": one, "ruled_out": str(e)})
            continue
        changed = [affects[n] for n in names if now[n] != one[n]]
        _recompute(script, analysis, results, {"claims"}.union(*changed) if changed else set())
        now = choices | one
        settings.append({"setting": one} | _reproduced(published, results, touched))
        if best is None or _merit(settings[-1]) > _merit(best[0]):
            best = settings[-1], dict(results["sections"])
    equal = [s["setting"] for s in settings if "misses" in s and _merit(s) == _merit(best[0])]
    default = {n: choices[n] for n in names}
    tried = {n: {repr(s["setting"][n]) for s in settings if "misses" in s} for n in names}
    return {"choices": names, "settings": settings, "equal": equal,
            "winner": default if default in equal else best[0]["setting"],
            "not_identifiable": [n for n in names if len({repr(s[n]) for s in equal}) > 1],
            "not_tried": [n for n in names if len(tried[n]) < 2],
            "results": {"meta": results["meta"], "sections": best[1]}}


def _reproduced(published: dict, results: dict, touched: set[str]) -> dict:
    """How many of the published numbers of the touched sections the results have, and the misses,
    in units of the last printed digit."""
    rows = [r for r in compare(published, results) if r["verdict"] != NOT_COMPARED
            and r["key"].split(".")[0] in touched]
    worst = max(rows, key=lambda r: r["miss"], default=None)
    return {"reproduced": sum(not r["miss"] for r in rows), "of": len(rows),
            "misses": float(sum(r["miss"] for r in rows)),
            "largest_miss": worst and {"key": worst["key"], "units": worst["miss"]}}


def _merit(setting: dict) -> tuple:
    return setting["reproduced"], -setting["misses"]


def _print_group(group: dict, log: Log) -> None:
    say = lambda setting: ", ".join(f"{k} {v!r}" for k, v in setting.items())  # noqa: E731
    log(f"  {', '.join(group['choices'])}: {len(group['settings'])} settings")
    for s in group["settings"]:
        if "ruled_out" in s:
            log(f"    {say(s['setting'])}: not possible here ({s['ruled_out'].split(':')[0]})")
            continue
        worst = s["largest_miss"]
        log(f"    {say(s['setting'])}: {s['reproduced']} of {s['of']} published numbers; largest "
            + (f"miss {worst['units']:.0f} units ({worst['key']})" if worst and worst["units"]
               else "miss none") + (" *" if s["setting"] in group["equal"] else ""))
    log(f"    wins: {say(group['winner'])}; cannot be told apart: "
        f"{', '.join(group['not_identifiable']) or 'none'}"
        + "; nothing else to try here: " * bool(group["not_tried"])
        + ", ".join(group["not_tried"]))


# ==================================================================================== Figures

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
SEQUENTIAL, DIVERGING = "viridis", "PuOr_r"  # colour-blind safe, as COLOURS (Okabe and Ito) are
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.titlesize": 11, "axes.labelsize": 10,
    "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9, "figure.titlesize": 12,
    "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 200,
    "image.interpolation": "nearest", "svg.hashsalt": "circuits",  # the same file every time
    "text.parse_math": False,  # a token may be "$$"
    "figure.constrained_layout.w_pad": 0.08, "figure.constrained_layout.h_pad": 0.08,
}


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **subplots):
    """A Figure of width x height inches whose parts keep clear of each other, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **subplots)


@functools.cache
def _drawable() -> frozenset[int]:
    from matplotlib import font_manager

    return frozenset(font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap())


def drawable(text: str) -> str:
    """A text for a figure: what is no printable sign of its font is written as Python escapes it,
    so that no token or file name can break the figure."""
    return "".join(_signs(text))


def _signs(text: str) -> list[str]:
    return [c if c.isprintable() and ord(c) in _drawable() else ascii(c)[1:-1] for c in text]


def label(token: str, limit: int = 18) -> str:
    """A token in quotes for a figure, as drawable() writes it; one that is longer than `limit`
    ends in an ellipsis."""
    signs, short = _signs(token), ""
    if sum(map(len, signs)) <= limit:
        return f"'{''.join(signs)}'"
    while len(short) + len(signs[0]) < limit:
        short += signs.pop(0)
    return f"'{short}…'"


def heat_map(ax, values, rows: list[str], columns: list[str], bar: str, digits: int | None = 2,
             limits: tuple[float, float] | None = None, diverging: bool = False):
    """values [row, column] as coloured cells with their numbers in them (digits None: without; and
    without where they would not fit), and a colour bar with the label `bar`, if there is one.
    Diverging scales are centred on zero."""
    import numpy as np

    values = np.asarray(values, dtype=float)
    if limits is None:
        limits = (values.min(), values.max()) if not diverging else (-abs(values).max(), 0)
    low, high = (-max(map(abs, limits)), max(map(abs, limits))) if diverging else limits
    image = ax.imshow(values, cmap=DIVERGING if diverging else SEQUENTIAL, vmin=low, vmax=high,
                      aspect="auto")
    ax.set_xticks(range(len(columns)), columns, rotation=0 if font_size(ax, columns, 9) else 90)
    ax.set_yticks(range(len(rows)), rows)
    cells = [[f"{v:z.{digits or 0}f}" for v in row] for row in values]
    size = font_size(ax, max(cells, key=lambda row: max(map(len, row))), 9, 8, 7)
    for (i, j), v in np.ndenumerate(values) if digits is not None and size else ():
        ax.text(j, i, cells[i][j], ha="center", va="center", fontsize=size,
                color=ink(image.cmap(image.norm(v))))
    for axis, n in ((ax.xaxis, len(columns)), (ax.yaxis, len(rows))):
        axis.set_ticks([i + 0.5 for i in range(n - 1)], minor=True)
    ax.grid(which="minor", color="white", linewidth=0.6)
    ax.spines[:].set_visible(False)
    ax.tick_params(which="both", length=0)
    return ax.figure.colorbar(image, ax=ax, label=bar) if bar else None


def ink(colour) -> str:
    """Black or white, whichever can be read on a colour."""
    from matplotlib.colors import to_rgb

    r, g, b = to_rgb(colour)
    return "white" if 0.299 * r + 0.587 * g + 0.114 * b < 0.5 else "black"


def font_size(ax, texts: list[str], *sizes: float) -> float | None:
    """The first of the sizes at which these texts have room side by side across the axes."""
    room = ax.figure.get_figwidth() * ax.get_position().width / len(texts)
    return next((s for s in sizes if text_width(max(texts, key=len), s) + 0.05 < room), None)


def heat_maps(axes, maps, rows: list[str], columns: list[str], bar: str, digits: int | None = 2,
              diverging: bool = False):
    """A heat map on each of the axes, all on one scale from zero, or on both sides of it, and one
    colour bar for them."""
    import numpy as np

    limits = (0, np.nanmax(np.abs(maps)))
    for ax, values in zip(axes, maps):
        heat_map(ax, values, rows, columns, "", digits, limits, diverging)
    return axes[0].figure.colorbar(axes[0].images[0], ax=list(axes), label=bar)


def headline(figure, results: dict, text: str) -> None:
    """The title of a figure: the model, and what is seen of it."""
    text = f"{drawable(results['meta']['model'])[:40]}: {text}"
    figure.suptitle(textwrap.fill(text, int(10 * figure.get_figwidth())))


def text_width(text: str, size: float) -> float:
    """Inches that a text takes."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=size).get_extents().width / 72 if text else 0.0


def bars(ax, groups: list[str], series: dict[str, list[float]],
         form: str | tuple | None = "{:z.2f}", errors: dict | None = None):
    """The values of every series side by side in each group, from a line at zero; each with its
    number as `form` writes it (a tuple: of each series; None: without) unless the bars are more
    than 24, and with its error bar where errors {series: values} has one. More than one series has
    a legend."""
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        x = [g + (i + 0.5) * width - 0.4 for g in range(len(values))]
        drawn = ax.bar(x, values, 0.94 * width, label=name, color=COLOURS[i],
                       yerr=(errors or {}).get(name), error_kw={"elinewidth": 1, "capsize": 3})
        if form and len(groups) * len(series) <= 24:
            ax.bar_label(drawn, fmt=form if isinstance(form, str) else form[i], padding=2,
                         fontsize=8)
    ax.set_xticks(range(len(groups)), groups)
    ax.tick_params(axis="x", length=0)
    ax.spines["bottom"].set_visible(False)
    ax.axhline(0, color="black", linewidth=0.8, clip_on=False)
    middle, half = (len(groups) - 1) / 2, max(len(groups), 2) / 2 + 0.1
    ax.set_xlim(middle - half, middle + half)
    ax.margins(y=0.12)
    if len(series) > 1:
        ax.legend(frameon=False, ncols=len(series), loc="lower right", bbox_to_anchor=(1, 1))


def draw(script: Script, results: dict, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw a script's figures from its results, each as PNG and SVG, whole or not at all. One that
    these results have nothing for is not there afterwards, nor what an earlier run drew."""
    import matplotlib

    wrote, file = [], folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_parts(folder / f"{stem}.{x}" for stem, *_ in script.figures for x in ("png", "svg"))
        with matplotlib.rc_context(STYLE):
            for stem, section, plot in progress(script.figures, "figures"):
                figure = plot(results["sections"][section], results)
                for suffix, no in ("png", "Software"), ("svg", "Date"):
                    file = folder / f"{stem}.{suffix}"
                    if figure is None:
                        file.unlink(missing_ok=True)
                        continue
                    with whole(file) as part:
                        figure.savefig(part, format=suffix, metadata={no: None})
                    wrote.append(file)
    except OSError as e:
        raise UserError(f"cannot write {file}: {e.strerror}; take --no-figures, or name another "
                        "folder with --out DIR") from None
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise UserError(f"these results have not what {stem} draws ({_cause(e)}): run python "
                        f"{script.file} anew") from None
    return wrote


# ===================================================================================== Report


class Log:
    """Prints the lines of the article's log and keeps them for the file."""

    def __init__(self):
        self.lines: list[str] = []

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)


def progress(items: list, what: str):
    """The items, with a bar on stderr if they take longer than two seconds."""
    from tqdm import tqdm

    return tqdm(items, desc=what, file=sys.stderr, delay=2, leave=False)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, like every other of ours."""

    def error(self, message: str):
        raise UserError(f"{message} (see --help)")


def whole_number(text: str) -> int:
    """For argparse: from 0 to 2^31 - 1, more than any size or seed needs."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**31 - 1}")
    return int(text)


def tolerance(text: str) -> float:
    """For argparse: a number from 0 up."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")


def parser(description: str, model: str, n_tokens: int = 3072, seq_len: int = 256) -> Parser:
    """The options that all scripts on a real model share; the rest are their defaults."""
    p = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=model, help="TransformerLens name of an attention-only "
                   f"model, mini (bundled), or a model folder (default {model})")
    p.add_argument("--device", default="cpu", help="cpu, cuda, ... (default cpu)")
    p.add_argument("--dtype", default="float32", choices=sorted(DTYPES),
                   help="of all that is computed on the model (default float32)")
    p.add_argument("--text", metavar="FILE", help="UTF-8 text to run on (default: the WikiText-2 "
                   "test split; the bundled sample for mini)")
    p.add_argument("--tokens", type=whole_number, help=f"tokens in all (default {n_tokens})")
    p.add_argument("--seq-len", type=whole_number, help="tokens of a sequence, BOS counted "
                   f"(default {seq_len}, or the model's context where that is shorter)")
    p.add_argument("--seed", type=whole_number, default=0, help="of the random draws (default 0)")
    p.add_argument("--sweep", action="store_true", help="try every setting of what the article "
                   "leaves open, and say which one the published numbers speak for")
    output_options(p, "results/ and figures/, with /<model> for other models")
    return p


def output_options(p: Parser, default: str) -> None:
    """What all scripts do with results: where they go, their figures."""
    p.add_argument("--out", metavar="DIR", type=pathlib.Path,
                   help=f"where results go, figures to DIR/figures (default {default})")
    p.add_argument("--no-figures", action="store_true", help="write no figures")
    p.add_argument("--figures-only", action="store_true",
                   help="draw them again from the results that are there, without a model")
    p.add_argument("--diff", nargs="*", metavar="FILE", help="compare the results that are there, "
                   "or those in FILE, with what the article prints; two files with each other")
    p.add_argument("--rtol", type=tolerance, default=1e-4, help="how close the numbers of two "
                   "files have to be, relative above 1 and absolute below (default 1e-4)")


@dataclass(frozen=True)
class Script:
    """What the shared options need to know of a script."""

    file: str  # circuits_part5.py: its results are part5.json, published/part5.json what it checks
    sections: list  # (name, compute, print) in the order of the log
    figures: list  # (file name, section, plot); plot(section, results) gives a Figure, or None
    model: str = ""  # the published one; a toy has none
    sweeps: list = dataclasses.field(default_factory=list)  # {open choice: sections it changes}

    @property
    def stem(self) -> str:
        return self.file.removeprefix("circuits_").removesuffix(".py")


def output_dirs(args: argparse.Namespace, published: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Where results go, and where figures go; UserError where others would be lost."""
    if args.out:
        if args.out.resolve() == PUBLISHED:
            raise UserError(f"--out {args.out} holds what the article prints: name another folder")
        return args.out, args.out / "figures"
    folder = "mini" if args.model in BUNDLED else pathlib.Path(args.model).resolve().name
    folder = "" if args.model == published else folder
    if folder in ("mini", PUBLISHED.name) and args.model not in BUNDLED or (
            not folder and args.model != published):
        raise UserError(f"results of a model folder named {folder} would replace others in "
                        f"results/{folder}: rename it, or name another place with --out DIR")
    return HERE / "results" / folder, HERE / "figures" / folder


def results_dir(args: argparse.Namespace, published: str) -> pathlib.Path:
    """The folder for results, made if need be; UserError where it cannot be written to."""
    out = output_dirs(args, published)[0]
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise UserError(f"cannot write to {out}: {e.strerror}; name another folder with --out "
                        "DIR") from None
    return out


def run_meta(
    script: str, source: dict, text: dict, args: argparse.Namespace, choices: dict
) -> dict:
    """What made a results file: model, text, settings and versions. No times."""
    packages = ("torch", "transformer_lens", "transformers", "tokenizers", "datasets", "numpy")
    versions = {p: importlib.metadata.version(p) for p in packages}
    return {"script": script, **source, **text, "processing": PROCESSING, "dtype": args.dtype,
            "device": args.device, "seed": args.seed, "choices": choices,
            "versions": versions | {"python": platform.python_version()}}


def part_of(file: pathlib.Path) -> pathlib.Path:
    """The hidden file that a file is while it is being written."""
    return file.with_name(f".{file.name}.part")


def remove_parts(files) -> None:
    """Remove what is left of these files where a run was killed while it wrote them."""
    for file in files:
        with contextlib.suppress(OSError):
            part_of(file).unlink()


@contextlib.contextmanager
def whole(file: pathlib.Path):
    """A hidden file to write to: it takes the file's place, or nothing of it is left."""
    try:
        yield part_of(file)
        os.replace(part_of(file), file)
    finally:
        remove_parts([file])


def check_finite(results: dict) -> None:
    bad = next(not_finite(results), None)
    if bad is not None:
        raise UserError(f"{bad} is not finite; nothing was written (are the weights sound?)")


def write_results(out: pathlib.Path, stem: str, results: dict, log: Log) -> list[pathlib.Path]:
    """Write {stem}.json and {stem}_stdout.txt, whole or not at all; returns their paths.

    The log is replaced first. Where a run is killed before the JSON is, that one's meta.log_sha256
    is not the log's, and read_results says so.
    """
    check_finite(results)
    text = "\n".join(log.lines) + "\n"
    results["meta"]["log_sha256"] = sha256(text)
    data = json.dumps(results, indent=1, sort_keys=True, allow_nan=False) + "\n"
    json_file, log_file = files = [out / f"{stem}.json", out / f"{stem}_stdout.txt"]
    old_log, had_log = out / f"{stem}_stdout.txt.old", log_file.exists()
    try:
        for file, content in zip(files, (data, text)):
            if file.exists() and not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, f"{file.name} is read-only")
            part_of(file).write_text(content, encoding="utf-8", newline="")
        if had_log:
            shutil.copyfile(log_file, part_of(old_log))
        os.replace(part_of(log_file), log_file)
        try:
            os.replace(part_of(json_file), json_file)
        except BaseException:
            if had_log:
                os.replace(part_of(old_log), log_file)
            else:
                log_file.unlink()
            raise
    except OSError as e:
        raise UserError(f"cannot write results to {out}: {e.strerror}; what was there is as it "
                        "was (name another folder with --out DIR)") from None
    finally:
        remove_parts([*files, old_log])
    return files


def read_results(file: pathlib.Path, script: Script) -> dict:
    """A results file of this script; UserError if it is none, or holds what is not finite."""
    why = None
    try:
        if not file.is_file():  # a pipe or a device need not end
            raise FileNotFoundError(errno.ENOENT, "no such file")
        results = json.loads(file.read_text(encoding="utf-8"))
        json.dumps(results, ensure_ascii=False).encode()  # what cannot be printed ends here
        meta, bad = results["meta"], next(not_finite(results), None)
        if not isinstance(results["sections"], dict) or meta["dtype"] not in DTYPES or (
                script.model and not isinstance(meta["model"], str)):
            why = "its tables are not as that script writes them"
        elif meta["script"] != script.file or bad:
            why = f"{bad} is not finite" if bad else f"it is of {meta['script']}"
    except OSError as e:
        why = e.strerror
    except (ValueError, LookupError, TypeError, RecursionError) as e:
        why = _cause(e)
    if why:
        raise UserError(f"cannot read {file} as results of {script.file} ({why}): python "
                        f"{script.file} makes it")
    log = file.with_name(f"{file.stem}_stdout.txt")
    if log.is_file() and meta.get("log_sha256") not in (None, sha256(log)):
        notice(f"warning: {log} is not the log of {file.name}, a run was cut off between the two: "
               f"python {script.file} makes both anew")
    return results


def without_model(script: Script, args: argparse.Namespace) -> dict | None:
    """Do what needs results alone, --diff or --figures-only; None where the script has to run."""
    asked = {"--diff": args.diff is not None, "--figures-only": args.figures_only,
             "--sweep": getattr(args, "sweep", False),
             "--no-figures": args.no_figures and args.figures_only}
    asked = [name for name, is_asked in asked.items() if is_asked]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)} do not go together: take one at a time")
    if args.diff is not None:
        return diff(script, args)
    if not args.figures_only:
        return None
    out, figures = output_dirs(args, script.model)
    results = read_results(out / f"{script.stem}.json", script)
    notice(f"wrote {len(draw(script, results, figures))} files to {figures}")
    return results


def run_sections(script: Script, meta: dict, args: argparse.Namespace, *analysis) -> dict:
    """Compute and print each section in turn, write the results, draw the figures; returns them.

    With an analysis compute(analysis, results), print(section, results, log); a toy has neither.
    """
    out, figures = results_dir(args, script.model), output_dirs(args, script.model)[1]
    published, results = read_published(script.stem), {"meta": meta, "sections": {}}
    remove_parts(figures / f"{stem}.{x}" for stem, *_ in script.figures for x in ("png", "svg"))
    remove_parts(out / f"sweep_{script.stem}{end}" for end in (".json", "_stdout.txt"))
    given, log = (results,) if analysis else (), Log()
    for name, compute, show in script.sections:
        results["sections"][name] = compute(*analysis, *given)
        show(results["sections"][name], *given, log)
    check_finite(results)  # before anything is compared
    log("== AGAINST WHAT THE ARTICLE PRINTS (--diff shows every number)")
    print_comparison(compare(published, results), log, every=False)
    wrote = ", ".join(str(p) for p in write_results(out, script.stem, results, log))
    if script.figures and not args.no_figures:
        wrote += f", and {len(draw(script, results, figures))} files to {figures}"
    notice(f"wrote {wrote}")
    return results


def run_toy(script: Script, description: str, argv: list[str] | None) -> dict:
    """The main of a toy script: no model, only what comes out."""
    p = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    output_options(p, "results/ and figures/")
    p.set_defaults(model="")
    args = p.parse_args(argv)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    meta = {"script": script.file, "dtype": "float64", "versions": versions}
    return without_model(script, args) or run_sections(script, meta, args)


def not_finite(value, key: str = "results"):
    """The keys of all numbers in a results tree that are NaN or infinite."""
    if isinstance(value, dict):
        for k, v in value.items():
            yield from not_finite(v, f"{key}.{k}")
    elif isinstance(value, list | tuple):
        for i, v in enumerate(value):
            yield from not_finite(v, f"{key}[{i}]")
    elif is_number(value) and not abs(value) < 1e300:  # of a whole number as well
        yield key


def run_script(main) -> int:
    """Run a script's main: 0, or one line on stderr and 1 for a closed stdout, 2 for what a user
    can mend, 130 for Ctrl-C."""
    name = pathlib.Path(sys.argv[0]).name
    if hasattr(sys.stdout, "reconfigure"):  # tokens are in every script, whatever the locale
        sys.stdout.reconfigure(encoding="utf-8")

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as in a job in the background
        signal.signal(signal.SIGINT, interrupted)
    try:
        main()
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        notice(f"{name}: stdout was closed; no file was left half written")
        return 1
    except (UserError, OSError, MemoryError, RuntimeError) as e:
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in _what_to_mend(e))
        notice(f"{name}: error: {line}")
        return 2
    finally:
        signal.signal(signal.SIGINT, before)


def _what_to_mend(e: Exception) -> str:
    """Cause and remedy of an exception that is no bug; one that is goes on."""
    if isinstance(e, UserError):
        return str(e)
    if isinstance(e, OSError):  # stdout on a full disk; every other one names its file
        return f"{e}; no file was left half written: make room, or mend what it names"
    if isinstance(e, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(e):
        return f"not enough memory ({_cause(e)}): take fewer --tokens or a shorter --seq-len"
    if "linalg" in str(e):
        return f"no solution for these weights ({_cause(e)}): are they sound?"
    raise e
