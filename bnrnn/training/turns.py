"""Several trainings that take turns in one process, so that their scans can be computed together.

Each training is a thread with its own random generators. Only one thread runs at a time, until it hands over a scan
(bnrnn.scan.joint) or ends; then it is the next one's turn. When all wait, the scans are computed, those of equal form
in one call. Apart from that a training knows nothing of the others, and its numbers are those of a training alone.
"""

import copy
import random
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.random import mtrand

from bnrnn.scan import joint

_thread = threading.local()


@dataclass
class Group:
    """The trainings that take turns: their number, their scans, and the calls of an engine that computed these."""

    size: int
    live: int  # those that have not ended
    num_scans: int = 0
    num_calls: int = 0


class Abandoned(BaseException):
    """Ends a training whose process is interrupted at once."""


def group_size() -> int:
    """The number of trainings that the present one began together with; 1 if it trains alone."""
    return _thread.group.size if hasattr(_thread, "group") else 1


def num_live() -> int:
    """How many trainings share the time of this process."""
    return _thread.group.live if hasattr(_thread, "group") else 1


def let_others_run() -> None:
    """Give the other trainings their turn, if this one has not waited for them since the last call."""
    if hasattr(_thread, "member"):
        _thread.member.pause()


class Member:
    """A training in its own thread, which runs within `resume` only."""

    def __init__(self, function: Callable[[], Any], group: Group) -> None:
        self.function, self.group = function, group
        self.outcome: Any = None
        self.call: joint.Call | None = None  # what the training waits for
        self.has_waited = False  # since the last pause
        self.ended = False
        *others, of_numpy = _random_state()
        self.random = *others, copy.deepcopy(of_numpy)
        self.is_running = False
        self.its_turn, self.our_turn = threading.Lock(), threading.Lock()
        self.its_turn.acquire()
        self.our_turn.acquire()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.its_turn.acquire()
        _thread.group, _thread.member = self.group, self
        try:
            # The backward pass of a GPU would run in another thread, which could not wait for several trainings.
            with joint.handing_over(self._hand_over), torch.autograd.set_multithreading_enabled(False):
                self.outcome = self.function()
        except BaseException as error:
            self.outcome = error
        self.ended = True
        self.group.live -= 1
        self._give_turn()

    def _hand_over(self, call: joint.Call) -> tuple[Any, ...]:
        self.call, call.owner, self.has_waited = call, self, True
        self._give_turn()
        self.its_turn.acquire()
        self.call = None
        if call.error is not None:
            raise call.error
        return call.answer

    def pause(self) -> None:
        if not self.has_waited:
            self._hand_over(joint.Call())
        self.has_waited = False

    def _give_turn(self) -> None:
        self.is_running = False
        self.our_turn.release()

    def resume(self) -> None:
        """Let the training run until it waits again, or ends."""
        _set_random_state(self.random)
        self.is_running = True
        self.its_turn.release()
        try:
            self.our_turn.acquire()
        except BaseException:  # an interrupt: wait until the training does
            while self.is_running:
                time.sleep(0.01)
            self.our_turn.acquire(timeout=0.1)  # unless the interrupt came after it was acquired
            raise
        self.random = _random_state()

    def abandon(self) -> None:
        """End the training at once."""
        while not self.ended:
            if self.call is not None:
                self.call.error = Abandoned()
            self.resume()


def take_turns(functions: Sequence[Callable[[], Any]]) -> tuple[list[Any], Group]:
    """Call the functions, which train, in turns. Returns what they return, or the exceptions that end them."""
    before, group = _random_state(), Group(len(functions), len(functions))
    members = [Member(function, group) for function in functions]
    try:
        ready = members
        while ready:
            for member in ready:
                member.resume()
            ready = _computed([member for member in members if not member.ended], group)
    finally:
        for member in members:
            member.abandon()
        _set_random_state(before)
    return [member.outcome for member in members], group


def _computed(waiting: list[Member], group: Group) -> list[Member]:
    """Compute what the trainings wait for, and return those that can be resumed.

    Backward passes come first. So trainings that begin at different updates, or evaluate at different times, come to
    wait for the same scan again. A backward pass waits for the other trainings of its graph.
    """
    calls: dict[Hashable, list[joint.Call]] = {}
    pauses = [member for member in waiting if type(member.call) is joint.Call]
    for member in waiting:
        if isinstance(member.call, joint.Forward | joint.Backward):
            calls.setdefault(member.call.group, []).append(member.call)
    complete = [of for key, of in calls.items() if isinstance(key, joint.Graph) and _is_complete(key, of)]
    chosen = complete or [of for key, of in calls.items() if not isinstance(key, joint.Graph)]
    if waiting and not chosen and not pauses:
        raise RuntimeError("the trainings wait for each other: they must run the same code")
    for of in chosen:
        joint.compute(of)
        group.num_scans += len(of)
        group.num_calls += 1
    answered = {id(call) for of in chosen for call in of}
    return [member for member in waiting if member in pauses or id(member.call) in answered]


def _is_complete(graph: joint.Graph, calls: list[joint.Call]) -> bool:
    """Whether all trainings of a graph that have not ended wait for its backward pass."""
    return all(any(call.owner is owner for call in calls) for owner in graph.owners if not owner.ended)


def _random_state() -> tuple[Any, ...]:
    """The random generators of the present training. That of numpy is exchanged as a whole, which is a hundred times
    faster than copying its state.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, random.getstate(), mtrand.get_bit_generator()


def _set_random_state(state: tuple[Any, ...]) -> None:
    cpu, cuda, of_python, of_numpy = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(of_python)
    mtrand.set_bit_generator(of_numpy)
