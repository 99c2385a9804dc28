"""The model of every sequence task here: input -> recurrent layer -> logits at each time step."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.layers.base import RecurrentLayer


class SequenceModel(nn.Module):
    """A recurrent layer that starts from a learned state, with a linear readout at every step.

    Args:
        layer: builds the layer from (input_size, hidden_size, t_max=...).
        init: initialises (layer, head) in place; None keeps the layers' own initialisation.
        state_noise: standard deviation of Gaussian noise on h_0, drawn anew in every pass, also in evaluation
            (Cooijmans et al. 2016, section 5.1, and their code; D5). It gives constant inputs a batch variance.
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
    ) -> None:
        super().__init__()
        self.layer = layer(input_size, hidden_size, t_max=t_max)
        self.head = nn.Linear(hidden_size, output_size)
        self.state_noise = state_noise
        self.initial_state = nn.ParameterDict({k: torch.zeros(hidden_size) for k in self.layer.state_names})
        if init is not None:
            init(self.layer, self.head)

    def forward(self, x: Float[Tensor, "T B I"]) -> Float[Tensor, "T B V"]:
        """Logits after every time step."""
        state = {k: s.expand(x.shape[1], -1) for k, s in self.initial_state.items()}
        if self.state_noise:
            state["h"] = state["h"] + self.state_noise * torch.randn_like(state["h"])
        y, _ = self.layer(x, tuple(state[k] for k in self.layer.state_names))
        return self.head(y)
