"""The comparison of running, exact and batch statistics for docs/layer.md."""

from bnrnn.report import running_page
from scripts import running


def test_running_statistics_are_compared_with_the_exact_and_the_batchs_without_disturbing_the_training():
    case = running.Case(("model.hidden_size=8", "batch_size=100"), 0.01, (2, 13), 1, 2)
    found = running.measure("digits", case)
    alone = running.measure("digits", case._replace(updates=(13,)))
    assert [row["update"] for row in found["rows"]] == [2, 13]  # one epoch has 12 updates
    assert found["rows"][1] == alone["rows"][0]
    assert all(len({row[kind] for kind in running_page.KINDS}) > 1 for row in found["rows"])
    page = running_page.render({"date": "today", "cases": {"digits": found}}, "digits")
    assert f"| 13 | {found['rows'][1]['running']:.3f} | {found['rows'][1]['exact']:.3f} |" in page
