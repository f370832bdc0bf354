"""Small attention-only models for the tests: every size different, every parameter random.

Nothing here is common.py's: a model is built through TransformerLens alone, and what a test
compares with is in naive.py.
"""

import json
import pathlib
import tempfile

import tokenizers
import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SIZES = dict(n_layers=2, n_heads=3, d_head=5, d_model=11, n_ctx=17, d_vocab=23)
SPECIAL = dict(eos_token="<|EOS|>", bos_token="<|BOS|>", pad_token="<|PAD|>")
FLAGS = dict(fold_ln=True, center_writing_weights=True, center_unembed=True,
             fold_value_biases=True, refactor_factored_attn_matrices=False)


def state_dict(sizes: dict = SIZES, seed: int = 0, scale: float = 1.0) -> dict:
    """Raw parameters under TransformerLens names, float64, biases and LayerNorm random too."""
    g = torch.Generator().manual_seed(seed)
    n_heads, d_head, d_model = (sizes[k] for k in ("n_heads", "d_head", "d_model"))

    def r(*shape, std=0.5):
        return torch.randn(*shape, generator=g, dtype=torch.float64) * std * scale

    d_vocab, n_ctx = sizes["d_vocab"], sizes["n_ctx"]
    state = {"embed.W_E": r(d_vocab, d_model), "pos_embed.W_pos": r(n_ctx, d_model),
             "unembed.W_U": r(d_model, d_vocab), "unembed.b_U": r(d_vocab),
             "ln_final.w": 1 + r(d_model, std=0.2), "ln_final.b": r(d_model)}
    for layer in range(sizes["n_layers"]):
        at = f"blocks.{layer}."
        state |= {at + "ln1.w": 1 + r(d_model, std=0.2), at + "ln1.b": r(d_model),
                  at + "attn.W_O": r(n_heads, d_head, d_model), at + "attn.b_O": r(d_model)}
        for k in "QKV":
            state |= {at + f"attn.W_{k}": r(n_heads, d_model, d_head),
                      at + f"attn.b_{k}": r(n_heads, d_head)}
    return state


def tokenizer(d_vocab: int = SIZES["d_vocab"]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of d_vocab tokens over three specials and, as far as they fit, the letters."""
    letters = ["Ġ", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'\"0123456789Ċ"]
    vocab = {t: i for i, t in enumerate([*SPECIAL.values(), *letters][:d_vocab])}
    for i in range(len(vocab), d_vocab):
        vocab[f"[{i}]"] = i
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="a"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, **SPECIAL)


def model(state: dict, sizes: dict = SIZES, dtype=torch.float64, flags: dict = FLAGS,
          **config) -> HookedTransformer:
    """The model of a state dict, processed as `flags` say; flags={} leaves it as it is."""
    cfg = HookedTransformerConfig(**sizes, attn_only=True, act_fn="relu", normalization_type="LN",
                                  dtype=dtype, device="cpu", init_weights=False, **config)
    with tempfile.TemporaryDirectory() as d:
        tokenizer(sizes["d_vocab"]).save_pretrained(d)
        m = HookedTransformer(cfg, AutoTokenizer.from_pretrained(d))
    state = {k: v.to(dtype) for k, v in state.items()}
    if flags:
        m.load_and_process_state_dict(dict(state), **flags)
    else:
        m.load_state_dict(state, strict=False)
    return m.eval().requires_grad_(False)


def tokens(n_rows: int = 3, length: int = 13, d_vocab: int = SIZES["d_vocab"], seed: int = 1):
    """[n_rows, length] random ids, each row beginning with BOS (id 1)."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, d_vocab, (n_rows, length), generator=g)
    ids[:, 0] = 1
    return ids


def config_json(sizes: dict = SIZES, **more) -> dict:
    """config.json in the keys of the public attention-only models."""
    return sizes | dict(d_mlp=4 * sizes["d_model"], act_fn="solu_ln", attn_only=True,
                        normalization="LN", shortformer_pos=False) | more


def folder(path: pathlib.Path, sizes: dict = SIZES, seed: int = 0, **more) -> pathlib.Path:
    """A model folder: config.json, model.safetensors (float16), tokenizer files."""
    import safetensors.torch

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_json(sizes, **more)))
    state = {k: v.to(torch.float16).contiguous() for k, v in state_dict(sizes, seed).items()}
    safetensors.torch.save_file(state, path / "model.safetensors")
    tokenizer(sizes["d_vocab"]).save_pretrained(path)
    return path
