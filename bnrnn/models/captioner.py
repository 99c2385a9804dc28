"""Captions from image features, Zhang et al. 2017 and Vinyals et al. 2015 (arXiv:1411.4555).

An image initializes the state of a recurrent layer, which then predicts the caption word by word. The LSTM follows
Vinyals et al., who feed the image to the layer as if it were the first word.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.inputs import CAPTIONS, Captioned
from bnrnn.layers.base import RecurrentLayer, State, check_values
from bnrnn.layers.linear import Linear
from bnrnn.layers.rhn import RHN
from bnrnn.layers.stack import Stack
from bnrnn.models.decoding import BEAM_SIZE, decode


class Captioner(nn.Module):
    """`logits, _ = model(captioned)`: logits (T, B, V) of the next word of each caption.

    Args:
        layer: builds the recurrent layer from (input_size, hidden_size, t_max=...).
        hidden_size, embedding_size: size of the layer and of the word vectors.
        num_layers: number of recurrent layers, all of the same size.
        input_size, output_size: V, the number of words.
        t_max: length of the longest training caption, START included.
        feature_size: F, the number of features of an image.
        image: how the layer gets the features, after a trained linear map. "state": as its initial state. "step": as
            the input of a first step, before the first word. With several layers, all have the same initial state.
        dropout: probability of setting an element of the word vectors and of the layer's output to 0.
        padding: how finished captions count in batch statistics. "masked": not at all. "counted": padding tokens are
            processed and included in the statistics.
        init: initializes the model in place, see SequenceModel.

    Raises BnrnnError for an unknown `image` or `padding`.
    """

    reads = CAPTIONS

    def __init__(
        self,
        layer: Callable[..., RecurrentLayer],
        hidden_size: int,
        embedding_size: int,
        input_size: int,
        output_size: int,
        t_max: int,
        feature_size: int,
        image: str = "state",
        dropout: float = 0.0,
        padding: str = "masked",
        init: Callable[["Captioner"], None] | None = None,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        if image not in ("state", "step"):
            raise BnrnnError(f"model.image={image} is unknown: use state or step")
        if padding not in ("masked", "counted"):
            raise BnrnnError(f"model.padding={padding} is unknown: use masked or counted")
        self.image, self.dropout, self.padding, self.first = image, dropout, padding, int(image == "step")
        self.embedding = nn.Embedding(input_size, embedding_size)
        self.layer = Stack(layer, embedding_size, hidden_size, num_layers, t_max=t_max + self.first)
        self.layer.checks_finite = False
        self.project = nn.Linear(feature_size, embedding_size if self.first else hidden_size, bias=False)
        self.head = Linear(hidden_size, output_size)
        if init is not None:
            init(self)

    def forward(
        self, inputs: Captioned, state: State | None = None, t_start: int = 0
    ) -> tuple[Float[Tensor, "T B V"], State]:
        """The logits after every word, and an empty state, because captions are processed whole.

        state and t_start are ignored.
        """
        check_values(inputs.words, self.embedding.num_embeddings)
        x = self.embedding(inputs.words)
        if self.first:
            x = torch.cat([self.project(inputs.features)[None], x])
            begin = None
        else:
            begin = self._begin(inputs.features)
        lengths = None if self.padding == "counted" else [n + self.first for n in inputs.lengths]
        y, _ = self.layer(F.dropout(x, self.dropout, self.training), begin, lengths=lengths)
        return self.head(F.dropout(y[self.first :], self.dropout, self.training)), ()

    def start(self, features: Float[Tensor, "B F"]) -> State:
        """The state of the layer before the first word."""
        if not self.first:
            return self._begin(features)
        _, state = self.layer(self.project(features)[None])
        return state

    def step(self, words: Int[Tensor, " B"], state: State, t: int) -> tuple[Float[Tensor, "B V"], State]:
        """Log-probabilities of the next word after `words`, and the new state. `words` are at position t, from 0 on."""
        y, state = self.layer(self.embedding(words)[None], state, t + self.first)
        return self.head(y[0]).log_softmax(1), state

    def generate(self, features: Float[Tensor, "N F"]) -> dict[str, list[list[int]]]:
        """The ids of generated captions: greedy decoding under the key "", beam search under "_beam3".

        The model is left in evaluation mode.
        """
        sizes = {"": 1, f"_beam{BEAM_SIZE}": BEAM_SIZE}
        return {name: [caption.ids for caption in decode(self, features, size)] for name, size in sizes.items()}

    def _begin(self, features: Float[Tensor, "B F"]) -> State:
        first = self.project(features).expand(self.layer.num_layers, -1, -1)
        return (first, *(torch.zeros_like(first) for _ in self.layer.state_names[1:]))


@torch.no_grad()
def init_captioner(model: nn.Module, bound: float) -> None:
    """Initialize matrices uniformly in ±bound, and biases and trained initial states with 0, in any kind of model.

    Two biases differ: that of an LSTM's forget gate starts at 1, those of an RHN at their values in `RHN.reset_bias`.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.startswith("initial_"):
            nn.init.uniform_(parameter, -bound, bound)
        elif not name.endswith((".gamma", ".beta")):
            parameter.zero_()
    for layer in model.modules():
        if isinstance(layer, RHN):
            layer.reset_bias()
        elif isinstance(layer, RecurrentLayer) and layer.num_gates == 4 and isinstance(layer.bias, Tensor):
            layer.bias[layer.hidden_size : 2 * layer.hidden_size] = 1.0
