"""Words and prompts of a model, and rows of results that a model may not have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

import common
from results import loading


class Skip(Exception):
    """A row that this model cannot have: the reason, and the pieces of a word that is no token."""


def row(base: dict, compute: Callable[..., dict], *args) -> dict:
    """A row of results: `base` and compute(*args), or the reason why it is skipped."""
    try:
        return base | compute(*args)
    except Skip as skip:
        return base | {"skipped": skip.args[0], "pieces": skip.args[1]}


def skipped(r: dict) -> str:
    """Why a row was skipped, for the log."""
    return f"skipped: {r['skipped']}" + (f" {r['pieces']}" if r["pieces"] else "")


def token_id(model, word: str) -> int:
    """The id of a word that is one token; Skip if it is not."""
    ids = loading.encode(model, word)
    pieces = [loading.token_text(model, i) for i in ids]
    if pieces != [word]:
        raise Skip(f"{word!r} is not one token here", pieces)
    return ids[0]


def prompt_tokens(model, text: str) -> list[int]:
    """BOS and the ids of a text."""
    return [model.tokenizer.bos_token_id, *loading.encode(model, text)]


def prompt_run(model, text: str) -> common.FrozenRun:
    """The run of BOS and a prompt; Skip if it does not fit the model."""
    ids = prompt_tokens(model, text)
    if len(ids) > model.cfg.n_ctx:
        raise Skip(f"{len(ids)} tokens, the context has {model.cfg.n_ctx}", [])
    if ids[0] in ids[1:]:
        raise Skip("the start token stands in the text", [])
    return common.freeze(model, torch.tensor([ids], device=model.cfg.device))


def top_tokens(model, values: Float[Tensor, " d_vocab"], k: int) -> list[str]:
    """The k tokens with the largest values; of equal ones the lower id first."""
    order = values.cpu().sort(descending=True, stable=True).indices[:k]
    return [loading.token_text(model, i) for i in order.tolist()]
