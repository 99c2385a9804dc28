"""The model of every sequence task here: input -> stack of recurrent layers -> logits at each time step."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.layers.base import RecurrentLayer
from bnrnn.stack import Stack


class SequenceModel(nn.Module):
    """Recurrent layers that start from a learned state, with a linear readout at every step.

    Args:
        layer: builds one layer of one direction from (input_size, hidden_size, t_max=...).
        init: initialises (layer, head) in place, for every single layer; None keeps the layers' own initialisation.
        state_noise: standard deviation of Gaussian noise on every layer's h_0, drawn anew in every pass, also in
            evaluation (Cooijmans et al. 2016, section 5.1, and their code; D5). It gives constant inputs a batch
            variance.
        num_layers, bidirectional, dropout: those of bnrnn.stack.Stack.
    """

    def __init__(
        self,
        layer: Callable[..., RecurrentLayer],
        hidden_size: int,
        input_size: int,
        output_size: int,
        t_max: int,
        init: Callable[[RecurrentLayer, nn.Linear], None] | None = None,
        state_noise: float = 0.0,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer = Stack(layer, input_size, hidden_size, num_layers, bidirectional, dropout, t_max)
        self.head = nn.Linear(self.layer.num_directions * hidden_size, output_size)
        self.state_noise = state_noise
        states = {name: torch.zeros(len(self.layer.layers), hidden_size) for name in self.layer.state_names}
        self.initial_state = nn.ParameterDict(states)
        if init is not None:
            for single in self.layer.layers:
                init(single, self.head)  # pyright: ignore[reportArgumentType]: a ModuleList forgets its type

    def forward(self, x: Float[Tensor, "T B I"]) -> Float[Tensor, "T B V"]:
        """Logits after every time step."""
        state = {k: s[:, None].expand(-1, x.shape[1], -1) for k, s in self.initial_state.items()}
        if self.state_noise:
            state["h"] = state["h"] + self.state_noise * torch.randn_like(state["h"])
        y, _ = self.layer(x, tuple(state[k] for k in self.layer.state_names))
        return self.head(y)
