"""Finds out from git whether a rule was committed before or after the runs that it judges."""

import json
import subprocess
from functools import cache
from typing import Any

import yaml

from bnrnn.config import ROOT
from bnrnn.report.markdown import NONE
from bnrnn.report.verdicts import JudgedTest


def registered(tested: JudgedTest) -> str:
    """The commit that added the test, the runs started with older commits, and those with this one or a later one."""
    if not tested.commits:
        return NONE
    rule = rule_commit(tested.paper, tested.claim, _text(tested.test))
    if rule is None:
        return "rule not committed yet"
    runs = [commit.split("+")[0] for commit in tested.commits]
    if any(_git("cat-file", "-e", run) is None for run in runs):
        return f"{rule}, unknown whether before the runs of {_named(runs)}"
    after = [run for run in runs if _git("merge-base", "--is-ancestor", rule, run) is None]
    before = [run for run in runs if run not in after]
    if not after:
        return f"{rule}, before the runs of {_named(before)}"
    return f"{rule}, after the runs of {_named(after)}" + (f", before those of {_named(before)}" if before else "")


def _named(commits: list[str]) -> str:
    more = f" and {len(commits) - 3} more" if len(commits) > 3 else ""
    return ", ".join(commit[:7] for commit in commits[:3]) + more


@cache
def rule_commit(paper: str, claim: str, test: str) -> str | None:
    """The first commit whose claims.yaml contains exactly this test."""
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
    """The content of a test as text, without the keys `note` and `replaced`, which do not change its outcome."""
    return json.dumps({k: v for k, v in test.items() if k not in ("note", "replaced")}, sort_keys=True)


def has_history() -> bool:
    """Whether this is a git checkout with its full history."""
    return _git("rev-parse", "--is-shallow-repository") == "false"


@cache
def _git(*args: str) -> str | None:
    """The output of a git command, or None if it fails."""
    try:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
