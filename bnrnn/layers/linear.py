"""A linear layer over a sequence."""

from torch import Tensor, nn

from bnrnn.scan import linear


class Linear(nn.Linear):
    """torch.nn.Linear, whose products over (T, B, I) are those of the recurrences' engine.

    Over 10,000 words they make up most of a word model's update, and the compiled product is faster there than torch's.
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
