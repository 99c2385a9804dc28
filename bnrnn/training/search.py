"""Random search. A trial's values depend only on its number, so a search is a sweep over trial numbers."""

import math
import random
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bnrnn.errors import BnrnnError


def apply_trial(cfg: DictConfig) -> DictConfig:
    """Draw the values of a random-search trial and return the configuration with them; unchanged if `search` is null.

    `search` is {trial: N, draws: {key: distribution}}. A distribution is {choice: [...]} or {log_uniform: [low, high]}.
    Raises BnrnnError for a negative trial, another distribution and a key that the configuration lacks.
    """
    if cfg.search is None:
        return cfg
    if not _is_search(cfg.search):
        raise BnrnnError(f"search={cfg.search} is not valid: expected {{trial: 0, draws: {{optim.lr: ...}}}}, or null")
    if cfg.search.trial < 0:  # a generator ignores the sign of its seed: -1 would draw the values of 1 again
        raise BnrnnError(f"search.trial={cfg.search.trial} is not valid: expected a whole number from 0")
    cfg, generator = cfg.copy(), random.Random(cfg.search.trial)
    for key, distribution in cfg.search.draws.items():
        if OmegaConf.select(cfg, str(key)) is None:
            raise BnrnnError(f"search.draws has the key {key}, which the configuration lacks: use one of its keys")
        OmegaConf.update(cfg, str(key), _draw(str(key), distribution, generator))
    return cfg


def _is_search(search: Any) -> bool:
    """Whether it has the number of a trial and what is drawn."""
    if not isinstance(search, DictConfig):
        return False
    return type(search.get("trial")) is int and isinstance(search.get("draws"), DictConfig)


def _draw(key: str, distribution: Any, generator: random.Random) -> Any:
    match OmegaConf.to_container(distribution) if OmegaConf.is_config(distribution) else distribution:
        case {"choice": [_, *_] as values}:
            return generator.choice(values)
        case {"log_uniform": [low, high]} if 0 < low < high:
            return float(f"{math.exp(generator.uniform(math.log(low), math.log(high))):.3g}")
    raise BnrnnError(
        f"search.draws.{key} is {distribution}: use choice: [...] or log_uniform: [low, high], 0 < low < high"
    )
