"""How long a model takes to load from safetensors, and from the orbax directory that `hybrid-jax convert` makes of it.

python benchmarks/engine/loading.py --json benchmarks/results/engine/loading_cpu.json

The model has random weights in the sizes of a known one. Each load is a process of its own and is timed from the call
of `load_model`, the import of orbax included, until all arrays are there. Both sides take turns, and the files are in
the page cache, since both were just written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file

CASES = (("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32"))


def write_model(folder: Path, name: str) -> None:
    """A directory in the layout of Hugging Face, stored in bfloat16."""
    from safetensors.numpy import save_file

    from hybrid_jax.models import known
    from hybrid_jax.models.initialize import random_params
    from hybrid_jax.train.export import hf_tensors

    config = known.load_known(name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(known.known()[name]), encoding="utf-8")
    save_file(hf_tensors(random_params(config, seed=0), config), folder / "model.safetensors")


def load_here(folder: str, dtype: str) -> float:
    """Seconds for one load in this process, jax already imported."""
    import jax

    from hybrid_jax import load_model

    jax.devices()
    start = time.perf_counter()
    _, params = load_model(folder, dtype=dtype)
    jax.block_until_ready(params)
    return time.perf_counter() - start


def load_apart(folder: Path, dtype: str) -> float:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--here", str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lfm2_1_2b", help="sizes of the model; lfm2_1_2b")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed; 5")
    parser.add_argument("--json", type=Path, help="the numbers")
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(load_here(*options.here))
        return
    from benchmarks.common import header, write_json
    from hybrid_jax import load_model, save_orbax

    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "safetensors"
        write_model(source, options.model)
        for dtype in dict.fromkeys(stored for stored, _ in CASES):
            save_orbax(Path(temporary) / dtype, *load_model(source, dtype=dtype))
        for stored, dtype in CASES:
            seconds: dict[str, list[float]] = {"safetensors": [], "orbax": []}
            for _ in range(options.rounds):
                seconds["safetensors"].append(load_apart(source, dtype))
                seconds["orbax"].append(load_apart(Path(temporary) / stored, dtype))
            ratio = [a / b for a, b in zip(*seconds.values(), strict=True)]
            case = f"{dtype}, stored in {stored}"
            rows[case] = {side: statistics.median(found) for side, found in seconds.items()}
            rows[case] |= {"times_as_fast": statistics.median(ratio), "least": min(ratio)}
            rows[case]["most"] = max(ratio)
    print(f"{'orbax':<28}{'safetensors':>13}{'orbax':>9}  times as fast")
    for case, row in rows.items():
        print(
            f"{case:<28}{row['safetensors']:>11.2f} s{row['orbax']:>7.2f} s  {row['times_as_fast']:.2f} "
            f"[{row['least']:.2f}, {row['most']:.2f}]"
        )
    if options.json:
        write_json(options.json, {**header(), "model": options.model, "loading": rows})


if __name__ == "__main__":
    main()
