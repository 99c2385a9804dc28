"""The model of every sequence task here: input -> stack of recurrent layers -> logits at each time step."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.inputs import Padded
from bnrnn.layers.base import RecurrentLayer, State, check_values
from bnrnn.layers.linear import Linear
from bnrnn.layers.stack import Stack


class SequenceModel(nn.Module):
    """Recurrent layers with a linear readout at every step: `logits, state = model(x, state=None, t_start=0)`.

    Args:
        layer: builds one layer of one direction from (input_size, hidden_size, t_max=...).
        input_size: of the features (T, B, I) at each step, or how many ids there are where x is (T, B) integers.
        init: initialises the model in place (see conf/init/); None keeps the modules' own initialisation.
        state_noise: standard deviation of Gaussian noise on every layer's h_0, drawn anew in every pass, also in
            evaluation (Cooijmans et al. 2016, section 5.1, and their code; D5). It gives constant inputs a batch
            variance.
        embedding_size: of a trained vector for each id; None feeds ids one-hot.
        learned_state: whether sequences begin with a trained state, zero at first, or always with zeros.
        dropout: probability of a zero in all that is not recurrent: embedded ids, outputs between layers and before
            the readout (Zaremba et al. 2014, arXiv:1409.2329, section 3.1).
        num_layers, bidirectional: those of bnrnn.layers.stack.Stack.
        scored_steps: how many steps, the last of a sequence, have logits; None for all. Follows from the data.
    """

    def __init__(
        self,
        layer: Callable[..., RecurrentLayer],
        hidden_size: int,
        input_size: int,
        output_size: int,
        t_max: int,
        init: Callable[["SequenceModel"], None] | None = None,
        state_noise: float = 0.0,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        embedding_size: int | None = None,
        learned_state: bool = True,
        scored_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(input_size, embedding_size) if embedding_size else None
        between = dropout if num_layers > 1 else 0.0
        self.layer = Stack(layer, embedding_size or input_size, hidden_size, num_layers, bidirectional, between, t_max)
        self.layer.checks_finite = self.embedding is None
        self.head = Linear(self.layer.num_directions * hidden_size, output_size)
        self.state_noise, self.dropout = state_noise, dropout
        self.first_scored = None if scored_steps is None else -scored_steps
        states = {name: torch.zeros(len(self.layer.layers), hidden_size) for name in self.layer.state_names}
        self.initial_state = nn.ParameterDict(states if learned_state else {})
        if init is not None:
            init(self)

    def forward(
        self, x: Float[Tensor, "T B I"] | Int[Tensor, "T B"] | Padded, state: State | None = None, t_start: int = 0
    ) -> tuple[Float[Tensor, "S B V"], State]:
        """Logits after every time step that is scored, and the state after the last, from which t_start = T goes on."""
        x, lengths = x if isinstance(x, Padded) else (x, None)
        if state is None:
            state = self._initial_state(x.shape[1])
        if self.embedding is not None:
            check_values(x, self.embedding.num_embeddings)
            x = F.dropout(self.embedding(x), self.dropout, self.training)
        y, ended = self.layer(x, state, t_start, lengths)
        return self.head(F.dropout(y[self.first_scored :], self.dropout, self.training)), ended

    def _initial_state(self, batch_size: int) -> State:
        if self.initial_state:
            states = [self.initial_state[k][:, None].expand(-1, batch_size, -1) for k in self.layer.state_names]
        else:
            zeros = self.head.weight.new_zeros(len(self.layer.layers), batch_size, self.layer.hidden_size)
            states = [zeros] * len(self.layer.state_names)
        if self.state_noise:
            states[0] = states[0] + self.state_noise * torch.randn_like(states[0])
        return tuple(states)


@torch.no_grad()
def init_cooijmans(
    model: SequenceModel, hidden: str = "orthogonal", per_gate: bool = False, forget_bias: float = 1.0
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
def init_uniform(model: SequenceModel, bound: float) -> None:
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
def init_glorot(model: SequenceModel) -> None:
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


def orthogonal(num_in: int, num_out: int) -> Float[Tensor, "num_out num_in"]:
    """A weight whose map of num_in features to num_out has orthonormal rows or columns, whichever are fewer."""
    return nn.init.orthogonal_(torch.empty(num_out, num_in))


def _layers(model: SequenceModel) -> list[RecurrentLayer]:
    return list(model.layer.layers)  # pyright: ignore[reportReturnType]: a ModuleList forgets its type


def _blocks(num_in: int, size: int, gates: int, per_gate: bool) -> Tensor:
    if per_gate:
        return torch.cat([orthogonal(num_in, size) for _ in range(gates)])
    return orthogonal(num_in, gates * size)
