"""How long an update of the BN-e* and BN-e** readers takes, beside the LSTM reader of as many directions."""

import statistics
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from torch import nn

from bnrnn.bench import Plan, time_in_turn
from bnrnn.config import compose_config
from bnrnn.inputs import Question
from bnrnn.metrics import cross_entropy

T, QUICK_T, B, S, V = 150, 40, 40, 20, 5000  # steps of passages, batch, steps of questions, words
TARGET = 1.3  # BN-e** over LSTM
READERS = {
    "lstm": ("lstm_reader", False),
    "lstm, both directions": ("lstm_reader", True),
    "bn_e_star": ("bn_e_star", False),
    "bn_e_star_star": ("bn_e_star_star", True),
    "bn_e_star_star, masked": ("bn_e_star_star", True),
}


def questions(num_steps: int, device: torch.device) -> tuple[Question, torch.Tensor]:
    """Random words, half of the longest length to all of it."""
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
    """Forward and backward."""
    torch.autograd.grad(cross_entropy(model(inputs)[0], answers), list(model.parameters()))


def reader_cost(device: torch.device, plan: Plan) -> dict[str, Any]:
    """Milliseconds of an update, all readers in turn, with the engine that `auto` takes."""
    num_steps = T if plan.full_length else QUICK_T
    given = questions(num_steps, device)
    runs = {name: partial(step, build(name, num_steps, device), *given) for name in READERS}
    times = time_in_turn(runs, device, plan)
    median = {name: statistics.median(t) for name, t in times.items()}
    return {"T": num_steps, "B": B, "target": TARGET, "ms": times, "median_ms": median}
