"""The Attentive Reader and its batch-normalized variants, Cooijmans et al. 2016 (arXiv:1603.09025), section 5.4.

The model is the Attentive Reader of Hermann et al. 2015 (arXiv:1506.03340) plus details that only the released code
has. One encoder reads the passage and has the outputs d_t; another reads the question and has the last output q. Then


    s_t = (M d_t)·(M q)                                  bilinear term
    a_t = v·tanh(W_dm d_t + b_m + W_qm q + s_t)          α = softmax over t
    r   = Σ α_t d_t
    g   = tanh(W_rg r + W_qg q + b_g + W_mg mean_t d_t)
    p(answer) = softmax(W_o dropout(g) + b_o)

"BN-everywhere" also normalizes each product inside the two tanh, but not s_t.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.inputs import QUESTIONS, Question
from bnrnn.layers.base import RecurrentLayer, State, check_values
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.rhn import RHN
from bnrnn.layers.stack import Stack, reverse
from bnrnn.scan.transfer import to_device

PADDING = ("masked", "zeros", "wrap")
READOUT = ("vocabulary", "passage")


class Product(nn.Module):
    """W x + b, or BN(W x; γ, b) if gamma_init is given, for the rows of x (N, I). Statistics are over all N rows."""

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
    """`logits, _ = model(question)`: logits (1, B, V) of all words as the answer to a `bnrnn.inputs.Question`.

    Passages of length 0 fill up a batch: their logits are 0, and they do not count in any statistic.

    Args:
        layer: builds one layer of one direction of an encoder from (input_size, hidden_size, t_max=...).
        hidden_size: H, the size of one direction, of the word vectors and of both tanh.
        num_layers: number of recurrent layers of each direction of an encoder. All have the same initial state.
        input_size, output_size: V, the number of words.
        t_max: length of the longest passage or question in training.
        init: initializes the model in place, see SequenceModel.
        bidirectional: whether a second encoder reads passage and question backwards, without their padding.
        gamma_init: initial gamma of the products in attention and readout (BN-everywhere); None does not normalize
            them.
        padding: how the padding after a sequence counts in batch statistics. "masked": not at all. "zeros": finished
            sequences count with the states that they keep. "wrap": the encoder reads the sequence again and again, and
            the repetitions count. The attention never covers padding.
        bilinear: whether the attention has the term s_t.
        mean_skip: whether the readout has the term W_mg mean_t d_t.
        dropout: probability of setting an element of word vectors and of g to 0.
        readout: "vocabulary" allows any word as the answer, "passage" only the entities of the passage.

    Raises BnrnnError for an unknown padding or readout.
    """

    reads = QUESTIONS

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
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        for name, value, known in (("padding", padding, PADDING), ("readout", readout, READOUT)):
            if value not in known:
                raise BnrnnError(f"model.{name}={value} is unknown: use {', '.join(known)}")
        self.padding, self.dropout, self.readout = padding, dropout, readout
        H, D = hidden_size, 2 if bidirectional else 1
        self.embedding = nn.Embedding(input_size, H)
        self.passage_encoder, self.question_encoder = (
            nn.ModuleList(Stack(layer, H, H, num_layers, t_max=t_max) for _ in range(D)) for _ in range(2)
        )
        for module in self.modules():
            if isinstance(module, Stack):
                module.checks_finite = False
            if isinstance(module, BNLSTM):
                module.ended_count = padding == "zeros"
        self.initial_h = nn.Parameter(torch.zeros(2, D, H))  # for passage and question; an LSTM's c starts at 0
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
        """The logits of the answer, as one time step, and an empty state. state and t_start are ignored."""
        real = [n for n, length in enumerate(inputs.passage_lengths) if length]
        if len(real) < len(inputs.passage_lengths):
            logits, _ = self(_chosen(inputs, real))
            every = logits.new_zeros(1, len(inputs.passage_lengths), logits.shape[2])
            return every.index_copy(1, to_device(torch.tensor(real), logits.device), logits), ()
        d, q = self._encode(inputs)
        context = (self._attention(d, q, inputs.passage_lengths)[..., None] * d).sum(0)  # (B, D H)
        g = self.read_context(context) + self.read_question(q)
        if self.read_mean is not None:
            mask = to_device(_mask(len(d), inputs.passage_lengths), d.device)
            g = g + self.read_mean((d * mask[..., None]).sum(0) / mask.sum(0)[:, None])
        logits = self.head(F.dropout(g.tanh(), self.dropout, self.training))
        if self.readout == "passage":
            allowed = torch.full_like(logits, -torch.inf).scatter(1, inputs.candidates.T, 0)
            logits = logits + allowed
        return logits[None], ()

    def attention(self, inputs: Question) -> Float[Tensor, "T B"]:
        """α, the attention weight of each word of the passages. Weights of a passage sum to 1, and are 0 in padding."""
        return self._attention(*self._encode(inputs), inputs.passage_lengths)

    def _encode(self, inputs: Question) -> tuple[Float[Tensor, "T B O"], Float[Tensor, "B O"]]:
        """The encoder outputs d and q."""
        d, _ = self._read(self.passage_encoder, inputs.passage, inputs.passage_lengths, self.initial_h[0])
        _, q = self._read(self.question_encoder, inputs.question, inputs.question_lengths, self.initial_h[1])
        return d, q

    def _read(
        self, encoder: nn.ModuleList, ids: Int[Tensor, "T B"], lengths: list[int], initial_h: Float[Tensor, "D H"]
    ) -> tuple[Float[Tensor, "T B O"], Float[Tensor, "B O"]]:
        """The outputs of an encoder after every word, and its last output for each sequence."""
        check_values(ids, self.embedding.num_embeddings)
        x = F.dropout(self.embedding(ids), self.dropout, self.training)
        ended = to_device(torch.tensor(lengths), x.device)
        mask = to_device(_mask(len(x), lengths), x.device)[..., None]
        ys, last = [], []
        for d, stack in enumerate(encoder):
            assert isinstance(stack, Stack)  # a ModuleList forgets its type
            given = reverse(x, ended) if d else x
            h = initial_h[d].expand(stack.num_layers, x.shape[1], -1)
            state = (h, *(torch.zeros_like(h) for _ in stack.state_names[1:]))
            if self.padding == "wrap":
                t = torch.arange(len(x), device=x.device)[:, None] % ended
                y, _ = stack(given.gather(0, t[..., None].expand_as(x)), state)
                last.append(y[ended - 1, torch.arange(x.shape[1], device=x.device)])
            else:
                y, (h, *_) = stack(given, state, lengths=lengths)
                y = torch.where(mask, y, h[-1]) if self.padding == "zeros" else y
                last.append(h[-1])
            ys.append(reverse(y, ended) if d else y)
        return torch.cat(ys, 2), torch.cat(last, 1)

    def _attention(
        self, d: Float[Tensor, "T B O"], q: Float[Tensor, "B O"], lengths: list[int]
    ) -> Float[Tensor, "T B"]:
        T, B, _ = d.shape
        words = _mask(T, lengths)  # the rows are found on the CPU: a GPU would have to be waited for
        rows = words.flatten().nonzero()[:, 0] if self.padding == "masked" else torch.arange(T * B)  # (N,)
        rows, mask = to_device(rows, d.device), to_device(words, d.device)
        flat, of = d.flatten(0, 1)[rows], rows % B
        summed = self.attend_passage(flat) + self.attend_question(q)[of]
        if self.bilinear is not None:
            summed = summed + (self.bilinear(flat) * self.bilinear(q)[of]).sum(1, keepdim=True)
        scores = self.score(summed.tanh())[:, 0]
        scores = scores.new_full((T * B,), -torch.inf).index_copy(0, rows, scores).view(T, B)
        return scores.masked_fill(~mask, -torch.inf).softmax(0)


def _chosen(inputs: Question, rows: list[int]) -> Question:
    """A batch with the given questions of a batch."""
    chosen = to_device(torch.tensor(rows), inputs.passage.device)
    passage, question, candidates = (x[:, chosen] for x in (inputs.passage, inputs.question, inputs.candidates))
    lengths, others = ([given[n] for n in rows] for given in (inputs.passage_lengths, inputs.question_lengths))
    return Question(passage, lengths, question, others, candidates)


def _mask(T: int, lengths: list[int]) -> Bool[Tensor, "T B"]:
    """A mask that is True for words and False for padding."""
    return torch.arange(T)[:, None] < torch.tensor(lengths)


@torch.no_grad()
def init_reader(model: AttentiveReader, scale: float = 0.05, equal_draws: bool = True) -> None:
    """Initialize a model like the reader released with Cooijmans et al. 2016, section 5.4.

    Square matrices are orthogonal times `scale`, separately for each gate. The attention vector v is uniform in
    ±1/sqrt(H), other matrices in ±sqrt(6 / (inputs + outputs + 1)). Biases and initial states are 0.

    Args:
        scale: factor of the orthogonal matrices.
        equal_draws: whether matrices of equal shape start with equal values, as if the random generator were seeded
            again before each of them (D20).

    Raises BnrnnError for another model.
    """
    if not isinstance(model, AttentiveReader) or any(isinstance(module, RHN) for module in model.modules()):
        raise BnrnnError("init@model.init=reader and reader_fair are for readers with LSTMs: leave it out")
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
