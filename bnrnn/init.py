"""Weight initialisation as the papers and their code have it."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.base import RecurrentLayer
from bnrnn.layers.rhn import RHN

if TYPE_CHECKING:
    from bnrnn.attentive_reader import AttentiveReader
    from bnrnn.captioner import Captioner
    from bnrnn.model import SequenceModel


def orthogonal(num_in: int, num_out: int) -> Float[Tensor, "num_out num_in"]:
    """A weight whose map of num_in features to num_out has orthonormal rows or columns, whichever are fewer."""
    return nn.init.orthogonal_(torch.empty(num_out, num_in))


@torch.no_grad()
def init_cooijmans(
    model: "SequenceModel", hidden: str = "orthogonal", per_gate: bool = False, forget_bias: float = 1.0
) -> None:
    """Initialisation of the released code of Cooijmans et al. 2016.

    Args:
        hidden: "identity" puts the identity into the candidate's block (g) of W_hh and one orthogonal matrix into the
            others (sequential MNIST); "orthogonal" makes all of W_hh one orthogonal matrix (Penn Treebank, text8).
        per_gate: every gate's block orthogonal by itself (as the paper reads) instead of all gates together (D3).
        forget_bias: start of the forget gate's bias (D2).
    """
    if hidden not in ("identity", "orthogonal"):
        raise BnrnnError(f"init.hidden is {hidden!r}: use 'identity' or 'orthogonal'")
    for layer in _layers(model):
        size, gates = layer.hidden_size, layer.num_gates
        g = 2 if gates == 4 else 0  # the candidate's place in i f g o; a plain RNN is nothing else
        layer.weight_ih.copy_(_blocks(layer.input_size, size, gates, per_gate))
        if hidden == "orthogonal":
            layer.weight_hh.copy_(_blocks(size, size, gates, per_gate))
        else:
            others = [k for k in range(gates) if k != g]
            blocks = layer.weight_hh.view(gates, size, size)
            blocks[g] = torch.eye(size)
            if others:
                blocks[others] = _blocks(size, size, len(others), per_gate).view(-1, size, size)
        bias = getattr(layer, "bias", None)
        if bias is not None:
            bias.zero_()
            if gates == 4:
                bias[size : 2 * size] = forget_bias
    model.head.weight.copy_(orthogonal(model.head.in_features, model.head.out_features))
    model.head.bias.zero_()


@torch.no_grad()
def init_uniform(model: "SequenceModel", bound: float) -> None:
    """Everything uniform in ±bound, embedding and biases too (Zaremba et al. 2014, arXiv:1409.2329, and their code).

    Scales of normalizations keep their own start; shifts, which the bias of a normalized product is, begin with 0 (L4).
    """
    for layer in _layers(model):
        bias = getattr(layer, "bias", None)
        if bias is not None:
            width = 0.0 if hasattr(layer, "bn_ih") else bound
            nn.init.uniform_(bias, -width, width)
    embedding = [] if model.embedding is None else [model.embedding.weight]
    matrices = [w for layer in _layers(model) for w in (layer.weight_ih, layer.weight_hh)]
    for parameter in [*embedding, *matrices, model.head.weight, model.head.bias]:
        nn.init.uniform_(parameter, -bound, bound)


@torch.no_grad()
def init_glorot(model: "SequenceModel") -> None:
    """Embedding N(0, 1), other matrices Glorot's, gate by gate, biases 0 (Laurent et al. 2015, appendix A)."""
    for layer in _layers(model):
        for weight in (layer.weight_ih, layer.weight_hh):
            for block in weight.chunk(layer.num_gates):
                nn.init.xavier_uniform_(block)
    nn.init.xavier_uniform_(model.head.weight)
    if model.embedding is not None:
        nn.init.normal_(model.embedding.weight)
    for bias in [model.head.bias, *(getattr(layer, "bias", None) for layer in _layers(model))]:
        if bias is not None:
            nn.init.zeros_(bias)


@torch.no_grad()
def init_captioner(model: "Captioner", bound: float) -> None:
    """Matrices uniform in ±bound, biases 0, but 1 for an LSTM's forget gate and the highway gates' own start."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.uniform_(parameter, -bound, bound)
        elif not name.endswith((".gamma", ".beta")):
            parameter.zero_()
    for layer in _layers(model):
        if isinstance(layer, RHN):
            layer.reset_bias()
        elif isinstance(layer.bias, torch.Tensor):
            layer.bias[layer.hidden_size : 2 * layer.hidden_size] = 1.0


@torch.no_grad()
def init_reader(model: "AttentiveReader", scale: float = 0.05, equal_draws: bool = True) -> None:
    """Initialisation of the reader released with Cooijmans et al. 2016, section 5.4: all biases and states 0.

    Args:
        scale: square matrices, every gate's by itself, are this times an orthogonal one; others are uniform within
            ±sqrt(6 / (inputs + outputs + 1)), and the attention's vector within ±1/sqrt(H).
        equal_draws: whether all matrices of the same shape begin equal, as where the random generator is seeded anew
            before every draw (D20).
    """
    seed = int(torch.randint(2**31, (), device="cpu"))
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name == "initial_h":
            if not name.endswith((".gamma", ".beta")):
                parameter.zero_()
            continue
        num_blocks = 4 if name.endswith(("weight_ih", "weight_hh")) else 1
        for block in parameter.chunk(num_blocks):
            num_out, num_in = block.shape
            with torch.random.fork_rng([], enabled=equal_draws):
                if equal_draws:
                    torch.manual_seed(seed)
                if name == "score.weight":
                    nn.init.uniform_(block, -(num_in**-0.5), num_in**-0.5)
                elif num_in == num_out:
                    nn.init.orthogonal_(block, scale)
                else:
                    bound = (6 / (num_in + num_out + 1)) ** 0.5
                    nn.init.uniform_(block, -bound, bound)


def _layers(model: "SequenceModel | Captioner") -> list[RecurrentLayer]:
    return list(model.layer.layers)  # pyright: ignore[reportReturnType]: a ModuleList forgets its type


def _blocks(num_in: int, size: int, gates: int, per_gate: bool) -> Tensor:
    if per_gate:
        return torch.cat([orthogonal(num_in, size) for _ in range(gates)])
    return orthogonal(num_in, gates * size)
