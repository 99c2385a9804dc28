"""Weight initialisation as the papers and their code have it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.base import RecurrentLayer


def orthogonal(num_in: int, num_out: int) -> Float[Tensor, "num_out num_in"]:
    """A weight whose map of num_in features to num_out has orthonormal rows or columns, whichever are fewer."""
    return nn.init.orthogonal_(torch.empty(num_out, num_in))


@torch.no_grad()
def init_cooijmans(
    layer: RecurrentLayer,
    head: nn.Linear,
    hidden: str = "orthogonal",
    per_gate: bool = False,
    forget_bias: float = 1.0,
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
    head.weight.copy_(orthogonal(head.in_features, head.out_features))
    head.bias.zero_()


def _blocks(num_in: int, size: int, gates: int, per_gate: bool) -> Tensor:
    if per_gate:
        return torch.cat([orthogonal(num_in, size) for _ in range(gates)])
    return orthogonal(num_in, gates * size)
