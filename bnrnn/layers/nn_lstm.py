"""The names of parameters of torch.nn.LSTM and nn.GRU, and the arguments with which bnrnn.LSTM replaces nn.LSTM."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.base import RecurrentLayer
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.input_bn_lstm import InputBNLSTM
from bnrnn.layers.ln_lstm import LNLSTM
from bnrnn.layers.lstm import LSTM as PlainLSTM

NORMS = {"batch": BNLSTM, "input_batch": InputBNLSTM, "layer": LNLSTM}
NAMES = ("weight_ih_l", "weight_hh_l", "bias_ih_l", "bias_hh_l")  # how nn.LSTM's names of parameters begin


def names(index: int, num_directions: int) -> dict[str, str]:
    """nn.LSTM's names of the parameters of the layer with this index, by kind."""
    n, d = divmod(index, num_directions)
    return {kind: f"{kind}_l{n}{'_reverse' * d}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}


def parameters(lstm: Any) -> list[dict[str, Tensor]]:
    """The parameters of each layer and direction, by nn.LSTM's names.

    An LSTM has one bias here, which is nn.LSTM's bias_ih; its bias_hh is 0 and cannot be written to.
    """
    found = []
    for index, layer in enumerate(lstm.layers):
        values = {"weight_ih": layer.weight_ih, "weight_hh": layer.weight_hh}
        if lstm.bias and lstm.has_both_biases:
            values |= {"bias_ih": layer.bias_ih, "bias_hh": layer.bias_hh}
        elif lstm.bias:
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
                ours = f"layers[{index}].{'bias' if kind.startswith('bias') and not lstm.has_both_biases else kind}"
                raise BnrnnError(f"{name} cannot be set: set {ours} to an nn.Parameter, or copy values into that one")


def _same(lstm: Any) -> tuple[str, ...]:
    """The kinds of parameters that are the same here and there."""
    return ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if lstm.has_both_biases else 2]


def rename_from(lstm: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give entries of nn.LSTM our names before loading; what has no counterpart stays, for strict loading."""
    for index in range(len(lstm.layers)):
        theirs = {kind: prefix + name for kind, name in names(index, lstm.num_directions).items()}
        ours = f"{prefix}layers.{index}."
        for kind in _same(lstm):
            if theirs[kind] in state_dict:
                state_dict[ours + kind] = state_dict.pop(theirs[kind])
        biases = [theirs["bias_ih"], theirs["bias_hh"]]
        if lstm.bias and not lstm.has_both_biases and all(name in state_dict for name in biases):
            state_dict[ours + "bias"] = state_dict.pop(biases[0]) + state_dict.pop(biases[1])


def rename_to(lstm: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Without a norm, give the entries of a state_dict nn.LSTM's names.

    Entries of state_dict(keep_vars=True) keep theirs, because torch.export takes them for the model's own parameters.
    """
    if lstm.norm is not None:
        return
    for index in range(len(lstm.layers)):
        theirs, ours = names(index, lstm.num_directions), f"{prefix}layers.{index}."
        for kind in (*_same(lstm), "bias"):
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
    norm: str | None, bias: bool, t_max: int | None, options: dict[str, Any], noise: dict[str, Any]
) -> Callable[..., RecurrentLayer]:
    """The function that builds one layer of one direction of an `LSTM`. Raises BnrnnError for contradictions.

    Args:
        options: those of the normalization by name.
        noise: those of zoneout and recurrent dropout.
    """
    if norm not in (None, *NORMS):
        raise BnrnnError(f"norm={norm!r} is unknown: use None, {', '.join(map(repr, NORMS))}")
    input_statistics, eps, gamma_init = (options[name] for name in ("input_statistics", "eps", "gamma_init"))
    has_statistics = (input_statistics, options["statistics"]) != ("frame", "exact")
    if norm is None and (has_statistics or gamma_init is not None):
        raise BnrnnError(
            "input_statistics, statistics and gamma_init need a normalization: set norm, or leave them out"
        )
    if norm == "layer" and has_statistics:
        raise BnrnnError("norm='layer' keeps no statistics: leave out input_statistics and statistics")
    if options["per_gate"] and norm != "layer":
        raise BnrnnError(f"per_gate=True is for norm='layer', and norm is {norm!r}: leave it out")
    if norm is None:
        return partial(PlainLSTM, bias=bias, **noise)
    given = noise | {"eps": eps} | ({} if gamma_init is None else {"gamma_init": gamma_init})
    if norm == "layer":
        return partial(LNLSTM, bias=bias, per_gate=options["per_gate"], **given)
    if t_max is None and (norm, input_statistics) != ("input_batch", "sequence"):
        raise BnrnnError(
            f"norm={norm!r} keeps population statistics for every time step: set t_max, the length of the training "
            "sequences (only norm='input_batch' with input_statistics='sequence' needs none)"
        )
    given |= {name: options[name] for name in ("input_statistics", "statistics", "momentum")}
    if norm == "batch":
        given["bias"] = bias
    elif not bias:
        raise BnrnnError("norm='input_batch' needs bias=True: the bias is the shift of the normalization")
    return partial(NORMS[norm], **given)
