"""The options of commands that load a model: which one, how large its engine is, and how it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from hybrid_jax.cli.exits import text_of

if TYPE_CHECKING:
    from hybrid_jax.api.llm import LLM
    from hybrid_jax.text.tokenizer import Tokenizer

ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Directory of a model, or tiny_gated_delta or tiny_cut for another small model (hybrid-jax-models).",
        show_default="the bundled small model",
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Memory for keys, values, states, rings and logits, like 5GB, 5GiB or bytes. Weights come on top.",
        show_default="what suits the machine",
    ),
]
HostMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Memory of the host for what the prefix cache evicts, like 8GB or 8GiB. Prompts that go on from that "
        "have it copied back.",
        show_default="none",
    ),
]
CacheDirOption = Annotated[
    str | None,
    typer.Option(
        help="Folder in which the prefix cache is kept, too, made if it is not there. Later runs with the same model "
        "find their prompts there; `hybrid-jax cache` looks after it.",
        show_default="none",
    ),
]
DiskMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Most bytes of the files there, like 20GB or 20GiB.",
        show_default="20GiB, or half of what is free",
    ),
]
RowsOption = Annotated[
    int | None,
    typer.Option(help="How many sequences decode together.", show_default="what suits the machine"),
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        help="Longest sequence in tokens, prompt and output together.", show_default="the model's"
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="Dtype of weights and activations: float32, bfloat16, or auto for float32 on a CPU and the stored one on "
        "a GPU."
    ),
]
KVDtypeOption = Annotated[
    str,
    typer.Option(
        help="Dtype of cached keys and values: auto for that of the model, or fp8 for one byte a number, which "
        "changes the text a little."
    ),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        help="Keep matrices of layers in fewer bits: int8, fp8 or int4. The model takes a half to a quarter of the "
        "memory; the text changes a little.",
        show_default="as the files have them",
    ),
]
CheckpointsOption = Annotated[
    str,
    typer.Option(
        help="How the prefix cache keeps recurrent states: float32, or int8 for about a quarter of the memory, which "
        "changes the text a little."
    ),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        help="Devices that divide the model, like tp=4, or replicas, like dp=2 or dp=2,tp=2, or some replicas that "
        "only compute prompts for others, like prefill=1,decode=2. Memory is then that of each device.",
        show_default="one device",
    ),
]
KernelsOption = Annotated[
    str,
    typer.Option(
        help="What steps are made of: pallas for kernels, xla for what XLA compiles, or auto for what suits the device."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What `LLM` takes, as options of a command."""

    TITLE: ClassVar[str] = "The model and its engine"

    model: ModelOption = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Directory of the tokenizer to use in place of the model's own.",
            show_default="the model's own",
        ),
    ] = None
    dtype: DtypeOption = "auto"
    kv_cache_dtype: KVDtypeOption = "auto"
    quantize: QuantizeOption = None
    memory: MemoryOption = None
    host_memory: HostMemoryOption = None
    cache_dir: CacheDirOption = None
    disk_memory: DiskMemoryOption = None
    max_rows: RowsOption = None
    max_model_len: LengthOption = None
    cache: Annotated[
        str,
        typer.Option(
            help="What the prefix cache keeps when memory is short: adaptive, lru, sglang, marconi, marconi-code or "
            "alpha:X, or off for no cache."
        ),
    ] = "adaptive"
    checkpoints: CheckpointsOption = "float32"
    speculation: Annotated[
        str,
        typer.Option(
            help="Speculative decoding guesses the next tokens and checks several in one step. The text does not "
            "change. ngram and suffix look for repetitions; mtp uses the model's own head, exit a head on its cut, "
            "draft:DIRECTORY a second model."
        ),
    ] = "off"
    kernels: KernelsOption = "auto"
    mesh: MeshOption = None
    seed: Annotated[int, typer.Option(help="Seed of random sampling.")] = 0
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Make all results bit-identical, whatever runs beside them; slower."
        ),
    ] = False

    def for_llm(self) -> dict[str, Any]:
        """The keywords of `LLM` beside the model."""
        given = dict(vars(self))
        del given["model"]
        checkpoints = given.pop("checkpoints")
        if checkpoints != "float32":
            from hybrid_jax.config import CacheConfig

            given["cache"] = CacheConfig(policy=given["cache"], checkpoints=checkpoints)
        return given

    @property
    def name(self) -> str:
        """What messages call the model."""
        return "the bundled model" if self.model is None else self.model


def tokenizer_of(llm: LLM, options: ModelOptions, where: str) -> Tokenizer:
    """The tokenizer; ValueError if the model came without one."""
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise ValueError(
            f"{where}: {options.model} has no tokenizer.json, so it takes no text; put one beside its config.json, or "
            "name a directory with --tokenizer"
        )
    return tokenizer


TemplateOption = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        help="Jinja file with a chat template.",
        show_default="the model's own template",
    ),
]


def template_of(path: Path | None) -> str | None:
    """The source of a chat template. It is checked before anything is loaded."""
    from hybrid_jax.text.templates import compile_template

    if path is None:
        return None
    source = text_of("--chat-template", path)
    if not source.strip():
        raise ValueError(f"--chat-template {path}: is empty; give a Jinja template")
    try:
        compile_template(source)
    except ValueError as error:
        text = str(error).removeprefix("chat template: ")
        raise ValueError(f"--chat-template {path}: is not a Jinja template: {text}") from error
    return source


def check_template(
    tokenizer: Tokenizer, template: str | None, options: ModelOptions, where: str
) -> None:
    """ValueError if there is no chat template, or it is none."""
    from hybrid_jax.text.templates import ChatTemplate

    try:
        for source in tokenizer.chat_templates.values() if template is None else ():
            ChatTemplate(source, tokenizer.template_files.get(source)).compile()
    except ValueError as error:
        raise ValueError(
            f"{where}: {options.name}: {error}; correct it, or give another with --chat-template FILE"
        ) from error
    if template is None and not tokenizer.has_chat_template:
        raise ValueError(
            f"{where}: {options.name} has no chat template; give one with --chat-template FILE, or continue plain text "
            "with `hybrid-jax generate`"
        )
