"""The model for classification, language modelling and speech: input -> recurrent layers -> logits at every step."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.inputs import SEQUENCES, Padded
from bnrnn.layers.base import RecurrentLayer, State, check_values
from bnrnn.layers.linear import Linear
from bnrnn.layers.rhn import RHN
from bnrnn.layers.stack import Stack


class SequenceModel(nn.Module):
    """Recurrent layers with a linear readout at every step: `logits, state = model(x, state=None, t_start=None)`.

    Args:
        layer: builds one layer of one direction from (input_size, hidden_size, t_max=...).
        hidden_size: H, the size of one layer of one direction.
        input_size: I, the number of features if x is (T, B, I), or of ids if x is (T, B) integers.
        output_size: V, the number of classes.
        t_max: length of the training sequences, passed to every layer.
        init: initializes the model in place (see conf/init/); None keeps the initial values of the modules.
        state_noise: standard deviation of Gaussian noise on h_0 of every layer, drawn for every batch, also in
            evaluation (Cooijmans et al. 2016, section 5.1, and their code; D5). With it, batch normalization has a
            variance even where all sequences have the same input.
        embedding_size: size of a trained vector for each id; None uses one-hot vectors.
        learned_state: whether the initial state is trained, starting at 0; otherwise it is always 0.
        dropout: probability of setting an element to 0 in all non-recurrent connections: embedded ids, outputs between
            layers, and outputs before the readout (Zaremba et al. 2014, arXiv:1409.2329, section 3.1).
        num_layers, bidirectional: see bnrnn.layers.stack.Stack.
        scored_steps: S, compute logits only for so many steps at the end of a sequence; None computes all. The data
            determine it.
    """

    reads = SEQUENCES

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
        self,
        x: Float[Tensor, "T B I"] | Int[Tensor, "T B"] | Padded,
        state: State | None = None,
        t_start: int | None = None,
    ) -> tuple[Float[Tensor, "S B V"], State]:
        """The logits of every scored time step, and the state after the last step.

        To continue the sequences, pass this state and the number of steps processed so far as t_start.
        """
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
    """Initialize a model as the released code of Cooijmans et al. 2016 does.

    Args:
        hidden: "orthogonal" makes W_hh one orthogonal matrix (Penn Treebank, text8). "identity" sets the block of the
            candidate g to the identity, and the other blocks together to one orthogonal matrix (sequential MNIST).
        per_gate: whether each gate has its own orthogonal matrix, as the text of the paper suggests (D3).
        forget_bias: initial bias of the forget gate (D2).

    Raises BnrnnError for an unknown `hidden`, and for "identity" if the layer is neither an LSTM nor a tanh RNN.
    """
    if hidden not in ("identity", "orthogonal"):
        raise BnrnnError(f"init.hidden is {hidden!r}: use 'identity' or 'orthogonal'")
    for layer in _layers(model):
        size, gates = layer.hidden_size, layer.num_gates
        if hidden == "identity" and gates not in (1, 4):
            raise BnrnnError(
                f"model.init.hidden=identity is for LSTMs and tanh RNNs, and {type(layer).__name__} has {gates} gates: "
                "use model.init.hidden=orthogonal"
            )
        g = 2 if gates == 4 else 0  # index of the candidate in i f g o; a plain RNN has only the candidate
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
    """Initialize everything uniformly in ±bound, embedding and biases too (Zaremba et al. 2014, arXiv:1409.2329).

    gamma keeps its initial value. The bias of a normalized product is BN's beta, so it starts at 0 (L4).
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
    """Initialize as in appendix A of Laurent et al. 2015.

    The embedding is N(0, 1), other matrices are Glorot-uniform, separately for each gate, and biases are 0.
    """
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
    """A random weight matrix with orthonormal rows or, if there are more rows than columns, orthonormal columns."""
    return nn.init.orthogonal_(torch.empty(num_out, num_in))


def _layers(model: SequenceModel) -> list[RecurrentLayer]:
    """The layers of a sequence model of LSTMs or tanh RNNs. Raises BnrnnError for another model."""
    if not isinstance(model, SequenceModel) or any(isinstance(layer, RHN) for layer in model.layer.layers):
        raise BnrnnError(
            "this init@model.init is for sequence models of LSTMs and tanh RNNs: leave it out, because every model "
            "brings its own"
        )
    return list(model.layer.layers)  # pyright: ignore[reportReturnType]: a ModuleList forgets its type


def _blocks(num_in: int, size: int, gates: int, per_gate: bool) -> Tensor:
    if per_gate:
        return torch.cat([orthogonal(num_in, size) for _ in range(gates)])
    return orthogonal(num_in, gates * size)
