#!/usr/bin/env bash
# The end-to-end proof on a GPU machine with vLLM and FlashInfer installed: stock, then this package, side by
# side in one session, with token comparison. Prints a table and writes JSON files.
#
#   bash benchmarks/gpu_proof.sh OUT timing          # all variants started, cells timed in turns (7 minutes)
#   bash benchmarks/gpu_proof.sh OUT tokens          # several at a time: tokens and graphs count, times do not
#   bash benchmarks/gpu_proof.sh OUT long            # 2,000 tokens, and drafts that are accepted
#   bash benchmarks/gpu_proof.sh OUT soak            # SOAK_S (480) seconds of mixed traffic, and a stock run beside
#   bash benchmarks/gpu_proof.sh OUT tools           # vllm-specpatch selftest --gpu, bench and doctor
#   bash benchmarks/gpu_proof.sh OUT kernels PACK    # checks and times of the kernels; PACK: spec_mask/pack.py --out
#   bash benchmarks/gpu_proof.sh OUT check PACK      # of these the checks only (sanitize: under compute-sanitizer)
#
# The package is installed with pip unless it is there; stock runs with VLLM_SPECPATCH=0. PYTHON (python3), CELLS
# ("bs=1,8,32 ctx=1024,8192 out=64"), KEYS (of e2e.py for all variants), ROUTES ("native spec_mask"), VARIANTS (of
# timing: "stock native spec_mask flash_attn", each a route, perhaps with a suffix and keys, as spec_mask-k1:k=1; of
# tokens: "k1:k=1 fp8:k=7,kv=fp8 ..."), JOBS (processes at a time in tokens, 3), RESULT (the result's name), TURNS
# (FOLDER:N, where calls with other releases on PYTHONPATH take turns, with a name of this call in AS), MEM and GPU_GIB
# (share of the GPU that must be free, GiB of KV cache: less where several calls run at once) may be set.
# Exits with 1 if a run failed or tokens differ (OUT/failed says which).
# Calling it again goes on where it was: a run whose JSON lies in RAW (/tmp/specpatch-proof) is not repeated.
set -uo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd) what=$2
python=${PYTHON:-python3} cells=${CELLS:-bs=1,8,32 ctx=1024,8192 out=64} routes=${ROUTES:-native spec_mask}
raw=${RAW:-/tmp/specpatch-proof} pack=$([ -n "${3:-}" ] && cd "$3" && pwd)
mkdir -p "$raw" "$out/log"
rm -f "$out/failed"
# Never in the checkout: `python -m` children of vLLM would find its folders as top-level packages.
cd "$raw" || exit 1
export PYTHONUNBUFFERED=1

failed() { # WHAT RC: from subshells, too
    [ "$2" -eq 0 ] || echo "$1 rc=$2" >> "$out/failed"
}

ended() { # WHAT RC
    failed "$1" "$2"
    echo "$1 rc=$2 $(date +%T)"
}

run() { # NAME BACKEND key=value...
    local name=$1
    shift
    # An earlier call of this script made it; one that was stopped lacks cells.
    [ -s "$raw/$name.json" ] && ! grep -q '"stopped": true' "$raw/$name.json" && return
    timeout "${LIMIT:-300}" "$python" -P "$checkout/benchmarks/e2e.py" "$name" "$@" "json=$raw/$name.json" \
        > "$out/log/$name.log" 2>&1
    ended "$name" $?
    [ -s "$raw/$name.json" ] || tail -n 3 "$out/log/$name.log" | cut -c1-300
}

compare() { # RESULT NAME...
    local result=$1 files=()
    shift
    for name in "$@"; do [ -s "$raw/$name.json" ] && files+=("$raw/$name.json"); done
    [ ${#files[@]} -gt 0 ] && "$python" -P "$checkout/benchmarks/compare.py" "${files[@]}" --write "$out/$result.json"
    failed "compare $result" $?
}

compare_routes() { # NAME: of the runs NAME-off and NAME-ROUTE
    echo "== $1"
    # shellcheck disable=SC2046,SC2086  # a list of words
    compare "$1" $(printf "$1-%s " off $routes)
}

use_route() { # ROUTE: in a subshell, for what it starts
    case $1 in
    off | stock | flash_attn) export VLLM_SPECPATCH=0 ;;
    *) export VLLM_SPECPATCH_ROUTE=$1 ;;
    esac
}

by_route() { # NAME key=value...: NAME is a route, or a route, a dash and more
    local name=$1 backend=FLASHINFER
    shift
    use_route "${name%%-*}"
    [ "${name%%-*}" != flash_attn ] || { backend=FLASH_ATTN && set -- fa=2 "$@"; }
    run "$name" "$backend" "$@"
}

"$python" -c "import vllm_specpatch" 2> /dev/null ||
    "$python" -m pip install -q --no-deps --no-build-isolation --no-index "$checkout" || exit 1

case $what in
timing)
    variants=(${VARIANTS:-stock native spec_mask flash_attn}) names=()
    turns=${TURNS:-$(mktemp -d):${#variants[@]}}
    for variant in "${variants[@]}"; do
        name=${variant%%:*} keys=${variant#"$name"}
        names+=("$name")
        # shellcheck disable=SC2086  # lists of words
        (LIMIT=${LIMIT:-580} by_route "$name" ${KEYS:-k=7} ${keys//[:,]/ } $cells "turns=$turns" \
            mem="${MEM:-0.1}" gpu_gib="${GPU_GIB:-10.5}" "as=${AS:-}$name"
        touch "${turns%:*}/${AS:-}$name.ready") &
    done
    wait
    # A table for all variants of one suffix (stock-k1, spec_mask-k1), one for those without.
    printf '%s\n' "${names[@]}" | sed 's/^[^-]*//' | sort -u | while read -r suffix; do
        mapfile -t same < <(printf '%s\n' "${names[@]}" | grep -xE "[^-]*$suffix")
        echo "== ${RESULT:-timing}$suffix"
        compare "${RESULT:-timing}$suffix" "${same[@]}"
    done
    ;;
tokens)
    small="$cells repeats=1 mem=${MEM:-0.15} gpu_gib=${GPU_GIB:-12}"
    variants=${VARIANTS:-accept:k=7,accept=4 own:k=4,method=own fp8:k=7,kv=fp8,accept=4 v1:k=7,accept=4 \
        lora:k=3,lora=8,accept=3 sample:k=7,sample=1 k1:k=1 k0:k=0 ngram:k=3,method=ngram}
    jobs=()
    for variant in $variants; do
        name=${variant%%:*} keys=${variant#*:}
        for route in off $routes; do jobs+=("$name $route ${keys//,/ }"); done
    done
    one() { # NAME ROUTE key=value...
        local name=$1 route=$2
        shift 2
        [ "$name" = v1 ] && export VLLM_USE_V2_MODEL_RUNNER=0
        use_route "$route"
        run "$name-$route" FLASHINFER $small "$@"
    }
    for job in "${jobs[@]}"; do
        # shellcheck disable=SC2086  # the job is a list of words
        (one $job) &
        while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-3}" ]; do wait -n; done
    done
    wait
    for variant in $variants; do compare_routes "${variant%%:*}"; done
    ;;
long)
    small="repeats=1 mem=${MEM:-0.25} gpu_gib=${GPU_GIB:-16}"
    for route in off $routes; do
        (
            use_route "$route"
            run "long-$route" FLASHINFER k=7 bs=8 ctx=1024 out=2000 $small &
            run "accept-$route" FLASHINFER k=7 accept=3 bs=1,8,32 ctx=1024 out=256 $small &
            run "accept1-$route" FLASHINFER k=3 accept=2.5 async=1 bs=8 ctx=8192 out=256 $small &
            wait
        )
    done
    for name in long accept accept1; do compare_routes "$name"; done
    ;;
soak)
    soak() { # NAME key=value...
        "$python" -P "$checkout/benchmarks/soak.py" "$@" "json=$raw/$1.json" > "$out/log/$1.log" 2>&1
        ended "$1" $?
        tail -n 1 "$out/log/$1.log" | cut -c1-600
    }
    # Both on one GPU at once: nothing here is timed.
    (VLLM_SPECPATCH=0 soak soak-off "seconds=${SOAK_S:-480}" mem=0.3) &
    (soak soak-patched "seconds=${SOAK_S:-480}" mem=0.3) &
    wait
    "$python" -P "$checkout/benchmarks/soak.py" --compare "$raw/soak-off.json" "$raw/soak-patched.json"
    failed "compare soak" $?
    cp "$raw"/soak-*.json "$out/"
    ;;
tools)
    vllm-specpatch doctor --json > "$out/doctor.json" 2> "$out/log/doctor.err"
    echo "doctor rc=$?"
    vllm-specpatch doctor > "$out/log/doctor.txt" 2>&1
    vllm-specpatch selftest --gpu --json > "$out/selftest.json" 2> "$out/log/selftest.err"
    ended selftest $?
    vllm-specpatch bench --model dummy --backends stock,native,spec_mask --batch 1,8 --context 1024 --out 64 \
        --out-folder "$out/bench" --timeout 300 --gpu-memory-utilization "${MEM:-0.6}" > "$out/bench.txt" 2>&1
    ended bench $?
    tail -n 20 "$out/bench.txt"
    ;;
kernels | check | sanitize)
    [ -n "$pack" ] || { echo "usage: gpu_proof.sh OUT $what PACK" >&2 && exit 2; }
    cd "$checkout" || exit 1
    kernel() { # NAME SECONDS script arguments...
        local name=$1 limit=$2
        shift 2
        mkdir -p "$out/$name"
        timeout "$limit" "$pack/run.sh" "$@" > "$out/$name/log.txt" 2>&1
        ended "$name" $?
        tail -n 4 "$out/$name/log.txt"
    }
    [ "$what" = sanitize ] || kernel check 420 gpu_check.py --out "$out/check"
    if [ "$what" = kernels ]; then
        kernel bench 280 gpu_bench.py --seconds 260 --with "${WITH:-native,fa2,fa3,xqa}" --out "$out/bench"
        kernel tune 130 gpu_bench.py --tune --seconds 120 --out "$out/tune"
    fi
    [ "$what" = check ] || kernel sanitize 400 sanitize.sh "$out/sanitize"
    ;;
*)
    echo "usage: gpu_proof.sh OUT timing|tokens|long|soak|tools|kernels|check|sanitize" >&2
    exit 2
    ;;
esac
tar -czf "$out/logs.tgz" -C "$out" log && rm -r "$out/log"
[ ! -s "$out/failed" ] || { cat "$out/failed" && exit 1; }
