"""`LLM`: a model, its engine and its tokenizer behind one object."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Unpack

from hybrid_jax.api.arguments import checks_arguments
from hybrid_jax.api.cache_view import CacheView, Ledger
from hybrid_jax.api.completions import Job
from hybrid_jax.api.feed import Feed
from hybrid_jax.api.intake import Errors, Intake
from hybrid_jax.api.options import (
    ChatOptions,
    EngineOptions,
    RareOptions,
    default_params,
    options_of_sides,
    unused_defaults,
)
from hybrid_jax.api.outputs import Delta, RequestOutput
from hybrid_jax.api.overview import device_words, fingerprint, overview
from hybrid_jax.api.progress_bar import COMPILING, ProgressOption, progress_of, unasked
from hybrid_jax.api.reading import Reader
from hybrid_jax.api.stats import Stats
from hybrid_jax.api.threads import questions
from hybrid_jax.api.threads.calls import CLOSED, Call
from hybrid_jax.api.threads.engine_thread import check_process
from hybrid_jax.api.warm_up import warm_up
from hybrid_jax.api.workers.messages import Start
from hybrid_jax.api.workers.starting import (
    Links,
    Processes,
    Workers,
    found_there,
    start_workers,
)
from hybrid_jax.config import CacheConfig, ModelConfig, SpeculationConfig
from hybrid_jax.config.model_directory import left_out
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.models.files import BUNDLED, model_folder
from hybrid_jax.process.importing import undisturbed
from hybrid_jax.process.streams import say
from hybrid_jax.text.conversation import Conversation
from hybrid_jax.text.given_tokenizer import TokenizerLike, as_tokenizer
from hybrid_jax.text.prompts import Prompt, Prompts
from hybrid_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from hybrid_jax.api.starting import Side, Started

LOG = logging.getLogger("hybrid_jax.engine")


class LLM(Reader):
    """Generates text with a hybrid (or pure attention, or pure recurrent) language model.

    Calls may come from several threads and asyncio tasks at once, and from inside a `stream` loop. The engine runs in a
    thread of its own and batches the requests of all callers. A caller that leaves early, by Ctrl-C, an exception or
    closing a stream, ends only its own requests. A fork of the process cannot use the object; start workers with
    "spawn".

    Programs are compiled when they are first needed, or all of them by `warmup()`, and kept in the user's cache folder
    for the next process. Each `memory`, `max_rows`, `max_model_len`, `dtype` and `exact` has programs of its own.

    Args:
        model: a directory in Hugging Face layout or written by `save_orbax`; None for the small model
            in the package; "tiny_gated_delta" or "tiny_cut" for one of hybrid-jax-models, which a clone has.
        dtype: of weights, activations and KV pages: "float32", "bfloat16", or "auto" for float32 on a CPU and the
            stored one elsewhere.
        memory: bytes for arena, rings, tables and logits together, as a number or like "8GiB"; weights come on top.
            None on a CPU: what `max_rows` sequences of min(max_model_len, 4096) tokens and 8 cached checkpoints a row
            need, but at most half of what the weights leave free and a quarter of the RAM. None on a GPU: 95 % of what
            weights and the temporaries of a step leave of the memory that jax may take, which is 95 % of the card
            unless XLA_CLIENT_MEM_FRACTION says otherwise.
        host_memory: bytes of the host's memory, as a number or like "8GiB", for prefixes that the cache evicts. A
            prompt that goes on from one has it copied back. None for none. On a CPU `memory` is in the same RAM.
        cache_dir: a folder on disk, made if it is not there, in which the prefix cache is kept, too. Another process
            with the same model finds its prompts there. Several processes may use it at once. None for none.
        disk_memory: bytes that its files may have, as a number or like "20GiB". None for 20 GiB, or half of what is
            free if that is less.
        max_rows: sequences that decode together; None for 8 on a CPU, and on a GPU for as many as the memory holds at
            4096 tokens each, up to 256.
        max_model_len: longest sequence, prompt and output together, in tokens; None for the model's own.
        cache: policy of the prefix cache, as `CacheConfig` has them ("adaptive", "lru", "marconi", "off", ...), or a
            `CacheConfig`.
        speculation: drafts the next tokens, so that one pass over the weights can bring several. The output does not
            change, unless `SpeculationConfig.unjudged_above` is set. "ngram" and "suffix" look for repetitions in
            prompt and output, "mtp" uses the model's own head for multi-token prediction, "exit" a head on its cut, and
            "draft:DIRECTORY" a second, smaller model. "off" for plain decoding, or a `SpeculationConfig` with more
            settings.
        seed: base of the noise of requests without a seed of their own. The k-th prompt of this object
            then has the seed `derive_seed(seed, k)`, so the same calls in the same order give the same text.
        exact: bit-identical logits whatever the batch, chunking or cache (slower).
        mesh: devices to run on. "tp=4" divides the model over the first four: each has a part of every layer (tensor
            parallelism). "dp=2" makes two replicas: each has a whole model, rows and a prefix cache of its own, and a
            prompt goes to one of them. "dp=2,tp=2" makes two replicas of two devices each. A `jax.sharding.Mesh` with
            axes "dp" and "tp" names the devices. `memory` is then that of each device, and `host_memory` and `max_rows`
            are those of each replica. Replicas share one `cache_dir`. "prefill=1,decode=2" makes one replica that only
            computes prompts and two that go on from them, so that a long prompt does not hold up other texts; "tp" may
            be added, and `cache_dir` does not go with it yet. None for one device.
        replicas: run so many engines, each in a process of its own, with a whole model, rows and a prefix cache of its
            own. `mesh` then divides each of them, as in "tp=2", and each gets GPUs of its own. A process that ends is
            started again, three times at most; its requests go on in the others, from the tokens that they have.
            "prefill=1,decode=2" makes one that only computes prompts, and two that go on from them. None for an engine
            in this process.
        prefill_options: options of the replicas that only compute prompts, where they differ from the others', such as
            {"max_rows": 2, "prefill_tokens": 2048}; "mesh" in it divides each of them. They may have other `memory`,
            `host_memory`, `max_rows`, `cache`, `page_tokens`, `grain`, `prefill_tokens`, `steps_per_dispatch`, `shapes`
            and `kernels`. None for no difference.
        tokenizer: in place of the model's own: a directory, an object of the libraries tokenizers or transformers, or
            any object with `encode(text)` and `decode(ids)`. Chats need its `chat_template` or `apply_chat_template`.
        quiet: print nothing unasked: neither `describe()`, nor bars and words about compiling.
        progress: a bar while the weights load: True or False, or None for one if it takes longer than a second and the
            LLM is not quiet. Where stderr is neither a terminal nor a notebook, a plain line in place of the bar, at
            most one in 30 seconds.
        **options: any other field of `EngineConfig`. What is not given is chosen for the device; `describe()` shows it.

    Raises:
        FileNotFoundError, ValueError: the directory or an option is not what it should be, or there is not enough
            memory.
        NotImplementedError: an option belongs to a feature that does not exist yet.
        TypeError: an option is unknown.
        RuntimeError: this process is a fork of one that has used an LLM.

    Example:
        >>> from hybrid_jax import LLM, SamplingParams
        >>> llm = LLM()
        >>> outs = llm.generate("def add(a, b):\\n", SamplingParams(temperature=0.0, max_tokens=8))
        >>> len(outs[0].outputs[0].token_ids), outs[0].outputs[0].finish_reason
        (8, 'length')
    """

    @checks_arguments
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        memory: int | str | None = None,
        host_memory: int | str | None = None,
        cache_dir: str | Path | None = None,
        disk_memory: int | str | None = None,
        max_rows: int | None = None,
        max_model_len: int | None = None,
        cache: str | CacheConfig = "adaptive",
        speculation: str | SpeculationConfig = "off",
        seed: int = 0,
        exact: bool = False,
        mesh: str | Mesh | None = None,
        replicas: int | str | None = None,
        prefill_options: Mapping[str, Any] | None = None,
        tokenizer: TokenizerLike | None = None,
        quiet: bool = False,
        progress: ProgressOption = None,
        **options: Unpack[RareOptions],
    ) -> None:
        given: dict[str, Any] = {
            "memory": memory,
            "host_memory": host_memory,
            "cache_dir": cache_dir,
            "disk_memory": disk_memory,
            "max_rows": max_rows,
            "max_model_len": max_model_len,
            "cache": cache,
            "speculation": speculation,
            "seed": seed,
            "exact": exact,
            "mesh": mesh,
            "prefill_options": prefill_options,
            **options,
        }
        check_process()
        self._load(
            model,
            given,
            dtype=dtype,
            tokenizer=tokenizer,
            quiet=quiet,
            progress=progress,
            links=None if replicas is None else Processes(replicas, given),
        )

    def _load(
        self,
        model: str | Path | None,
        options: Mapping[str, Any],
        *,
        dtype: str,
        tokenizer: TokenizerLike | None,
        quiet: bool = True,
        progress: ProgressOption = False,
        links: Links | None = None,
        sharing: int = 1,
        side: Side | None = None,
    ) -> None:
        """Begins with a model that is read from files.

        Args:
            model, dtype, tokenizer, quiet, progress: of `LLM`.
            options: its other arguments.
            links: starts what the engines run in; None for this process.
            sharing: processes with an LLM that share the memory of a machine, this one included.
            side: as in `start_folder`.
        """
        # Mistakes show before anything is loaded.
        have_sides = links is not None and links.mesh.prefill > 0
        settings, prefill = options_of_sides(options, have_sides=have_sides)
        own_tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
        folder = BUNDLED if model is None else model_folder(model, "LLM")
        if model is None and not (folder / "config.json").is_file():
            raise FileNotFoundError(f"LLM: this copy holds no bundled model at {folder}; name one")
        defaults = default_params(folder)
        used_tokenizer = own_tokenizer or Tokenizer.from_directory(folder)
        shown = unasked(progress, quiet=quiet)
        started: Started | Workers
        if links is None:
            started = _starting().start_folder(
                folder,
                settings,
                dtype=dtype,
                progress=shown,
                tokenizer=used_tokenizer,
                mesh=options.get("mesh"),
                prefill=prefill,
                sharing=sharing,
                side=side,
            )
        else:
            own = {"dtype": dtype, "tokenizer": tokenizer}
            started = start_workers(links, Start(found_there(model), options, own), shown)
        unread = left_out(folder, own_tokenizer is None) + unused_defaults(folder)
        self._begin(started, used_tokenizer, defaults, quiet=quiet, unread=unread)

    @classmethod
    def _elsewhere(
        cls,
        model: str | Path | None,
        links: Links,
        *,
        dtype: str = "auto",
        tokenizer: TokenizerLike | None = None,
        quiet: bool = False,
        progress: ProgressOption = None,
        **options: Any,
    ) -> LLM:
        """An LLM whose engines run in what `links` starts. The other arguments are those of `LLM`."""
        check_process()
        self = cls.__new__(cls)
        self._load(
            model,
            options,
            dtype=dtype,
            tokenizer=tokenizer,
            quiet=quiet,
            progress=progress,
            links=links,
        )
        return self

    @classmethod
    @checks_arguments
    def from_params(
        cls,
        config: ModelConfig,
        params: Any,
        *,
        tokenizer: TokenizerLike | None = None,
        dtype: str = "float32",
        quiet: bool = False,
        **options: Unpack[EngineOptions],
    ) -> LLM:
        """An LLM of weights that are in memory already, in `dtype`. The options are those of `LLM`.

        Example:
            >>> from hybrid_jax import LLM, SamplingParams, load_model
            >>> config, params = load_model()
            >>> llm = LLM.from_params(config, params, max_rows=1, quiet=True)
            >>> [output] = llm.generate([100, 101, 102, 32], SamplingParams(max_tokens=4))
            >>> len(output.outputs[0].token_ids), output.outputs[0].text
            (4, '')
        """
        check_process()
        settings, prefill = options_of_sides(options, own=("tokenizer", "dtype", "quiet"))
        own_tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)

        self = cls.__new__(cls)
        started = _starting().start_params(
            config,
            params,
            settings,
            dtype=dtype,
            tokenizer=own_tokenizer,
            mesh=options.get("mesh"),
            prefill=prefill,
        )
        self._begin(started, own_tokenizer, SamplingParams(), quiet=quiet)
        return self

    def _begin(
        self,
        started: Started | Workers,
        tokenizer: Tokenizer | None,
        defaults: SamplingParams,
        *,
        quiet: bool,
        unread: Sequence[str] = (),
    ) -> None:
        config, engine_config = started.config, started.engine_config
        self._stored_dtype, self._unread = started.stored_dtype, tuple(unread)
        self.model_config, self.engine_config = config, engine_config
        self._digest, self._weight_bytes = started.digest, started.weight_bytes
        self._ledger = Ledger()
        self._quiet = quiet
        self._thread = started.threads(record=self._ledger.record, quiet=quiet)
        # Nothing here may hold this object, so that one that nobody else holds frees its memory soon.
        self._intake = Intake(config, engine_config, tokenizer, defaults, self._thread)
        self._cache = CacheView(self._thread, self._ledger.seen, config, engine_config, tokenizer)
        # Its words, because a logger may keep what it is given.
        LOG.info("started %s on %s", repr(self), self.device)
        for line in self._unread:
            LOG.info("left out: %s", line)
        if not quiet:
            say(self.describe())

    # --- generating -------------------------------------------------------------------------------

    @checks_arguments
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        progress: ProgressOption = None,
        errors: Errors = "raise",
    ) -> list[RequestOutput]:
        """Completes prompts together, along the tree of their prefixes. The outputs are in the order of the prompts.

        Args:
            prompts: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or several of these. A dict may
                have "cache_breakpoints": where prefixes end that other prompts share, in characters of a text, or in
                tokens.
            sampling_params: one for all, or a list of equal length; None for `get_default_sampling_params()`. Without
                `max_tokens` a completion goes on until a stop or the longest length that model and memory allow.
            use_tqdm: vLLM's name for the option: True shows a bar, False shows none. None leaves it to `progress`.
            progress: a bar, as for `LLM`, or call this with (prompts done, prompts in all).
            errors: "raise" ends the call with the first error of a prompt. With "return" such a prompt has its
                exception in the list, in place of its output, and the others are completed: look with
                isinstance(output, Exception).

        Raises:
            ValueError: something is wrong with a prompt or its parameters. Nothing has run.
            FloatingPointError: the model's numbers for a prompt are not finite (NaN or infinity).

        Example:
            >>> llm = LLM()
            >>> greedy = SamplingParams(temperature=0.0, max_tokens=4)
            >>> outs = llm.generate(["import ", {"prompt_token_ids": [100, 101, 102, 32]}], greedy)
            >>> [len(out.outputs[0].token_ids) for out in outs]
            [4, 4]
            >>> outs = llm.generate(["import ", ""], greedy, errors="return")
            >>> len(outs[0].outputs[0].token_ids), outs[1]
            (4, ValueError('prompt 1: is empty; a prompt needs at least one token'))
        """
        return self._generate(prompts, sampling_params, use_tqdm, progress, errors)

    def _generate(
        self,
        prompts: Prompts | Sequence[Prompt | Exception],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | None,
        progress: ProgressOption,
        errors: Errors,
    ) -> list[RequestOutput]:
        """`generate`, also of prompts that have failed already."""
        accepted = self._intake.accepted(prompts, sampling_params, errors=errors)
        if use_tqdm is not None:
            progress = progress or use_tqdm
        return self._run(accepted, progress, "generating", Job.output, errors)

    def _run(
        self,
        accepted: Sequence[Job | Exception],
        progress: ProgressOption,
        what: str,
        read: Callable[[Job], object],
        errors: Errors,
    ) -> list[Any]:
        """Runs jobs to their ends, behind a bar that says `what`. For each: what is read of it, or its error."""
        jobs = [job for job in accepted if isinstance(job, Job)]
        call = Call(jobs, keeps_errors=errors == "return")
        wanted = unasked(progress, quiet=self._quiet)
        with progress_of(wanted, what, total=len(jobs)) as report:
            with closing(self._thread.run(call)) as all_news:
                for news in all_news:
                    if jobs:
                        report(news.num_finished, len(jobs))
        return [job if isinstance(job, Exception) else job.error or read(job) for job in accepted]

    @checks_arguments
    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[Delta, None, None]:
        """Like `generate`, but yields what is new as it comes. Closing the iterator ends the requests.

        The texts of a completion's deltas, joined, are its text. The last delta of a prompt holds its `RequestOutput`.

        Example:
            >>> llm = LLM()
            >>> deltas = list(llm.stream("class A", SamplingParams(temperature=0.0, max_tokens=6)))
            >>> "".join(d.text for d in deltas) == deltas[-1].output.outputs[0].text
            True
        """
        return self._thread.deltas(self._intake.jobs(prompts, sampling_params))

    @checks_arguments
    def astream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """`stream` for `async for`: other tasks go on while it waits. To leave it early, use `contextlib.aclosing`.

        Texts are tokenized, and new forms of `structured_outputs` tried, in other threads while other tasks go on. So
        mistakes in them are raised by the first step, and others at the call. At most 16,384 streams may wait for
        their first token; the next one raises a RuntimeError at its first step.

        Example:
            >>> import asyncio
            >>> async def main(llm):
            ...     async for delta in llm.astream("x = ", SamplingParams(max_tokens=3)):
            ...         last = delta
            ...     return len(last.output.outputs[0].token_ids)
            >>> asyncio.run(main(LLM(quiet=True)))
            3
        """
        return self._thread.adeltas(*self._intake.later_jobs(prompts, sampling_params))

    @checks_arguments
    def feed(self) -> Feed:
        """Returns a feed, to which prompts are added while others run: for prompts that come later, or are too many.

        Example:
            >>> llm, greedy = LLM(), SamplingParams(temperature=0.0, max_tokens=4)
            >>> with llm.feed() as feed:
            ...     tickets = [feed.add("import "), feed.add(["def ", "class "], greedy)]
            ...     while not tickets[1].finished:
            ...         finished = feed.step()
            >>> [len(output.outputs[0].token_ids) for output in tickets[1].outputs()]
            [4, 4]
        """
        return Feed(self._thread, self._intake)

    @checks_arguments
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        progress: ProgressOption = None,
        errors: Errors = "raise",
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Continues a conversation, or several, through the model's chat template.

        Args:
            messages: [{"role": ..., "content": ...}, ...], or a list of such lists. The content is text, or a list of
                parts {"type": "text", "text": ...}. An assistant's message with tool_calls needs no content. The
                arguments of a call are an object or its JSON text. The template gets the form that it reads.
            sampling_params, use_tqdm, progress, errors: as in `generate`. With errors="return" a conversation that the
                template refuses has its exception in the list as well.
            options: `add_generation_prompt`, `continue_final_message`, `chat_template` and `tools` as in
                `Tokenizer.apply_chat_template`. `chat_template_kwargs`: other variables that the template reads.
                `cache_breakpoints`: indices of messages after which other conversations go on differently; None for
                the system messages at the beginning. A message may say so itself, with "cache": True.

        Raises:
            ValueError: something is wrong with a conversation, or the template refuses it. Nothing has run.
                Roles are system, developer, user, assistant, tool, and those that the template names.
            TypeError: an option is unknown.

        Example:
            >>> llm = LLM()
            >>> outs = llm.chat(
            ...     [{"role": "user", "content": "Say hello."}],
            ...     SamplingParams(temperature=0.0, max_tokens=4),
            ...     chat_template="{% for m in messages %}# {{ m.role }}: {{ m.content }}\\n{% endfor %}",
            ... )
            >>> outs[0].prompt, len(outs[0].outputs[0].token_ids)
            ('# user: Say hello.\\n', 4)
        """
        prompts = self._intake.conversations(messages, errors=errors, **options)
        return self._generate(prompts, sampling_params, use_tqdm, progress, errors)

    @checks_arguments
    def stream_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generator[Delta, None, None]:
        """Like `chat`, but yields what is new as it comes, as `stream` does. The options are those of `chat`.

        Example:
            >>> llm = LLM()
            >>> deltas = llm.stream_chat(
            ...     [{"role": "user", "content": "Say hello."}],
            ...     SamplingParams(temperature=0.0, max_tokens=4),
            ...     chat_template="{% for m in messages %}# {{ m.role }}: {{ m.content }}\\n{% endfor %}",
            ... )
            >>> sum(len(delta.token_ids) for delta in deltas)
            4
        """
        prompts = self._intake.conversations(messages, **options)
        return self.stream(prompts, sampling_params)

    @checks_arguments
    def astream_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[Delta, None]:
        """`stream_chat` for `async for`. The options are those of `chat`.

        Example:
            >>> import asyncio
            >>> async def main(llm):
            ...     messages = [{"role": "user", "content": "Say hello."}]
            ...     template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\\n{% endfor %}"
            ...     async for delta in llm.astream_chat(
            ...         messages, SamplingParams(max_tokens=4), chat_template=template
            ...     ):
            ...         last = delta
            ...     return len(last.output.outputs[0].token_ids)
            >>> asyncio.run(main(LLM(quiet=True)))
            4
        """
        prompts = self._intake.conversations(messages, **options)
        return self.astream(prompts, sampling_params)

    @checks_arguments
    def render_chat(
        self,
        messages: Conversation,
        **options: Unpack[ChatOptions],
    ) -> Prompt:
        """The prompt that `chat` makes of a conversation: for `generate`, for `stream`, or to look at its text.

        The options are those of `chat`.

        Example:
            >>> template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\\n{% endfor %}"
            >>> llm = LLM()
            >>> llm.render_chat([{"role": "user", "content": "hi"}], chat_template=template).text
            '# user: hi\\n'
        """
        return self._intake.conversation(messages, **options)

    # --- looking and tidying ----------------------------------------------------------------------

    @property
    def cache(self) -> CacheView:
        """The prefix cache: `llm.cache.explain(output)`, `llm.cache.describe()`."""
        return self._cache

    @property
    def device(self) -> str:
        """Where it runs: "cpu", or a name such as "gpu, NVIDIA H200"."""
        return device_words(self._thread.facts.device)

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, that model and memory allow, in tokens."""
        return self._thread.facts.max_model_len

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if it came without one."""
        return self._intake.tokenizer

    @checks_arguments
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as `generate` makes them of a prompt.

        Raises:
            ValueError: the model came without a tokenizer.

        Example:
            >>> llm = LLM()
            >>> llm.encode("ab")
            [97, 98]
            >>> llm.decode([97, 98]), llm.batch_decode([[97], [98, 99]])
            ('ab', ['a', 'bc'])
        """
        return self._tokenizer().encode(text, add_special_tokens=add_special_tokens)

    @checks_arguments
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises as `encode` does."""
        return self._tokenizer().decode(ids, skip_special_tokens=skip_special_tokens)

    @checks_arguments
    def batch_decode(
        self, sequences: Iterable[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """The texts of several lists of token ids. Raises as `encode` does."""
        return self._tokenizer().batch_decode(sequences, skip_special_tokens=skip_special_tokens)

    def _tokenizer(self) -> Tokenizer:
        if (tokenizer := self.get_tokenizer()) is None:
            raise ValueError("LLM: this model came without a tokenizer; pass tokenizer=...")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of prompts that come without any: those in the model's generation_config.json, if it has one.

        They are its temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens. If do_sample is false, the
        temperature is 0. Other fields are ignored. `SamplingParams` without a temperature also get this one. If the
        model names none, it is 1.0.
        """
        return self._intake.complete(self._intake.defaults)

    def fingerprint(self) -> str:
        """A digest of this model with its tokenizer and chat templates, which tells it from others."""
        return fingerprint(self._digest(), self._intake.tokenizer)

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most memory in use at one time since the process began, as `RequestMetrics` defines it."""
        return self._thread.ask(questions.peak_memory_bytes)

    @property
    def compile_s(self) -> float:
        """Seconds in which calls have waited for programs to be compiled, since the start; any thread may ask."""
        return self._thread.ask(questions.compile_seconds)

    def stats(self) -> Stats:
        """Counters since the start, and present numbers of requests, frames and prefixes: see docs/reference/stats.md.

        The result is a dict. As text, and in a notebook, it shows its numbers in groups, each with what it means.
        """
        self._thread.settle()
        own = {
            "requests": self._intake.num_requests,
            "replicas": self._thread.mesh.num_replicas,
            "peak_memory_bytes": self.peak_memory_bytes,
        }
        return Stats(own | self._ledger.totals._asdict() | self._thread.ask(questions.stats))

    def describe(self) -> str:
        """The lines that a new object prints: the model, where its memory goes, and what the cache can do.

        Example:
            >>> llm = LLM(max_rows=1, max_model_len=512, quiet=True)
            >>> names = [line.split()[0] for line in llm.describe().splitlines()]
            >>> names[:5]
            ['model', 'device', 'weights', 'arena', 'rings']
            >>> names[5:]
            ['tables', 'logits', 'sequences', 'steps', 'products', 'cache', 'sampling']
        """
        return overview(
            self._thread.facts,
            weight_bytes=self._weight_bytes,
            sampling=self._intake.defaults,
            stored_dtype=self._stored_dtype,
            tokenizer=self._intake.tokenizer,
            unread=self._unread,
            loops=self._thread.ask(questions.about_loops),
            mesh=self._thread.mesh,
            where=self._thread.where,
        )

    @checks_arguments
    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix that no running request uses."""
        self._thread.ask(questions.reset_prefix_cache)

    @checks_arguments
    def warmup(
        self,
        *,
        logprobs: bool = False,
        penalties: bool = False,
        threads: int | None = None,
        progress: ProgressOption = None,
    ) -> dict[str, float]:
        """Compiles what `generate` will need, so that the first call is as fast as later ones.

        Args:
            logprobs: also for requests with `logprobs` (not `prompt_logprobs`).
            penalties: also for requests with penalties, biases, allowed tokens, bad words or a grammar.
            threads: how many compile at the same time. None for as many as there are processors, but for 1 on a GPU,
                where the compiler times variants of a product, and two compilers would disturb each other. While
                more than one compiles, other calls go on.
            progress: a bar, as for `LLM`, or call this with (programs done, programs in all).

        Returns:
            Seconds of compiling by the name of the program. With several threads they overlap.

        Raises:
            ValueError: threads is not an integer of at least 1.
        """
        if threads is None:
            threads = (os.cpu_count() or 1) if self._thread.facts.device.is_host else 1
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise ValueError(
                f"LLM: warmup: threads must be an integer of at least 1, got {threads!r}"
            )
        ask = self._thread.ask
        programs = ask(questions.warm_ups, logprobs, penalties)
        with progress_of(unasked(progress, quiet=self._quiet), COMPILING) as report:
            ahead = functools.partial(ask, questions.compile_ahead, logprobs, penalties)
            run = functools.partial(ask, questions.run_program, logprobs, penalties)
            return warm_up(programs, ahead, run, threads, report)

    def close(self) -> None:
        """Ends what still runs and frees the device memory. The object cannot be used afterwards."""
        self._close(wait=True)

    def _close(self, *, wait: bool) -> None:
        self._thread.close(wait=wait)
        self._intake.close()
        self._digest = _closed  # it holds the weights

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Who presses Ctrl-C does not want to wait for the compiler.
        self._close(wait=kind is None or not issubclass(kind, KeyboardInterrupt))

    def __reduce__(self) -> Any:
        raise TypeError(
            "LLM: it holds device memory and a thread, so it can neither be pickled nor copied; make it inside the "
            "worker that uses it, and send prompts, parameters and outputs"
        )

    def __repr__(self) -> str:
        state = "closed" if self._thread.closed else f"max_model_len={self.max_model_len}"
        return (
            f"LLM({self.model_config.family}, {self.engine_config.dtype}, {state}, "
            f"max_rows={self.engine_config.max_rows}, cache={self.engine_config.cache.policy!r})"
        )


def _closed() -> str:
    raise RuntimeError(CLOSED)


def _starting() -> ModuleType:
    """The module that makes an engine. It loads jax."""
    with undisturbed():
        from hybrid_jax.api import starting
    return starting
