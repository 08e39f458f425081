"""The options that say how tokens are chosen: the fields of `SamplingParams`, as a shell writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from hybrid_jax.cli.exits import text_of, typed
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.config.structured_outputs import StructuredOutputsParams

FORMS = (
    *("json_schema", "json_object", "regex", "choice", "grammar"),
)  # options of which a text can follow one
MODELS_OWN = "the model's, or off"  # the default of what generation_config.json may set


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options by the names of the fields of `SamplingParams`; None where that has the model's or its own default."""

    TITLE: ClassVar[str] = "How tokens are chosen"

    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="The most new tokens in an answer.",
            show_default="the model's; without one, 256 in generate and no limit in chat",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 always takes the likeliest token; the higher, the more surprising the text.",
            show_default="the model's, or 1",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(help="Draw from this many of the likeliest tokens.", show_default=MODELS_OWN),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the likeliest tokens that together have this probability.",
            show_default=MODELS_OWN,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from tokens with at least this share of the likeliest one's probability.",
            show_default=MODELS_OWN,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            help="Subtract this from the logit of each token that was generated before.",
            show_default="0",
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            help="Subtract this once for each time that a token was generated.", show_default="0"
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1 it makes tokens of the prompt and of the text so far less likely.",
            show_default=MODELS_OWN,
        ),
    ] = None
    min_tokens: Annotated[
        int | None,
        typer.Option(help="Generate at least this many tokens.", show_default="0"),
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the text. May be repeated.")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", help="A token that ends the text. May be repeated."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool, typer.Option("--include-stop", help="Keep the stop string in the text.")
    ] = False
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end token.")
    ] = False
    bad_words: Annotated[
        list[str] | None,
        typer.Option("--bad-word", help="A text that must not be generated. May be repeated."),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        typer.Option("--allowed-token-id", help="Draw only from such tokens. May be repeated."),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=NUMBER", help="Add this to the logit of a token. May be repeated."
        ),
    ] = None
    keep_special_tokens: Annotated[
        bool, typer.Option("--keep-special-tokens", help="Show special tokens in the text.")
    ] = False
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the text must follow.")
    ] = None
    json_object: Annotated[
        bool, typer.Option("--json-object", help="The text must be a JSON object.")
    ] = False
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole text must match.")
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option(help="A text that may be the answer. Repeat it for each other one."),
    ] = None
    grammar: Annotated[
        Path | None, typer.Option(help="File with a Lark grammar that the text must follow.")
    ] = None

    def form(self) -> StructuredOutputsParams | None:
        """The form that the text must have.

        Raises:
            ValueError: more than one form, or one that cannot be read. OSError: a file cannot be read.
        """
        named = [
            f"--{name.replace('_', '-')}"
            for name in FORMS
            if getattr(self, name) not in (None, False, [])
        ]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} exclude each other; leave one out")
        if self.json_schema is not None:
            schema = text_of("--json-schema", self.json_schema)
            try:
                return StructuredOutputsParams(json=schema)
            except ValueError as error:
                text = str(error).removeprefix("StructuredOutputsParams: json ")
                raise ValueError(f"--json-schema {self.json_schema}: {text}") from error
        if self.grammar is not None:
            return StructuredOutputsParams(grammar=text_of("--grammar", self.grammar))
        if self.json_object:
            return StructuredOutputsParams(json_object=True)
        if self.choice:
            return StructuredOutputsParams(choice=tuple(map(typed, self.choice)))
        return None if self.regex is None else StructuredOutputsParams(regex=typed(self.regex))

    def params(
        self, defaults: SamplingParams, form: StructuredOutputsParams | None, **more: Any
    ) -> SamplingParams:
        """The model's own parameters with these in their place.

        Args:
            defaults: of the model. form: as `form` returned it. more: further fields.
        """
        given = dict(vars(self))
        for name in FORMS:
            del given[name]
        given["skip_special_tokens"] = not given.pop("keep_special_tokens")
        if given["logit_bias"]:
            given["logit_bias"] = dict(map(_bias, given["logit_bias"]))
        for name in ("stop", "bad_words"):
            given[name] = given[name] and list(map(typed, given[name]))
        given |= {"structured_outputs": form, **more}
        return replace(
            defaults, **{name: value for name, value in given.items() if value not in (None, [])}
        )


def _bias(text: str) -> tuple[int, float]:
    """A token and what is added to its logit."""
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        raise ValueError(
            f"--logit-bias must be ID=NUMBER, such as 97=-5, got {json.dumps(text)}"
        ) from None
