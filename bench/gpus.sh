# For two_gpus.sh, four_gpus.sh and eight_gpus.sh, which source it: limits, a smoke test, the tests over NCCL.
# Reads OUT (folder of everything), COMMIT (hash), LIMIT (seconds of all steps; the script's own by default).
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH=. NCCL_DEBUG=WARN OMP_NUM_THREADS=1
T0=$SECONDS; C=${COMMIT:-$(git rev-parse --short HEAD)}; P="python3 -m pytest -q -p no:cacheprovider"
say() { echo "[$((SECONDS - T0)) s] $*"; }
left() { echo $(( LIMIT - (SECONDS - T0) )); }
# lim SECONDS [KEEP]: so many, or what is left but for KEEP, and at least 5
lim() { local l=$(( $(left) - ${2:-0} )); ((l < $1)) || l=$1; echo $((l > 5 ? l : 5)); }
fails() { grep -E "^E  |passed|failed|no tests|^FAILED|^ERROR" "$1" | cut -c1-200 | tail -${2:-8}; }
# table FILE START: from the line with START on; of a run that was cut short its rows and what went wrong
table() { grep -qF "$2" "$1" && sed -n "/$2/,\$p" "$1" | grep -v "^W[0-9]" | cut -c1-180 | head -50 || grep -E "Error|cp_gdn:|^[^ ].* (model|slow) [0-9]" "$1" | cut -c1-200 | head -30; }

# begin GPUS LIMIT: the devices are there, the kernels load, ranks of NCCL exchange messages
begin() {
    WORLD=$1; R="python3 -m torch.distributed.run --standalone --nproc-per-node $1"; LIMIT=${LIMIT:-$2}; export OUT=${OUT:-gpus-$1}; mkdir -p "$OUT"
    python3 -c "import torch; print(torch.__version__, torch.cuda.nccl.version(), [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]); assert torch.cuda.device_count() >= $WORLD" || exit 1
    nvidia-smi topo -m > "$OUT/topo.txt" 2>&1
    timeout 60 python3 -m cp_gdn build > "$OUT/build.txt" 2>&1; say "build $?: $(tail -1 "$OUT/build.txt" | cut -c1-150)"
    timeout 60 $P -x tests/gpu/test_comm_nccl.py -k "bits_and_the_messages and nccl and ${WORLD}gpus" > "$OUT/smoke.txt" 2>&1; say "smoke $(tail -1 "$OUT/smoke.txt")"
    grep -q passed "$OUT/smoke.txt" || { fails "$OUT/smoke.txt" 20; tail -30 "$OUT/smoke.txt" | cut -c1-200; exit 1; }
}

# tests SECONDS COMMAND: three pytest processes at a time, each with ranks of its own, and the command meanwhile
tests() {
    local f limit; limit=$(lim "$1"); shift
    for f in nccl nccl_faults comm_nccl; do
        timeout "$limit" $P "tests/gpu/test_$f.py" -k "${WORLD}gpus" --durations=8 > "$OUT/$f.txt" 2>&1 &
        eval "${f}_pid=$!"
    done
    "$@"
    wait "$nccl_pid"; say "nccl $?"; wait "$nccl_faults_pid"; say "faults $?"; wait "$comm_nccl_pid"; say "comm $?"
    for f in nccl nccl_faults comm_nccl; do echo "-- $f"; fails "$OUT/$f.txt" 8; done
}
