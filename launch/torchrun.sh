#!/usr/bin/env bash
# Runs a training script under torchrun on this machine, alone or as one of several; arguments go to torchrun:
#
#   launch/torchrun.sh examples/finetune_hf.py --packed
#   NNODES=2 HEAD_ADDR=10.0.0.1 launch/torchrun.sh -m cp_gdn.run train.py        the same line on both machines
#   DRY_RUN=1 launch/torchrun.sh train.py                                        only print what would be run
#
# What it reads (each from Kubeflow's PET_* where there is one):
#   NNODES           machines (1)
#   NPROC_PER_NODE   processes on each (its GPUs)
#   CP_SIZE          ranks that a sequence is split over (NPROC_PER_NODE: it stays inside a machine)
#   HEAD_ADDR        address of the first machine, needed with several; HEAD_PORT (29500)
#   NODE_RANK        which machine this is, from 0, the first one; without it they find an order by themselves
#   JOB_ID           the same on all machines of a job (cp_gdn)
#   PYTHON           the interpreter (python)
# Accelerate's own variables are set too, so that a script with an Accelerator needs no YAML; what is set already stays.
set -euo pipefail

fail() {
    printf 'torchrun.sh: %s\n' "$*" >&2
    exit 2
}

if (($# == 0)); then fail "no script given; usage: launch/torchrun.sh SCRIPT [ARGUMENT ..], or -m MODULE .."; fi

python=${PYTHON:-python}
nnodes=${NNODES:-${PET_NNODES:-1}}
nproc=${NPROC_PER_NODE:-${PET_NPROC_PER_NODE:-auto}}
head_addr=${HEAD_ADDR:-${PET_MASTER_ADDR:-}}
head_port=${HEAD_PORT:-${PET_MASTER_PORT:-29500}}
node_rank=${NODE_RANK:-${PET_NODE_RANK:-}}

if [[ ! $nproc =~ ^[0-9]+$ ]]; then
    nproc=$("$python" -c 'import torch; print(torch.cuda.device_count())')
fi
if ((nproc == 0)); then fail "torch sees no GPU here; set NPROC_PER_NODE"; fi
if [[ ! $nnodes =~ ^[0-9]+$ ]]; then fail "NNODES: got '$nnodes', expected a number of machines"; fi
cp=${CP_SIZE:-${PARALLELISM_CONFIG_CP_SIZE:-$nproc}}
world=$((nnodes * nproc))
if [[ ! $cp =~ ^[1-9][0-9]*$ ]] || ((world % cp)); then fail "CP_SIZE: got $cp, expected a divisor of $nnodes x $nproc = $world processes"; fi

# What became a flag must not reach torchrun a second time, with a default of its own for what is left out.
unset PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT
# NOTE: dp_shard is the slow axis of Accelerate's mesh and cp the fast one, so cp ranks are neighbours on a machine.
settings=(
    "ACCELERATE_MIXED_PRECISION=${ACCELERATE_MIXED_PRECISION:-bf16}"
    "ACCELERATE_USE_FSDP=${ACCELERATE_USE_FSDP:-true}"
    "FSDP_VERSION=${FSDP_VERSION:-2}"
    "FSDP_AUTO_WRAP_POLICY=${FSDP_AUTO_WRAP_POLICY:-TRANSFORMER_BASED_WRAP}"
    "FSDP_RESHARD_AFTER_FORWARD=${FSDP_RESHARD_AFTER_FORWARD:-true}"
    "FSDP_STATE_DICT_TYPE=${FSDP_STATE_DICT_TYPE:-SHARDED_STATE_DICT}"
    "FSDP_CPU_RAM_EFFICIENT_LOADING=${FSDP_CPU_RAM_EFFICIENT_LOADING:-false}"
    "FSDP_ACTIVATION_CHECKPOINTING=${FSDP_ACTIVATION_CHECKPOINTING:-true}"
    "ACCELERATE_USE_PARALLELISM_CONFIG=${ACCELERATE_USE_PARALLELISM_CONFIG:-true}"
    "PARALLELISM_CONFIG_DP_SHARD_SIZE=${PARALLELISM_CONFIG_DP_SHARD_SIZE:-$((world / cp))}"
    "PARALLELISM_CONFIG_CP_SIZE=$cp"
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY=${PARALLELISM_CONFIG_CP_COMM_STRATEGY:-allgather}"
    "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"
)

command=("$python" -m torch.distributed.run --nnodes "$nnodes" --nproc-per-node "$nproc" --max-restarts 0)
if ((nnodes == 1)); then
    command+=(--standalone)
elif [[ -z $head_addr ]]; then
    fail "HEAD_ADDR: $nnodes machines need the address of the first one"
elif [[ -n $node_rank ]]; then
    command+=(--node-rank "$node_rank" --master-addr "$head_addr" --master-port "$head_port")
else
    command+=(--rdzv-backend c10d --rdzv-endpoint "$head_addr:$head_port" --rdzv-id "${JOB_ID:-cp_gdn}")
fi
command+=("$@")

if [[ -n ${DRY_RUN:-} ]]; then
    printf '%s\n' "${settings[@]}"
    printf '%q ' "${command[@]}"
    printf '\n'
    exit 0
fi
exec env "${settings[@]}" "${command[@]}"
