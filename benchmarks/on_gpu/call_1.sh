#!/usr/bin/env bash
# Anatomy of a decode step on a GPU, nine minutes: what a step, a dispatch, the host and each kernel take.
#   benchmarks/on_gpu/call_1.sh OUT [--peers FOLDER] [--smoke]
# Run it first whenever a new kind of card is at hand, or a new driver: it says where a step's time goes, what the loop
# over steps gains inside the graph, and whether it leaves the same bits there as outside and as started by the host.
# OUT: a folder for the results, written as they come: anatomy.json, profiles.tar.gz, call_1.log.
# Each form of the loop has a process of its own, the most important first, so a crash or a lack of time costs no other.
# Any card does that holds a part of the 7B hybrid. Otherwise as first.sh. --smoke: a minute or two, on a CPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
. benchmarks/on_gpu/common.sh "$@"
LIMIT=540

SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
# What one process compiles, or finds fastest, the next one takes as well: other products would have other bits.
export JAX_COMPILATION_CACHE_DIR=$SCRATCH/programs JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.2
COMMON=(--out "$OUT/anatomy.json" --trace "$SCRATCH/profiles")
[ "$COMMIT" ] && COMMON+=(--commit "$COMMIT")
[ "$SMOKE" ] && COMMON+=(--smoke --repeats 2)
rm -f "$OUT/anatomy.json" # all forms of one run, or none
form() { part "$1" "$2" python -m benchmarks.on_gpu.anatomy --form "$2" "${COMMON[@]}"; }
form 150 graph
form 90 outside
form 90 host
form 70 unbuffered
form 70 async
form 70 independent
pack profiles "$SCRATCH/profiles"
finish
