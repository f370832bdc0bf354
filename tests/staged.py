"""The paper's own way to the losses by order: a model run again and again, its patterns frozen."""

import torch
from jaxtyping import Float

import common


@torch.no_grad()
def staged_streams(
    run: common.FrozenRun, max_order: int
) -> Float[torch.Tensor, "order batch pos d_model"]:
    """Final streams of order <= 0, 1, ..., max_order by the paper's own algorithm.

    ("Term Importance Analysis".) The model runs again and again with the patterns and scales of
    `run` frozen. In stage 0 every head's output is zero; in stage n it is what that head computed
    in stage n - 1. Any number of layers; an independent route to Paths.stream.
    """
    model, end = run.model, f"blocks.{run.model.cfg.n_layers - 1}.hook_resid_post"
    saved: dict[str, torch.Tensor] = {}
    streams = []

    def replace_z(z, hook):
        before, saved[hook.name] = saved.get(hook.name), z.clone()
        return torch.zeros_like(z) if before is None else before

    hooks = [(end, lambda x, hook: streams.append(x))]
    for i in range(model.cfg.n_layers):
        pattern, scale = run.patterns[i].transpose(0, 1), run.scales[i]
        hooks += [(f"blocks.{i}.attn.hook_pattern", lambda x, hook, keep=pattern: keep),
                  (f"blocks.{i}.ln1.hook_scale", lambda x, hook, keep=scale: keep),
                  (f"blocks.{i}.attn.hook_z", replace_z)]
    for _ in range(max_order + 1):
        model.run_with_hooks(run.tokens, return_type=None, fwd_hooks=hooks)
    return torch.stack(streams)
