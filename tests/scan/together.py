"""Triton's interpreter with all programs of a launch at the same time, each in a thread.

It records which program has accessed which bytes, and between which waits for the others. Programs that access the same
bytes between the same two waits, of which one writes, conflict: their order is left to chance.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime.interpreter import GridExecutor, interpreter_builder

from bnrnn.scan.lstm import triton_kernels

Access = tuple[tuple[int, int], int, bool, np.ndarray]  # launch and number of waits, program, whether it writes, bytes


@dataclass
class Together:
    """What happened: the number of programs of each launch, and its accesses."""

    programs: list[int] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)

    @property
    def conflicts(self) -> int:
        """Number of bytes on which programs conflict."""
        at = dict[tuple[int, int], list[Access]]()
        for access in self.accesses:
            at.setdefault(access[0], []).append(access)
        return sum(_conflicting(accesses) for accesses in at.values())


def _conflicting(accesses: list[Access]) -> int:
    programs = {program for _, program, *_ in accesses}

    def all_bytes(program: int, kinds: tuple[bool, ...]) -> np.ndarray:
        found = [b for _, of, writes, b in accesses if of == program and writes in kinds]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    written = {program: all_bytes(program, (True,)) for program in programs}
    touched = {program: all_bytes(program, (True, False)) for program in programs}
    return sum(len(np.intersect1d(written[p], touched[q])) for p in programs for q in programs if p != q)


class _Programs:
    """Takes the place of a kernel. A call of a program starts a thread; that of the last one waits for all."""

    def __init__(self, run: Callable[..., None], local: threading.local, chance: random.Random) -> None:
        self.run, self.local, self.chance = run, local, chance
        self.__signature__, self.__globals__, self.__name__ = signature(run), run.__globals__, run.__name__
        self.threads, self.errors = list[threading.Thread](), list[BaseException]()

    def __call__(self, **arguments: Any) -> None:
        self.threads.append(threading.Thread(target=self._program, args=(self.local.grid_idx, arguments)))
        if len(self.threads) < interpreter_builder.grid_dim[0]:
            return
        for thread in self.chance.sample(self.threads, len(self.threads)):
            thread.start()
        for thread in self.threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _program(self, index: tuple[int, int, int], arguments: dict[str, Any]) -> None:
        self.local.grid_idx, self.local.waits = index, 0
        try:
            self.run(**arguments)
        except BaseException as error:
            self.errors.append(error)


@contextmanager
def together(seed: int = 0, waits: bool = True) -> Iterator[Together]:
    """Context manager in which the programs of a launch run at the same time. Without `waits`, they do not wait."""
    found, local, chance = Together(), threading.local(), random.Random(seed)
    kind, wait_for_all, launched = type(interpreter_builder), triton_kernels.wait_for_all, GridExecutor.__call__

    def recorded(name: str, pointers: int, mask: int, writes: bool) -> Any:
        original = getattr(kind, name)

        def access(*arguments: Any) -> Any:
            if chance.random() < 0.1:
                time.sleep(0.0005 * chance.random())  # so that another program gets its turn
            element = arguments[pointers].get_element_ty()
            if name != "create_atomic_rmw" or element.is_floating():  # programs wait for each other by an integer
                valid = np.broadcast_to(arguments[mask].data, arguments[pointers].data.shape)
                first = np.asarray(arguments[pointers].data)[valid].astype(np.int64)
                every = (first[:, None] + np.arange(element.primitive_bitwidth // 8)).ravel()
                found.accesses.append(((len(found.programs), local.waits), local.grid_idx[0], writes, every))
            return original(*arguments)

        return patch.object(kind, name, access)

    def wait(*arguments: Any) -> None:
        if waits:
            wait_for_all(*arguments)
            local.waits += 1

    def launch(executor: GridExecutor, *given: Any, **options: Any) -> None:
        executor.fn = programs = _Programs(executor.fn, local, chance)
        launched(executor, *given, **options)
        found.programs.append(len(programs.threads))

    own_index = property(lambda _: local.grid_idx, lambda _, index: setattr(local, "grid_idx", index))
    with ExitStack() as stack:
        stack.enter_context(patch.dict(vars(interpreter_builder)))
        vars(interpreter_builder).pop("grid_idx", None)
        stack.enter_context(patch.object(kind, "grid_idx", own_index, create=True))
        stack.enter_context(recorded("create_masked_load", 1, 2, False))  # of which the builder is the first argument
        stack.enter_context(recorded("create_masked_store", 1, 3, True))
        stack.enter_context(recorded("create_atomic_rmw", 2, 4, True))
        stack.enter_context(patch.object(GridExecutor, "__call__", launch))
        stack.enter_context(patch.object(triton_kernels, "wait_for_all", wait))
        yield found
