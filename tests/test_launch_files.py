"""The files of launch/: what each makes a launcher run, without running it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
YAMLS = {"two_gpus": (1, 2, 2), "eight_gpus": (1, 8, 4), "two_nodes": (2, 16, 8)}
"""File -> machines, processes of all of them, ranks of a sequence."""

yaml = pytest.importorskip("yaml")


# ---- accelerate ------------------------------------------------------------------------------------------------------


def launch_environment(name: str, *flags: str) -> dict[str, str]:
    """What `accelerate launch` puts into the environment of its workers for a YAML and flags."""
    launch = pytest.importorskip("accelerate.commands.launch")
    path = LAUNCH / "accelerate" / f"{name}.yaml"
    # Only machine 0 looks for a free port.
    call = ["--config_file", str(path), "--machine_rank", "1", "--main_process_ip", "localhost", *flags, "train.py"]
    args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(call))
    args.num_machines = max(args.num_machines, 2)
    environment: dict[str, str] = launch.prepare_multi_gpu_env(args)
    return environment


@pytest.mark.parametrize("name", YAMLS)
def test_every_key_of_a_yaml_is_one_that_accelerate_reads(name: str) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    config = launch.load_config_from_file(str(LAUNCH / "accelerate" / f"{name}.yaml"))  # refuses unknown outer keys
    flags = {action.dest for action in launch.launch_command_parser()._actions}
    inner = {**config.fsdp_config, **config.parallelism_config}
    assert len(inner) == 9
    assert set(inner) <= flags  # unknown inner keys would be dropped without a word


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_splits_each_sequence_inside_a_machine_and_uses_every_process(name: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    machines, processes, cp = YAMLS[name]
    environment = launch_environment(name)
    config = yaml.safe_load((LAUNCH / "accelerate" / f"{name}.yaml").read_text())
    assert (config["num_machines"], config["num_processes"]) == (machines, processes)
    with mock.patch.dict(os.environ, environment, clear=True):
        sizes = accelerate.ParallelismConfig()
    assert (sizes.total_size, sizes.cp_size) == (processes, cp)
    assert (processes // machines) % cp == 0
    # The slow axis first: ranks of one sequence are neighbours.
    assert sizes._get_mesh()[0][-1] == "cp"
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["FSDP_VERSION"] == "2"


# ---- torchrun.sh -----------------------------------------------------------------------------------------------------

SCRIPT = [str(LAUNCH / "torchrun.sh"), "train.py", "--name", "two words"]
EIGHT = {"NPROC_PER_NODE": "8"}
PODS = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
NUMBERED = {"nnodes": "2", "nproc_per_node": "8", "node_rank": 1, "rdzv_backend": "static", "rdzv_endpoint": ""}
COMMANDS: dict[str, tuple[dict[str, str], dict[str, Any], tuple[str, str]]] = {
    "one machine": (EIGHT, {"nnodes": "1", "nproc_per_node": "8", "standalone": True}, ("1", "8")),
    "one machine, halves": ({**EIGHT, "CP_SIZE": "4"}, {"nnodes": "1", "nproc_per_node": "8"}, ("2", "4")),
    "several machines without a number": (
        {**EIGHT, "NNODES": "2", "HEAD_ADDR": "10.0.0.1", "JOB_ID": "7"},
        {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "10.0.0.1:29500", "rdzv_id": "7"},
        ("2", "8"),
    ),
    "several machines with a number": (
        {**EIGHT, "NNODES": "2", "HEAD_ADDR": "10.0.0.1", "HEAD_PORT": "1234", "NODE_RANK": "1"},
        {**NUMBERED, "master_addr": "10.0.0.1", "master_port": 1234},
        ("2", "8"),
    ),
    "pods of Kubeflow": (PODS, {**NUMBERED, "master_addr": "job-node-0-0.job", "master_port": 29500}, ("2", "8")),
    "a sequence over machines": ({**PODS, "CP_SIZE": "16"}, NUMBERED, ("1", "16")),
}
REFUSED = {
    "no script": ({}, [SCRIPT[0]], "no script given"),
    "no head": ({**EIGHT, "NNODES": "2"}, SCRIPT, "HEAD_ADDR: 2 machines need"),
    "a size that does not divide": ({**EIGHT, "CP_SIZE": "3"}, SCRIPT, "CP_SIZE: got 3, expected a divisor of 1 x 8"),
    "no size": ({**EIGHT, "CP_SIZE": "0"}, SCRIPT, "CP_SIZE: got 0"),
    "machines that are no number": ({**EIGHT, "NNODES": "1:2"}, SCRIPT, "NNODES: got '1:2'"),
    "no GPU": ({"PYTHON": "true", "NPROC_PER_NODE": "0"}, SCRIPT, "set NPROC_PER_NODE"),
}


def shell(call: list[str], variables: dict[str, str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script in an environment of its own, programs in ``folder`` before all others."""
    path = f"{folder}:{os.environ['PATH']}" if folder else os.environ["PATH"]
    environment = {"PATH": path, "DRY_RUN": "1", **variables}
    return subprocess.run(["bash", *call], env=environment, capture_output=True, text=True, check=False)


def parsed(printed: str) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """What torchrun.sh printed: variables, torchrun's own reading of the flags, and the script with its arguments."""
    from torch.distributed.run import get_args_parser

    *settings, line = printed.splitlines()
    command = shlex.split(line)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    args = vars(get_args_parser().parse_args(command[3:]))
    return dict(pair.split("=", 1) for pair in settings), args, [args["training_script"], *args["training_script_args"]]


@pytest.mark.parametrize(("variables", "flags", "sizes"), COMMANDS.values(), ids=COMMANDS)
def test_torchrun_sh_builds_the_command_of_its_variables(
    variables: dict[str, str], flags: dict[str, Any], sizes: tuple[str, str]
) -> None:
    done = shell(SCRIPT, variables)
    assert done.returncode == 0, done.stderr
    settings, args, script = parsed(done.stdout)
    assert {name: args[name] for name in flags} == flags
    assert (settings["PARALLELISM_CONFIG_DP_SHARD_SIZE"], settings["PARALLELISM_CONFIG_CP_SIZE"]) == sizes
    assert script == SCRIPT[1:]


def test_torchrun_sh_sets_what_accelerate_launch_sets() -> None:
    settings, _, _ = parsed(shell(SCRIPT, {**EIGHT, "CP_SIZE": "4"}).stdout)
    wanted = launch_environment("eight_gpus")
    assert {name: wanted.get(name) for name in settings} == settings


@pytest.mark.parametrize(("variables", "call", "text"), REFUSED.values(), ids=REFUSED)
def test_torchrun_sh_refuses_with_status_2_and_says_what_to_change(
    variables: dict[str, str], call: list[str], text: str
) -> None:
    done = shell(call, variables)
    assert done.returncode == 2
    assert text in done.stderr


# ---- SLURM and Kubernetes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_shell_scripts_have_no_fault_that_bash_or_shellcheck_sees(name: str) -> None:
    checkers = [["bash", "-n"], *([["shellcheck"]] if shutil.which("shellcheck") else [])]
    for checker in checkers:
        done = subprocess.run([*checker, str(LAUNCH / name)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


FAKES = {
    "scontrol": '[[ $* == "show hostnames node[3-4]" ]] && printf "node3\\nnode4\\n"',
    # As srun: its own flags, then one task per machine, here the second one.
    "srun": 'echo "srun:" "$1" "$2" >&2; [[ $2 == --ntasks-per-node=1 ]] || exit 9; shift 2; SLURM_NODEID=1 exec "$@"',
}


def test_the_slurm_job_runs_torchrun_sh_once_per_machine_with_the_first_one_as_head(tmp_path: Path) -> None:
    for name, body in FAKES.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    spooled = tmp_path / "slurm_script"  # SLURM runs a copy
    shutil.copy(LAUNCH / "slurm.sbatch", spooled)
    job = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[3-4]"}
    variables = {**job, "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_GPUS_ON_NODE": "4"}
    done = shell([str(spooled), "train.py", "two words"], variables, tmp_path)
    assert done.returncode == 0, done.stderr
    settings, args, script = parsed(done.stdout)
    assert (args["nnodes"], args["nproc_per_node"], args["node_rank"]) == ("2", "4", 1)
    assert (args["master_addr"], args["master_port"]) == ("node3", 29500 + 711)
    assert settings["PARALLELISM_CONFIG_CP_SIZE"] == "4"
    assert script == ["train.py", "two words"]
    assert "srun: --kill-on-bad-exit=1" in done.stderr


def test_the_slurm_job_asks_for_one_task_per_machine() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert options.keys() == {
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "exclusive", "time", "output",
    }  # fmt: skip
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "8")
    # sbatch stops reading at the first command.
    assert text.rindex("#SBATCH") < text.index("set -euo")


TRAIN_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"generateName": str},
    "spec": {
        "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
        "trainer": {
            "image": str,
            "numNodes": int,
            "numProcPerNode": int,
            "command": [str],
            "args": [str],
            "env": [{"name": str, "value": str}],
            "resourcesPerNode": {"limits": {"nvidia.com/gpu": str}},
        },
        "runtimePatches": [
            {"manager": str, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [
                {"name": str, "template": {"spec": {"template": {"spec": {
                    "volumes": [{"name": str, "emptyDir": {"medium": str}}],
                    "containers": [{"name": str, "volumeMounts": [{"name": str, "mountPath": str}]}],
                }}}}}
            ]}}}}
        ],
    },
}  # fmt: skip
"""The fields of a TrainJob of trainer.kubeflow.org/v1alpha1 (Trainer 2.3) that the file uses, and their types."""


def misfits(value: Any, schema: Any, path: str = "") -> list[str]:
    """Paths of what is not as the schema says, too much or missing."""
    if isinstance(schema, dict):
        keys = value.keys() | schema.keys() if isinstance(value, dict) else set()
        odd = [f"{path}.{key}" for key in keys if key not in schema or key not in value]
        return (
            odd
            or [bad for key in keys for bad in misfits(value[key], schema[key], f"{path}.{key}")]
            or ([] if isinstance(value, dict) else [path])
        )
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [path]
        return [bad for i, entry in enumerate(value) for bad in misfits(entry, schema[0], f"{path}[{i}]")]
    return [] if type(value) is schema else [path]


def test_the_train_job_has_the_fields_of_v1alpha1_and_its_pods_run_torchrun_sh() -> None:
    job = yaml.safe_load((LAUNCH / "k8s-trainjob.yaml").read_text())
    assert misfits(job, TRAIN_JOB) == []
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == str(trainer["numProcPerNode"])
    command, *rest = trainer["command"]
    call = [part.replace("/workspace/cp_gdn", str(ROOT)) for part in (*rest, *trainer["args"])]
    assert command == "bash"
    assert all(Path(part).is_file() for part in call if part.startswith("/"))
    sizes = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    _, args, script = parsed(shell(call, {**PODS, **sizes}).stdout)
    assert (args["nnodes"], args["nproc_per_node"], args["node_rank"]) == ("2", "8", 1)
    assert script == [str(ROOT / "examples" / "finetune_hf.py"), "--packed"]
