"""Which models fit which datasets. A model reads one kind of data: sequences, captions of images, or questions."""

from functools import cache

from hydra.utils import get_class
from omegaconf import DictConfig

from bnrnn.config import CONF, target_of
from bnrnn.errors import BnrnnError
from bnrnn.inputs import CAPTIONS, QUESTIONS, SEQUENCES

KINDS = (SEQUENCES, CAPTIONS, QUESTIONS)


def options(group: str) -> list[str]:
    """The options of a group of conf/, such as captioner/lstm of `model`."""
    paths = (path.relative_to(CONF / group).with_suffix("") for path in sorted((CONF / group).rglob("*.yaml")))
    return sorted((str(path) for path in paths if not path.name.startswith("_")), key=lambda name: ("/" in name, name))


@cache
def fitting(group: str, kind: str) -> list[str]:
    """The models that read this kind of data, or the datasets that are of this kind."""
    attribute = {"model": "reads", "data": "kind"}[group]
    return [name for name in options(group) if getattr(get_class(target_of(group, name)), attribute) == kind]


def check_pair(cfg: DictConfig, model: str | None = None, data: str | None = None) -> None:
    """Raise BnrnnError if the model does not read this kind of data.

    Args:
        model, data: names of the options for the message; None if they are not known.
    """
    found = getattr(get_class(cfg.data._target_), "kind", None)
    read = getattr(get_class(cfg.model._target_), "reads", None)
    if found is None or read is None or found == read:  # classes of others may name no kind
        return
    which, of = f"model={model}" if model else "this model", f"data={data}" if data else "this dataset"
    raise BnrnnError(
        f"{which} reads {read}, and {of} has {found}: use one of the models {', '.join(fitting('model', found))}, or "
        f"one of the datasets {', '.join(fitting('data', read))}"
    )
