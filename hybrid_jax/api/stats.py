"""What `LLM.stats()` returns: numbers by name, with a sentence for each, in groups."""

from __future__ import annotations

import re
from typing import Any

from hybrid_jax.byte_sizes import format_size
from hybrid_jax.display import html_table

# The meaning of each number, by heading and name. Counters count since the start; sizes, and what says "now", are those
# of this moment.
MEANINGS: dict[str, dict[str, str]] = {
    "Requests and tokens": {
        "requests": "prompts so far, those of `score` and `embed` too",
        "replicas": "engines that answer, now; all other numbers are sums over them",
        "prompt_tokens": "prompt tokens of finished requests",
        "cached_tokens": "how many of these came from the prefix cache",
        "generated_tokens": "new tokens of finished requests; one for each prompt of `score` and `embed`",
        "running": "sequences with a row, now",
        "waiting": "sequences that wait for a row, now",
    },
    "Steps": {
        "plans": "plans made, each for one turn of the engine",
        "prefill_rows": "chunks of prompts that were computed",
        "prefill_tokens": "tokens of these chunks",
        "decode_rows": "rows in decode dispatches",
        "decode_steps": "steps planned for these rows",
        "forks": "completions that started after a prompt that a sibling had computed",
        "copies": "pages copied because a row goes on inside a shared one",
        "moves": "rows moved to keep the batch without gaps",
        "preemptions": "sequences sent back to the queue because memory ran out",
        "waits": "times a request waited for a checkpoint that another one was computing",
        "restarts": "times the engine lost its device memory and started all requests again",
        "num_traces": "programs traced, to be compiled",
        "compile_s": "seconds in which the engine waited for the compiler, or for programs to load",
    },
    "Memory": {
        "memory_bytes": "bytes of arena, rings and tables",
        "peak_memory_bytes": "the most memory the process ever had, as in `RequestMetrics`",
        "num_frames": "frames of the arena",
        "free_frames": "free frames, now",
        "page_frames": "frames that hold keys and values, now",
        "checkpoint_frames": "frames that hold recurrent states, now",
        "live_page_frames": "frames with keys and values of running sequences, now",
        "live_checkpoint_frames": "frames with states of running sequences, now",
        "peak_live_frames": "the most frames that running sequences ever held",
        "checkpoints": "checkpoints, cached or not, now",
        "folds_in_place": "folds that overwrote the row's own checkpoint",
        "folds_to_new": "folds into a new checkpoint",
        "narrowed_checkpoints": "checkpoints that the cache took as int8",
        "widened_checkpoints": "checkpoints kept as int8 that a request went on from",
        "narrow_without_room": "checkpoints that the cache would have taken as int8, but for room",
        "memory_shortages": "times a request could not get its memory even if the whole cache were evicted",
    },
    "Prefix cache: what it did": {
        "cache_lookups": "prompts looked up",
        "cache_lookup_tokens": "their tokens",
        "cache_hits": "look-ups that resumed after a prefix",
        "cache_hit_tokens": "tokens skipped by these",
        "cache_token_hit_rate": "tokens skipped per token looked up",
        "cache_cached_tokens": "tokens looked up whose keys and values were cached",
        "cache_lost_tokens": "how many of these were computed all the same, because no checkpoint stood there",
        "cache_inserted_checkpoints": "checkpoints put into the cache",
        "cache_inserted_tokens": "tokens whose pages were put into the cache",
        "cache_leaf_evictions": "nodes evicted whole",
        "cache_tombstone_evictions": "checkpoints evicted alone, while their pages stayed",
        "cache_expected_evictions": "evictions of either sort that a waiting prompt would have used",
        "cache_disowned_checkpoints": "checkpoints that the cache gave back so that their row could fold in place",
        "cache_pruned_nodes": "spans forgotten that were known but not cached",
        "evicted_page_frames": "frames with keys and values that evictions freed",
        "evicted_checkpoint_frames": "frames with states that evictions freed",
    },
    "Prefix cache: what it holds now": {
        "cache_nodes": "nodes of the tree",
        "cached_frames": "frames of the cache",
        "cached_page_frames": "those that hold keys and values",
        "cached_page_bytes": "bytes of cached keys and values",
        "cached_checkpoints": "checkpoints in the cache",
        "cached_checkpoint_bytes": "bytes of these checkpoints",
    },
    "Tier in the host's memory": {
        "host_num_frames": "frames that the host's memory keeps at most",
        "host_free_frames": "free frames there, now",
        "host_checkpoints": "checkpoints there, now",
        "host_bytes": "bytes of what is there, now",
        "host_saves": "prefixes that were copied there when the cache evicted them",
        "host_saved_frames": "frames copied for them",
        "host_saves_dropped": "evicted prefixes that were too much for one plan to copy",
        "host_saves_without_room": "evicted prefixes that did not fit there",
        "host_loads": "prefixes that were copied back because a prompt went on from them",
        "host_loaded_frames": "frames copied for them",
        "host_loaded_tokens": "tokens of these that the cache did not have itself",
        "host_hit_tokens": "how many of these tokens prompts skipped; `cache_hit_tokens` has them, too",
        "host_loads_without_room": "prefixes there that a prompt could have used, but for room to copy them back",
        "host_loads_slower": "prefixes there that were computed all the same, because that takes less time",
    },
    "Tier on disk": {
        "disk_files": "files there of this model, now",
        "disk_bytes": "bytes of all files there, now",
        "disk_saves": "prefixes that were written",
        "disk_saved_bytes": "bytes written for them; what prefixes share is written once",
        "disk_saves_dropped": "prefixes not written: evicted first, too many at once, or their copies failed",
        "disk_saves_slower": "prefixes that were not written, because to compute them takes less time",
        "disk_writes_failed": "whether an error of the system, such as a full disk, has ended writing: 0 or 1",
        "disk_loads": "prefixes that were read because a prompt went on from them",
        "disk_loaded_bytes": "bytes read for them",
        "disk_loaded_tokens": "tokens of these that the cache did not have itself",
        "disk_hit_tokens": "how many of these tokens prompts skipped; `cache_hit_tokens` has them, too",
        "disk_loads_failed": "prefixes that could not be read, because a file was damaged or gone",
        "disk_loads_without_room": "prefixes that were read, but there was no room for them",
        "disk_loads_slower": "prefixes there that were computed all the same, because that takes less time",
    },
    "Prompts that other replicas compute": {
        "handed_over_prefixes": "prefixes that came from a replica that computes prompts",
        "handed_over_bytes": "bytes of these",
        "handed_over_tokens": "tokens of these that the cache did not have itself",
        "handed_over_failed": "prefixes that did not come as promised, and were computed here",
    },
    "Speculation": {
        "verifications": "rows of steps that judged drafts",
        "draft_tokens": "draft tokens that were judged",
        "accepted_draft_tokens": "draft tokens that became output",
        "tokens_per_verification": "new tokens of such a row in one step",
        "host_drafting_s": "seconds that the host spent on drafting",
        "drafting_share": "share of the decoding time that drafting takes, estimated",
    },
}
OTHER = "Other"  # what has no words yet
ACCEPTED = re.compile(r"accepted_at_(\d+)")


class Stats(dict[str, Any]):
    """Numbers by name. As text, and in a notebook, they stand in groups, each with its meaning.

    Example:
        >>> print(Stats(requests=2, cache_hits=1))
        Requests and tokens
          requests              2  prompts so far, those of `score` and `embed` too
        Prefix cache: what it did
          cache_hits            1  look-ups that resumed after a prefix
    """

    def groups(self) -> dict[str, list[tuple[str, str, str]]]:
        """Name, value and meaning of each number that is there, by heading."""
        found: dict[str, list[tuple[str, str, str]]] = {
            heading: [] for heading in (*MEANINGS, OTHER)
        }
        known = {name: (head, words) for head, of in MEANINGS.items() for name, words in of.items()}
        for name in sorted(self, key=[*known, *self].index):
            if place := ACCEPTED.fullmatch(name):
                words = f"drafts accepted in place {place[1]} after the row's own token"
                heading = "Speculation"
            else:
                heading, words = known.get(name, (OTHER, ""))
            found[heading].append((name, shown(name, self[name]), words))
        return {heading: rows for heading, rows in found.items() if rows}

    def __str__(self) -> str:
        lines = []
        for heading, rows in self.groups().items():
            lines.append(heading)
            name, value = (max(len(row[part]) for row in rows) for part in (0, 1))
            lines += [
                f"  {row[0]:<{max(name, 14)}}  {row[1]:>{max(value, 7)}}  {row[2]}" for row in rows
            ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return "".join(
            f"<details open><summary>{heading}</summary>{html_table(rows)}</details>"
            for heading, rows in self.groups().items()
        )


def shown(name: str, value: Any) -> str:
    """A number as people read it."""
    if value is None:
        return "unknown"
    if name.endswith("_bytes"):
        return format_size(value)
    if name.endswith(("_rate", "_share")):
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
