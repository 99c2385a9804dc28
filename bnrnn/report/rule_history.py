"""Finds out from git whether a rule was committed before or after the runs that it judges."""

import subprocess
from collections.abc import Iterable
from functools import cache

from bnrnn.config import ROOT, from_yaml
from bnrnn.report.claim_types import text_of
from bnrnn.report.markdown import NONE
from bnrnn.report.outcome import JudgedTest

BEFORE, PARTLY, AFTER = "before its runs", "partly before", "after its runs"  # when a rule was committed


def registered(tested: JudgedTest) -> str:
    """The commit that added the test, the runs started with older commits, and those with this one or a later one."""
    if not tested.commits:
        return NONE
    rule, before, after, unknown = _dated(tested)
    if rule is None:
        return "rule not committed yet"
    if unknown:
        return f"{rule}, unknown whether before the runs of {_named(unknown)}"
    seen = f"; {tested.test.known}" if tested.test.known else ""
    if not after:
        return f"{rule}, before the runs of {_named(before)}{seen}"
    others = f", before those of {_named(before)}" if before else ""
    return f"{rule}, after the runs of {_named(after)}{others}{seen}"


def age(tests: Iterable[JudgedTest]) -> str:
    """Whether the rules of a verdict's tests are older than its runs: BEFORE, PARTLY or AFTER; "" without runs.

    A rule whose author had seen runs that are not stored, which the key `known` tells, is at most PARTLY older.
    """
    found = set()
    for tested in tests:
        rule, before, after, unknown = _dated(tested)
        is_older = rule is not None and not (after or unknown or tested.test.known)
        found.add(BEFORE if is_older else PARTLY if rule is not None and before else AFTER)
    return found.pop() if len(found) == 1 else PARTLY if found else ""


def _dated(tested: JudgedTest) -> tuple[str | None, list[str], list[str], list[str]]:
    """The commit that added the test, and the commits of its runs: with or after it, before it, and unknown ones."""
    rule = rule_commit(tested.test.key.partition("/")[0], tested.test.claim, tested.test.text)
    runs = [commit.split("+")[0] for commit in tested.commits]
    unknown = [run for run in runs if _git("cat-file", "-e", run) is None]
    if rule is None or unknown:
        return rule, [], [], unknown
    after = [run for run in runs if _git("merge-base", "--is-ancestor", rule, run) is None]
    return rule, [run for run in runs if run not in after], after, []


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
        content = from_yaml(_git("show", f"{commit}:{path}") or "") or {}
        claims = (content.get("claims") or {}).items()
        tests = {(name, text_of(test)) for name, claim in claims for test in claim["tests"]}
        history.append((commit, tests))
    return history


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
