"""The scan in Triton, for bfloat16: launches of the kernels in `triton_kernel`, which is imported when they are used.

Rows are cut into segments at places that depend on the number of heads alone, never on the batch, so a row gets the
same bits alone and among others. Four launches, and two where no row is longer than a segment:

1. `decay_kernel`: sums of the decay exponents in each chunk, once for all that use them.
2. `added_kernel`: what each segment but the last adds to a state of zeros.
3. `starts_kernel`: from that the states at the segments' starts.
4. `scan_kernel`: every segment from its start, all at the same time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import jax_triton
from pallas_kernels.records import RecordSizes
from pallas_kernels.ssd_scan.plan import sides, why_not_triton
from pallas_kernels.ssd_scan.reference import ScanFrames
from pallas_kernels.triton import cdiv, power_of_two

CHUNK = 64  # tokens a program takes at once
LONGEST, SHORTEST = 1024, 256  # tokens of a segment
MAX_WORDS = 1 << 31  # offsets within a row are of 32 bits
TILE = 16  # heads of a program of `decay_kernel`
# Words of a program of `starts_kernel`, 16 bytes a thread; and segments whose words it loads at once.
BLOCK, AHEAD = 512, 8


def segment_tokens(heads: int) -> int:
    """Tokens of a segment: of 8,192 tokens there are about four programs for every one that runs at the same time."""
    return min(max(power_of_two(8 * heads), SHORTEST), LONGEST)


def why_unsupported(records: RecordSizes, dtype: str | jnp.dtype, tokens: int = 1) -> str | None:
    """Why the kernels cannot take these shapes, or cannot be called here, or None."""
    reason = why_not_triton(records.head_dim, records.state_size, jnp.dtype(dtype).name)
    if reason is not None:
        return reason
    if tokens * records.conv_size >= MAX_WORDS:
        return (
            f"a row must have fewer than {MAX_WORDS // records.conv_size} tokens for 'triton', "
            f"got {tokens}; use 'pallas'"
        )
    return jax_triton.why_unavailable()


def ssd_scan_frames_triton(arrays: ScanFrames, *, records: RecordSizes, first_frame: int):
    """See `api.ssd_scan_frames`."""
    from pallas_kernels.ssd_scan import triton_kernel as kernels

    xBC, dt, A, D, arena, read, write, exists, lengths, state_lengths = arrays
    rows, tokens, _ = xBC.shape
    heads, words = records.num_heads, records.head_words
    segment = segment_tokens(heads)
    segments = cdiv(tokens, segment)
    P, R = sides(records.head_dim, records.state_size)
    exists = exists.astype(jnp.int32)
    # An array, not constants: so one compiled kernel serves all layers and lengths.
    sizes = jnp.array([first_frame, tokens, 0], jnp.int32)
    shapes = {
        "HEADS": heads,
        "WIDTH": records.head_dim,
        "GROUPS": records.num_groups,
        "SIZE": records.state_size,
        "SEGMENT": segment,
        "CHUNK": CHUNK,
        "P": P,
        "R": R,
        "INTERPRETED": jax_triton.interpreted(),
    }
    frames = {
        "FRAMES": read.shape[1],
        "FRAME": arena.shape[1],
        "PER_FRAME": records.per_frame(arena),
    }

    chunks = cdiv(tokens, CHUNK)
    (decays,) = jax_triton.call(
        *(kernels.decay_kernel, dt, A, lengths, sizes),
        outputs=[_float32(rows, heads, chunks, 2, CHUNK)],
        grid=(chunks, cdiv(heads, TILE), rows),
        num_warps=4,
        HEADS=heads,
        TILE=TILE,
        CHUNK=CHUNK,
    )
    starts = decays  # of no use where no row is longer than a segment
    if segments > 1:
        starts, totals = jax_triton.call(
            *(kernels.added_kernel, xBC, decays, lengths, sizes),
            outputs=[_float32(rows, heads, segments, words), _float32(rows, heads, segments)],
            grid=(heads, segments - 1, rows),
            num_warps=4,
            num_stages=2,
            **shapes,
        )
        (starts,) = jax_triton.call(
            *(kernels.starts_kernel, starts, arena, read, exists, totals, lengths, sizes),
            in_place=[0],
            grid=(cdiv(words, BLOCK), heads, rows),
            num_warps=4,
            HEADS=heads,
            WORDS=words,
            SEGMENT=segment,
            BLOCK=BLOCK,
            AHEAD=AHEAD,
            **frames,
        )
    arena, y = jax_triton.call(
        *(kernels.scan_kernel, arena, read, write, exists, xBC, A if D is None else D),
        *(decays, starts, lengths, state_lengths, sizes),
        outputs=[jax.ShapeDtypeStruct((rows, tokens, records.inner_size), xBC.dtype)],
        in_place=[0],
        grid=(heads, segments, rows),
        num_warps=4,
        num_stages=2,
        SKIPS=D is not None,
        CUT=segments > 1,
        **shapes,
        **frames,
    )
    return y, arena


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
