"""The model of every sequence task here: input -> stack of recurrent layers -> logits at each time step."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bnrnn.data.base import Padded
from bnrnn.layers.base import RecurrentLayer, State, check_values
from bnrnn.stack import Stack


class SequenceModel(nn.Module):
    """Recurrent layers with a linear readout at every step: `logits, state = model(x, state=None, t_start=0)`.

    Args:
        layer: builds one layer of one direction from (input_size, hidden_size, t_max=...).
        input_size: of the features (T, B, I) at each step, or how many ids there are where x is (T, B) integers.
        init: initialises the model in place (see bnrnn.init); None keeps the modules' own initialisation.
        state_noise: standard deviation of Gaussian noise on every layer's h_0, drawn anew in every pass, also in
            evaluation (Cooijmans et al. 2016, section 5.1, and their code; D5). It gives constant inputs a batch
            variance.
        embedding_size: of a trained vector for each id; None feeds ids one-hot.
        learned_state: whether sequences begin with a trained state, zero at first, or always with zeros.
        dropout: probability of a zero in all that is not recurrent: embedded ids, outputs between layers and before
            the readout (Zaremba et al. 2014, arXiv:1409.2329, section 3.1).
        num_layers, bidirectional: those of bnrnn.stack.Stack.
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
        self.head = nn.Linear(self.layer.num_directions * hidden_size, output_size)
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
