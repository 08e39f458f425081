"""Turns prompts, conversations and parameters, as callers give them, into jobs, and checks them on the way."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from hybrid_jax.api.completions import Job, derive_seed
from hybrid_jax.api.threads.front import Front
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.constraints import Constraints
from hybrid_jax.engine.pack import MAX_STOP_IDS
from hybrid_jax.process.ending import pool_of_threads
from hybrid_jax.schedule.request import Pooling
from hybrid_jax.text.conversation import (
    READ,
    ROLES,
    Conversation,
    ConversationError,
    are_several,
    check_rendered,
    check_roles,
    message_ends,
    read_messages,
    take_marks,
    template_options,
    thoughts_cut,
    unread_fields,
)
from hybrid_jax.text.prompts import (
    OR_RAISE,
    TOKENIZER_REMEDY,
    Prompt,
    PromptLike,
    Prompts,
    TooLong,
    check_length,
    check_unicode,
    leading_tokens,
    pair_params,
    read_prompt,
    several_prompts,
)
from hybrid_jax.text.templates import variables_read
from hybrid_jax.text.thoughts import Thoughts, thoughts_of_chat
from hybrid_jax.text.tokenizer import Tokenizer

LOG = logging.getLogger("hybrid_jax.requests")
# Tokens of a conversation that is rendered and not run, if the engine takes fewer.
MAX_SHOWN = 1 << 18
MAX_TEMPLATES = 64  # that are remembered
# What becomes of the mistake of one prompt of several: it is raised, or returned in place of what was asked for.
Errors = Literal["raise", "return"]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, not tokenized yet.

    Attributes:
        text: what its template made.
        ends: where messages end with which other conversations begin too, and where thoughts that are cut begin, in
            characters.
        thoughts: as in `Prompt`.
    """

    text: str
    ends: tuple[int, ...]
    thoughts: Thoughts | None


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
        thread: Front,
    ) -> None:
        self.tokenizer, self.defaults, self.num_requests = tokenizer, defaults, 0
        self._numbering, self._thread = threading.Lock(), thread
        self._config, self._seed = config, engine_config.seed
        self._constraints = Constraints(tokenizer, config)
        self._with_tools: set[str] = set()  # templates that were rendered with tools
        self._tokenizing = pool_of_threads(1, "hybrid_jax-tokenize")

    def jobs(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Job]:
        """One job per prompt, each with the next request id.

        Args:
            prompts, params: as in `LLM.generate`.

        Raises:
            ValueError: something is wrong with a prompt or its parameters. No request has been numbered.
            RuntimeError: the engine is closed.
        """
        return [job for job in self.accepted(prompts, params) if isinstance(job, Job)]

    def later_jobs(
        self,
        prompts: Prompts | Sequence[Rendered],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[Callable[[], list[Job]], Executor | None]:
        """As `jobs`, for callers that must not wait: what makes the jobs, and where. Their request ids are taken now.

        Prompts are taken as they are now. Texts are tokenized one after the other, so requests keep their order. A
        new form may take seconds to be tried, and is tried beside them: then there is no executor.

        Raises:
            ValueError: something is wrong that can be seen without tokenizing a text. RuntimeError: as `jobs`.
        """
        self._thread.check()
        listed = [self._held(*given) for given in enumerate(several_prompts(prompts))]
        paired = pair_params(params, len(listed), self.defaults)
        numbers = self._numbers(len(listed))

        def make() -> list[Job]:
            try:
                found = self.accepted(listed, paired, numbers=numbers)
            except ValueError:  # the next request has the number that it would have had
                with self._numbering:
                    if self.num_requests == numbers.stop:
                        self.num_requests = numbers.start
                raise
            return [job for job in found if isinstance(job, Job)]

        tries = any(self._constraints.must_try(own) for own in paired)
        return make, None if tries else self._tokenizing

    def _held(self, index: int, given: Any) -> Any:
        """A prompt that its caller can no longer change. Only texts are not read yet."""
        held = dict(given) if isinstance(given, Mapping) else given
        text = held.get("prompt") if isinstance(held, dict) else held
        if isinstance(text, str | Rendered):
            return held
        return read_prompt(index, held, self.tokenizer, self._config.vocab_size)

    def accepted(
        self,
        prompts: Prompts | Sequence[PromptLike | Rendered | Exception],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        logprobs_from: Sequence[int] | None = None,
        pooling: Pooling | None = None,
        errors: Errors = "raise",
        numbers: Sequence[int] | None = None,
    ) -> list[Job | Exception]:
        """One job per prompt, as `jobs`, or with errors="return" what is wrong with the prompt.

        Args:
            prompts, params: as in `LLM.generate`. A prompt that has failed already is given as its error.
            logprobs_from, pooling: as in `Request`, the first of them for each prompt. If one is given, nothing is
                generated.
            errors: "raise" or "return".
            numbers: for request ids; None for the next ones.

        Raises:
            As `jobs`. With errors="return" only what concerns no single prompt.
        """
        check_errors(errors)
        self._thread.check()
        listed = several_prompts(prompts)
        paired = pair_params(params, len(listed), self.defaults)
        complete = {id(own): self.complete(own) for own in paired}  # often there is one for all
        found: list[functools.partial[Job] | Exception] = []
        for index, (prompt, given) in enumerate(zip(listed, paired, strict=True)):
            first = None if logprobs_from is None else logprobs_from[index]
            try:
                if isinstance(prompt, Exception):
                    raise prompt
                own = complete[id(given)]
                found.append(self._maker(index, prompt, own, first, pooling))
            except ValueError as error:
                refusal = self._advised(error)
                LOG.info("refused: %s", str(refusal))
                if errors == "raise":
                    raise refusal from error.__cause__
                found.append(refusal)
        if numbers is None:
            numbers = self._numbers(sum(not isinstance(make, Exception) for make in found))
        left = iter(numbers)
        return [
            make
            if isinstance(make, Exception)
            else make(str(number := next(left)), seed=derive_seed(self._seed, number))
            for make in found
        ]

    def _advised(self, error: ValueError) -> ValueError:
        """An error whose advice helps: where the model itself takes no more, no setting does."""
        at_most = self._thread.facts.max_model_len >= self._config.max_position
        if at_most and isinstance(error, TooLong):
            return TooLong(str(error).replace(OR_RAISE, ""))
        return error

    def _maker(
        self,
        index: int,
        given: PromptLike | Rendered,
        params: SamplingParams,
        logprobs_from: int | None,
        pooling: Pooling | None,
    ) -> functools.partial[Job]:
        """What makes a job of a prompt, which has been checked, once it has a number."""
        facts = self._thread.facts
        reads_only = logprobs_from is not None or pooling is not None
        longest = facts.longest_prompt if reads_only else facts.max_model_len
        if isinstance(given, Rendered):
            given = self._tokenized(given)
        prompt = read_prompt(index, given, self.tokenizer, self._config.vocab_size, longest)
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"prompt {index}: stop strings need a tokenizer, which this model lacks; "
                "use stop_token_ids"
            )
        prompt_len, max_tokens = len(prompt.token_ids), 1
        if reads_only:
            check_fits(index, prompt_len, longest)
        else:
            max_tokens = resolve_max_tokens(
                index,
                prompt_len,
                params,
                longest,
                default=self.defaults.max_tokens,
            )
        stop_ids = resolve_stop_ids(index, params, self._config)
        limits = self._constraints.limits(index, params, stop_ids, prompt.thoughts)
        return functools.partial(
            Job,
            index=index,
            prompt=prompt,
            params=params,
            tokenizer=self.tokenizer,
            stop_ids=stop_ids,
            max_tokens=max_tokens,
            limits=limits,
            logprobs_from=logprobs_from or 1,
            pooling=pooling,
            reads_only=reads_only,
        )

    def ordered(self, prompt: Prompt, params: SamplingParams, **rest: Any) -> Job:
        """A job of a prompt and parameters that another process has checked; the other arguments are those of `Job`.

        Raises:
            ValueError: what limits its tokens is not known here, such as a grammar without llguidance.
        """
        limits = self._constraints.limits(rest["index"], params, rest["stop_ids"], prompt.thoughts)
        return Job(prompt=prompt, params=params, tokenizer=self.tokenizer, limits=limits, **rest)

    def _numbers(self, count: int) -> range:
        """The numbers of so many requests more."""
        with self._numbering:
            first = self.num_requests
            self.num_requests += count
        return range(first, first + count)

    def foresee(self, params: SamplingParams) -> None:
        """As `Constraints.foresee`."""
        self._constraints.foresee(params)

    def close(self) -> None:
        """As `Constraints.close`. Texts that wait are refused by the engine's thread."""
        self._constraints.close()
        self._tokenizing.shutdown(wait=False)

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
        errors: Errors = "raise",
        **template: Any,
    ) -> list[Any]:
        """A conversation, or a list of them, as texts. The other arguments are those of `conversation`.

        Raises:
            As `conversation`. With errors="return" what is wrong with a conversation stands in place of its text.
        """
        check_errors(errors)
        options = template_options(**template)
        several = are_several(messages)
        rendered: list[Any] = []
        for index, conversation in enumerate(messages if several else [messages]):
            try:
                rendered.append(self._rendered(conversation, cache_breakpoints, options))
            except ConversationError as error:
                error.conversation = index if several else None
                if errors == "raise":
                    raise
                rendered.append(error)
        return rendered

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
                the system messages at the beginning. Messages with "cache": True are others.
            template: as in `template_options`.

        Raises:
            ConversationError: it is not a conversation, the template refuses it, or there is no such message.
            TooLong: it is far longer than the engine takes, and than `MAX_SHOWN` tokens.
            TypeError: an argument is unknown.
        """
        rendered = self._rendered(messages, cache_breakpoints, template_options(**template))
        return self._tokenized(rendered, shown=MAX_SHOWN)

    def _rendered(
        self, messages: Any, cache_breakpoints: Sequence[int] | None, options: dict[str, Any]
    ) -> Rendered:
        read = read_messages(messages)
        marked = take_marks(read)
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
        render = self.tokenizer.apply_chat_template
        ends = message_ends(render, read, cache_breakpoints, marked, text, options)
        source = self.tokenizer.template_source(
            options["chat_template"], with_tools=options["tools"] is not None
        )
        if options["tools"] is not None:
            self._look_for_tools(source)
        if (cut := thoughts_cut(render, read, text, options, source)) is not None:
            ends.append(cut)
        return Rendered(text, tuple(ends), thoughts_of_chat(text, source, options))

    def _tokenized(self, given: Rendered, *, shown: int = 0) -> Prompt:
        text, tokenizer = given.text, self.tokenizer
        assert tokenizer is not None, "it rendered the text"
        check_length("chat", tokenizer, text, self._thread.facts.longest_prompt, shown=shown)
        # The template has written the special tokens already.
        token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        leading = leading_tokens(tokenizer, text, token_ids, given.ends)
        return Prompt(text, token_ids, leading, given.thoughts)

    def _look_for_tools(self, source: str) -> None:
        """Warns, once for each template, if it never reads the tools that came with a conversation."""
        # Of a template inside of an object's method nothing is known.
        if source in self._with_tools or not source:
            return
        if len(self._with_tools) >= MAX_TEMPLATES:
            self._with_tools.clear()
        self._with_tools.add(source)
        if "tools" not in variables_read(source):
            LOG.warning(
                "the chat template never reads tools, so the model does not see those of this conversation; give a "
                "chat_template that does, or describe them in the system message"
            )


def check_errors(errors: str) -> None:
    """ValueError for a way with errors that does not exist."""
    if errors not in get_args(Errors):
        raise ValueError(f"errors must be 'raise' or 'return', got {errors!r}")


def _render(tokenizer: Tokenizer, messages: Conversation, options: dict[str, Any]) -> str:
    """The text of a conversation. The template must know its roles and leave out none of its messages."""
    try:
        if any(message["role"] not in ROLES for message in messages):
            template, tools = options["chat_template"], options["tools"]
            quoted = tokenizer.quoted_in_template(template, with_tools=tools is not None)
            check_roles(messages, quoted)
        text = tokenizer.apply_chat_template(messages, **options)
        if any(message.keys() - READ for message in messages):
            template, tools = options["chat_template"], options["tools"]
            source = tokenizer.template_source(template, with_tools=tools is not None)
            # Of a template inside of an object's method nothing is known.
            if source and (unread := unread_fields(messages, source, text)):
                LOG.info("the chat template does not read %s", ", ".join(sorted(unread))[:200])
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


def check_fits(index: int, prompt_len: int, longest_prompt: int) -> None:
    """TooLong if a prompt that is only read does not fit.

    Args:
        index: of the prompt, for messages.
        prompt_len, longest_prompt: lengths in tokens.
    """
    if prompt_len > longest_prompt:
        raise TooLong(
            f"prompt {index}: has {prompt_len} tokens, but the longest that can be read is {longest_prompt}; "
            f"shorten it{OR_RAISE}"
        )


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
            f"sequence is {max_model_len}; shorten it{OR_RAISE}"
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
