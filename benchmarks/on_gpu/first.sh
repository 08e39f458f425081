#!/usr/bin/env bash
# The first ten minutes on a GPU: are the kernels right, are they the same each time, and how fast are they?
#   benchmarks/on_gpu/first.sh OUT [--peers FOLDER] [--smoke]
# OUT: a folder for the results, written as they come: checks.json, repeats.json, kernels.json, first.log.
# Triton kernels take part if jax-triton and triton can be imported (extra `triton`, or wheels of them in FOLDER).
# FOLDER: wheels of public kernels to compare with (flash-linear-attention and the like); none is needed.
# No network is used. It ends within 9.5 minutes. --smoke: seconds, on a CPU, to see that all of it works.
set -uo pipefail
cd "$(dirname "$0")/../.."
. benchmarks/on_gpu/common.sh "$@"

part 190 checks python -m benchmarks.on_gpu.checks --out "$OUT/checks.json" $([ "$SMOKE" ] && echo --few)
part 150 repeats python -m benchmarks.on_gpu.repeats --out "$OUT/repeats.json" \
    $([ "$SMOKE" ] && echo --smoke --repeats 2)
if [ "$SMOKE" ]; then
    part 120 kernels python -m benchmarks.kernels.all --smoke --only row_product token_sampling --out "$OUT/kernels.json"
else
    part 230 kernels python -m benchmarks.kernels.all --minutes 3.5 --out "$OUT/kernels.json"
fi
finish
