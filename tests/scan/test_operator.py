"""The operator that compiled programs call: torch's own checks of its schema, its shapes and its gradients."""

import pytest
import torch

from bnrnn.scan import operator
from tests.scan.test_arguments import B, lstm, rhn


@pytest.mark.parametrize("population", [False, True])
@pytest.mark.parametrize("sizes", [None, [B, B, 2]])
@pytest.mark.parametrize(("name", "arguments"), [("lstm", lstm), ("rhn", rhn)])
def test_torch_finds_nothing_wrong_with_it(name, arguments, sizes, population):
    given = arguments()
    statistics = given.pop("population")._asdict()
    given = {k: v.requires_grad_() for k, v in given.items()} | (statistics if population else {})
    call = (name, ",".join(given), list(given.values()), 1e-5, sizes, False, None, True)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    found = torch.library.opcheck(operator._scan, call, test_utils=utilities)
    assert found == dict.fromkeys(utilities, "SUCCESS")
    with torch.no_grad():
        results = operator._scan(*call)
    backward = (*call[:-1], results, torch.randn_like(results[0]), torch.randn_like(results[1]))
    utilities = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(operator._scan_backward, backward, test_utils=utilities)
    assert found == dict.fromkeys(utilities, "SUCCESS")
