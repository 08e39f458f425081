"""The fake engine with a real scheduler, and with it a real prefix cache. Only the device is missing."""

from __future__ import annotations

import time

from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.virtual_engine import FRAME_BYTES, VirtualEngine
from tests.api.fake_engine import FakeEngine, StepOutput

# A page of 16 tokens fills a frame, and a checkpoint takes 2.
KV = FRAME_BYTES // 16
COSTS = Costs(flops_per_token=10**9, flops_per_key=0, kv_bytes=KV, checkpoint_bytes=32 * KV)
FRAMES = 90  # so few that prefixes are evicted again and again


def said(prompt, sample: int, count: int) -> list[int]:
    """The first tokens of an answer. They tell prompts and completions apart."""
    text = FakeEngine.script
    return [text[(sum(prompt) + 7 * sample + index) % len(text)] for index in range(count)]


class TreeEngine(FakeEngine):
    """Says what `said` gives."""

    def __init__(self, config, params, engine_config, *args, **kwargs):
        super().__init__(config, params, engine_config, *args, **kwargs)
        virtual = VirtualEngine(COSTS, COSTS, engine_config, FRAMES * FRAME_BYTES, None)
        self.scheduler = virtual.scheduler
        self.geometry = self.scheduler.geometry

    @property
    def tree(self):
        return self.scheduler.memory.tree

    def watch_cache(self, watcher):
        self.tree.watch(watcher)

    def add(self, request):
        super().add(request)
        self.scheduler.add(request)

    def abort(self, request_id):
        if request_id in self.requests:
            self.scheduler.abort(request_id)
        super().abort(request_id)

    def step(self):
        self.num_steps += 1
        time.sleep(self.pause)
        plan = self.scheduler.plan()
        if not plan:
            return []
        for row in (*plan.prefill, *plan.forks):
            row.new_tokens = self.following(row.request, row.most_tokens)
        for row in plan.decode:
            done = row.position + 1 - len(row.request.prompt)
            row.new_tokens = self.following(row.request, row.num_tokens, done)
        results = []
        for new in self.scheduler.receive(plan):
            if new.finished:
                del self.requests[new.request.request_id]
            results.append(StepOutput(new.request, new.new_token_ids, [], new.finished))
        return results

    def following(self, request, count, done=None):
        """The tokens after the first `done` ones, or after all that are known."""
        done = len(request.output.token_ids) if done is None else done
        return said(request.prompt, request.sample_index, done + count)[done:]

    def reset_prefix_cache(self):
        self.scheduler.reset_prefix_cache()

    def close(self):
        for request_id in list(self.requests):
            self.abort(request_id)
        self.scheduler.check_invariants()
