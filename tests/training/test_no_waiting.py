"""An update of every model looks at no value: on a GPU, the program would wait until all earlier work is done."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bnrnn.inputs import IGNORE, Batch, Captioned, Padded, Question
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.bn_rhn import BNRHN
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.gru import GRU
from bnrnn.layers.ligru import LiGRU
from bnrnn.layers.ln_lstm import LNLSTM
from bnrnn.layers.lstm import LSTM
from bnrnn.layers.rhn import RHN
from bnrnn.models.attentive_reader import PADDING, READOUT, AttentiveReader
from bnrnn.models.captioner import Captioner
from bnrnn.models.sequence_model import SequenceModel
from bnrnn.scan import set_backend
from bnrnn.training import loop
from bnrnn.training.loop import Trainer
from bnrnn.training.optim import RMSProp
from bnrnn.training.state import TrainState
from tests.waiting import META, nothing_waits

T, B, I, H, V = 3, 4, 4, 5, 7
SIZES = {"hidden_size": H, "t_max": T, "output_size": V}
WORDS = SIZES | {"input_size": V}
NOISY = partial(BNLSTM, zoneout=(0.3, 0.2), recurrent_dropout=0.1)
RUNNING = partial(BNLSTM, statistics="running", input_statistics="sequence")
OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "rmsprop": partial(RMSProp, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}


def ids(*shape: int) -> Tensor:
    return torch.randint(V, shape)


def targets(T=T) -> Tensor:
    classes = ids(T, B)
    classes[-1, 0] = IGNORE
    return classes


def sequences(layer, **options):
    return SequenceModel(layer, input_size=I, **SIZES | options), Batch(torch.randn(T, B, I), targets())


def padded(layer, **options):
    model, batch = sequences(layer, bidirectional=True, **options)
    return model, batch._replace(inputs=Padded(batch.inputs, [3, 1, 2, 3]))


def text(layer, **options):
    model = SequenceModel(layer, num_layers=2, dropout=0.5, **{"embedding_size": H} | WORDS | options)
    return model, Batch(ids(T, B), targets(), carried=True, t_start=0)


def captions(layer, **options):
    model = Captioner(layer, embedding_size=H, feature_size=6, dropout=0.5, **WORDS | options)
    return model, Batch(Captioned(torch.randn(B, 6), ids(T, B), [3, 1, 2, 2]), targets())


def questions(layer, lengths=(3, 2, 1, 3), **options):
    model = AttentiveReader(layer, **WORDS | options)
    return model, Batch(Question(ids(T, B), list(lengths), ids(T, B), [1, 2, 3, 1], ids(2, B)), targets(1))


CASES = {
    "sequences": partial(sequences, BNLSTM, state_noise=0.1),
    "sequences, no trained state": partial(sequences, RHN, learned_state=False),
    "scored at the end": lambda: scored(sequences(NOISY, scored_steps=1)),
    "sequences, tanh": partial(sequences, BNRNN, num_layers=2),
    "padded": partial(padded, NOISY),
    "padded, running": partial(padded, RUNNING),
    "padded, GRU": partial(padded, partial(GRU, norm="input_batch")),
    "padded, light GRU": partial(padded, partial(LiGRU, recurrent_dropout=0.2)),
    "text": partial(text, LNLSTM),
    "text, highways": partial(text, partial(BNRHN, statistics="running")),
    "one-hot ids": partial(text, LSTM, embedding_size=None),
    **{
        f"captions, {image}, {padding}": partial(captions, layer, image=image, padding=padding)
        for image, layer in (("step", LSTM), ("state", BNRHN))
        for padding in ("masked", "counted")
    },
    **{
        f"questions, {padding}, {readout}": partial(
            questions, RUNNING, padding=padding, readout=readout, gamma_init=0.1, bidirectional=True
        )
        for padding in PADDING
        for readout in READOUT
    },
    "questions, some without passage": partial(questions, LSTM, (3, 0, 1, 0)),
}


def scored(case):
    model, batch = case
    return model, batch._replace(targets=batch.targets[-1:])


def trainer(model, optimizer, metric: str, monkeypatch) -> Trainer:
    """A trainer as `fit` uses it: of the run around it, an update needs only these options."""
    cfg = SimpleNamespace(optim=SimpleNamespace(lr=0.1), lr_decay=None, grad_clip=1.0, sum_over_time=metric == "error")
    monkeypatch.setattr(Trainer, "_precision", lambda _: nullcontext())  # autocast does not know this device
    made = Trainer(
        cfg, model, SimpleNamespace(metric=metric), META, None, None, "", optimizer, TrainState("", []), None
    )
    for name in ("window", "largest_norm"):
        setattr(made.state, name, getattr(made.state, name).to(META))
    return made


def untrained(model, batch, optimizer, metric: str, monkeypatch) -> list[str]:
    """Names of the parameters without a gradient in the second of two updates, with the sums that `fit` keeps."""
    model = model.to(META)
    made = trainer(model, OPTIMIZERS[optimizer](model.parameters()), metric, monkeypatch)
    with nothing_waits():
        for n in range(2):
            sums = made.update(batch._replace(carried=batch.carried and n > 0))
            made.state.window += sums
            made.state.largest_norm = made.state.largest_norm.maximum(sums[2])
    return [name for name, p in model.named_parameters() if p.grad is None]


@pytest.fixture(autouse=True)
def _engine():
    yield
    set_backend("auto")


@pytest.mark.parametrize("engine", ["reference", "fused"])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_an_update_of_every_model_waits_for_nothing(make, engine, monkeypatch):
    set_backend(engine)
    model, batch = make()
    first_state = [name for name, _ in model.named_parameters() if name.startswith("initial_")]
    expected = first_state if batch.carried else []  # the second update of a text begins where the first one ended
    assert untrained(model, batch, "rmsprop", "error", monkeypatch) == expected


@pytest.mark.parametrize("metric", ["error", "bpc"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_optimizer_waits(optimizer, metric, monkeypatch):
    assert untrained(*CASES["sequences"](), optimizer, metric, monkeypatch) == []


def test_a_loss_that_waits_is_noticed(monkeypatch):
    right = loop.cross_entropy

    def waiting(logits, classes):
        loss = right(logits, classes)
        loss.item()
        return loss

    monkeypatch.setattr(loop, "cross_entropy", waiting)
    with pytest.raises(RuntimeError, match="meta"):
        untrained(*CASES["sequences"](), "sgd", "error", monkeypatch)


def test_a_gpu_copies_a_batch_from_pinned_memory(monkeypatch):
    """An ordinary copy waits until the GPU has done all earlier work."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x.as_subclass(Pinned))
    cuda = torch.device("cuda")
    batch = Batch(Captioned(torch.randn(B, 6), ids(T, B), [3, 1, 2, 2]), targets())
    monkeypatch.setattr(Tensor, "to", lambda x, device, non_blocking: (isinstance(x, Pinned), device, non_blocking))
    moved = batch.to(cuda)
    assert [moved.inputs.features, moved.inputs.words, moved.targets] == 3 * [(True, cuda, True)]
    assert moved.inputs.lengths == [3, 1, 2, 2]
    assert batch.to(torch.device("cpu")).targets == (False, torch.device("cpu"), True), "a CPU needs no such memory"


class Pinned(Tensor):
    """A tensor in pinned memory, as if there were a GPU."""
