"""Two engines, one of which computes prompts for the other, driven like one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hybrid_jax.cluster.prefill import comes_from_elsewhere, prefix_request
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.schedule.request import NewTokens, Request
from hybrid_jax.tiers.chain import root_of
from hybrid_jax.tiers.hand_over import HandOver, Receiver, Sender
from tests.exactness.engines import make_engine


class Pair:
    """As much of `Engine` as `drive` needs.

    Args:
        settings: of the engine that goes on. other: what the one that computes prompts has otherwise.
        fails_at: the n-th prompts, from 0, whose engine fails in the middle.

    Attributes:
        prefill, decode: the engines. shared: between them.
        handed_over: prompts that came that way. failed: prompts that did not, because their engine failed.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        settings: EngineConfig,
        *,
        room: float,
        other: dict | None = None,
        fails_at: tuple[int, ...] = (),
        **tiers,
    ) -> None:
        self.shared = HandOver(root_of("pair"))
        self.prefill = make_engine(
            config,
            params,
            replace(settings, **other or {}),
            room=room,
            side=partial(Sender, self.shared),
        )
        self.decode = make_engine(
            config, params, settings, room=room, side=partial(Receiver, self.shared), **tiers
        )
        self.grain = max(self.prefill.geometry.grain, self.decode.geometry.grain)
        self._names: dict[str, str] = {}  # of promises, by request
        self._fails_at, self._count = fails_at, 0
        self.handed_over = self.failed = 0

    def add(self, request: Request) -> None:
        position = comes_from_elsewhere(request, self.grain)
        if position:
            asked = prefix_request(request, position, self.prefill.engine_config.prefill_tokens)
            self._names[request.request_id] = self.shared.promise(request.tokens, position)
            self.prefill.add(asked)
        self.decode.add(request)

    def step(self) -> list[NewTokens]:
        for new in self.prefill.step():
            if new.finished:
                self._end_prefix(new.request)
        news = self.decode.step()
        for new in news:
            if (name := self._names.pop(new.request.request_id, None)) is not None:
                self.handed_over += new.request.hit.num_tokens > 0
                self.shared.take_back(name)
        return news

    def _end_prefix(self, request: Request) -> None:
        """A prompt is computed: what waits to be handed over goes, and what did not come by then never will."""
        while self.prefill.has_saves:
            self.prefill.step()
        if (name := self._names.get(request.request_id)) is not None:
            self.prefill.disk.settle(name)

    def abort(self, request_id: str) -> None:
        self.decode.abort(request_id)
        self.prefill.abort(request_id)
        if (name := self._names.pop(request_id, None)) is not None:
            self.shared.take_back(name)

    @property
    def has_work(self) -> bool:
        return self.decode.has_work or self.prefill.has_work

    @property
    def scheduler(self):
        return self.decode.scheduler

    def stats(self) -> dict:
        return self.decode.stats()

    def reset_prefix_cache(self) -> None:
        self.decode.reset_prefix_cache()
