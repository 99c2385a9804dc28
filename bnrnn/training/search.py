"""Random search: what a trial draws is a function of its number alone, so a search is a sweep over numbers."""

import math
import random
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bnrnn.errors import BnrnnError


def apply_trial(cfg: DictConfig) -> DictConfig:
    """The configuration with what `search` = {trial: N, draws: {key: distribution}} draws; itself without a search.

    A distribution is {choice: [...]} or {log_uniform: [low, high]}. Raises BnrnnError for another, and for a key that
    the configuration has not.
    """
    if cfg.search is None:
        return cfg
    cfg, generator = cfg.copy(), random.Random(int(cfg.search.trial))
    for key, distribution in cfg.search.draws.items():
        if OmegaConf.select(cfg, str(key)) is None:
            raise BnrnnError(f"search.draws has {key}, and the configuration has no such value to replace")
        OmegaConf.update(cfg, str(key), _draw(str(key), distribution, generator))
    return cfg


def _draw(key: str, distribution: Any, generator: random.Random) -> Any:
    match dict(distribution):
        case {"choice": values}:
            return generator.choice(list(values))
        case {"log_uniform": [low, high]} if 0 < low < high:
            return float(f"{math.exp(generator.uniform(math.log(low), math.log(high))):.3g}")
    raise BnrnnError(
        f"search.draws.{key} is {distribution}: use choice: [...] or log_uniform: [low, high], 0 < low < high"
    )
