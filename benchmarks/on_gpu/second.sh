#!/usr/bin/env bash
# The next ten minutes on a GPU: the engine on the 7B hybrid, random bfloat16 weights.
#   benchmarks/on_gpu/second.sh OUT [--peers FOLDER] [--smoke]
# OUT: a folder for the results, written as they come: engine.json (decode at 64 rows and 1, prefill of 8k, time to the
# first token cold and on a hit, seconds of the warm-up, most memory), trace.tar.gz, autotune.tar.gz, second.log.
# Otherwise as first.sh.
set -uo pipefail
cd "$(dirname "$0")/../.."
. benchmarks/on_gpu/common.sh "$@"

SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
COMMON=(--kernels pallas --json "$OUT/engine.json" --cache "$SCRATCH/programs" --trace "$SCRATCH/trace")
[ "$COMMIT" ] && COMMON+=(--commit "$COMMIT")
if [ "$SMOKE" ]; then
    part 300 engine python benchmarks/gpu_7b.py --smoke "${COMMON[@]}" --only decode,prefill,ttft
else
    part 430 engine python benchmarks/gpu_7b.py "${COMMON[@]}" --only decode,prefill,ttft --rows 64,1 --steps 4 \
        --lengths 8192 --chunks 8192 --minutes 6.5
    part 120 warm-up python benchmarks/gpu_7b.py "${COMMON[@]}" --only compile --minutes 1.5
fi
pack trace "$SCRATCH/trace"
pack autotune "$SCRATCH/programs/xla_gpu_per_fusion_autotune_cache_dir"
finish
