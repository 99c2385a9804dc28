"""The training command: its overrides, and errors that end it with one message."""

import subprocess
import sys

import pytest

from bnrnn.config import ROOT
from bnrnn.train import cli, named_overrides


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.layer.gama_init=1", "gama_init': did you mean model.layer.gamma_init?"),
        ("modle=lstm", "Could not override 'modle': did you mean model?"),
        ("model=bn_lstn", "bn_lstm"),
        ("hydra/launcher=slurm", "hydra/launcher=slurm submits workers, not single runs: use `bnrnn-cluster submit"),
        ("device=tpu", "device=tpu is unknown: use auto, cpu or cuda"),
        ("precision=float8", "precision=float8 is unknown: use float32, tf32 or bfloat16"),
        ("device=cpu precision=tf32", "precision=tf32 needs a GPU, but the device is cpu"),
        ("batch_size=1", "batch_size=1: one sequence has no batch statistics"),
        ("population_batch_size=1", "population_batch_size=1: one sequence has no batch statistics"),
        ("data=smnist", "train-images-idx3-ubyte.gz is missing: run `make data`"),
        ("optim.decay=2.0", "optim.decay=2.0 is not valid: expected a number from 0, below 1"),
        ("budget.updates=0", "budget.updates=0 is not valid: expected a whole number from 1, or null"),
        ("hydra.run.dir=/proc/x", "/proc/x cannot be used (No such file or directory): choose another path"),
        (f"hydra.run.dir={'n' * 300}", f"{'n' * 300} cannot be used (File name too long): use shorter names"),
    ],
)
def test_an_error_of_the_user_is_one_message(tmp_path, monkeypatch, override, message):
    given = [f"hydra.run.dir={tmp_path}/run", *override.split(), f"data_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["bnrnn-train", *given])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit) as ended:
        cli()
    assert str(ended.value.code).startswith("error: ") and message in str(ended.value.code)
    assert "Error in call" not in str(ended.value.code)  # the words of hydra


def test_a_process_ends_with_the_message_and_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "bnrnn.train", f"hydra.run.dir={tmp_path}/run", "device=tpu"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate()
    assert process.returncode == 1 and output.endswith("\nerror: device=tpu is unknown: use auto, cpu or cuda\n")
    assert "Traceback" not in output


def test_all_failed_runs_of_a_sweep_are_named(tmp_path, monkeypatch, capsys):
    chosen = ["--multirun", "data=smnist,ptb_char", f"out_dir={tmp_path}", f"data_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["bnrnn-train", *chosen, "wandb.mode=disabled"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit):
        cli()
    output = capsys.readouterr().out
    assert (
        "failed: " in output and "train-images-idx3-ubyte.gz is missing" in output and "ptb" in output.split("idx3")[1]
    )


@pytest.mark.parametrize("multirun", ["--multirun", "hydra.mode=MULTIRUN", "experiment=quickstart"])
def test_a_sweep_over_an_option_that_names_no_folder_is_refused(tmp_path, monkeypatch, multirun):
    chosen = [multirun, "precision=float32,bfloat16", f"out_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["bnrnn-train", *chosen])
    with pytest.raises(SystemExit, match="several values, but the folders of runs are not named by precision"):
        cli()
    assert list(tmp_path.iterdir()) == []


def test_overrides_are_named_by_their_keys_also_those_that_delete():
    given = ["seed=1", "~optim.momentum", "+model.name=a=b"]
    assert named_overrides(given) == [("model.name", "a=b"), ("seed", "1"), ("~optim.momentum", "")]
