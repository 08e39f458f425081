"""An engine without a model: it continues every prompt with a script, through the real interface."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import jax
import numpy as np

from hybrid_jax.cache.tree.node import Node
from hybrid_jax.config import XLA, Attention, ModelConfig, residual_layer
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.costs import Costs
from hybrid_jax.engine.programs.compiling import WarmUp
from hybrid_jax.engine.this_device import peak_memory_bytes
from hybrid_jax.schedule.request import Request, TokenLogprobs
from hybrid_jax.sizing.devices import Device

EOS = 0
SCRIPT = "The quick brown fox jumps over the lazy dog. "
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
CONFIG = ModelConfig(
    family="llama",
    vocab_size=256,
    width=8,
    layers=(residual_layer(mixers=(Attention(num_heads=1, num_kv_heads=1, head_dim=8),)),),
    max_position=200,
    eos_token_ids=(EOS,),
)


def texts(outputs):
    """The first text of each output."""
    return [output.outputs[0].text for output in outputs]


@dataclass
class StepOutput:
    request: Request
    new_token_ids: list
    new_logprobs: list = field(default_factory=list)
    finished: bool = False


class FakeEngine:
    """Says `script` (bytes), starting over at its end; prompts seen before hit up to the last grain."""

    script = SCRIPT.encode()
    max_len = 200
    own_settings = staticmethod(contextlib.nullcontext)
    whole = staticmethod(lambda params: params)

    def __init__(
        self,
        config,
        params,
        engine_config,
        store=None,
        devices=None,
        sharing=1,
        side=None,
        hosts=None,
    ):
        self.hosts = hosts
        self.config, self.engine_config = config, engine_config
        self.max_model_len = min(engine_config.max_model_len or self.max_len, self.max_len)
        self.longest_prompt = self.max_model_len
        self.requests: dict[str, Request] = {}
        self.added: list[Request] = []
        self.aborted: list[str] = []
        self.seen: set[tuple[int, ...]] = set()
        self.raises: BaseException | None = None
        self.raises_for: tuple[bytes, Exception] | None = None  # a prompt, and what comes of it
        self.num_steps = 0
        self.compiled = self.pause = 0.0  # seconds; the latter of each step
        self.listed = {}
        self.sizes = SimpleNamespace(
            host_frames=0,
            host_bytes=0,
            arena_bytes=3 << 20,
            num_frames=7,
            ring_bytes=2048,
            table_bytes=64,
            max_slots=5,
            logits_bytes=4096,
            adjust_bytes=512,
            total_bytes=5 << 20,
        )
        self.device, self.disk = Device(num_bytes=1 << 30), None
        self.backend, self.about_loops = XLA, ""
        self.not_triton, self.left_to_xla, self.about_disk = {}, {}, ""
        self.about_products = ""
        root = Node(np.zeros(0, np.int32), 0)
        root.children[97] = Node(np.int32([97, 98]), 0, parent=root)
        tree = SimpleNamespace(root=root)
        off = engine_config.cache.policy == "off"
        memory = SimpleNamespace(tree=None if off else tree, below=None, on_disk=None)
        costs = Costs(flops_per_token=1e6, flops_per_key=0, kv_bytes=1, checkpoint_bytes=1)
        self.scheduler = SimpleNamespace(memory=memory, costs=costs)
        self.geometry = SimpleNamespace(grain=engine_config.grain, has_state=True)

    def watch_cache(self, watcher):
        """Nothing ever changes."""

    def order(self, prompts):
        return list(range(len(prompts)))

    def add(self, request):
        if len(request.prompt) + request.max_tokens > self.max_model_len + request.reads_only:
            raise ValueError(f"request of {len(request.prompt)} tokens can never fit")
        if request.prompt[:1] == [255]:
            raise ValueError("the engine refuses byte 255")
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self.added.append(request)

    def abort(self, request_id):
        if self.requests.pop(request_id, None) is None:
            return
        self.aborted.append(request_id)

    has_saves = False

    @property
    def has_work(self):
        return bool(self.requests)

    def step(self):
        self.num_steps += 1
        time.sleep(self.pause)
        if self.raises is not None and self.num_steps >= 2:
            error, self.raises = self.raises, None
            raise error
        prompts = [bytes(request.prompt) for request in self.requests.values()]
        if self.raises_for is not None and self.raises_for[0] in prompts:
            raise self.raises_for[1]
        results = []
        for request in list(self.requests.values())[: self.engine_config.max_rows]:
            if not request.output.token_ids:
                key, grain = tuple(request.prompt), self.engine_config.grain
                if key in self.seen:
                    request.hit.num_tokens = (len(key) - 1) // grain * grain
                self.seen.add(key)
            new = []
            while (
                len(new) < self.engine_config.steps_per_dispatch
                and not request.output.finish_reason
            ):
                new.append(self.next_token(request))
                request.output.token_ids.append(new[-1])
                request.output.logprobs.append(self.logprobs(request, new[-1]))
                if new[-1] in request.stop_ids:
                    request.output.finish_reason = "stop"
                    if new[-1] not in self.config.eos_token_ids:
                        request.output.stop_reason = new[-1]
                elif len(request.output.token_ids) == request.max_tokens:
                    request.output.finish_reason = "length"
            finished = request.output.finish_reason is not None
            if finished:
                del self.requests[request.request_id]
            results.append(StepOutput(request, new, request.output.logprobs[-len(new) :], finished))
        return results

    def next_token(self, request):
        text = self.script
        return text[(len(request.output.token_ids) + 4 * request.sample_index) % len(text)]

    def logprobs(self, request, token):
        if request.params.logprobs is None:
            return None
        best = [(token, -0.25), (token ^ 1, -2.0), (token ^ 2, -3.0)][: request.params.logprobs]
        return TokenLogprobs(token_id=token, logprob=-0.25, rank=1, top=tuple(best))

    def stats(self):
        return {"engine_steps": self.num_steps}

    def reset_prefix_cache(self):
        self.seen.clear()

    def warm_ups(self, *, logprobs=False, adjusts=False):
        self.listed[logprobs, adjusts] = [WarmUp("a program", lambda: None)] * 3
        return self.listed[logprobs, adjusts]

    keeps_programs = True

    def watch_compiling(self, listener):
        self.listener = listener

    def expect_everything(self):
        self.expects_everything = True

    def compile_seconds(self):
        return self.compiled

    def peak_memory_bytes(self):
        return peak_memory_bytes(jax.devices()[0])

    def close(self):
        self.requests.clear()

    def describe(self):
        return "a fake engine"
