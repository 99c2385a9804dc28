"""The arguments and the names of parameters with which bnrnn.LSTM replaces torch.nn.LSTM."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.base import RecurrentLayer
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.input_bn_lstm import InputBNLSTM
from bnrnn.layers.lstm import LSTM as PlainLSTM

NORMS = {"batch": BNLSTM, "input_batch": InputBNLSTM}
NAMES = ("weight_ih_l", "weight_hh_l", "bias_ih_l", "bias_hh_l")  # how nn.LSTM's names of parameters begin


def names(index: int, num_directions: int) -> dict[str, str]:
    """nn.LSTM's names of the parameters of the layer with this index, by kind."""
    n, d = divmod(index, num_directions)
    return {kind: f"{kind}_l{n}{'_reverse' * d}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}


def parameters(lstm: Any) -> list[dict[str, Tensor]]:
    """The parameters of each layer and direction, by nn.LSTM's names.

    There is one bias here, which is nn.LSTM's bias_ih; its bias_hh is 0 and cannot be written to.
    """
    found = []
    for index, layer in enumerate(lstm.layers):
        values = {"weight_ih": layer.weight_ih, "weight_hh": layer.weight_hh}
        if lstm.bias:
            with torch.inference_mode():
                values |= {"bias_ih": layer.bias, "bias_hh": torch.zeros_like(layer.bias)}
        theirs = names(index, lstm.num_directions)
        found.append({theirs[kind]: value for kind, value in values.items()})
    return found


def refuse_to_set(lstm: Any, name: str) -> None:
    """Raise BnrnnError if nn.LSTM has a parameter of this name. An attribute of the name would change no layer."""
    for index in range(len(lstm.layers)):
        for kind, theirs in names(index, lstm.num_directions).items():
            if name == theirs:
                ours = f"layers[{index}].{'bias' if kind.startswith('bias') else kind}"
                raise BnrnnError(f"{name} cannot be set: set {ours} to an nn.Parameter, or copy values into that one")


def rename_from(lstm: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give entries of nn.LSTM our names before loading; what has no counterpart stays, for strict loading."""
    for index in range(len(lstm.layers)):
        theirs = {kind: prefix + name for kind, name in names(index, lstm.num_directions).items()}
        ours = f"{prefix}layers.{index}."
        for kind in ("weight_ih", "weight_hh"):
            if theirs[kind] in state_dict:
                state_dict[ours + kind] = state_dict.pop(theirs[kind])
        biases = [theirs["bias_ih"], theirs["bias_hh"]]
        if lstm.bias and all(name in state_dict for name in biases):
            state_dict[ours + "bias"] = state_dict.pop(biases[0]) + state_dict.pop(biases[1])


def rename_to(lstm: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Without a norm, give the entries of a state_dict nn.LSTM's names.

    Entries of state_dict(keep_vars=True) keep theirs, because torch.export takes them for the model's own parameters.
    """
    if lstm.norm is not None:
        return
    for index in range(len(lstm.layers)):
        theirs, ours = names(index, lstm.num_directions), f"{prefix}layers.{index}."
        for kind in ("weight_ih", "weight_hh", "bias"):
            value = state_dict.get(ours + kind)
            if value is None or isinstance(value, nn.Parameter):
                continue
            del state_dict[ours + kind]
            if kind == "bias":
                state_dict[prefix + theirs["bias_ih"]] = value
                state_dict[prefix + theirs["bias_hh"]] = value.new_zeros(value.shape)
            else:
                state_dict[prefix + theirs[kind]] = value


def single_layer(
    norm: str | None, bias: bool, t_max: int | None, options: dict[str, Any], gamma_init: float | None
) -> Callable[..., RecurrentLayer]:
    """The function that builds one layer of one direction of an `LSTM`. Raises BnrnnError for contradictions."""
    input_statistics, statistics = options["input_statistics"], options["statistics"]
    if norm is None:
        if (input_statistics, statistics, gamma_init) != ("frame", "exact", None):
            raise BnrnnError(
                "input_statistics, statistics and gamma_init need a normalization: set norm, or leave them out"
            )
        return partial(PlainLSTM, bias=bias)
    if norm not in list(NORMS):
        raise BnrnnError(f"norm={norm!r} is unknown: use None, {', '.join(map(repr, NORMS))}")
    if t_max is None and (norm, input_statistics) != ("input_batch", "sequence"):
        raise BnrnnError(
            f"norm={norm!r} keeps population statistics for every time step: set t_max, the length of the training "
            "sequences (only norm='input_batch' with input_statistics='sequence' needs none)"
        )
    options = dict(options)
    if gamma_init is not None:
        options["gamma_init"] = gamma_init
    if norm == "batch":
        options["bias"] = bias
    elif not bias:
        raise BnrnnError("norm='input_batch' needs bias=True: the bias is the shift of the normalization")
    return partial(NORMS[norm], **options)
