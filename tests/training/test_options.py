"""Wrong values of a configuration: each is one message that says what was expected, before anything is started."""

import sys

import pytest
import torch
from omegaconf import OmegaConf

from bnrnn.config import compose_config
from bnrnn.data.digits import Digits
from bnrnn.errors import BnrnnError
from bnrnn.train import _leave_nothing, cli
from bnrnn.training.device import choose_device
from bnrnn.training.options import check_options, naming_nearest_key, options_with
from bnrnn.training.search import apply_trial
from tests.helpers import composed

WRONG = [
    ("lr_decay", 0.5, "lr_decay=0.5 is not valid: expected {after: N, divisor: D} and perhaps every: M, or null"),
    ("lr_decay", {}, "lr_decay={} is not valid: expected {after: N"),
    ("lr_decay", {"after": 1}, "lr_decay={'after': 1} is not valid: expected {after: N"),
    ("lr_decay", {"after": 1, "divisor": 2, "evry": 1}, "lr_decay.evry is no option: did you mean lr_decay.every?"),
    ("search", 3, "search=3 is not valid: expected {trial: 0, draws: {optim.lr: ...}}, or null"),
    ("search", {"trial": "abc", "draws": {}}, "search={'trial': 'abc', 'draws': {}} is not valid"),
    ("search", {"trial": 1.5, "draws": {}}, "search={'trial': 1.5, 'draws': {}} is not valid"),
    ("search", {"trial": -1, "draws": {}}, "search.trial=-1 is not valid: expected a whole number from 0"),
    ("search", {"trial": 1, "draws": {"seed": {"choice": []}}}, "search.draws.seed is {'choice': []}: use choice:"),
    ("search", {"trial": 1, "draws": {"seed": {"choice": 5}}}, "search.draws.seed is {'choice': 5}: use choice:"),
    ("search", {"trial": 1, "draws": {"seed": 5}}, "search.draws.seed is 5: use choice:"),
    ("search", {"trial": 1, "draws": {"seed": {"log_uniform": [0, 1]}}}, "log_uniform: [low, high], 0 < low < high"),
    ("search", {"trial": 1, "draws": {"optim.rate": {"choice": [1]}}}, "the key optim.rate, which the configuration"),
    ("model.layer.gamma_init", {"a": 1}, "model.layer.gamma_init={'a': 1} is not valid: expected a number"),
    ("model.layer.gamma_init", True, "model.layer.gamma_init=True is not valid: expected a number"),
    ("model.layer.gamma_init", None, "model.layer.gamma_init=None is not valid: expected a number"),
    ("model.layer.gamma_init", -1e39, "model.layer.gamma_init=-1e+39 is not valid: expected a number from -1e+38"),
    ("model.layer", 3, "model.layer=3 is not valid: expected keys and values"),
    ("model.layer", None, "model.layer=None is not valid: expected keys and values"),
    ("model.layer.t_max", 0, "model.layer.t_max=0 has no effect, because the model determines t_max"),
    ("model.layer.hidden_size", 3, "model.layer.hidden_size=3 has no effect, because the model determines"),
    ("model.t_max", 0, "model.t_max=0 has no effect, because the data determine t_max: leave it out"),
    ("model.output_size", 7, "model.output_size=7 has no effect, because the data determine output_size"),
    ("model.hidden_size", None, "model.hidden_size=None is not valid: expected a whole number from 1"),
    ("optim.lr", {"a": {"b": 1}}, "optim.lr={'a': {'b': 1}} is not valid: expected a number above 0"),
    ("optim.lr", -1, "optim.lr=-1 is not valid: expected a number above 0"),
    ("optim.lr", 1e308, "optim.lr=1e+308 is not valid: expected a number from -1e+38 to 1e+38"),
    ("optim.weight_decay", 1e300, "optim.weight_decay=1e+300 is not valid: expected a number from -1e+38"),
    ("budget.updates", {"a": 1}, "budget.updates={'a': 1} is not valid: expected a whole number from 1, or null"),
    ("budget.updates", 2.5, "budget.updates=2.5 is not valid: expected a whole number from 1, or null"),
    ("budget.updates", -3, "budget.updates=-3 is not valid"),
    ("budget.updatez", 3, "budget.updatez is no option: did you mean budget.updates"),
    ("budget.eval_every", 0, "budget.eval_every=0 is not valid"),
    ("batch_size", 0, "batch_size=0 is not valid: expected a whole number from 1"),
    ("batches", {}, "batches is no option: did you mean batch_size"),
    ("batchsize", 3, "batchsize is no option: did you mean batch_size"),
    ("num_threads", 100_000, "num_threads=100000 is not valid: expected a whole number from 1 to 512"),
    ("seed", "abc", "seed=abc is not valid: expected a whole number from 0"),
    ("seed", 2**32, "seed=4294967296 is not valid: expected a whole number from 0 to 4,294,967,295"),
    ("checkpoint_seconds", "abc", "checkpoint_seconds=abc is not valid: expected a number from 0"),
    ("resume", "maybe", "resume=maybe is not valid: expected same or changed"),
    ("wandb.mode", "loud", "wandb.mode=loud is not valid: expected offline or online or disabled"),
    *(
        ("wandb.project", name, f"wandb.project={name} is not valid: expected a name without / ")
        for name in ("a/b", 5, "")
    ),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG)
def test_a_wrong_value_is_one_message_before_anything_starts(key, value, message):
    cfg = composed()
    OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    with pytest.raises(BnrnnError) as error:
        check_options(apply_trial(cfg))
    assert message in str(error.value)


@pytest.mark.parametrize("device", [None, 5, "cpu:abc", "cudaa"])
def test_a_device_that_torch_does_not_know_is_one_message(device):
    with pytest.raises(BnrnnError, match=f"device={device} is unknown: use auto, cpu or cuda"):
        choose_device(device)


@pytest.mark.parametrize("group", ["model", "data", "optim", "budget"])
def test_a_group_that_is_null_is_one_message(group):
    with pytest.raises(BnrnnError, match="model, data, optim, budget cannot be null or empty: use one of their files"):
        compose_config(f"{group}=null")


def test_a_number_of_epochs_that_has_no_effect_is_refused():
    cfg = composed("+budget.epochs=1", "budget.updates=5")
    with pytest.raises(BnrnnError, match=r"^budget\.epochs=1 has no effect, because budget\.updates is 5"):
        check_options(cfg, {"budget.epochs": "1"})
    check_options(cfg, {})  # a named budget replaces the epochs of a recipe


def test_noise_on_the_state_of_a_model_that_would_not_add_it_is_refused():
    for model, accepted in (("lstm", False), ("bn_lstm", True)):
        cfg = composed(f"model={model}", "data.state_noise=0.5")
        if accepted:
            check_options(cfg, {"data.state_noise": "0.5"})
        else:
            with pytest.raises(BnrnnError, match=r"data\.state_noise=0\.5 has no effect on this model"):
                check_options(cfg, {"data.state_noise": "0.5"})
        check_options(cfg)  # the noise that belongs to a dataset is no override


def test_an_option_of_another_file_of_its_group_is_named_with_these_files():
    assert options_with("optim.decay") == ["rmsprop"]
    assert "bn_lstm" in options_with("model.layer.gamma_init") and "lstm" not in options_with("model.layer.gamma_init")
    assert options_with("optim.leer") == options_with("budget.decay") == options_with("optim") == []
    message = r"the chosen optim has no such option; these have it: optim=rmsprop$"
    with pytest.raises(BnrnnError, match=message), naming_nearest_key():
        compose_config("optim=sgd", "optim.decay=0.5")


def test_a_value_for_a_group_of_options_is_answered_with_one_of_them():
    message = r"'wandb': it is a group of options; give one of them, such as wandb\.mode"
    with pytest.raises(BnrnnError, match=message), naming_nearest_key():
        compose_config("wandb={a:1}")


@pytest.mark.parametrize("group", ["model", "data", "optim", "budget"])
def test_a_dictionary_for_a_group_of_files_is_answered_with_one_of_them(group):
    message = (
        rf"'{group}': {group} is a group of files; choose one by its name, such as {group}=\w+, and change single "
    )
    with (
        pytest.raises(BnrnnError, match=f"{message}options, such as {group}\\.[a-z_.]+=\\.\\.\\.$"),
        naming_nearest_key(),
    ):
        compose_config(f"{group}={{a:1}}")


def test_the_largest_seed_is_another_than_every_smaller_one():
    """The generator of an epoch has the seed times 1,000,003, of which torch uses 32 bits: an odd factor keeps all."""
    check_options(composed(f"seed={2**32 - 1}"))
    assert len({seed * 1_000_003 % 2**32 for seed in (*range(1000), *range(2**32 - 1000, 2**32))}) == 2000
    orders = [torch.randperm(50, generator=torch.Generator().manual_seed(s * 1_000_003)) for s in (0, 1, 2**32 - 1)]
    assert not torch.equal(orders[0], orders[2]) and not torch.equal(orders[1], orders[2])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=1e308", "optim.lr=1e+308 is not valid: expected a number from -1e+38 to 1e+38"),
        ("+model.layer.gama_init=1", "BNLSTM has no option gama_init: did you mean model.layer.gamma_init?"),
        ("+optim.decayy=1", "optim cannot be built"),
        (
            "data=flickr8k",
            "this model reads sequences, and data=flickr8k has captions of images: use one of the models",
        ),
        ("model.layer.gamma_init=[1]", "model.layer.gamma_init=[1] is not valid: expected a number"),
        ("init@model.init=reader", "init@model.init=reader and reader_fair are for readers"),
    ],
)
def test_a_refused_configuration_leaves_nothing_on_the_disk(tmp_path, monkeypatch, override, message):
    monkeypatch.setattr(sys, "argv", ["bnrnn-train", override, "wandb.mode=disabled", f"out_dir={tmp_path}/out"])
    with pytest.raises(SystemExit) as ended:
        cli()
    assert message in str(ended.value)
    assert not (tmp_path / "out").exists()


def test_folders_that_are_not_empty_stay(tmp_path):
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "kept").touch()
    _leave_nothing(tmp_path / "a" / "b" / "c", tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


class Lines(Digits):
    """A data set of a newcomer, whose options have names that others use in another way."""

    def __init__(self, length: int | None = None, scale: str = "log", window: tuple[int, ...] = (), size: int = 0):
        super().__init__()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("length", None, ""),
        ("length", 5, ""),
        ("length", 1, "data.length=1 is not valid: expected a whole number from 2, or null"),
        ("scale", "log", ""),
        ("size", 2.5, "data.size=2.5 is not valid: expected a whole number"),
        ("scale", None, "data.scale=None is not valid: expected a text"),
        ("window", [1, 2], ""),
    ],
)
def test_the_signature_of_a_class_says_what_its_options_may_be(key, value, message):
    cfg = composed()
    cfg.data = {"_target_": f"{__name__}.Lines", key: value}
    if not message:
        check_options(cfg)
        return
    with pytest.raises(BnrnnError) as error:
        check_options(cfg)
    assert message in str(error.value)


def test_null_is_accepted_where_a_class_takes_it():
    check_options(composed("model.embedding_size=null", "model.init=null"))
