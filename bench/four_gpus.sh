#!/usr/bin/env bash
# Everything that needs four GPUs: tests over NCCL, whole packs of 240k to 262k tokens under three rules, the same against fp64.
# OUT=folder COMMIT=hash bash bench/four_gpus.sh; about 380 s expected on four H200s; every step has a limit, all of them LIMIT seconds (530).
source "$(dirname "${BASH_SOURCE[0]}")/gpus.sh"
begin 4 530

# 1. tests; the figures keep 200 s
tests "$(lim 240 200)" true

# 2. figures, alone on the machine
timeout "$(lim 140 60)" $R bench/cp_records.py --seconds 90 --out "$OUT/records.json" --commit "$C" $RECORDS_ARGS > "$OUT/records.txt" 2>&1; say "records $?"
table "$OUT/records.txt" "ranks, rule"

# 3. the same packs against fp64
timeout "$(lim 110)" $R bench/cp_oracle.py --out "$OUT/oracle.json" --commit "$C" > "$OUT/oracle.txt" 2>&1; say "oracle $?"
table "$OUT/oracle.txt" ", world "
say done
