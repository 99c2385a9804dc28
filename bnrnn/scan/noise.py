"""Zoneout and recurrent dropout: the random factors of a recurrence.

They come from a generator without a state: a hash of a key of 64 bits and of a counter, which is the time step, the
sequence and the unit. So all engines draw the same factors, in any order, and the backward pass draws them again and
need not store them. native/noise.h computes the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bnrnn.scan.transfer import to_device

WORD = 2**32 - 1
SPREAD = 0x9E3779B1  # 2^32 divided by the golden ratio: spreads neighboring counters over all bits
FIRST, SECOND, THIRD = 0x7FEB352D, 0x846CA68B, 0x9E485565  # odd, so that multiplying loses no bits
LEVELS = 2**16  # a probability is rounded to a multiple of 1 / LEVELS


class Noise(NamedTuple):
    """Zoneout (Krueger et al. 2017, arXiv:1606.01305) and recurrent dropout (Semeniuta et al. 2016, arXiv:1603.05118).

    Args:
        zoneout_c, zoneout_h: probability that a unit keeps its previous c, and its previous h.
        dropout: probability that the candidate g of a unit is set to 0.
        key: (), 64 random bits, drawn on the CPU. None uses the expected factors instead, as evaluation does.
    """

    zoneout_c: float
    zoneout_h: float
    dropout: float
    key: Tensor | None = None

    def on(self, device: torch.device) -> "Noise":
        """The same with its key on a device, where each step reads it: moved once, and without waiting for a GPU."""
        return self if self.key is None else self._replace(key=to_device(self.key, device))

    def factors(self, t: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Three (B, H) tensors of the dtype and device of `like` (B, H), for step t.

        Returns the parts of the previous c and of the previous h that are kept, and the factor of the candidate g.
        """
        if self.key is None:
            parts = (self.zoneout_c, self.zoneout_h, 1 - self.dropout)
            return tuple(torch.full_like(like, part) for part in parts)  # pyright: ignore[reportReturnType]
        hashed = _hash(self.key.to(like.device), t, *like.shape)
        third = (hashed * THIRD) & WORD
        kept_c = (hashed % LEVELS) < round(self.zoneout_c * LEVELS)
        kept_h = (hashed >> 16) < round(self.zoneout_h * LEVELS)
        passed = (third >> 16) >= round(self.dropout * LEVELS)
        return kept_c.to(like), kept_h.to(like), passed.to(like)


def _hash(key: Tensor, t: int, B: int, H: int) -> Tensor:
    """32 random bits (B, H) for step t, as non-negative int64."""
    sequence = torch.arange(B, device=key.device)[:, None] * SPREAD
    unit = torch.arange(H, device=key.device) * SPREAD
    first, second = _mixed((key + t * SPREAD) & WORD), _mixed(((key >> 32) & WORD) ^ (t * SPREAD & WORD))
    first, second = _mixed((first + sequence) & WORD), _mixed(second ^ (sequence & WORD))
    return _mixed((first + unit) & WORD, second)


def _mixed(x: Tensor, more: Tensor | int = 0) -> Tensor:
    """Each bit of the result depends on all bits of x, a word of 32 bits, and on those of `more`."""
    x = ((x ^ (x >> 16)) * FIRST + more) & WORD
    x = ((x ^ (x >> 15)) * SECOND) & WORD
    return x ^ (x >> 16)
