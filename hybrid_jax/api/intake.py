"""Turns prompts, conversations and parameters, as callers give them, into jobs, and checks them on the way."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybrid_jax.api.completions import Job, derive_seed
from hybrid_jax.api.engine_thread import EngineThread
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.constraints import Constraints
from hybrid_jax.engine.pack import MAX_STOP_IDS
from hybrid_jax.schedule.request import Pooling
from hybrid_jax.text.conversation import (
    ROLES,
    Conversation,
    ConversationError,
    are_several,
    check_rendered,
    check_roles,
    message_ends,
    read_messages,
    template_options,
)
from hybrid_jax.text.prompts import (
    TOKENIZER_REMEDY,
    Prompt,
    Prompts,
    check_unicode,
    leading_tokens,
    pair_params,
    read_prompts,
)
from hybrid_jax.text.tokenizer import Tokenizer

LOG = logging.getLogger("hybrid_jax.requests")


class TooLong(ValueError):
    """A prompt and its completion together exceed the longest sequence that model and memory allow."""


class Intake:
    """Finds all mistakes of a caller before the engine is involved, and numbers the requests. Threads may share it.

    Args:
        config, engine_config: of the model and its engine.
        tokenizer: None for a model that came without one.
        defaults: the parameters of prompts that come without any; the temperature is None if the model names none.
        thread: of the engine.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine_config: EngineConfig,
        tokenizer: Tokenizer | None,
        defaults: SamplingParams,
        thread: EngineThread,
    ) -> None:
        self.tokenizer, self.defaults, self.num_requests = tokenizer, defaults, 0
        self._numbering, self._thread = threading.Lock(), thread
        self._config, self._seed = config, engine_config.seed
        self._constraints = Constraints(tokenizer, config)

    def jobs(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        logprobs_from: Sequence[int] | None = None,
        pooling: Pooling | None = None,
    ) -> list[Job]:
        """One job per prompt, each with the next request id. The arguments are those of `_jobs`.

        Raises:
            As `_jobs`.
        """
        try:
            return self._jobs(prompts, params, logprobs_from, pooling)
        except ValueError as error:
            LOG.info("refused: %s", error)
            raise

    def _jobs(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        logprobs_from: Sequence[int] | None,
        pooling: Pooling | None,
    ) -> list[Job]:
        """One job per prompt.

        Args:
            prompts, params: as in `LLM.generate`.
            logprobs_from, pooling: as in `Request`, the first of them for each prompt.

        Raises:
            ValueError: something is wrong with a prompt or its parameters. No request has been numbered.
            RuntimeError: the engine is closed.
        """
        engine = self._thread.engine
        read = read_prompts(prompts, self.tokenizer, vocab_size=self._config.vocab_size)
        paired = pair_params(params, len(read), self.defaults)
        complete = {id(own): self.complete(own) for own in paired}  # often there is one for all
        makers = []  # what is checked becomes a job once it has a number
        for index, (prompt, given) in enumerate(zip(read, paired, strict=True)):
            own = complete[id(given)]
            if own.stop and self.tokenizer is None:
                raise ValueError(
                    f"prompt {index}: stop strings need a tokenizer, which this model lacks; "
                    "use stop_token_ids"
                )
            max_tokens = resolve_max_tokens(
                index,
                len(prompt.token_ids),
                own,
                engine.max_model_len,
                default=self.defaults.max_tokens,
            )
            stop_ids = resolve_stop_ids(index, own, self._config)
            limits = self._constraints.limits(index, own, stop_ids)
            make = functools.partial(
                Job,
                index=index,
                prompt=prompt,
                params=own,
                tokenizer=self.tokenizer,
                stop_ids=stop_ids,
                max_tokens=max_tokens,
                limits=limits,
                compile_seconds=engine.compile_seconds,
                peak_memory_bytes=engine.peak_memory_bytes,
                logprobs_from=1 if logprobs_from is None else logprobs_from[index],
                pooling=pooling,
            )
            makers.append(make)
        with self._numbering:
            first = self.num_requests
            self.num_requests += len(makers)
        return [
            make(str(number), seed=derive_seed(self._seed, number))
            for number, make in enumerate(makers, start=first)
        ]

    def complete(self, params: SamplingParams) -> SamplingParams:
        """The parameters for the engine. A temperature that is not given becomes the model's own, or 1.0."""
        if params.temperature is not None:
            return params
        return replace(params, temperature=self.defaults.engine_temperature)

    def conversations(
        self,
        messages: Conversation | Sequence[Conversation],
        *,
        cache_breakpoints: Sequence[int] | None = None,
        **template: Any,
    ) -> list[Prompt]:
        """A conversation, or a list of them, as prompts. The other arguments are those of `conversation`.

        Raises:
            ConversationError: a conversation cannot become a prompt.
        """
        options = template_options(**template)
        if not are_several(messages):
            return [self._prompt(messages, cache_breakpoints, options)]
        prompts = []
        for index, conversation in enumerate(messages):
            try:
                prompts.append(self._prompt(conversation, cache_breakpoints, options))
            except ConversationError as error:
                error.conversation = index
                raise
        return prompts

    def conversation(
        self,
        messages: Conversation,
        *,
        cache_breakpoints: Sequence[int] | None = None,
        **template: Any,
    ) -> Prompt:
        """One conversation as a prompt.

        Args:
            messages: of the conversation.
            cache_breakpoints: indices of messages after which other conversations will go on differently; None for
                the system messages at the beginning.
            template: as in `template_options`.

        Raises:
            ConversationError: it is not a conversation, the template refuses it, or there is no such message.
        """
        return self._prompt(messages, cache_breakpoints, template_options(**template))

    def _prompt(
        self, messages: Any, cache_breakpoints: Sequence[int] | None, options: dict[str, Any]
    ) -> Prompt:
        read = read_messages(messages)
        if self.tokenizer is None:
            raise ConversationError(
                "this model came without a tokenizer.json, so without a template; "
                f"{TOKENIZER_REMEDY}",
                code="chat_template",
            )
        text = _render(self.tokenizer, read, options)
        try:
            check_unicode("the conversation", text)
        except ValueError as error:
            raise ConversationError(str(error)) from None
        # The template has written the special tokens already.
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        ends = message_ends(
            self.tokenizer.apply_chat_template, read, cache_breakpoints, text, options
        )
        return Prompt(text, token_ids, leading_tokens(self.tokenizer, text, token_ids, ends))


def _render(tokenizer: Tokenizer, messages: Conversation, options: dict[str, Any]) -> str:
    """The text of a conversation. The template must know its roles and leave out none of its messages."""
    try:
        if any(message["role"] not in ROLES for message in messages):
            template, tools = options["chat_template"], options["tools"]
            quoted = tokenizer.quoted_in_template(template, with_tools=tools is not None)
            check_roles(messages, quoted)
        text = tokenizer.apply_chat_template(messages, **options)
        check_rendered(messages, text)
        return text
    except ConversationError:
        raise
    except Exception as error:  # a template is a program, which runs on what the caller wrote
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        text = f"{kind}{error}".removeprefix("chat template: ")
        raise ConversationError(f"chat template: {text}", code="chat_template") from error


def resolve_stop_ids(index: int, params: SamplingParams, config: ModelConfig) -> frozenset[int]:
    """The token ids that end a completion: the caller's, and the model's own unless they are ignored.

    Args:
        index: of the prompt, for messages.
        params, config: of the request and of the model.

    Raises:
        ValueError: there are more than the engine supports.
    """
    eos_ids = () if params.ignore_eos else config.eos_token_ids
    stops = frozenset((*eos_ids, *(params.stop_token_ids or ())))
    if len(stops) > MAX_STOP_IDS:
        raise ValueError(
            f"prompt {index}: at most {MAX_STOP_IDS} stop token ids are supported, the "
            f"model's own included, got {len(stops)}"
        )
    return stops


def resolve_max_tokens(
    index: int,
    prompt_len: int,
    params: SamplingParams,
    max_model_len: int,
    default: int | None = None,
) -> int:
    """The most tokens of a completion: what was asked for, or all that fit after the prompt.

    Args:
        index: of the prompt, for messages.
        prompt_len, max_model_len: lengths in tokens.
        params: of the request.
        default: the model's own `max_tokens`. If just that is asked for and does not fit, it is lowered.

    Raises:
        TooLong: no token fits, or fewer than `max_tokens` or `min_tokens` ask for.
    """
    room = max_model_len - prompt_len
    if room < 1:
        raise TooLong(
            f"prompt {index}: has {prompt_len} tokens and needs room for one more, but the longest "
            f"sequence is {max_model_len}; shorten it, or raise max_model_len or memory"
        )
    if params.min_tokens > room:
        raise TooLong(
            f"prompt {index}: {prompt_len} tokens and min_tokens={params.min_tokens} exceed the "
            f"longest sequence of {max_model_len}; lower min_tokens to {room} at most"
        )
    if params.max_tokens is None or params.max_tokens == default:
        return min(room, params.max_tokens or room)
    if params.max_tokens > room:
        raise TooLong(
            f"prompt {index}: {prompt_len} tokens and max_tokens={params.max_tokens} exceed the "
            f"longest sequence of {max_model_len}; lower max_tokens to {room} or leave it out"
        )
    return params.max_tokens
