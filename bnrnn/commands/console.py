"""The console commands. Without the packages of bnrnn[train] they end with a message that names the missing package."""

import sys
from functools import partial
from importlib import import_module


def _run(name: str) -> None:
    try:
        command = import_module("bnrnn.train" if name == "train" else f"bnrnn.commands.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "bnrnn":
            raise
        sys.exit(f"error: bnrnn-{name} needs {error.name}, which is not installed: pip install 'bnrnn[train]'")
    command.cli()


# pyproject.toml names these as the programs bnrnn-train and so on.
train, sweep, plan, campaign = (partial(_run, name) for name in ("train", "sweep", "plan", "campaign"))
cluster, doctor, prepare, verify = (partial(_run, name) for name in ("cluster", "doctor", "prepare", "verify"))
