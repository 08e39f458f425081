"""Work in tiles that several threads share.

A job lies in memory of its own, and everybody who knows it counts. The caller takes tiles as the helpers do, and waits
only for tiles that a helper has begun. A helper that starts late finds no tile, and frees the job if it is the last. So
a busy pool, one thread, or calls within calls cannot hold anybody up.
"""

from __future__ import annotations

from hybrid_jax.products.cpu import ffi
from hybrid_jax.products.cpu.code import Code

LINE = 64  # bytes of a cache line; what threads write has lines of its own
SHARED = ("holders", "taken", "done", "workers")
FIELDS = (
    *("tile", "finish", "x", "w", "y", "scratch", "sums", "counters"),
    *("tiles", "bands", "parts", "M", "K", "N", "x_row", "w_row", "y_row", "sum_row", "each"),
)
OFFSETS = {name: LINE * place for place, name in enumerate(SHARED)}
OFFSETS |= {name: LINE * len(SHARED) + 8 * place for place, name in enumerate(FIELDS)}
JOB_BYTES = LINE * len(SHARED) + 8 * len(FIELDS)
POINTERS = FIELDS[:8]
PATIENCE = 4000  # looks at what is done, before the caller lets others have its core


def read(c: Code, name: str, job: str = "%job") -> str:
    """A field of a job."""
    return c.load("ptr" if name in POINTERS else "i64", job, OFFSETS[name])


def write(c: Code, name: str, value: str | int, job: str = "%job") -> None:
    """Sets a field of a job."""
    c.store("ptr" if name in POINTERS else "i64", value, job, OFFSETS[name])


def functions(pause: str) -> list[str]:
    """What `share(job, frame, helpers)` needs, and itself.

    Args:
        pause: the instruction for a core that waits.
    """
    return [
        ffi.threads(),
        ffi.schedule(),
        ffi.refuse(),
        _release(),
        _work(),
        _task(),
        _share(pause),
    ]


def _count(c: Code, name: str, how: str, order: str) -> str:
    """Adds one to a shared field of a job, or takes one; returns what it was."""
    return c.set(f"atomicrmw {how} ptr {c.at('%job', OFFSETS[name])}, i64 1 {order}")


def _release() -> str:
    c = Code("define internal void @release(ptr %job)")
    with c.when(c.is_("eq", _count(c, "holders", "sub", "acq_rel"), 1)):
        c.do("call void @free(ptr %job)")
    c.do("ret void")
    return c.text()


def _work() -> str:
    """Tiles, one after the other, until all are taken."""
    c = Code("define internal void @work(ptr %job)")
    tiles, tile = read(c, "tiles"), read(c, "tile")
    mine = c.mul(read(c, "each"), _count(c, "workers", "add", "monotonic"))
    scratch = c.at(read(c, "scratch"), mine)
    c.do("br label %take")
    c.label("take")
    number = _count(c, "taken", "add", "monotonic")
    c.do(f"br i1 {c.is_('ult', number, tiles)}, label %run, label %out")
    c.label("run")
    c.do(f"call void {tile}(ptr %job, i64 {number}, ptr {scratch})")
    _count(c, "done", "add", "release")
    c.do("br label %take")
    c.label("out")
    c.do("ret void")
    return c.text()


def _task() -> str:
    """What a helper does."""
    c = Code("define internal void @task(ptr %job)")
    c.do("call void @work(ptr %job)")
    c.do("call void @release(ptr %job)")
    c.do("ret void")
    return c.text()


def _share(pause: str) -> str:
    c = Code("define internal void @share(ptr %job, ptr %frame, i64 %helpers)")
    tiles = read(c, "tiles")
    c.store("i64", c.add("%helpers", 1), "%job", OFFSETS["holders"])
    with c.loop("%helpers"):
        comes = c.set("call i1 @schedule(ptr %frame, ptr @task, ptr %job)")
        with c.when(c.set(f"xor i1 {comes}, true")):
            c.do("call void @release(ptr %job)")
    c.do("call void @work(ptr %job)")
    looks = c.set("alloca i64")
    c.store("i64", 0, looks)
    c.do("br label %wait")
    c.label("wait")
    done = c.set(f"load atomic i64, ptr {c.at('%job', OFFSETS['done'])} acquire, align 8")
    c.do(f"br i1 {c.is_('uge', done, tiles)}, label %out, label %not")
    c.label("not")
    count = c.load("i64", looks)
    c.store("i64", c.add(count, 1), looks)
    c.do(f"br i1 {c.is_('ult', count, PATIENCE)}, label %pause, label %yield")
    c.label("pause")
    c.do(pause)
    c.do("br label %wait")
    c.label("yield")
    c.set("call i32 @sched_yield()")
    c.do("br label %wait")
    c.label("out")
    c.do("call void @release(ptr %job)")
    c.do("ret void")
    return c.text()
