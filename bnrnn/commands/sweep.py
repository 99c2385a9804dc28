"""Train the runs of a sweep with several processes on this machine.

bnrnn-sweep jobs=2 experiment=cooijmans2016/table1 budget=cpu seed=0,1,2

The processes are workers (bnrnn.commands.workers): a run that fails does not stop the others, and a second start of
the command resumes the runs that are not finished. In a terminal, one display shows all runs. Their lines are in each
run's log.
"""

import sys
import time

from bnrnn.commands.arguments import JOBS, read_arguments
from bnrnn.commands.live import Live
from bnrnn.commands.workers import run_team
from bnrnn.config import MENDABLE
from bnrnn.errors import report_errors
from bnrnn.system.files import make_folder
from bnrnn.training.cells import expand
from bnrnn.training.log import say
from bnrnn.training.states import check_cells, failures_of, state_of, summary
from bnrnn.training.stop import Stop

FAILED = 3  # exit status if some runs have failed and the others are done; an error of the user is 1


def main() -> None:
    """Train the cells of a sweep that are left, with `jobs` of them at a time."""
    own = [a for a in sys.argv[1:] if a.startswith("jobs=")]
    jobs = read_arguments(own, {"jobs": JOBS}, "bnrnn-sweep").get("jobs", 1)
    arguments = [a for a in sys.argv[1:] if a not in own]
    cells, since = expand(arguments), time.time()
    check_cells(cells)
    make_folder(cells[0].sweep_folder)  # an out_dir that cannot be used is one message too
    with Stop() as stop:
        with Live(cells, since) as live:
            run_team([cells] * jobs, since, stop, look=live.look, is_silent=live.is_shown)
        for line in failures_of(cells, since):
            say(line)
        say(summary(cells, since))
        if stop.received is not None:
            say("the runs are saved: the same command resumes them")
            sys.exit(128 + stop.received)
    sys.exit(FAILED if any(state_of(cell, since) != "finished" for cell in cells) else 0)


def cli() -> None:
    """Run main. Print errors that the user can correct as one message."""
    report_errors(main, *MENDABLE, usage=__doc__)


if __name__ == "__main__":
    cli()
