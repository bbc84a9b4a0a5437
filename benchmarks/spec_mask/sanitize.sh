#!/bin/sh
# compute-sanitizer over a small set of gpu_check.py, in the root of the checkout, on a GPU:
#
#     sh benchmarks/spec_mask/sanitize.sh [folder for the logs]
#
# memcheck: accesses out of bounds; racecheck: hazards in shared memory; initcheck: global memory
# read before it was written. A case takes seconds to minutes under these tools, hence --every.
# Exits 1 if one of them reports an error. Graph replays are left out: the tools do not look inside.
set -u
logs=${1:-${OUT:-/tmp}}
python=${PYTHON:-python3}
tool=${COMPUTE_SANITIZER:-compute-sanitizer}
command -v "$tool" >/dev/null || tool=/usr/local/cuda/bin/compute-sanitizer
[ -x "$(command -v "$tool")" ] || { echo "compute-sanitizer not found: set COMPUTE_SANITIZER"; exit 2; }
mkdir -p "$logs"
# torch's caching allocator would hide accesses between its blocks.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 VLLM_SPECPATCH_CHECK_NO_GRAPHS=1
failed=0
run() {
    name=$1
    groups=$2
    every=$3
    shift 3
    "$tool" --tool "$name" --error-exitcode 9 --print-limit 20 "$@" "$python" benchmarks/spec_mask/gpu_check.py \
        --only "$groups" --every "$every" --out "$logs/$name" >"$logs/$name.log" 2>&1
    code=$?
    summary=$(grep 'ERROR SUMMARY\|RACECHECK SUMMARY' "$logs/$name.log" | tail -1)
    echo "$name: exit $code, $(grep -c '^FAIL' "$logs/$name.log") failed cases, $summary"
    [ $code -eq 0 ] || failed=1
}
run memcheck masks,query_lengths,ragged,windows,splits,many_tiles,smaller_specs,planner 9
run racecheck query_lengths,splits,smaller_specs,planner 13
# Every other group writes NaN everywhere first, so that nothing is left to find; and this tool follows each byte of
# each kernel, torch's too: over a part of those groups it had not ended after 400 s. In this group only ours run.
run initcheck first_use 1
exit $failed
