"""The pieces of a run: what trained each part of it. All pieces of a run must agree, or its numbers mean nothing."""

import hashlib
import math
from typing import Any

from torch import Tensor

from bnrnn.data.base import FILE, SequenceData
from bnrnn.errors import BnrnnError

# What all pieces have in common. The number of threads is not, although it changes the rounding of sums: runs move
# between machines with other numbers of cores. Each piece records it.
AGREE = ("backend", "precision", "device", "torch", "numpy", "data")
RAN = "ran"  # the engine that ran a piece, if the selected one failed: it may change while the piece is trained
SAMPLES = 50  # batches of each split that enter the digest, evenly spaced


def digest(data: SequenceData, batch_size: int) -> str:
    """A digest of the data: of its description and of up to SAMPLES batches of each split, in the order of the files.

    Splits of up to SAMPLES batches are covered completely. Larger ones would take too long at every start.
    """
    found = hashlib.sha256(data.description.encode())
    for split in ("train", "valid", "test"):
        total = data.num_batches(split, batch_size)
        for n in sorted({total * k // SAMPLES for k in range(SAMPLES)}) if total else []:
            batch = next(data.batches(split, batch_size, None, n))
            inputs = (batch.inputs,) if isinstance(batch.inputs, Tensor) else tuple(batch.inputs)
            for part in (*inputs, batch.targets):
                found.update(part.numpy().tobytes() if isinstance(part, Tensor) else repr(part).encode())
    return found.hexdigest()[:16]


def joined(
    pieces: list[dict[str, Any]], update: int, commit: str, environment: dict[str, Any], data: str, resume: str
) -> list[dict[str, Any]]:
    """The pieces of a run with the present one, which begins at this update.

    A start in the same way as before makes no new piece. Parts from before pieces were recorded are unknown and agree
    with any.

    Args:
        pieces: the pieces before.
        data: the digest of the data.
        resume: "same" refuses a piece that differs from the one before in AGREE, "changed" accepts it.

    Raises BnrnnError for a piece that is refused.
    """
    piece = {"update": update, "commit": commit, **environment, "data": data}
    before = pieces[-1] if pieces else {}
    changed = [f"{k}: {before[k]} there, {piece[k]} now" for k in AGREE if k in before and before[k] != piece[k]]
    if changed and resume != "changed":
        raise BnrnnError(
            f"the run was begun in another way ({'; '.join(changed)}): resume it as it was begun, remove its folder to "
            "run again, or add resume=changed to accept that its parts differ"
        )
    is_same = {k: v for k, v in before.items() if k != RAN} == {**piece, "update": before.get("update")}
    return pieces if is_same else [*pieces, piece]


def note_engine(piece: dict[str, Any], ran: str) -> None:
    """Record in a piece the engine that ran, if it is not the one that was selected when the piece began."""
    if ran != piece["backend"]:
        piece[RAN] = ran


def order_of(pieces: list[dict[str, Any]]) -> str:
    """The order in which the last of these pieces was evaluated. Before it was recorded, it was that of the file."""
    return pieces[-1].get("evaluation_order", FILE) if pieces else FILE


def file_order_until(pieces: list[dict[str, Any]]) -> float:
    """The update before which a run was evaluated in FILE order: 0 if it never was, infinity if it still is."""
    if not pieces:
        return math.inf
    return next((float(piece["update"]) for piece in pieces if order_of([piece]) != FILE), math.inf)
