"""Loading of models and text."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from common import HERE, UserError, cause, notice

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

MINI = HERE / "tests" / "mini"  # the bundled models and their sample text
BUNDLED = ("mini", "mini-1l", "mini-2l")
SIZES = ("n_layers", "d_model", "d_head", "n_heads", "n_ctx", "d_vocab")  # in config.json
EPS = 1e-5  # of LayerNorm, where config.json does not say
# Keys of config.json that change what a model computes, with the values that the kernels are exact
# for. Those that depend on other keys are in _values_supported.
SUPPORTED = {
    **dict.fromkeys(("use_attn_scale", "default_prepend_bos"), (True, None)),
    **dict.fromkeys(
        ("shortformer_pos", "use_local_attn", "use_qk_norm", "use_logn_attn", "use_attention_sinks",
         "scale_attn_by_inverse_layer_idx", "final_rms", "uses_rms_norm", "post_embedding_ln",
         "use_normalization_before_and_after", "layer_norm_folding", "parallel_attn_mlp",
         "gated_mlp", "load_in_4bit", "factored_embed"), (False, None)),
    **dict.fromkeys(("attn_scores_soft_cap", "output_logits_soft_cap"), (-1, 0, None)),
    **dict.fromkeys(
        ("window_size", "attn_types", "clip_qkv", "num_experts", "experts_per_token",
         "quantization_method", "relative_attention_max_distance", "relative_attention_num_buckets",
         "decoder_start_token_id"), (None,)),
    "attention_dir": ("causal", None),
    "positional_embedding_type": ("standard",),
}
# Any other key is taken to change what a model computes if its name holds one of these words,
SHAPING = re.compile("attn|attention|norm|posi|pos_|_pos|emb|window|scal|bias|cap|head|layer|mask|"
                     "mlp|expert|resid|parallel|alibi|temperature|eps|logit|softmax|causal|direction")
# unless it is about training, about MLPs or rotary positions, which these models lack, or about
# what TransformerLens hooks, stores or ties while it reads a model.
HARMLESS = re.compile("init|train|lr|loss|grad|optim|decay|dropout|schedule|data|checkpoint|"
                      "neuron|rotary|rope|ntk|yarn|^d_mlp$|^use_pos_resid$|^use_attn_result$|"
                      "^use_attn_in$|^use_hook_mlp_in$|^ungroup_grouped_query_attention$|"
                      "^tie_word_embeddings$|^norm_topk_prob$", re.IGNORECASE)
PROCESSING = dict(fold_ln=True, center_writing_weights=True, center_unembed=True,
                  fold_value_biases=True, refactor_factored_attn_matrices=False)
WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
WIKITEXT_ROWS = 4358
WIKITEXT_SHA256 = "bbf94c53a05abe9ee670d3b6343608095822c85e26de37c70b24fc571964574a"
PUBLIC = {f"attn-only-{n}l": f"NeelNanda/Attn_Only_{n}L512W_C4_Code" for n in (1, 2, 3, 4)}
HELLO_IDS = [11765, 14, 1499, 3]  # "Hello, world!" in the public models' tokenizer, without BOS
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def on_own_device(function):
    """Run a function with the CPU as torch's default device, whatever a notebook has set."""
    @functools.wraps(function)
    def run(*args, **kwargs):
        with torch.device("cpu"):
            return function(*args, **kwargs)
    return run


@on_own_device
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
        device: "cpu", "cuda", ... Never selected automatically.
        dtype: of everything that is computed. TransformerLens always folds in float32.
        n_layers: the number of layers that the caller supports; None for any.
        processing: the flags of HookedTransformer.from_pretrained, by name.

    The files of a public model come from the Hugging Face cache, or are downloaded into it. They
    are read here, because HookedTransformer.from_pretrained asks the hub for a list of files even
    if every file is cached, and fails without network.

    Returns:
        the model, and its source: {model, revision, weights_sha256}.

    Raises:
        UserError: unknown name, not attention-only, positions not standard, another number of
            layers, no such device, unreadable weights, or nothing cached and no network.
    """
    _prepare_torch(device)
    name = f"mini-{n_layers or 2}l" if name == "mini" else name
    folder = bundled(name) or pathlib.Path(name)
    if folder.is_dir() and name not in PUBLIC:
        files, source = _files_of_folder(folder, n_layers)
    else:
        files, source = _files_of_hub(name, n_layers)
    model = _model_from_files(files, device, dtype, processing)
    from_hub = source["revision"] is not None
    if from_hub and source["model"] in PUBLIC and encode(model, "Hello, world!") != HELLO_IDS:
        raise UserError(f"the tokenizer of {name} gives other ids than it used to for 'Hello, "
                        "world!': install the versions that requirements.txt pins")
    source |= {"weights_sha256": sha256(files.weights)}
    return model.eval().requires_grad_(False), source


def bundled(name: str) -> pathlib.Path | None:
    """The folder of a bundled model, by its name or path; None for any other model or folder."""
    folder = MINI / (name if name in BUNDLED else pathlib.Path(name).resolve().name)
    is_it = name in BUNDLED or pathlib.Path(name).resolve() == folder.resolve()
    return folder if is_it and folder != MINI else None


@dataclass(frozen=True)
class ModelFiles:
    """The files that a model is read from."""

    config_file: pathlib.Path
    config: dict
    weights: pathlib.Path
    tokenizer: pathlib.Path  # the folder


def _files_of_folder(folder: pathlib.Path, n_layers: int | None) -> tuple[ModelFiles, dict]:
    weights = folder / "model.safetensors"
    if not weights.exists():
        weights = folder / "model_final.pth"
    config_file = folder / "config.json"
    for file, what in ((config_file, "config.json"),
                       (weights, "model.safetensors or model_final.pth")):
        if not file.is_file():
            raise UserError(f"{folder} has no {what}: a model folder holds config.json, "
                            "model.safetensors or model_final.pth, and tokenizer files")
    if not any(file for pattern in ("tokenizer.*", "vocab*", "*.model")
               for file in folder.glob(pattern)):
        raise UserError(f"{folder} has no tokenizer.json: put the tokenizer files of the model "
                        "beside its weights")
    config = _read_config(config_file, folder.name, n_layers)
    unknown = _unknown_key(config)
    if unknown:
        raise UserError(f"{config_file} has {unknown!r:.60}, which may change what the model "
                        "computes, and is not known here: if it changes nothing, leave it out")
    name = folder.resolve().name
    if name in (*BUNDLED, *PUBLIC) and not bundled(str(folder)):
        name = f"{name} (a folder)"  # of the user's: neither the bundled nor the public model
    source = {"model": name, "revision": None}
    return ModelFiles(config_file, config, weights, folder), source


def _files_of_hub(name: str, n_layers: int | None) -> tuple[ModelFiles, dict]:
    repo = _official_name(name)
    config_file = _fetch(repo, "config.json")
    config = _read_config(config_file, name, n_layers)
    weights = _fetch(repo, "model_final.pth")
    tokenizer = _fetch(str(config.get("tokenizer_name")), "tokenizer.json")
    public = {official: short for short, official in PUBLIC.items()}
    source = {"model": public.get(repo, name), "revision": config_file.parent.name}
    return ModelFiles(config_file, config, weights, tokenizer.parent), source


def _prepare_torch(device: str) -> None:
    """Full float32 precision and repeatable kernels; UserError if there is no such device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        torch.zeros(1, device=device).item()  # fails on "meta", which holds no numbers
    except Exception as e:
        raise UserError(f"no device {device!r} here ({cause(e)}): use --device cpu") from None
    if device.startswith("cuda"):  # on a CPU this call would only import the compiler, for seconds
        torch.use_deterministic_algorithms(True)


def _transformer_lens():
    """TransformerLens, imported on first use, because it takes seconds."""
    version = importlib.metadata.version("transformer_lens")
    if int(version.split(".")[0]) >= 4:
        raise UserError(f"transformer_lens {version} has no HookedTransformer: "
                        'pip install "transformer_lens<4"')
    import transformer_lens

    return transformer_lens


def _official_name(name: str) -> str:
    """The hub repository of a TransformerLens name."""
    if name in PUBLIC:  # known without the seconds that importing TransformerLens takes
        return PUBLIC[name]
    _transformer_lens()
    from transformer_lens.loading_from_pretrained import get_official_model_name

    try:
        return get_official_model_name(name)
    except ValueError:
        raise UserError(f"no model {name!r}: it is neither a TransformerLens name (attn-only-1l, "
                        "attn-only-2l, ...) nor mini, mini-1l, mini-2l, nor a folder") from None


@functools.cache
def hub_problem() -> str | None:
    """Why the Hugging Face hub does not answer within 4 s; None if it does, even to refuse.

    Asked once, when a file is not cached."""
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        huggingface_hub.HfApi().dataset_info(WIKITEXT[0], timeout=4)
    except huggingface_hub.errors.HfHubHTTPError:
        return None
    except Exception as e:
        return f"the hub does not answer ({root_cause(e)})"
    return None


def root_cause(e: BaseException) -> str:
    """What the libraries' own exceptions, which only say that something failed, were raised for."""
    while e.__cause__ is not None:
        e = e.__cause__
    return cause(e)


def _fetch(repo: str, file: str) -> pathlib.Path:
    """A file of a hub repository: from the cache, else downloaded."""
    import huggingface_hub
    from huggingface_hub import constants, hf_hub_download

    problem = None
    try:
        return pathlib.Path(hf_hub_download(repo, file, local_files_only=True))
    except huggingface_hub.errors.LocalEntryNotFoundError:
        copied = _only_snapshot(repo) / file
        if copied.is_file():
            return copied
    except Exception as e:
        problem = f"cannot be read from it ({root_cause(e)})"
    problem = problem or hub_problem()
    if not problem:
        try:
            return pathlib.Path(hf_hub_download(repo, file))
        except Exception as e:
            problem = f"the download failed ({root_cause(e)})"
    raise UserError(f"{file} of {repo} is not in the Hugging Face cache {constants.HF_HUB_CACHE} "
                    f"and {problem}: {_remedy(problem)}, or run python "
                    f"{pathlib.Path(sys.argv[0]).name} --model mini")


def _only_snapshot(repo: str) -> pathlib.Path:
    """The folder of a repository's one snapshot, for a cache that was copied without its refs."""
    from huggingface_hub import constants

    folder = pathlib.Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    if (folder / "refs" / "main").exists():
        return folder / "no other snapshot"
    snapshots = sorted((folder / "snapshots").glob("*"))
    return snapshots[0] if len(snapshots) == 1 else folder / "no single snapshot"


REMEDIES = {  # what a message about the hub or the cache says: what helps
    "certificate|ssl|tls": "let SSL_CERT_FILE name the certificates of your network",
    "401|403|unauthorized|forbidden|token": "correct or unset HF_TOKEN, then connect once",
    "permission|read-only": "let HF_HOME name a folder that can be read and written",
    "no space": "make room there, or let HF_HOME name another folder",
    "offline": "unset it and connect once",
}


def _remedy(problem: str) -> str:
    found = (text for words, text in REMEDIES.items() if re.search(words, problem.lower()))
    return next(found, "connect once")


def _read_config(file: pathlib.Path, name: str, n_layers: int | None) -> dict:
    """config.json; UserError unless the kernels are exact for this kind of model."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        problem = _unsupported(config, n_layers)
    except (ValueError, AttributeError, OSError, RecursionError) as e:
        raise UserError(f"cannot read {file} ({cause(e)}): a model folder holds config.json, "
                        "model.safetensors or model_final.pth, and tokenizer files") from None
    if problem:
        raise UserError(f"{name} {problem}: use attn-only-{n_layers or 2}l or mini")
    for size in SIZES:
        if type(config.get(size)) is not int or config[size] < 1:
            raise UserError(f"{file} has {config.get(size)!r:.40} for {size}, not a whole number "
                            "above 0: fetch it again")
    return config


def _unsupported(config: dict, n_layers: int | None) -> str | None:
    """What the kernels do not support about a model."""
    normalization = config.get("normalization", config.get("normalization_type"))
    positions = config.get("positional_embedding_type",
                           "shortformer" if config.get("shortformer_pos") else "standard")
    if config.get("attn_only") is not True:
        return f"is not attention-only (attn_only is {config.get('attn_only')!r:.40})"
    if positions != "standard":
        return (f"has {positions!s:.40} position embeddings, not standard ones that are added to "
                "the stream once")
    if normalization == "LNPre":
        return ("has LNPre for normalization, so its LayerNorm was folded into the weights before "
                "they were saved, which cannot be undone: save the model without fold_ln, or")
    if normalization != "LN":
        return f"has {normalization!s:.40} for normalization, not LayerNorm"
    if n_layers and config.get("n_layers") != n_layers:
        return (f"has {config.get('n_layers')!s:.40} layer(s), this script supports models of "
                f"{n_layers}")
    for key, supported in _values_supported(config).items():
        if key in config and config[key] not in supported:
            return (f"has {config[key]!r:.40} for {key} in config.json, where only "
                    f"{supported[0]!r:.40} is supported")
    return None


def _values_supported(config: dict) -> dict[str, tuple]:
    """SUPPORTED, and the keys whose supported value depends on the rest of config.json."""
    eps = config.get("eps", EPS)
    scale, d_head = config.get("attn_scale"), config.get("d_head")
    numbers = all(isinstance(x, int | float) and x > 0 for x in (scale, d_head))
    is_root = numbers and math.isclose(scale, math.sqrt(d_head), rel_tol=1e-6)
    return SUPPORTED | {
        "eps": (eps if isinstance(eps, float) and 0 < eps < math.inf else EPS,),
        **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "ln_eps"), (eps, None)),
        "attn_scale": (scale,) if is_root else ("the square root of d_head", -1, None),
        "n_key_value_heads": (config.get("n_heads"), None),
        "d_vocab_out": (config.get("d_vocab"), -1, None),
    }


def _unknown_key(config: dict) -> str | None:
    """A key of config.json that may change what the model computes and is not known here.

    Only for folders: of a model on the hub TransformerLens ignores such keys too."""
    known = {"attn_only", "normalization", "normalization_type", *SIZES}
    known |= _values_supported(config).keys()
    return next((k for k, v in config.items() if k not in known and v is not None
                 and SHAPING.search(k.lower()) and not HARMLESS.search(k)), None)


def _model_from_files(files: ModelFiles, device, dtype, processing) -> HookedTransformer:
    """A model from config.json and weights as the public attention-only models store them."""
    state = _read_weights(files.weights)
    tl = _transformer_lens()
    from transformers import AutoTokenizer, PretrainedConfig

    eps = files.config.get("eps", EPS)
    try:
        cfg = tl.HookedTransformerConfig(  # without an MLP any act_fn will do
            **{k: files.config[k] for k in SIZES}, eps=eps, attn_only=True, act_fn="relu",
            normalization_type="LN", device=device, dtype=dtype, init_weights=False)
        with torch.device("meta"):  # takes no memory, so that sizes out of proportion do no harm
            empty = tl.HookedTransformer(cfg, move_to_device=False)
        state = _fitting(empty.state_dict(), state, cfg.n_layers, files.weights)
        tokenizer = AutoTokenizer.from_pretrained(  # config.json is not of transformers' kind
            str(files.tokenizer), trust_remote_code=False, config=PretrainedConfig())
        model = tl.HookedTransformer(cfg, move_to_device=False)
    except UserError:
        raise
    except Exception as e:
        if lacks_memory(e):
            raise
        raise UserError(f"{files.config_file} or the tokenizer in {files.tokenizer} is not usable "
                        f"({cause(e)!r}): fetch them again") from None
    # Not by set_tokenizer, which reads the files again, asks config.json for settings that are not
    # its own, and fills in a start token where there is none.
    model.tokenizer = tokenizer
    _check_start_token(tokenizer, files.tokenizer)
    n_ids = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if n_ids > cfg.d_vocab:
        raise UserError(f"{files.weights} does not fit the files beside it: the tokenizer has "
                        f"{n_ids:,} tokens, the model {cfg.d_vocab:,}; fetch them again")
    with contextlib.redirect_stdout(sys.stderr):
        model.load_and_process_state_dict({k: v.to(dtype) for k, v in state.items()}, **processing)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(f"{files.weights}: {name} is not finite in {dtype}: fetch it again")
    return model.to(device, print_details=False)


def _check_start_token(tokenizer, folder: pathlib.Path) -> None:
    """UserError unless the tokenizer's own files name a start token that is in the vocabulary."""
    start = tokenizer.bos_token
    if start is None:
        raise UserError(f"the tokenizer in {folder} has no start token, and no other token can "
                        "stand for it: add the bos_token of the training to tokenizer_config.json")
    if tokenizer.get_vocab().get(start) != tokenizer.bos_token_id:
        raise UserError(f"the tokenizer in {folder} has the start token {start!r:.40}, which is "
                        "not in its vocabulary: correct bos_token in tokenizer_config.json")


def _fitting(empty: dict, state: dict, n_layers: int, file: pathlib.Path) -> dict[str, Tensor]:
    """The entries of a state dict that the model uses; UserError if they are not all there.

    Not by load_state_dict, since the public files have masks too, and b_U may be absent. Any other
    entry would be left out of the computation, so it is refused.
    """
    wanted = {k: v.shape for k, v in empty.items() if not k.endswith(("mask", "IGNORE"))}
    missing = [k for k in wanted if k not in state and not k.endswith("b_U")]
    found = {k: state[k] for k in wanted if k in state}
    misshapen = [k for k, v in found.items()
                 if v.shape != wanted[k] or not v.is_floating_point()]
    unexpected = [k for k in state if k.startswith(f"blocks.{n_layers}.")]
    bad = missing + misshapen + unexpected
    if bad:
        raise UserError(f"{file} does not fit the files beside it: {bad[0]} is missing, "
                        "unexpected or has the wrong shape or type; fetch them again")
    # ln2 is the LayerNorm before an MLP: without the MLP nothing reads it.
    others = [k for k in state if k not in wanted and not k.endswith(("mask", "IGNORE"))
              and ".ln2." not in k]
    if others:
        raise UserError(f"{file} holds {others[0]!r:.60}, which is no part of an attention-only "
                        "model with LayerNorm and standard positions: use a model without it")
    return found


def _read_weights(file: pathlib.Path) -> dict[str, Tensor]:
    try:
        state = _load(file)
        problem = _other_contents(state)
    except Exception as e:
        if lacks_memory(e):
            raise
        problem = cause(e)
    if problem:
        raise UserError(f"{file} is not a readable state dict of weights ({problem}): put a sound "
                        "one in its place")
    return state


def _load(file: pathlib.Path) -> dict:
    if file.suffix == ".safetensors":
        import safetensors.torch

        return safetensors.torch.load_file(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # files of PyTorch before 1.6 are sound, but cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True)


def _other_contents(state) -> str | None:
    """What a file holds instead of tensors by name."""
    if not isinstance(state, dict):
        return f"it holds a {type(state).__name__}"
    for key, value in state.items():
        if isinstance(value, dict) and any(isinstance(v, Tensor) for v in value.values()):
            return f"its entry {key!r:.40} is one: save that alone"
    others = [key for key, value in state.items() if not isinstance(value, Tensor)]
    return f"its entry {others[0]!r:.40} is no tensor" if others else None


def lacks_memory(e: Exception) -> bool:
    return isinstance(e, MemoryError | torch.OutOfMemoryError) or (
        isinstance(e, RuntimeError) and "allocate memory" in str(e))  # of a CPU, in words alone


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
        raise UserError(f"the tokenizer fails on {text[:20]!r} ({cause(e)}): fetch "
                        "its files again") from None


def token_text(model: HookedTransformer, token: int) -> str:
    """A token as text, its space included; no two ids of a model have the same.

    Bytes that are no whole character show as <0xE2>, ids without a token as <id 48261>. Where two
    tokens have one text, the one that the tokenizer does not use for it has its id behind it.
    """
    return _token_names(model.tokenizer, model.cfg.d_vocab)[token]


@functools.lru_cache(maxsize=4)
def _token_names(tokenizer, d_vocab: int) -> list[str]:
    names = [_token_name(tokenizer, i) for i in range(d_vocab)]
    ids_of: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        ids_of.setdefault(name, []).append(i)
    for name, ids in ids_of.items():
        if len(ids) > 1:
            used = tokenizer(name, add_special_tokens=False)["input_ids"]
            for i in ids:
                names[i] = name if used == [i] else f"{name}<id {i}>"
    return names


def _token_name(tokenizer, token: int) -> str:
    """The name of a token, as far as it can be told without the others."""
    entry = tokenizer.convert_ids_to_tokens(token)
    if not entry:
        return f"<id {token}>"
    if re.fullmatch("<0x[0-9A-F]{2}>", entry):  # how SentencePiece writes a byte
        return entry
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if "\ufffd" in text:
        return _readable(entry)
    if entry.startswith("\u2581") and not text.startswith("\u2581"):
        return entry.replace("\u2581", " ")  # SentencePiece; decode drops the first space
    return text or entry


def _readable(entry: str) -> str:
    """The text of a vocabulary entry that is no valid UTF-8."""
    byte_of = _byte_alphabet()
    known = all(c in byte_of for c in entry)
    data = bytes(byte_of[c] for c in entry) if known else entry.encode("utf-8")
    text = data.decode("utf-8", "surrogateescape")  # byte 0x80 + n becomes U+DC80 + n
    text = "".join(f"<0x{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)
    return text.replace("\ufffd", "<0xEF><0xBF><0xBD>")


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """{character: byte} of byte-level vocabularies: printable Latin-1 as it is, the rest in order
    from U+0100."""
    as_it_is = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in as_it_is]
    return {chr(b): b for b in as_it_is} | {chr(256 + n): b for n, b in enumerate(others)}


# ------------------------------------------------------------------ text


def wikitext(
    join: str = "\n\n", keep_blank: bool = True, config: str = WIKITEXT[1]
) -> tuple[str, str]:
    """The WikiText-2 test split, its rows joined, and the SHA-256 of its rows.

    A notice warns if that hash is not WIKITEXT_SHA256, the known content of the raw split.
    """
    rows = _wikitext_rows(config)
    rows_sha256 = sha256("".join(rows))
    known = len(rows) == WIKITEXT_ROWS and rows_sha256 == WIKITEXT_SHA256
    if config == WIKITEXT[1] and not known:
        notice("warning: the WikiText-2 test split here is not the one this was made with; "
               "the losses cannot be compared with the published ones")
    return join.join(r for r in rows if keep_blank or r.strip()), rows_sha256


@functools.cache
def _wikitext_rows(name: str) -> list[str]:
    """The rows of the WikiText-2 test split: from the cache, else downloaded."""
    import datasets

    path, _, split = WIKITEXT
    if os.path.exists(path):
        raise UserError(f"the folder {path} here hides the data set of that name: run from another "
                        "folder, or name a text with --text FILE")
    cache, offline = datasets.config.HF_DATASETS_CACHE, datasets.config.HF_HUB_OFFLINE
    for from_cache in (True, False):
        problem = None if from_cache else hub_problem()
        if problem:
            break
        datasets.config.HF_HUB_OFFLINE = from_cache  # the cache alone, whatever the network does
        try:
            return list(datasets.load_dataset(path, name, split=split)["text"])
        except Exception as e:
            problem = f"the download failed ({root_cause(e)})"
            if from_cache and not isinstance(e, ConnectionError | ValueError):  # not "not cached"
                raise UserError(f"{path} {name} in the cache {cache} cannot be read "
                                f"({root_cause(e)}): let HF_DATASETS_CACHE name another folder "
                                "and connect once, or name a text with --text FILE") from None
        finally:
            datasets.config.HF_HUB_OFFLINE = offline
    raise UserError(f"{path} {name} is not in the cache {cache} and {problem}: "
                    f"{_remedy(problem)}, or name a text with --text FILE")


@on_own_device
def load_tokens(
    model: HookedTransformer,
    name: str,
    text_file: str | None = None,
    n_tokens: int = 3072,
    seq_len: int | None = None,
    bos_counted: bool = True,
    join: str = "\n\n",
    keep_blank: bool = True,
    wikitext: str = WIKITEXT[1],
    default_len: int = 256,
) -> tuple[Int[Tensor, "batch pos"], dict]:
    """Rows of a text, each BOS and the next stretch of it: [n_tokens // seq_len, seq_len].

    The text is `text_file`, or the bundled sample for the bundled models, or else the WikiText-2
    test split. It is tokenised once, no further than needed, and BOS is added here, once.

    Args:
        name: the model's name as it was asked for.
        n_tokens: tokens in all, BOS counted if bos_counted.
        seq_len: tokens of a row; None for default_len, or the context if that is shorter.
        bos_counted: False puts BOS before seq_len tokens of text instead of seq_len - 1.
        join, keep_blank: how the rows of WikiText become one text; "end-of-text" joins them with
            that token, as TransformerLens' tokenize_and_concatenate does.
        wikitext: the configuration of WikiText.

    Returns:
        the ids, and {n_tokens, seq_len, text, text_sha256, rows_sha256 (None for a file),
        token_ids_sha256}.

    Raises:
        UserError: text too short, rows longer than the context, unreadable file.
    """
    n_bos = 1 if bos_counted else 0  # of the seq_len tokens
    longest = model.cfg.n_ctx - (1 - n_bos)
    seq_len = min(default_len, longest) if seq_len is None else seq_len
    if seq_len > longest:
        start_token = "" if bos_counted else " plus a start token"
        raise UserError(f"--seq-len {seq_len}{start_token} is longer than the context of {name}, "
                        f"{model.cfg.n_ctx} tokens: use --seq-len {longest} or less")
    if seq_len < 3 or n_tokens < seq_len:
        raise UserError(f"--tokens {n_tokens} in sequences of {seq_len} makes none: a sequence has "
                        "3 tokens or more (--seq-len), and --tokens has room for at least one")
    n_rows, per_row = n_tokens // seq_len, seq_len - n_bos
    if n_rows * seq_len != n_tokens:
        notice(f"using {n_rows * seq_len:,} of {n_tokens:,} tokens: whole sequences of {seq_len}")
    if text_file is None and (name in BUNDLED or bundled(name)):
        text_file = str(MINI / "sample.txt")
    ids, hashes = _encode_enough(model, n_rows * per_row, text_file, join, keep_blank, wikitext)
    text_name = text_file or "WikiText-2"
    if len(ids) < n_rows * per_row:
        raise UserError(f"{text_name} has {len(ids):,} tokens, {n_rows:,} sequences need "
                        f"{n_rows * per_row:,}: {_fewer(len(ids), seq_len, n_bos)}")
    bos = model.tokenizer.bos_token_id
    if bos in ids:
        raise UserError(f"{text_name} contains the start token of {name} as text: use another text")
    rows = [[bos, *ids[i * per_row : (i + 1) * per_row]] for i in range(n_rows)]
    flat = " ".join(str(i) for row in rows for i in row)
    of_wikitext = "/".join((WIKITEXT[0], wikitext, WIKITEXT[2]))
    meta = {"n_tokens": n_rows * seq_len, "seq_len": seq_len,
            "text": pathlib.Path(text_file).name if text_file else of_wikitext,
            "token_ids_sha256": sha256(flat), **hashes}
    return torch.tensor(rows, device=model.cfg.device), meta


def _fewer(n_ids: int, seq_len: int, n_bos: int) -> str:
    """What to do about a text of n_ids tokens."""
    n_rows, whole = n_ids // (seq_len - n_bos), n_ids + n_bos
    if n_rows:
        return f"use --tokens {n_rows * seq_len} or a longer text"
    if whole >= 3:
        return f"use --tokens {whole} --seq-len {whole} or a longer text"
    return "use a longer text"


def _encode_enough(
    model, n_needed: int, text_file: str | None, join: str, keep_blank: bool, config: str
) -> tuple[list[int], dict]:
    """The first n_needed ids of the text, fewer if it is shorter, and the text's hashes.

    A tokenizer decides word by word, so the start of a text has the ids of the whole text except
    for its last word."""
    if join == "end-of-text":
        join = model.tokenizer.eos_token
    text, rows_sha256 = None, None
    if text_file is None:
        text, rows_sha256 = wikitext(join, keep_blank, config)
    n_chars = 16 * n_needed + 4096
    while True:
        start = _read_start(text_file, n_chars) if text is None else text[:n_chars]
        ids = encode(model, start)
        if len(start) < n_chars or len(ids) >= n_needed + 64:
            whole = sha256(pathlib.Path(text_file) if text is None else text)
            return ids[:n_needed], {"text_sha256": whole, "rows_sha256": rows_sha256}
        n_chars *= 4


def _read_start(file: str, n_chars: int) -> str:
    """The first n_chars of --text, its line ends as they are."""
    try:
        if os.path.exists(file) and not os.path.isfile(file):
            raise UserError(f"--text {file} is not a regular file: save it as one")
        with open(file, encoding="utf-8-sig", newline="") as f:
            return f.read(n_chars)
    except OSError as e:
        raise UserError(f"cannot read --text {file}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read --text {file}: it is not UTF-8") from None
