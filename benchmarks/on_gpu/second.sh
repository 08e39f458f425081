#!/usr/bin/env bash
# The next ten minutes on a GPU: the engine on the 7B hybrid, random bfloat16 weights.
#   benchmarks/on_gpu/second.sh OUT [--peers FOLDER] [--smoke]
# OUT: a folder for the results, written as they come: engine.json (decode at 64 rows and 1, prefill of 8k, time to the
# first token cold and on a hit, most memory; seconds of the warm-up with the settings that users get, from nothing and
# from stored programs, and whether both draw the same tokens), trace.tar.gz, autotune.tar.gz, second.log.
# Otherwise as first.sh.
set -uo pipefail
cd "$(dirname "$0")/../.."
. benchmarks/on_gpu/common.sh "$@"

SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
COMMON=(--kernels pallas --json "$OUT/engine.json" --cache "$SCRATCH/programs" --trace "$SCRATCH/trace")
[ "$COMMIT" ] && COMMON+=(--commit "$COMMIT")
if [ "$SMOKE" ]; then
    part 300 engine python benchmarks/gpu/hybrid_7b.py --smoke "${COMMON[@]}" --only decode
else
    part 320 engine python benchmarks/gpu/hybrid_7b.py "${COMMON[@]}" --only decode,prefill,ttft --rows 64,1 --steps 4 \
        --lengths 8192 --chunks 8192 --minutes 4.5
    part 240 warm-up python benchmarks/gpu/hybrid_7b.py "${COMMON[@]}" --only compile --minutes 3.5
fi
pack trace "$SCRATCH/trace"
pack autotune "$SCRATCH/programs/xla_gpu_per_fusion_autotune_cache_dir"
finish
