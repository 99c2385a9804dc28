"""The time of a run."""

import signal
import time

import pytest

from bnrnn.training.state import Clock, TrainState
from bnrnn.training.stop import Stop


def test_the_time_for_which_a_process_was_stopped_does_not_count():
    with Stop() as stop:
        for expected, signals in ((0.05, ()), (0.0, (signal.SIGCONT,))):
            state, clock = TrainState("", []), Clock(stop)
            time.sleep(0.05)
            for number in signals:
                signal.raise_signal(number)
            clock.add_to(state)
            assert state.seconds == pytest.approx(state.cpu_seconds) if signals else state.seconds >= expected
