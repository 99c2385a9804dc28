"""What `bnrnn-train --help` prints. It is made from the files of conf/, so it names every option that exists."""

from textwrap import fill

import yaml

from bnrnn.config import CONF
from bnrnn.training.pairs import KINDS, fitting, options

USAGE = """Train models. Options are written KEY=VALUE; with -m, a key may have several values, and each run has one.

  bnrnn-train model=bn_lstm data=digits                                one run
  bnrnn-train model=lstm,bn_lstm data=pmnist seed=0,1,2 -m             a sweep: six runs
  bnrnn-train model=bn_lstm model.layer.gamma_init=0.1,0.3,1.0 -m      a sweep over the initial gamma
  bnrnn-train model=bn_rhn data=ptb_char model.num_layers=2 optim=adam budget.updates=1000
  bnrnn-train experiment=cooijmans2016/table1 budget=cpu seed=0        the runs of a table, with its own sweep
"""
END = """bnrnn-train KEY=VALUE ... --cfg job   prints a whole configuration without training
bnrnn-train --hydra-help              lists the options of hydra
"""


def text() -> str:
    """The usage, models and datasets that fit together, the other groups, and all options with their defaults."""
    parts = [USAGE, "Models and the datasets that they read"]
    for kind in KINDS:
        parts.append(f"  {kind}")
        parts += [_listed(f"{group}=", fitting(group, kind)) for group in ("model", "data")]
    parts.append("\nOther groups")
    for group in ("optim", "budget", "init", "setting", "experiment"):
        parts.append(_listed("init@model.init=" if group == "init" else f"{group}=", options(group)))
    return "\n".join(
        [*parts, "\nOptions and their defaults", _defaults(), "Options of each model and dataset: conf/", END]
    )


def _listed(name: str, values: list[str]) -> str:
    return fill(f"{name}{'|'.join(values)}".replace("|", " | "), 110, initial_indent="    ", subsequent_indent="      ")


def _defaults() -> str:
    """The options of conf/train.yaml with their comments, without its list of groups and without those of hydra."""
    lines = (CONF / "train.yaml").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("seed:"))
    last = next(n for n, line in enumerate(lines) if line.startswith("hydra:"))
    kept = lines[first:last]
    assert yaml.safe_load("\n".join(kept))
    return "\n".join(f"  {line}" if line else "" for line in kept)
