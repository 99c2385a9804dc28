"""The runs of a test, paired by seed, whose numbers a rule compares."""

import math
from dataclasses import dataclass, field

from bnrnn.metrics import sign
from bnrnn.report.run import Run

DIVERGED = (
    "a pair of which one run diverged counts like the other pair that is farthest from the threshold; if both "
    "diverged, there is no difference"
)


@dataclass
class Pairing:
    """The runs of a test: for each seed, the runs of each side.

    Args:
        by_seed: the runs of each side, by seed. A side has one run, unless the rule compares several learning rates.
        metrics: the metrics of each side.
        updates: the number of updates up to which runs are compared; None for whole runs.
        marks: remarks on the outcome, for the page.
    """

    by_seed: dict[str, list[list[Run]]]
    metrics: list[tuple[str, ...]]
    updates: int | None = None
    marks: set[str] = field(default_factory=set)

    def signed_values(self, k: int = 0) -> list[list[float]]:
        """The k-th metric of all sides, one list per seed, with a sign with which larger is better.

        A diverged run has minus infinity. The list is empty if all runs diverged.
        """
        found = [
            [self._signed(runs[0], names[k]) for runs, names in zip(sides, self.metrics, strict=True)]
            for sides in self.by_seed.values()
        ]
        return found if any(math.isfinite(value) for row in found for value in row) else []

    def _signed(self, run: Run, metric: str) -> float:
        if self.lost(run):
            self.marks.add(DIVERGED)
            return -math.inf
        return sign(metric) * run.best_until(metric, self.updates)

    def lost(self, run: Run) -> bool:
        """Whether a run diverged within the updates that are compared."""
        return run.diverged(self.updates)
