#!/usr/bin/env bash
# The first ten minutes on a GPU: are the kernels right, are they the same each time, and how fast are they?
#   benchmarks/on_gpu/first.sh OUT [--peers FOLDER] [--smoke]
# OUT: a folder for the results, written as they come: checks.json, engines.json, answers.json, repeats.json,
# kernels.json, first.log.
# Triton kernels take part if jax-triton and triton can be imported (extra `triton`, or wheels of them in FOLDER).
# FOLDER: wheels of public kernels to compare with (flash-linear-attention and the like); none is needed.
# No network is used. It ends within 9.5 minutes. --smoke: some minutes on a CPU, to see that all of it works.
set -uo pipefail
cd "$(dirname "$0")/../.."
. benchmarks/on_gpu/common.sh "$@"

# Compiling takes most of the time, so many processes share the card until times are measured.
MANY=$(($(nproc) - 2 > 2 ? $(nproc) - 2 : 2))
if [ "$SMOKE" ]; then
    part 150 checks python -m benchmarks.on_gpu.checks --few --out "$OUT/checks.json"
    part 150 engines python -m benchmarks.on_gpu.checks --few --engine --out "$OUT/engines.json"
    part 150 answers python -m benchmarks.on_gpu.answers --few --out "$OUT/answers.json"
else
    part 140 checks python -m benchmarks.on_gpu.checks --all --processes "$MANY" --minutes 2.2 --out "$OUT/checks.json"
    part 100 engines python -m benchmarks.on_gpu.checks --engine --processes "$((MANY / 2))" --minutes 1.5 \
        --out "$OUT/engines.json"
    part 70 answers python -m benchmarks.on_gpu.answers --out "$OUT/answers.json"
fi
part 110 repeats python -m benchmarks.on_gpu.repeats --out "$OUT/repeats.json" \
    $([ "$SMOKE" ] && echo --smoke --repeats 2)
if [ "$SMOKE" ]; then
    part 120 kernels python -m benchmarks.kernels.all --smoke --only row_product token_sampling --out "$OUT/kernels.json"
else
    part 150 kernels python -m benchmarks.kernels.all --minutes 2.3 --out "$OUT/kernels.json"
fi
finish
