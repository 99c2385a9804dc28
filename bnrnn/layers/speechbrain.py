"""The names that SpeechBrain gives to the parameters of its LiGRU and SLiGRU."""

from typing import Any

import torch

NAMES = {"w.weight": "weight_ih", "u.weight": "weight_hh", "norm.weight": "bn_ih.gamma", "norm.bias": "bias",
         "norm.running_mean": "bn_ih.pop_mean", "norm.running_var": "bn_ih.pop_var",
         "norm.num_batches_tracked": "bn_ih.num_batches_tracked"}  # fmt: skip
UNUSED = ("h_init", "drop_masks", "drop_mask_te")  # zeros, and masks that were drawn in advance


def rename_from(ligru: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give entries of SpeechBrain our names before loading; what has no counterpart stays, for strict loading.

    Its gates are n z in this order, ours are z n. Its frozen bias and the number of batches are left out if the layer
    has none.
    """
    for index, layer in enumerate(ligru.layers):
        theirs, ours = f"{prefix}rnn.{index}.", f"{prefix}layers.{index}."
        if theirs + "w.weight" not in state_dict:
            continue
        for name in UNUSED:
            state_dict.pop(theirs + name, None)
        for name, own in NAMES.items():
            value = state_dict.pop(theirs + name, None)
            counts = name.endswith("tracked")
            if value is None or (own == "bias" and layer.bias is None) or (counts and not _counts(layer)):
                continue
            value = value if counts else torch.cat(value.chunk(2)[::-1])
            state_dict[ours + own] = value[None] if counts or "pop_" in own else value


def _counts(layer: Any) -> bool:
    """Whether a layer counts the batches of its statistics."""
    return layer.bn_ih is not None and layer.bn_ih.running
