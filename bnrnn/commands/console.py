"""The console commands. Without the packages of bnrnn[train] they end with a message that names the missing package."""

import sys
from importlib import import_module


def train() -> None:
    _run("train")


def sweep() -> None:
    _run("sweep")


def plan() -> None:
    _run("plan")


def campaign() -> None:
    _run("campaign")


def cluster() -> None:
    _run("cluster")


def doctor() -> None:
    _run("doctor")


def prepare() -> None:
    _run("prepare")


def verify() -> None:
    _run("verify")


def _run(name: str) -> None:
    try:
        command = import_module("bnrnn.train" if name == "train" else f"bnrnn.commands.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "bnrnn":
            raise
        sys.exit(f"error: bnrnn-{name} needs {error.name}, which is not installed: pip install 'bnrnn[train]'")
    command.cli()
