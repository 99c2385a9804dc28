import re
import shutil

import pytest
import torch
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf

from bnrnn import config
from bnrnn.config import ROOT, compose_config, grid_of, label, sweep, targets, with_present_paths
from bnrnn.data.mnist import SequentialMNIST
from bnrnn.errors import BnrnnError
from bnrnn.layers.population import has_batch_norm
from bnrnn.report.claim_types import Analysis
from bnrnn.report.claims import entries, tables
from bnrnn.training.search import apply_trial

CONF = ROOT / "conf"


def options(group: str) -> list[str]:
    """The options of a config group."""
    return sorted(p.stem for p in (CONF / group).glob("*.yaml") if not p.stem.startswith("_"))


EXPERIMENTS = sorted(
    str(p.relative_to(CONF / "experiment").with_suffix("")) for p in (CONF / "experiment").rglob("*.yaml")
)
SMALL = (50, 50, 100)  # input, output, training steps of data that SIZES does not have
SIZES = {  # those that matter: as large as the papers' data, or with features of images
    "Digits": (1, 10, 64), "SequentialMNIST": (1, 10, 784),
    "PTBChar": (50, 50, 99), "Text8": (27, 27, 179), "PTBWord": (10_000, 10_000, 35),
    "CNNQA": (65_829, 65_829, 2000), "BAbI": (39, 39, 343), "IEERCloze": (5805, 5805, 210),
    "Flickr8k": (946, 946, 36, 1280), "CocoCaptions": (12_000, 12_000, 50, 2048),
    "KaldiFrames": (123, 3546, 1300), "TimitSample": (123, 183, 518),
}  # fmt: skip


def cells(key: str) -> list[list[str]]:
    """As few cells of an experiment's grid as have every option of each config group.

    Composing takes a good part of a second; of a key with numbers, the first is enough.
    """
    grid = {k: values[:1] if is_number(k) else values for k, values in sweep(key).items()}
    count = max(map(len, grid.values()), default=1)
    return [[f"{k}={values[n % len(values)]}" for k, values in grid.items()] for n in range(count)]


def is_number(key: str) -> bool:
    return key == "seed" or "." in key


def sizes_of(cfg) -> dict[str, int]:
    """The sizes of the data of a configuration, as its model is built with them."""
    names = ("input_size", "output_size", "t_max", "feature_size")
    return dict(zip(names, SIZES.get(cfg.data._target_.split(".")[-1], SMALL), strict=False))


def build(cfg):
    """The model and the optimizer of a configuration, without memory for their weights."""
    with torch.device("meta"):
        model = instantiate(cfg.model, **sizes_of(cfg))
        return model, instantiate(cfg.optim)(model.parameters())


def test_a_grid_is_read_as_hydra_reads_it():
    given = ["optim.lr=1e-2,1e-3", "search.trial=range(0,3)", "optim.lr=0.5", "hydra.mode=RUN"]
    assert grid_of(given) == {"optim.lr": ["0.5"], "search.trial": ["0", "1", "2"]}
    assert grid_of(["optim.lr=1e-2,8e-5"]) == {"optim.lr": ["0.01", "8e-05"]}


@pytest.mark.parametrize("key", EXPERIMENTS)
def test_an_experiment_is_called_by_its_path_and_names_its_own_grid_and_length(key):
    text = (CONF / "experiment" / f"{key}.yaml").read_text()
    assert text.startswith("# @package _global_\n"), "hydra reads it only in the first line"
    cfg = compose_config(f"experiment={key}", hydra=True)
    assert cfg.name == key
    composed = grid_of(f"{k}={values}" for k, values in (cfg.hydra.sweeper.params or {}).items())
    assert sweep(key) == composed, "the grid is read from this file alone"
    numbers = [value for k, values in composed.items() if is_number(k) for value in values]
    assert not any(isinstance(OmegaConf.create(f"x: {value}").x, str) for value in numbers), numbers
    chosen = yaml.safe_load(text).get("defaults", [])  # with hydra.mode=RUN these are those of the single run
    named = {
        k.removeprefix("override /"): option
        for given in chosen
        if isinstance(given, dict)
        for k, option in given.items()
    }
    assert all(option in composed[group] for group, option in named.items() if group in composed), "no cell of the grid"
    assert has_a_length(cfg.budget) and cfg.budget.name == "paper"


@pytest.mark.parametrize(
    "content",
    [
        "[1, 2]",
        "hydra:\n",
        "defaults:\n",
        "defaults: [null]\n",
        "defaults: [_self_]\nlr: ${\n",
        "a: [",
        "\xff",
        "",
        "a text",
    ],
)
def test_a_damaged_file_of_a_recipe_is_named(tmp_path, monkeypatch, content):
    shutil.copytree(CONF, tmp_path / "conf")
    monkeypatch.setattr(config, "CONF", tmp_path / "conf")
    config.check_files()
    (tmp_path / "conf/experiment/quickstart.yaml").write_bytes(f"# @package _global_\n{content}".encode("latin1"))
    message = r"experiment/quickstart.yaml is not a configuration file \(.*restore it with git"
    with pytest.raises(BnrnnError, match=message):
        config.check_files()
    if "{" in content or "hydra" in content or "defaults" in content:  # these give hydra errors that name no file
        with pytest.raises(BnrnnError, match=message):
            compose_config("experiment=quickstart")


def has_a_length(budget) -> bool:
    return (budget.updates or budget.epochs * 300) >= (budget.eval_every or 300) > 0


@pytest.mark.parametrize("key", EXPERIMENTS)
def test_every_value_of_a_grid_composes_with_another_budget_and_builds_its_model(key):
    for overrides in cells(key):
        cfg = apply_trial(compose_config(f"experiment={key}", "budget=smoke", *overrides))
        assert (cfg.budget.updates, cfg.budget.name) == (4, "smoke") and has_a_length(cfg.budget)
        model, optimizer = build(cfg)
        sizes = [size for parameter in model.parameters() for size in parameter.shape]
        assert sizes_of(cfg)["output_size"] in sizes, "the model must score every class of the data"
        assert optimizer.param_groups[0]["lr"] == cfg.optim.lr


@pytest.mark.parametrize("model", options("model"))
def test_every_model_runs_on_the_default_data(model):
    cfg = compose_config(f"model={model}")
    data = instantiate(cfg.data)
    built = instantiate(cfg.model, input_size=1, output_size=10, t_max=data.t_max)
    logits, _ = built(next(data.batches("train", 4)).inputs)
    assert logits.shape == (64, 4, 10)
    assert has_batch_norm(built) == ("bn" in model), "a name has bn exactly if the model has batch normalization"


@pytest.mark.parametrize("budget", options("budget"))
def test_a_budget_changes_lengths_only(budget):
    paper = compose_config("experiment=cooijmans2016/table1")
    assert paper.budget.updates == 100_000
    cfg = compose_config("experiment=cooijmans2016/table1", f"budget={budget}")
    assert cfg.budget.name == budget
    del paper.budget, cfg.budget
    assert paper == cfg


def test_table_1_is_the_papers_recipe():
    cfg = compose_config("experiment=cooijmans2016/table1", "model=bn_lstm", "data=smnist")
    assert cfg.budget.updates == 100_000 and cfg.batch_size == 100 and cfg.grad_clip == 1.0
    assert cfg.model.hidden_size == 100 and cfg.model.layer.gamma_init == 0.1 and cfg.model.layer.eps == 1e-5
    assert cfg.optim.lr == 1e-3 and cfg.optim.decay == 0.9 and cfg.optim.momentum == 0
    assert cfg.population_batch_size == 5000


@pytest.mark.parametrize(
    ("model", "data", "noise"),
    [("bn_lstm", "smnist", 0.1), ("bn_lstm", "pmnist", 0.0), ("lstm", "smnist", 0.0), ("lstm", "pmnist", 0.0)],
)
def test_only_the_bn_lstm_on_in_order_pixels_gets_state_noise(model, data, noise):
    assert compose_config(f"model={model}", f"data={data}").model.state_noise == noise


def test_the_data_configs_name_the_pixel_orders():
    orders = {
        name: compose_config(f"data={name}").data.pixel_order for name in ("smnist", "pmnist", "pmnist_permutation")
    }
    assert orders == {"smnist": "scanline", "pmnist": "authors", "pmnist_permutation": "permutation"}
    assert compose_config("data=pmnist").data._target_.endswith(SequentialMNIST.__name__)


def test_every_claim_has_a_recipe_or_an_analysis_and_every_recipe_a_claim():
    assert {table.key for table in tables()} == {key for key in EXPERIMENTS if "/" in key}
    assert all((ROOT / entry.program).exists() for entry in entries() if isinstance(entry, Analysis))


def test_hydras_own_slurm_launcher_is_ready():
    cfg = compose_config("experiment=cooijmans2016/table1", "hydra/launcher=submitit_slurm", hydra=True).hydra.launcher
    assert cfg._target_.endswith("SlurmLauncher")


@pytest.mark.parametrize("group", ["model", "data", "setting"])
def test_every_option_has_a_label_which_is_no_part_of_the_configuration(group):
    paths = [path for path in (CONF / group).rglob("*.yaml") if not path.stem.startswith("_")]
    names = [str(path.relative_to(CONF / group).with_suffix("")) for path in paths]
    assert not [name for name in names if label(group, name) == name and name != "text8"]
    assert label(group, "unheard_of") == "unheard_of"
    overrides = {"setting": ["experiment=laurent2015/table2", "setting=large"]}.get(group, ["model=bn_lstm"])
    assert "label" not in str(compose_config(*overrides))


def test_a_name_in_the_configurations_stands_for_one_class_alone():
    texts = [path.read_text() for path in CONF.rglob("*.yaml")]
    paths = {path for text in texts for path in re.findall(r"_target_: *(bnrnn\.[\w.]+)", text)}
    assert len(targets()) == len(paths) > 20
    stored = {"_target_": "bnrnn.old.place.BNLSTM", "layers": [{"_target_": "bnrnn.gone.Gone", "size": 3}]}
    assert with_present_paths(stored) == {
        "_target_": "bnrnn.layers.bn_lstm.BNLSTM", "layers": [{"_target_": "bnrnn.gone.Gone", "size": 3}],
    }  # fmt: skip
