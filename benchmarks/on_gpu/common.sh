# What first.sh, second.sh and call_1.sh share: the command line, and parts that end in time.
LIMIT=570 # seconds in all
BEGIN=$SECONDS
OUT= PEERS= SMOKE= FAILED=0
usage() {
    echo "usage: $(basename "$0") OUT [--peers FOLDER] [--smoke]; $1" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case "$1" in
    --peers) [ $# -gt 1 ] && [ -d "$2" ] || usage "--peers must name a folder of wheels, got '${2-}'"; PEERS=$2; shift ;;
    --smoke) SMOKE=1 ;;
    -h | --help) sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    -*) usage "unknown option '$1'" ;;
    *) [ -z "$OUT" ] || usage "one folder, got '$OUT' and '$1'"; OUT=$1 ;;
    esac
    shift
done
[ "$OUT" ] || usage "name a folder for the results"
mkdir -p "$OUT" 2>/dev/null && [ -w "$OUT" ] || usage "cannot write to '$OUT'"
OUT=$(cd "$OUT" && pwd)
COMMIT=$(git rev-parse --short HEAD 2>/dev/null || cat .commit 2>/dev/null || true)
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
export JAX_PLATFORMS=${JAX_PLATFORMS:-$([ "$SMOKE" ] && echo cpu || echo cuda)}
python() { "${PYTHON:-python3}" "$@"; }
if [ "$PEERS" ]; then # wheels are zip archives: unpacked, they need no pip and no network
    UNPACKED=$(mktemp -d)
    for wheel in "$PEERS"/*.whl; do
        [ -e "$wheel" ] && python -m zipfile -e "$wheel" "$UNPACKED"
    done
    chmod -R u+rwX "$UNPACKED"
    find "$UNPACKED" -path '*/bin/*' -type f -exec chmod u+x {} + # zipfile drops it: Triton's ptxas
    export PYTHONPATH=$PYTHONPATH:$UNPACKED
fi

found=$(python -c 'import pytest, hypothesis, jax; print(jax.default_backend())' 2>&1) || true
found=${found##*$'\n'} # the last line: a backend, or an error
case "$SMOKE $found" in
1\ *ModuleNotFoundError*) usage "$found; pip install -e '.[test]'" ;;
*ModuleNotFoundError*) usage "$found; pip install -e '.[cuda12,test]', or have the packages in FOLDER" ;;
1\ * | *\ gpu) ;;
*) usage "no GPU that jax can use with JAX_PLATFORMS=$JAX_PLATFORMS; give --smoke to try it without one" ;;
esac
LOG=$OUT/$(basename "$0" .sh).log
: > "$LOG"

# part SECONDS NAME COMMAND...: runs it for at most so long, and no longer than is left of all
part() {
    local most=$1 name=$2 start=$SECONDS code
    shift 2
    local left=$((LIMIT - (SECONDS - BEGIN)))
    if [ "$left" -lt 20 ]; then
        echo "$name: no time is left" | tee -a "$LOG"
        FAILED=1
        return
    fi
    [ "$left" -lt "$most" ] && most=$left
    shift # "python"
    timeout --kill-after=5 "$most" "${PYTHON:-python3}" "$@" 2>&1 | tee -a "$LOG"
    code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || FAILED=1
    [ "$code" = 124 ] && echo "$name: stopped after $most s; what it wrote stays" | tee -a "$LOG"
    echo "$name: exit code $code, $((SECONDS - start)) s" | tee -a "$LOG"
}

# pack NAME FOLDER: one file for many
pack() {
    [ -d "$2" ] && tar -czf "$OUT/$1.tar.gz" -C "$2" . || echo "$1: there is none" | tee -a "$LOG"
}

finish() {
    echo "in all: $((SECONDS - BEGIN)) s; tables: python -m benchmarks.on_gpu.report '$OUT'" | tee -a "$LOG"
    exit $FAILED
}
