#!/usr/bin/env bash
# Everything that needs two GPUs, one after the other: tests over NCCL, verify and demo, the example of the plugin, bench/cp.py.
# OUT=folder COMMIT=hash bash bench/two_gpus.sh; about 330 s on two H200s; every step has a limit, all of them LIMIT seconds (400).
source "$(dirname "${BASH_SOURCE[0]}")/gpus.sh"
begin 2 400

# 1. tests; verify and the demo meanwhile: their times are not measured
commands() {
    timeout $(lim 80) python3 -m cp_gdn verify --cu-seqlens 0,3000,3000,4100,4105,9000 --world 2 --segments grid:4 --layout zigzag > $OUT/verify.txt 2>&1; say "verify $?"
    timeout $(lim 80) python3 -m cp_gdn demo --steps 20 --world 2 --device cuda --out $OUT/demo > $OUT/demo.txt 2>&1; M=$?; say "demo $M"
}
tests 130 commands
tail -2 $OUT/verify.txt | cut -c1-160; grep -E "largest|median" $OUT/demo.txt; ((M)) && tail -4 $OUT/demo.txt | cut -c1-200

# 2. the example: accelerate launch on one and on two GPUs, torchrun.sh with backend hopper
timeout $(lim 120 120) python3 bench/example.py --out $OUT/example.json --commit $C --logs $OUT/example > $OUT/example.txt 2>&1; say "example $?"
cut -c1-230 $OUT/example.txt | tail -6; find $OUT/example -name "*.safetensors" -delete 2>/dev/null

# 3. figures, alone on the machine; what is printed is in cp.json too, row by row
timeout $(lim 150) $R bench/cp.py --out $OUT/cp.json --commit $C --trace $OUT/trace $CP_ARGS > $OUT/cp.txt 2>&1; say "cp $?"
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
