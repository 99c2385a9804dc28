"""Measures an update of the BN-e* and BN-e** readers against the LSTM reader with the same number of directions."""

from functools import partial

import torch
from hydra.utils import instantiate
from torch import nn

from bnrnn.bench.timing import Case, Plan
from bnrnn.config import compose_config
from bnrnn.inputs import Question
from bnrnn.metrics import cross_entropy

T, QUICK_T, B, S, V = 150, 40, 40, 20, 5000  # steps of passages, batch, steps of questions, words
TARGET = 1.3  # target ratio of a normalized reader to the LSTM reader
BOTH = "lstm, both directions"
READERS = {
    "lstm": ("lstm_reader", False),
    BOTH: ("lstm_reader", True),
    "bn_e_star": ("bn_e_star", False),
    "bn_e_star_star": ("bn_e_star_star", True),
    "bn_e_star_star, masked": ("bn_e_star_star", True),
}


def questions(num_steps: int, device: torch.device) -> tuple[Question, torch.Tensor]:
    """Random questions. Lengths are uniform between half of the maximum and the maximum."""
    torch.manual_seed(1)
    lengths = [torch.randint(n // 2, n + 1, (B,)).tolist() for n in (num_steps, S)]
    passage, words, answers = (torch.randint(V, size).to(device) for size in ((num_steps, B), (S, B), (1, B)))
    return Question(passage, lengths[0], words, lengths[1], passage[:1]), answers


def build(name: str, num_steps: int, device: torch.device) -> nn.Module:
    setting, bidirectional = READERS[name]
    cfg = compose_config("experiment=cooijmans2016/fig4a", f"setting={setting}", f"model.bidirectional={bidirectional}")
    if name.endswith("masked"):
        cfg.model.padding = "masked"
    torch.manual_seed(0)
    return instantiate(cfg.model, input_size=V, output_size=V, t_max=num_steps).to(device)


def step(model: nn.Module, inputs: Question, answers: torch.Tensor) -> None:
    """One forward and backward pass."""
    torch.autograd.grad(cross_entropy(model(inputs)[0], answers), list(model.parameters()))


def reader_cases(device: torch.device, plan: Plan) -> list[Case]:
    """A step of every reader against the LSTM reader with as many directions, on the engine that `auto` selects."""
    num_steps = T if plan.full_length else QUICK_T
    given = questions(num_steps, device)
    runs = {name: partial(step, build(name, num_steps, device), *given) for name in READERS}
    one, both = ({name: run for name, run in runs.items() if READERS[name][1] == b} for b in (False, True))
    return [
        Case("Attentive readers", f"one direction, T {num_steps}", one, "lstm", {"bn_e_star": TARGET}),
        Case("Attentive readers", f"both directions, T {num_steps}", both, BOTH, dict.fromkeys(list(both)[1:], TARGET)),
    ]
