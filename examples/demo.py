"""`make demo`: the bundled model continues methods of a class it has never seen.

Eight prompts share the head of the standard library's sched.py, which training held out. The engine
computes that head once; the other prompts resume from its checkpoint.
"""

from __future__ import annotations

import sched
import time
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from hybrid_jax import LLM, SamplingParams

STUBS = (
    "    def empty(self):\n",
    "    def cancel(self, event):\n",
    "    def __len__(self):\n",
    "    def clear(self):\n        with self._lock:\n",
    "    def __repr__(self):\n",
    "    def run(self, blocking=True):\n",
    "    def enter(self, delay, priority, action, argument=(), kwargs=_sentinel):\n",
    "    def next_event(self):\n        if not self._queue:\n",
)
PARAMS = SamplingParams(
    temperature=0.5, top_p=0.9, seed=3, max_tokens=96, stop=["\n    def ", "\nclass "]
)


def shared_head() -> str:
    """sched.py from its imports to the end of the constructor."""
    source = Path(sched.__file__).read_text(encoding="utf-8")
    start, end = source.find("import time"), source.find("    def enterabs")
    return source[start:end] if 0 <= start < end else source[:1200]


def measure(llm: LLM, prompts: list[str]) -> tuple[list, float]:
    started = time.perf_counter()
    outputs = llm.generate(prompts, PARAMS)
    return outputs, time.perf_counter() - started


def show(console: Console, title: str, outputs: list, seconds: float) -> None:
    table = Table(title=title, title_justify="left", box=None)
    for name in ("prompt", "tokens", "from cache", "new", "first token ms", "decode tok/s"):
        table.add_column(name, justify="right")
    for index, output in enumerate(outputs, start=1):
        metrics = output.metrics
        rate = metrics.decode_tokens_per_s
        table.add_row(
            str(index),
            str(metrics.num_prompt_tokens),
            str(metrics.num_cached_tokens),
            str(metrics.num_generation_tokens),
            f"{1000 * metrics.ttft_s:.0f}",
            "-" if rate is None else f"{rate:.0f}",
        )
    prompt_tokens = sum(o.metrics.num_prompt_tokens for o in outputs)
    cached = sum(o.metrics.num_cached_tokens for o in outputs)
    new = sum(o.metrics.num_generation_tokens for o in outputs)
    console.print(table)
    console.print(
        f"{prompt_tokens} prompt tokens, {cached} ({cached / prompt_tokens:.0%}) from the prefix cache; "
        f"{new} new tokens in {seconds:.2f} s: {new / seconds:.0f} tokens/s\n",
        soft_wrap=True,
    )


def main() -> None:
    console = Console()
    started = time.perf_counter()
    llm = LLM(max_rows=len(STUBS), max_model_len=2048)
    prompts = [shared_head() + stub for stub in STUBS]
    console.print(f"loaded in {time.perf_counter() - started:.1f} s: {llm}", soft_wrap=True)
    started = time.perf_counter()
    with console.status("compiling what these prompts need"):
        for _ in ("empty cache", "filled cache"):
            measure(llm, prompts)
    llm.reset_prefix_cache()
    console.print(f"programs compiled (or found) in {time.perf_counter() - started:.1f} s\n")

    cold, cold_seconds = measure(llm, prompts)
    for stub, output in zip(STUBS, cold, strict=True):
        console.print(Syntax(stub + output.outputs[0].text, "python", background_color="default"))
    console.print()
    show(console, "empty cache: the shared head is computed once", cold, cold_seconds)
    warm, warm_seconds = measure(llm, prompts)
    show(console, "the same prompts again", warm, warm_seconds)
    same = [a.outputs == b.outputs for a, b in zip(cold, warm, strict=True)]
    console.print(f"same tokens both times: {all(same)}")
    console.print(str(llm.cache.explain(warm[0])), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
