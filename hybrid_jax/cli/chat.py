"""The command `chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_jax.byte_sizes import counted
from hybrid_jax.cli.exits import for_terminal, typed, write
from hybrid_jax.cli.options.groups import spreads
from hybrid_jax.cli.options.model import (
    ModelOptions,
    TemplateOption,
    check_template,
    template_of,
    tokenizer_of,
)
from hybrid_jax.cli.options.sampling import SamplingOptions
from hybrid_jax.process.streams import is_terminal, say

if TYPE_CHECKING:
    from hybrid_jax.api.llm import LLM
    from hybrid_jax.api.outputs import RequestOutput
    from hybrid_jax.config.sampling_params import SamplingParams

PROMPT, MORE = "> ", "... "
FENCE = '"""'  # begins and ends a message of several lines
HELP = {
    "/help": "show these commands",
    "/reset": "forget the conversation and begin a new one",
    "/save FILE": "write the conversation to a file, as JSON",
    "/load FILE": "go on with a conversation that was saved",
    "/stats": "show how fast the last answer came, and what the prefix cache did",
    "/quit": "leave, as Ctrl-D does",
}


@spreads(engine=ModelOptions, sampling=SamplingOptions)
def chat(
    engine: ModelOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    chat_template: TemplateOption = None,
) -> None:
    """Talk with a model in the terminal.

    Ctrl-C stops an answer, Ctrl-D leaves, and /help lists what else can be typed. If stdin is no terminal, each of its
    lines is a message, and the exit code is 1 if any got no answer.
    """
    from hybrid_jax.api.llm import LLM

    write(end="", flush=True)  # if stdout takes nothing, this fails before anything is loaded
    form, template = sampling.form(), template_of(chat_template)
    llm = LLM(engine.model, quiet=True, **engine.for_llm())
    check_template(tokenizer_of(llm, engine, "chat"), template, engine, "chat")
    params = sampling.params(llm.get_default_sampling_params(), form)
    system = None if system is None else typed(system)
    talk = Talk(llm, params, system=system, template=template)
    if is_terminal(sys.stdin):
        with suppress(ImportError):
            import readline  # noqa: F401  (arrow keys and earlier lines in `input`)
        tell(
            f"talking with {engine.name}; /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves"
        )
    while (read := read_message()) is not None:
        text, fenced = read
        if text.startswith("/") and not fenced:
            if not talk.command(text):
                break
        elif text.strip():
            talk.say(text)
    if talk.refused and not is_terminal(sys.stdin):
        raise typer.Exit(1)


def tell(text: str) -> None:
    """A line to the user that is no part of an answer."""
    say(text)


def read_message() -> tuple[str, bool] | None:
    """The next message or command, and whether it stood between fences; None at the end of the input."""
    terminal = is_terminal(sys.stdin)
    while True:
        try:
            line = _line(PROMPT, terminal)
            if line is None:
                return None
            if not line.startswith(FENCE):
                return line, False
            lines = [line.removeprefix(FENCE)]
            while not lines[-1].endswith(FENCE):
                more = _line(MORE, terminal)
                if more is None:
                    return "\n".join(lines), True
                lines.append(more)
            return "\n".join(lines).removesuffix(FENCE), True
        except KeyboardInterrupt:
            if not terminal:
                raise
            write()
            tell("Ctrl-D or /quit leaves")


def _line(prompt: str, terminal: bool) -> str | None:
    if sys.stdin is None:
        return None
    if not terminal:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        return input(prompt)
    except EOFError:
        write()
        return None


class Talk:
    """A conversation and what may be done with it.

    Args:
        llm, params: who answers, and how tokens are chosen.
        system: what the system says first, or None.
        template: a chat template in place of the model's own, or None.

    Attributes:
        messages: of the conversation so far.
        refused: how many messages got no answer.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, *, system: str | None, template: str | None
    ) -> None:
        self._llm, self._params, self._template = llm, params, template
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self._opening)
        self.refused = 0
        self._last: RequestOutput | None = None
        self._stopped = False

    def say(self, text: str) -> None:
        """Adds a user's message, and writes the answer as it comes. Ctrl-C ends the answer; what came so far counts."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer, stopped = "", False
        try:
            prompt = self._llm.render_chat(messages, chat_template=self._template)
            with closing(self._llm.stream(prompt, self._fitting(len(prompt.token_ids)))) as deltas:
                for delta in deltas:
                    answer += delta.text
                    write(for_terminal(delta.text), end="", flush=True)
                    self._last = delta.output or self._last
        except ValueError as error:
            self.refused += 1
            tell(self._refusal(error))
            return
        except RuntimeError as error:  # the engine failed; what was said so far can still be saved
            self.refused += 1
            write()
            tell(f"no answer: {error}")
            return
        except KeyboardInterrupt:
            stopped = True
        self._stopped = stopped
        write(flush=True)
        if stopped:
            tell("stopped")
        if answer or not stopped:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _fitting(self, length: int) -> SamplingParams:
        """The parameters, with no more new tokens than there is room for after a prompt of this length."""
        asked, room = self._params.max_tokens, self._llm.max_model_len - length
        if asked is None or not 0 < room < asked:
            return self._params
        return replace(self._params, max_tokens=room)

    def _refusal(self, error: ValueError) -> str:
        """Why a message got no answer."""
        from hybrid_jax.text.prompts import TooLong

        if isinstance(error, TooLong):
            return (
                f"the conversation no longer fits the longest sequence of {self._llm.max_model_len} tokens; /reset "
                "begins a new one"
            )
        return str(error)

    def command(self, text: str) -> bool:
        """Does what a line that begins with a slash asks for; returns False if it asks to leave."""
        name, _, argument = text.strip().partition(" ")
        argument = argument.strip()
        match name:
            case "/quit":
                return False
            case "/reset":
                self.messages, self._last, self._stopped = list(self._opening), None, False
                tell("a new conversation")
            case "/save" | "/load" if not argument:
                tell(f"{name} needs the name of a file")
            case "/save":
                self._save(Path(argument))
            case "/load":
                self._load(Path(argument))
            case "/stats":
                self._show_stats()
            case "/help":
                for command, meaning in HELP.items():
                    tell(f"{command:<12} {meaning}")
                tell(f"{FENCE} begins a message of several lines, and {FENCE} ends it")
            case _:
                tell(f"there is no command {name}; /help lists them")
        return True

    def _save(self, path: Path) -> None:
        text = json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            tell(f"{path}: {error.strerror}")
        else:
            tell(f"{counted(len(self.messages), 'message')} saved to {path}")

    def _load(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            messages = list(found["messages"])
            if messages:
                self._llm.render_chat(messages, chat_template=self._template)
        except OSError as error:
            tell(f"{path}: {error.strerror}")
        except (ValueError, TypeError, KeyError) as error:
            tell(f"{path} holds no conversation that /save wrote: {error}")
        else:
            self.messages, self._last, self._stopped = messages, None, False
            tell(f"{len(messages)} messages from {path}")

    def _show_stats(self) -> None:
        if self._stopped:
            tell("the last answer was stopped; an answer that ends by itself has numbers")
            return
        if self._last is None:
            tell("there is no finished answer")
            return
        tell(self._last.metrics.in_words())
        tell(str(self._llm.cache.explain(self._last)))
