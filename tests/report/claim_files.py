"""Claims for tests: a test of a claim as claims.yaml would have it, and whole files of claims."""

from pathlib import Path
from typing import Any

import yaml

from bnrnn.report.claim_tests import read_test
from bnrnn.report.claim_types import ClaimTest
from bnrnn.report.claims import paper_of
from bnrnn.report.schema import parse_keys


def claim_test(test: dict[str, Any], paper: str = "cooijmans2016") -> ClaimTest:
    """The test of a claim C1 of a paper, whose entries it may name."""
    keys = parse_keys(yaml.safe_dump(test, sort_keys=False), Path("claims.yaml"))
    return read_test("C1", paper, keys, paper_of(f"{paper}/").entries)
