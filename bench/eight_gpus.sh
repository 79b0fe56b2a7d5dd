#!/usr/bin/env bash
# Everything that needs eight GPUs: tests over NCCL, packs of a million tokens on 1 to 8 GPUs, two packs against fp64, the example.
# OUT=folder COMMIT=hash bash bench/eight_gpus.sh; some 480 s expected on eight H200s; every step has a limit, all of them LIMIT seconds (540).
# PARTS="tests figures example" (all by default): what to run, where one call has no time for all.
source "$(dirname "${BASH_SOURCE[0]}")/gpus.sh"
begin 8 540
PARTS=${PARTS:-tests figures example}

# 1. tests; the other parts keep their time
if [[ $PARTS == *tests* ]]; then
    keep=0; [[ $PARTS == *figures* ]] && keep=$((keep + 150)); [[ $PARTS == *example* ]] && keep=$((keep + 150))
    tests "$(lim 400 $keep)" true
fi

# 2. figures, alone on the machine: strong scaling over 2, 4 and 8 beside one GPU
if [[ $PARTS == *figures* ]]; then
    keep=0; [[ $PARTS == *example* ]] && keep=150
    timeout "$(lim 150 $((keep + 20)))" $R bench/cp_records.py --packs 1x1048576 "33 documents" --worlds 8 4 2 --rules measured --exchanges ring a2a \
        --groups 2 --seconds 80 --out "$OUT/million.json" --commit "$C" $RECORDS_ARGS > "$OUT/million.txt" 2>&1; say "million $?"
    table "$OUT/million.txt" "ranks, rule"
    timeout "$(lim 30)" python3 bench/cp_plot.py "$OUT/million.json" 2>&1 | tail -1
    timeout "$(lim 60 $keep)" $R bench/cp_oracle.py --packs 1x262144 "8 documents" --out "$OUT/oracle.json" --commit "$C" > "$OUT/oracle.txt" 2>&1; say "oracle $?"
    table "$OUT/oracle.txt" ", world "
fi

# 3. the example: (dp 2, cp 4), (dp 4, cp 2) and (dp 1, cp 8) of one YAML beside fewer GPUs
if [[ $PARTS == *example* ]]; then
    L=$(($(left) / 4)); timeout "$(lim 330)" python3 bench/example.py --gpus 8 --steps 6 --limit $((L > 80 ? 80 : L)) --out "$OUT/example.json" --commit "$C" --logs "$OUT/example" > "$OUT/example.txt" 2>&1; say "example $?"
    cut -c1-230 "$OUT/example.txt" | tail -9; find "$OUT/example" -name "*.safetensors" -delete 2>/dev/null
fi
say done
