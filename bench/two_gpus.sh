#!/usr/bin/env bash
# Everything that needs two GPUs, one after the other: tests over NCCL, verify and demo, the example of the plugin, bench/cp.py.
# OUT=folder COMMIT=hash bash bench/two_gpus.sh; about 330 s on two H200s; every step has a limit, all of them LIMIT seconds (400).
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH=. NCCL_DEBUG=WARN OMP_NUM_THREADS=1
export OUT=${OUT:-two_gpus}; mkdir -p "$OUT"; C=${COMMIT:-$(git rev-parse --short HEAD)}; T0=$SECONDS; P="python3 -m pytest -q -p no:cacheprovider"
say() { echo "[$((SECONDS - T0)) s] $*"; }
left() { echo $(( ${LIMIT:-400} - (SECONDS - T0) )); }
lim() { local l; l=$(left); if ((l < $1)); then echo $((l > 5 ? l : 5)); else echo $1; fi; }
fails() { grep -E "^E  |passed|failed|no tests|^FAILED|^ERROR" $1 | cut -c1-200 | tail -${2:-8}; }

# 1. smoke: two devices, NCCL, the kernels load
python3 -c "import torch; print(torch.__version__, torch.cuda.nccl.version(), [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]); assert torch.cuda.device_count() >= 2" || exit 1
nvidia-smi topo -m > $OUT/topo.txt 2>&1
timeout 60 python3 -m cp_gdn build > $OUT/build.txt 2>&1; say "build $?: $(tail -1 $OUT/build.txt | cut -c1-150)"
timeout 60 $P -x tests/gpu/test_comm_nccl.py -k "bits_and_the_messages and nccl" > $OUT/smoke.txt 2>&1; say "smoke $(tail -1 $OUT/smoke.txt)"
grep -q passed $OUT/smoke.txt || { fails $OUT/smoke.txt 20; tail -30 $OUT/smoke.txt | cut -c1-200; exit 1; }

# 2. tests, three pytest processes at a time (each its own pair of ranks)
timeout $(lim 130) $P tests/gpu/test_nccl.py --durations=12 > $OUT/nccl.txt 2>&1 & A=$!
timeout $(lim 110) $P tests/gpu/test_nccl_faults.py --durations=4 > $OUT/faults.txt 2>&1 & B=$!
timeout $(lim 130) $P tests/gpu/test_comm_nccl.py --durations=4 > $OUT/comm.txt 2>&1 & D=$!
# verify and the demo meanwhile: their times are not measured
timeout $(lim 80) python3 -m cp_gdn verify --cu-seqlens 0,3000,3000,4100,4105,9000 --world 2 --segments grid:4 --layout zigzag > $OUT/verify.txt 2>&1; V=$?
timeout $(lim 80) python3 -m cp_gdn demo --steps 20 --world 2 --device cuda --out $OUT/demo > $OUT/demo.txt 2>&1; M=$?
wait $A; A=$?; wait $B; B=$?; wait $D; D=$?
say "nccl $A, faults $B, comm $D, verify $V, demo $M"
for f in nccl faults comm; do echo "-- $f"; fails $OUT/$f.txt 8; done
tail -2 $OUT/verify.txt | cut -c1-160; grep -E "largest|median" $OUT/demo.txt; ((M)) && tail -4 $OUT/demo.txt | cut -c1-200

# 3. the example: accelerate launch on one and on two GPUs, torchrun.sh with backend hopper
E=$(( $(left) - 120 )); timeout $(lim $((E < 20 ? 20 : E > 120 ? 120 : E))) python3 bench/example.py --out $OUT/example.json --commit $C --logs $OUT/example > $OUT/example.txt 2>&1; say "example $?"
cut -c1-230 $OUT/example.txt | tail -6; find $OUT/example -name "*.safetensors" -delete 2>/dev/null

# 4. figures, alone on the machine; what is printed is in cp.json too, row by row
timeout $(lim 150) python3 -m torch.distributed.run --standalone --nproc-per-node 2 bench/cp.py --out $OUT/cp.json --commit $C --trace $OUT/trace $CP_ARGS > $OUT/cp.txt 2>&1; say "cp $?"
grep -E "Error|cp_gdn:" $OUT/cp.txt | cut -c1-200 | head -5
python3 - <<P
import json, os
try: rows = json.load(open(os.environ["OUT"] + "/cp.json"))["rows"]
except Exception as e: rows = []; print(e)
short, lines = {"contiguous": "C", "zigzag": "Z", "zigzag_per_document": "ZD"}, {}
for r in rows:
    head = f"{r['shape'][2:]:>6} {r['heads']:5} {r['gate'][0]} {short[r['layout']]:2}"
    if "fwd_exposed_us" in r:
        print(head, r["exchange"], "waited/alone us: fwd", r["fwd_exposed_us"], r["fwd_isolated_us"], "step", r["step_exposed_us"], r["step_isolated_us"],
              "nccl/uncovered", *(r.get(k) for k in ("fwd_profile_nccl_us", "fwd_profile_uncovered_us", "step_profile_nccl_us", "step_profile_uncovered_us")))
        continue
    name, key = ("head_parallel_", "heads") if r.get("peers") else ("", r["exchange"])
    line = lines.setdefault(head, [f"1 GPU {r['one_gpu_fwd_queued_ms']:.2f} {r['one_gpu_step_queued_ms']:.2f}"])
    line.append(f"{key} {r[name+'fwd_queued_ms']:.2f} {r[name+'step_queued_ms']:.2f} ({r[name+'fwd_efficiency_pct']:.0f} {r[name+'efficiency_pct']:.0f} %)")
print("tokens, heads, gate, layout: queued ms forward, step (efficiency)")
for head, line in lines.items(): print(head, "; ".join(line))
P
say done
