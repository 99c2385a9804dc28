"""The operator that compiled programs call: torch's own checks of its schema, its shapes and its gradients."""

import pytest
import torch

from bnrnn.scan import lstm_scan, operator
from tests.scan.test_arguments import B, lstm, rhn

NOISE = [0.3, 0.2, 0.1]


@pytest.mark.parametrize("sizes", [None, [B, B, 2]])
@pytest.mark.parametrize(
    ("name", "arguments", "population", "over", "noise"),
    [
        ("lstm", lstm, False, "batch", None),
        ("lstm", lstm, True, "batch", NOISE),
        ("lstm", lstm, False, "layer", None),
        ("lstm", lstm, False, "gate", NOISE),
        ("rhn", rhn, False, "batch", None),
        ("rhn", rhn, True, "batch", None),
    ],
)
def test_torch_finds_nothing_wrong_with_it(name, arguments, sizes, population, over, noise):
    given = arguments()
    statistics = given.pop("population")._asdict()
    given = {k: v.requires_grad_() for k, v in given.items()} | (statistics if population else {})
    if noise is not None:
        given["key"] = torch.tensor(3)
    call = (name, ",".join(given), list(given.values()), 1e-5, sizes, False, None, over, noise, True)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    found = torch.library.opcheck(operator._scan, call, test_utils=utilities)
    assert found == dict.fromkeys(utilities, "SUCCESS")
    with torch.no_grad():
        results = operator._scan(*call)
    backward = (*call[:-1], results, torch.randn_like(results[0]), torch.randn_like(results[1]))
    utilities = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(operator._scan_backward, backward, test_utils=utilities)
    assert found == dict.fromkeys(utilities, "SUCCESS")


def test_what_is_not_given_is_left_out_of_the_call():
    """The inputs of a scan and the population's statistics are optional; the operator takes a list without gaps."""
    given = lstm()
    population = given.pop("population")
    del given["gamma_hh"]
    of_cell = population._replace(mean_hh=None, var_hh=None)
    y, last, statistics = operator.scan("lstm", {**given, "gamma_hh": None}, of_cell, {})
    expected = lstm_scan(**given, population=of_cell)
    torch.testing.assert_close((y, last), (expected[0], expected[1][1]))
    assert statistics is of_cell
