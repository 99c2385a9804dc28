"""A sweep with submitit's real Slurm launcher; small programs replace the commands of Slurm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bnrnn.config import ROOT
from bnrnn.training.results import Result

SBATCH = r"""#!/usr/bin/env bash
# Starts every task of a job array at once, as a cluster with room would.
cp "${@: -1}" "$STUB/submitted.sh"
range=$(sed -n 's/^#SBATCH --array=\([0-9-]*\).*/\1/p' "$STUB/submitted.sh")
for task in $(seq "${range%-*}" "${range#*-}"); do
  env SLURM_JOB_ID=$((100 + task)) SLURM_ARRAY_JOB_ID=77 SLURM_ARRAY_TASK_ID=$task SLURM_JOB_NODELIST=localhost \
    SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 \
    bash "$STUB/submitted.sh" >"$STUB/$task.log" 2>&1 </dev/null &
done
echo "Submitted batch job 77"
"""
SRUN = """#!/usr/bin/env bash
while [[ "$1" == -* ]]; do case "$1" in --output|--error) shift 2;; *) shift;; esac; done
exec "$@"
"""
SACCT = """#!/usr/bin/env bash
echo "JobID|State|NodeList"
for task in 0 1; do echo "77_$task|RUNNING|localhost"; done
"""
SCONTROL = """#!/usr/bin/env bash
echo localhost
"""


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """An environment in which Slurm's commands exist."""
    stub = tmp_path / "stub"
    stub.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT, "scontrol": SCONTROL}.items():
        (stub / name).write_text(text)
        (stub / name).chmod(0o755)
    return {**os.environ, "PATH": f"{stub}:{os.environ['PATH']}", "STUB": str(stub), "WANDB_MODE": "disabled"}


@pytest.mark.slow
def test_every_cell_becomes_a_slurm_task_with_the_configured_resources(tmp_path: Path, cluster):
    command = [sys.executable, "-m", "bnrnn.train", "experiment=quickstart", "seed=0", "budget=smoke",
               "model.hidden_size=16", f"out_dir={tmp_path}", "hydra/launcher=slurm",
               "hydra.launcher.partition=gpu"]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, env=cluster, capture_output=True, text=True, timeout=120)
    logs = "\n".join(path.read_text() for path in (tmp_path / "stub").glob("*.log"))
    assert run.returncode == 0, run.stdout + run.stderr + logs
    results = [Result.read(p) for p in tmp_path.glob("quickstart/smoke/*/result.json")]
    assert {r.overrides["model"] for r in results} == {"lstm", "bn_lstm"}
    script = (tmp_path / "stub" / "submitted.sh").read_text()
    for line in ("--partition=gpu", "--gpus-per-node=1", "--time=720", "--array=0-1%2"):
        assert f"#SBATCH {line}\n" in script
    assert "[cell 2 of 2]" in logs
