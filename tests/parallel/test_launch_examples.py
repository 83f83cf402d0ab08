"""The examples of launchers start ranks, as far as a machine without those launchers can tell.

SLURM's srun and Ray are stand-ins here, which start tasks and actors on this machine; of GKE there is what it
tells its pods.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.backend.distributed.ranks import free_port
from tputrain.parallel.cluster import first_node

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "launch"
RECIPE = """
model:
  {name: llama-5m, vocab_size: 300, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
   num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}
data: {files: text.txt, vocab_size: 280, sequence_length: 16, cache_dir: cache}
batch: {tokens: 64, sequences: 4}
trainer: {steps: 2, evaluate_every: null, evaluate_batches: 1}
log: {progress: plain}
sample: {max_new_tokens: 0}
parallel: {shard: -1}
"""
SRUN = """#!/bin/bash
# Two tasks on this machine, as srun starts them.
shift  # --output
export SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
code=0
for task in 0 1; do
  wait -n
  ended=$?
  [ "$ended" -gt "$code" ] && code=$ended
done
exit "$code"
"""
RAY = """
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

pool = ThreadPoolExecutor(8)
util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

class Remote:
    def __init__(self, call):
        self.remote = lambda *arguments: pool.submit(call, *arguments)

class Actor:
    def __init__(self, wrapped):
        self.wrapped = wrapped

    def __getattr__(self, name):
        return Remote(getattr(self.wrapped, name))

def remote(**needs):
    return lambda kind: SimpleNamespace(remote=lambda: Actor(kind()))

def get(futures):
    return [each.result() for each in futures]

def init():
    pass

def kill(actor):
    pass
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("launchers")
    (directory / "small.yaml").write_text(RECIPE)
    (directory / "text.txt").write_text("def add(first, second):\n    return first + second\n" * 100)
    commands = {
        "tputrain": f'#!/bin/sh\nexec {sys.executable} -m tputrain "$@"\n',
        "torchrun": f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n',
        "srun": SRUN,
        "scontrol": '#!/bin/sh\necho "scontrol $*"\n',
    }
    (directory / "bin").mkdir()
    for name, text in commands.items():
        (directory / "bin" / name).write_text(text)
        (directory / "bin" / name).chmod(0o755)
    (directory / "ray.py").write_text(RAY)
    return directory


def environment(directory: Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TPU_", "SLURM_"))}
    return kept | {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'backend'}:{ROOT}:{directory}",
        "TPU_CACHE_DIR": str(directory / "programs"),
        **more,
    }


def begin(directory: Path, command: list[str], **more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        cwd=directory,
        env=environment(directory, **more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(directory: Path, *command: str, **more: str) -> tuple[int, str]:
    process = begin(directory, [*command], **more)
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def assert_trained(directory: Path, name: str, said: str) -> None:
    """Two ranks have: the speed is said for one chip of several, by one rank."""
    assert (directory / "runs" / name / "checkpoints" / "step-2").is_dir(), said
    assert said.count("step 2/2") == 1, said
    assert " a chip)" in said
    assert "[Gloo]" not in said


def test_slurm_s_tasks_are_ranks_that_are_queued_again_after_a_stop(directory: Path):
    script = str(EXAMPLES / "slurm.sbatch")
    said_by_slurm = {"SLURM_JOB_ID": str(free_port())}
    code, said = run(directory, "bash", script, "small.yaml", "run_dir=runs/slurm", **said_by_slurm)
    assert code == 0, said
    assert_trained(directory, "slurm", said)
    assert "scontrol" not in said


@pytest.mark.parametrize(
    ("code", "restarts", "again"), [(143, 9, 1), (1, 0, 1), (1, 3, 0), (2, 0, 0), (0, 0, 0)]
)
def test_slurm_s_job_is_queued_again_where_that_helps(tmp_path: Path, code: int, restarts: int, again: int):
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": f"exit {code}", "scontrol": 'echo "scontrol $*"'}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    told = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    ended, said = run(tmp_path, "bash", str(EXAMPLES / "slurm.sbatch"), "small.yaml", **told)
    assert ended == code
    assert said.count("scontrol requeue 7") == again


def test_the_pods_of_a_jobset_are_the_hosts_of_one_run(directory: Path):
    (jobs,) = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    pod = jobs["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert jobs["template"]["spec"]["parallelism"] == jobs["template"]["spec"]["completions"] == 2
    assert container["command"][:3] == ["tputrain", "run", "llama"]
    assert f"parallel.processes={container['resources']['limits']['google.com/tpu']}" in container["command"]
    command = ["tputrain", "run", "small.yaml", "parallel.shard=2", "run_dir=runs/jobset"]
    told = {"TPU_WORKER_HOSTNAMES": "localhost,localhost", "MASTER_PORT": str(free_port())}
    pods = [begin(directory, command, TPU_WORKER_ID=str(index), **told) for index in (0, 1)]
    said = [each.communicate(timeout=300)[0] for each in pods]
    assert [each.returncode for each in pods] == [0, 0], said
    assert_trained(directory, "jobset", said[0])
    assert "starting 1 rank on host 1 of 2" in said[1]
    assert (directory / "runs" / "jobset" / "ranks" / "rank-1.out").exists()


def test_ray_s_actors_are_ranks(directory: Path):
    command = (sys.executable, str(EXAMPLES / "ray_ranks.py"), "2", "small.yaml", "run_dir=runs/ray")
    code, said = run(directory, *command)
    assert code == 0, said
    assert_trained(directory, "ray", said)


def test_what_ranks_of_torchrun_refuse_is_said_once_and_is_no_traceback(directory: Path):
    command = shlex.join([str(EXAMPLES / "torchrun.sh"), "small.yaml", "run_dir=runs/refused", "device=cpu"])
    told = {"DEVICES": "2", "RESTARTS": "0", "MASTER_PORT": str(free_port())}
    code, said = run(directory, "bash", "-c", command, **told)
    assert code == 1  # torchrun's own
    assert said.count("tputrain: device=cpu: expected tpu with 2 processes") == 1, said
    assert "world.py" not in said  # torchrun's report has no traceback of ours, either


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("a[07-09,12],b", "a07"), ("rack1-[3,5]", "rack1-3"), ("n[1-2].x", "n1.x")],
)
def test_the_first_node_of_slurm_s_list(nodes: str, first: str):
    assert first_node(nodes) == first
