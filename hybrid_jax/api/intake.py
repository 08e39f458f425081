"""Prompts, conversations and parameters as callers give them, checked and made into jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hybrid_jax.api.completions import Job, derive_seed
from hybrid_jax.api.options import peak_memory_bytes
from hybrid_jax.api.request_limits import resolve_max_tokens, resolve_stop_ids
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.constraints import Constraints
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


class Intake:
    """Finds everything a caller can get wrong before the engine hears of it, and numbers the requests.

    Args:
        config, engine_config: of the model and its engine.
        tokenizer: None for a model that came without one.
        defaults: the parameters of prompts that come without; its temperature is None where the model names none.
        max_model_len: tells the longest sequence in tokens, or raises when nothing can run any more.
        compile_seconds: tells how long the engine has compiled so far.

    Several threads may use it at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine_config: EngineConfig,
        tokenizer: Tokenizer | None,
        defaults: SamplingParams,
        max_model_len: Callable[[], int],
        compile_seconds: Callable[[], float],
    ) -> None:
        self.tokenizer, self.defaults, self.num_requests = tokenizer, defaults, 0
        self._numbering, self._compile_seconds = threading.Lock(), compile_seconds
        self._config, self._seed = config, engine_config.seed
        self._max_model_len = max_model_len
        self._constraints = Constraints(tokenizer, config)

    def jobs(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Job]:
        """One job per prompt, each with the next request id.

        Raises:
            ValueError: something is wrong with a prompt or its parameters; no request has been numbered then.
        """
        max_model_len = self._max_model_len()
        read = read_prompts(prompts, self.tokenizer, vocab_size=self._config.vocab_size)
        paired = pair_params(params, len(read), self.defaults)
        complete = {id(own): self.complete(own) for own in paired}  # often one for all
        checked = []
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
                max_model_len,
                default=self.defaults.max_tokens,
            )
            stop_ids = resolve_stop_ids(index, own, self._config)
            limits = self._constraints.limits(index, own, stop_ids)
            checked.append((index, prompt, own, stop_ids, max_tokens, limits))
        with self._numbering:
            first = self.num_requests
            self.num_requests += len(checked)
        return [
            Job(
                str(first + index),
                index,
                prompt,
                own,
                self.tokenizer,
                seed=derive_seed(self._seed, first + index) if own.seed is None else own.seed,
                stop_ids=stop_ids,
                max_tokens=max_tokens,
                limits=limits,
                peak_memory=peak_memory_bytes,
                compile_seconds=self._compile_seconds,
            )
            for index, prompt, own, stop_ids, max_tokens, limits in checked
        ]

    def complete(self, params: SamplingParams) -> SamplingParams:
        """The parameters as the engine gets them: a temperature that is not given is the model's own, else 1.0."""
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
        """A conversation, or a list of them, as prompts; the arguments are those of `conversation`.

        Raises:
            ConversationError: it is neither, or one of them cannot become a prompt.
        """
        if not are_several(messages):
            return [self.conversation(messages, cache_breakpoints=cache_breakpoints, **template)]
        options = template_options(**template)
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
            cache_breakpoints: indices of messages behind which other conversations will go on differently; None for
                the system messages that it opens with.
            template: as in `template_options`.

        Raises:
            ConversationError: it is none, the template refuses it, or there is no such message.
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
        # The template writes the special tokens itself.
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        ends = message_ends(
            self.tokenizer.apply_chat_template, read, cache_breakpoints, text, options
        )
        return Prompt(text, token_ids, leading_tokens(self.tokenizer, text, token_ids, ends))


def _render(tokenizer: Tokenizer, messages: Conversation, options: dict[str, Any]) -> str:
    """The text of a conversation, of which the template knows the roles and leaves out nothing."""
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
    except Exception as error:  # a template is a program, run on what the caller says
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        text = f"{kind}{error}".removeprefix("chat template: ")
        raise ConversationError(f"chat template: {text}", code="chat_template") from error
