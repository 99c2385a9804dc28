"""The Attentive Reader and its batch-normalized variants, Cooijmans et al. 2016 (arXiv:1603.09025), section 5.4.

Hermann et al. 2015 (arXiv:1506.03340) with what the released code has beyond the papers' text. Of the states d_t of an
encoder of the passage and the last state q of one of the question:

    s_t = (M d_t)·(M q)                                  bilinear term
    a_t = v·tanh(W_dm d_t + b_m + W_qm q + s_t)          α = softmax over t
    r   = Σ α_t d_t
    g   = tanh(W_rg r + W_qg q + b_g + W_mg mean_t d_t)
    p(answer) = softmax(W_o dropout(g) + b_o)

"BN-everywhere" normalizes each product that goes into the two tanh, but not s_t.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.inputs import Question
from bnrnn.layers.base import RecurrentLayer, State, check_values
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.stack import Stack, reverse

PADDING = ("masked", "zeros", "wrap")
READOUT = ("vocabulary", "passage")


class Product(nn.Module):
    """W x + b, or BN(W x; γ, b), for the rows of x (N, I); the statistics are of all N rows."""

    def __init__(self, input_size: int, output_size: int, bias: bool, gamma_init: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        self.bias = nn.Parameter(torch.zeros(output_size)) if bias else None
        self.bn = None if gamma_init is None else SequenceBatchNorm(output_size, 1, gamma_init)

    def forward(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N O"]:
        if self.bn is None:
            return F.linear(x, self.weight, self.bias)
        return self.bn(F.linear(x, self.weight)[None], shift=self.bias)[0]


class AttentiveReader(nn.Module):
    """`logits, _ = model(question)`: scores (1, B, V) of every word as the answer, from a `bnrnn.inputs.Question`.

    A passage of length 0 only fills the batch up: its logits are 0, and it does not count in any statistic.

    Args:
        layer: builds one direction of an encoder, an LSTM of any kind, from (input_size, hidden_size, t_max=...).
        hidden_size: of one direction, of the word vectors, of both tanh.
        input_size, output_size: number of words.
        t_max: longest passage or question in training.
        init: initialises the model in place (see conf/init/); None keeps the modules' own initialisation.
        bidirectional: whether passage and question are read backwards too; only what is no padding is reversed.
        gamma_init: start of the scales in attention and readout, which are normalized then (BN-everywhere); None for
            neither.
        padding: what stands behind the end of a sequence, as far as batch statistics see it. "masked": nothing, they
            are of what was read alone. "zeros": ended sequences count with the states that they keep. "wrap": the
            sequence is read again and again, and counts. Outputs behind the end are never attended to.
        bilinear: whether there is an s_t.
        mean_skip: whether there is a W_mg.
        dropout: probability of a zero in word vectors and in g.
        readout: "vocabulary" answers with any word, "passage" with one of the passage's entities.

    Raises BnrnnError for an unknown padding or readout.
    """

    def __init__(
        self,
        layer: Callable[..., RecurrentLayer],
        hidden_size: int,
        input_size: int,
        output_size: int,
        t_max: int,
        init: Callable[["AttentiveReader"], None] | None = None,
        bidirectional: bool = False,
        gamma_init: float | None = None,
        padding: str = "masked",
        bilinear: bool = True,
        mean_skip: bool = True,
        dropout: float = 0.5,
        readout: str = "vocabulary",
    ) -> None:
        super().__init__()
        for name, value, known in (("padding", padding, PADDING), ("readout", readout, READOUT)):
            if value not in known:
                raise BnrnnError(f"model.{name}={value} is unknown: use {', '.join(known)}")
        self.padding, self.dropout, self.readout = padding, dropout, readout
        H, D = hidden_size, 2 if bidirectional else 1
        self.embedding = nn.Embedding(input_size, H)
        self.passage_encoder, self.question_encoder = (
            nn.ModuleList(Stack(layer, H, H, t_max=t_max) for _ in range(D)) for _ in range(2)
        )
        for module in self.modules():
            if isinstance(module, Stack):
                module.checks_finite = False
            if isinstance(module, BNLSTM):
                module.ended_count = padding == "zeros"
        self.initial_h = nn.Parameter(torch.zeros(2, D, H))  # of passage and question; c begins with 0
        self.bilinear = nn.Linear(D * H, H, bias=False) if bilinear else None
        self.attend_passage = Product(D * H, H, True, gamma_init)
        self.attend_question = Product(D * H, H, False, gamma_init)
        self.score = nn.Linear(H, 1, bias=False)
        self.read_context = Product(D * H, H, False, gamma_init)
        self.read_question = Product(D * H, H, True, gamma_init)
        self.read_mean = Product(D * H, H, False, gamma_init) if mean_skip else None
        self.head = nn.Linear(H, output_size)
        if init is not None:
            init(self)

    def forward(
        self, inputs: Question, state: State | None = None, t_start: int = 0
    ) -> tuple[Float[Tensor, "1 B V"], State]:
        """Logits of the answer as if of one time step, and no state; state and t_start are not used."""
        real = [n for n, length in enumerate(inputs.passage_lengths) if length]
        if len(real) < len(inputs.passage_lengths):
            logits, _ = self(_chosen(inputs, real))
            every = logits.new_zeros(1, len(inputs.passage_lengths), logits.shape[2])
            return every.index_copy(1, torch.tensor(real, device=logits.device), logits), ()
        d, q, mask = self._encode(inputs)
        context = (self._attention(d, q, mask)[..., None] * d).sum(0)  # (B, D H)
        g = self.read_context(context) + self.read_question(q)
        if self.read_mean is not None:
            g = g + self.read_mean((d * mask[..., None]).sum(0) / mask.sum(0)[:, None])
        logits = self.head(F.dropout(g.tanh(), self.dropout, self.training))
        if self.readout == "passage":
            allowed = torch.full_like(logits, -torch.inf).scatter(1, inputs.candidates.T, 0)
            logits = logits + allowed
        return logits[None], ()

    def attention(self, inputs: Question) -> Float[Tensor, "T B"]:
        """α, the weight of each word of the passages: 0 behind their ends, 1 in sum."""
        return self._attention(*self._encode(inputs))

    def _encode(self, inputs: Question) -> tuple[Float[Tensor, "T B O"], Float[Tensor, "B O"], Bool[Tensor, "T B"]]:
        """d, q, and where d is no padding."""
        d, _ = self._read(self.passage_encoder, inputs.passage, inputs.passage_lengths, self.initial_h[0])
        _, q = self._read(self.question_encoder, inputs.question, inputs.question_lengths, self.initial_h[1])
        return d, q, _mask(len(d), inputs.passage_lengths, d.device)

    def _read(
        self, encoder: nn.ModuleList, ids: Int[Tensor, "T B"], lengths: list[int], initial_h: Float[Tensor, "D H"]
    ) -> tuple[Float[Tensor, "T B O"], Float[Tensor, "B O"]]:
        """What an encoder says after every word, and after all of them."""
        check_values(ids, self.embedding.num_embeddings)
        x = F.dropout(self.embedding(ids), self.dropout, self.training)
        ended = torch.tensor(lengths, device=x.device)
        mask = _mask(len(x), lengths, x.device)[..., None]
        ys, last = [], []
        for d, stack in enumerate(encoder):
            given = reverse(x, ended) if d else x
            h = initial_h[d].expand(1, x.shape[1], -1)
            state = (h, torch.zeros_like(h))
            if self.padding == "wrap":
                t = torch.arange(len(x), device=x.device)[:, None] % ended
                y, _ = stack(given.gather(0, t[..., None].expand_as(x)), state)
                last.append(y[ended - 1, torch.arange(x.shape[1], device=x.device)])
            else:
                y, (h, *_) = stack(given, state, lengths=lengths)
                y = torch.where(mask, y, h) if self.padding == "zeros" else y
                last.append(h[0])
            ys.append(reverse(y, ended) if d else y)
        return torch.cat(ys, 2), torch.cat(last, 1)

    def _attention(
        self, d: Float[Tensor, "T B O"], q: Float[Tensor, "B O"], mask: Bool[Tensor, "T B"]
    ) -> Float[Tensor, "T B"]:
        T, B = mask.shape
        counted = mask.flatten() if self.padding == "masked" else torch.ones_like(mask.flatten())
        rows = counted.nonzero()[:, 0]  # (N,)
        flat, of = d.flatten(0, 1)[rows], rows % B
        summed = self.attend_passage(flat) + self.attend_question(q)[of]
        if self.bilinear is not None:
            summed = summed + (self.bilinear(flat) * self.bilinear(q)[of]).sum(1, keepdim=True)
        scores = self.score(summed.tanh())[:, 0]
        scores = scores.new_full((T * B,), -torch.inf).index_copy(0, rows, scores).view(T, B)
        return scores.masked_fill(~mask, -torch.inf).softmax(0)


def _chosen(inputs: Question, rows: list[int]) -> Question:
    """Some of the questions of a batch."""
    passage, question, candidates = (x[:, rows] for x in (inputs.passage, inputs.question, inputs.candidates))
    lengths, others = ([given[n] for n in rows] for given in (inputs.passage_lengths, inputs.question_lengths))
    return Question(passage, lengths, question, others, candidates)


def _mask(T: int, lengths: list[int], device: torch.device) -> Bool[Tensor, "T B"]:
    """Where the words are."""
    return torch.arange(T, device=device)[:, None] < torch.tensor(lengths, device=device)


@torch.no_grad()
def init_reader(model: AttentiveReader, scale: float = 0.05, equal_draws: bool = True) -> None:
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
