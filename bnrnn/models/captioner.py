"""Captions from image features: an image sets the state of recurrent layers, which then predict word after word.

Zhang et al. 2017 and, for the LSTM, Vinyals et al. 2015 (arXiv:1411.4555), who show the image as a first word.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.inputs import Captioned
from bnrnn.layers.base import RecurrentLayer, State, check_values
from bnrnn.layers.linear import Linear
from bnrnn.layers.rhn import RHN
from bnrnn.layers.stack import Stack
from bnrnn.models.decoding import BEAM_SIZE, decode


class Captioner(nn.Module):
    """`logits, _ = model(captioned)`: scores (T, B, V) of each caption's next word.

    Args:
        layer: builds the recurrent layer from (input_size, hidden_size, t_max=...).
        input_size, output_size: number of words.
        t_max: longest caption in training, with its start.
        feature_size: of an image.
        image: "state" makes the layer's first state a linear function of the features; "step" shows such a function,
            of the size of a word's vector, before the first word.
        dropout: probability of a zero in the words' vectors and in what the readout sees.
        padding: what statistics make of a caption that has ended. "masked": nothing; "counted": it goes on with the
            words that pad it, and counts.
        init: initialises the model in place (see conf/init/); None keeps the modules' own initialisation.

    Raises BnrnnError for another `image` or `padding`.
    """

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
    ) -> None:
        super().__init__()
        if image not in ("state", "step"):
            raise BnrnnError(f"model.image={image} is unknown: use state or step")
        if padding not in ("masked", "counted"):
            raise BnrnnError(f"model.padding={padding} is unknown: use masked or counted")
        self.image, self.dropout, self.padding, self.first = image, dropout, padding, int(image == "step")
        self.embedding = nn.Embedding(input_size, embedding_size)
        self.layer = Stack(layer, embedding_size, hidden_size, t_max=t_max + self.first)
        self.layer.checks_finite = False
        self.project = nn.Linear(feature_size, embedding_size if self.first else hidden_size, bias=False)
        self.head = Linear(hidden_size, output_size)
        if init is not None:
            init(self)

    def forward(
        self, inputs: Captioned, state: State | None = None, t_start: int = 0
    ) -> tuple[Float[Tensor, "T B V"], State]:
        """Logits after every word, and no state: captions are read whole."""
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
        """The state before the first word."""
        if not self.first:
            return self._begin(features)
        _, state = self.layer(self.project(features)[None])
        return state

    def step(self, words: Int[Tensor, " B"], state: State, t: int) -> tuple[Float[Tensor, "B V"], State]:
        """Log-probabilities of the word after `words`, which are the t-th (from 0), and the state then."""
        y, state = self.layer(self.embedding(words)[None], state, t + self.first)
        return self.head(y[0]).log_softmax(1), state

    def generate(self, features: Float[Tensor, "N F"]) -> dict[str, list[list[int]]]:
        """Ids of the captions of images, greedy ("") and by beam search ("_beam3")."""
        sizes = {"": 1, f"_beam{BEAM_SIZE}": BEAM_SIZE}
        return {name: [caption.ids for caption in decode(self, features, size)] for name, size in sizes.items()}

    def _begin(self, features: Float[Tensor, "B F"]) -> State:
        first = self.project(features)[None]
        return (first, *(torch.zeros_like(first) for _ in self.layer.state_names[1:]))


@torch.no_grad()
def init_captioner(model: Captioner, bound: float) -> None:
    """Matrices uniform in ±bound, biases 0, but 1 for an LSTM's forget gate and the highway gates' own start."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.uniform_(parameter, -bound, bound)
        elif not name.endswith((".gamma", ".beta")):
            parameter.zero_()
    for layer in model.layer.layers:
        assert isinstance(layer, RecurrentLayer)
        if isinstance(layer, RHN):
            layer.reset_bias()
        elif isinstance(layer.bias, Tensor):
            layer.bias[layer.hidden_size : 2 * layer.hidden_size] = 1.0
