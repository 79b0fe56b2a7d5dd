#!/usr/bin/env bash
# memcheck and synccheck of compute-sanitizer over small steps of the op, a process each; about a minute on a quiet H200.
# bash tests/gpu/sanitize.sh [folder for the reports]
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
export PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1
out=${1:-$(mktemp -d)}; mkdir -p "$out"
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
[[ -n $tool ]] || { echo "compute-sanitizer: not found; it comes with the CUDA toolkit" >&2; exit 2; }
names=(ragged segments packed many)
for name in "${names[@]}"; do  # compiles, and shows that the step itself runs
    timeout 90 python3 -m tests.gpu.sanitize "$name" || exit 1
done
failed=0
for check in memcheck synccheck; do
    for name in "${names[@]}"; do
        # Errors of API calls are left out: bindings ask the driver for entry points that it may not have.
        timeout 120 "$tool" --tool $check --report-api-errors no --print-limit 5 --error-exitcode 7 \
            python3 -m tests.gpu.sanitize "$name" > "$out/$check-$name.txt" 2>&1 || failed=1
        echo "$check $name: $(grep -a 'ERROR SUMMARY' "$out/$check-$name.txt" | tail -1)"
    done
done
exit $failed
