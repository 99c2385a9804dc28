"""When a rule was committed: before the runs that it judges, or after. Only git knows."""

import json
import subprocess
from functools import cache
from typing import Any

import yaml

from bnrnn.config import ROOT
from bnrnn.report.markdown import NONE
from bnrnn.report.verdicts import JudgedTest


def registered(tested: JudgedTest) -> str:
    """The commit that brought the test, and whether it came before the runs: each was begun with it or a later one."""
    if not tested.commits:
        return NONE
    rule = rule_commit(tested.paper, tested.claim, _text(tested.test))
    if rule is None:
        return "rule not committed yet"
    runs = [commit.split("+")[0] for commit in tested.commits]
    of_runs = f"the runs of {', '.join(run[:7] for run in runs[:3])}"
    if any(_git("cat-file", "-e", run) is None for run in runs):
        return f"{rule}, not known whether before {of_runs}"
    before = all(_git("merge-base", "--is-ancestor", rule, run) is not None for run in runs)
    return f"{rule}, {'before' if before else 'after'} {of_runs}"


@cache
def rule_commit(paper: str, claim: str, test: str) -> str | None:
    """The first commit whose claims.yaml has this test, word for word."""
    return next((commit for commit, tests in _history(paper) if (claim, test) in tests), None)


@cache
def _history(paper: str) -> list[tuple[str, set[tuple[str, str]]]]:
    """The tests of a paper at every commit that changed its claims, the oldest first."""
    path, history = f"experiments/{paper}/claims.yaml", []
    for commit in (_git("log", "--reverse", "--format=%h", "--abbrev=7", "--", path) or "").split():
        content = yaml.safe_load(_git("show", f"{commit}:{path}") or "") or {}
        claims = (content.get("claims") or {}).items()
        tests = {(name, _text(test)) for name, claim in claims for test in claim["tests"]}
        history.append((commit, tests))
    return history


def _text(test: dict[str, Any]) -> str:
    """What makes a test what it is; that it was replaced later does not."""
    return json.dumps({k: v for k, v in test.items() if k != "replaced"}, sort_keys=True)


def has_history() -> bool:
    """Whether this is a checkout that knows its commits."""
    return _git("rev-parse", "--is-shallow-repository") == "false"


@cache
def _git(*args: str) -> str | None:
    """What git prints; None where it fails."""
    try:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
