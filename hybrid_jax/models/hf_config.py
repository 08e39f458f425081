"""Reads the fields of a Hugging Face config.json, in the dialects of transformers 4 and 5.

Where a field was renamed between the two, the families name both. Null counts as absent, unless transformers makes
something else of it.

Each field of transformers' config classes is read, refused, or known to make no difference (`HARMLESS`, and
`Family.harmless` for what only one family has). tests/parity/test_fields.py compares that with transformers.

This is no pydantic model. Most rules join several fields (a size that follows from two others, a list that must be as
long as there are layers), and which fields there are depends on values of others. As validators they would be longer.
"""

from __future__ import annotations

import logging
import math
import reprlib
import sys
from collections.abc import Collection, Iterable
from typing import Any

from hybrid_jax.config import DTYPES, Attention, Mamba2, Rope, RopeScaling

REQUIRED = object()
Names = tuple[str, ...]  # of one field, the first that is there
LOG = logging.getLogger("hybrid_jax.models")
MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 4096
ROPE_KINDS = ("default", "linear", "llama3")
# Names of mixers in lists of layers, old and new, of families whose recurrent layers are Mamba-2. Newer files of these
# say "linear_attention"; a family with another kind of recurrent layer needs a table of its own.
MIXER_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


# Fields that make no difference to what a model answers here, whatever their value: what a training did, how another
# program runs the model, heads for other tasks, and notes.
HARMLESS = frozenset(
    (
        *("architectures", "auto_map", "model_type", "name_or_path", "transformers_version"),
        *("attention_dropout", "gradient_checkpointing", "hidden_dropout"),
        *("init_std", "initializer_factor", "initializer_range"),
        *("output_router_logits", "router_aux_loss_coef"),
        *("attn_implementation", "chunk_size_feed_forward", "experts_implementation"),
        *("fusion_config", "num_logits_to_keep", "output_attentions", "output_hidden_states"),
        *("return_dict", "use_cache"),
        *("id2label", "is_encoder_decoder", "label2id", "num_labels", "problem_type"),
        *("number_of_conv_states", "pad_token_id", "tie_last_hidden_states"),
        *("vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"),
    )
)
# Fields of a rotation, for families without one.
ROTATION = frozenset(("partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta"))
# Fields that change all of a model, with what to do about them. Nothing (null, {}) is the only value they may have.
REFUSED = {
    "kv_sharing_modes": "each layer with attention must have its own keys and values",
    "per_layer_config": "all layers of a kind must have the same fields",
    "transformers_weights": "name the file model.safetensors and take the field out",
}


def plain(value: Any) -> Any:
    """Replaces {"__float__": "Infinity"}, as transformers 5 writes non-finite numbers, at any depth."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            try:
                return float(value["__float__"])
            except (TypeError, ValueError) as error:
                raise ValueError(f"__float__ must be a number as text, got {value}") from error
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class HFConfig:
    """The fields of one config.json; every error names the family, the field and its value."""

    def __init__(self, values: dict, family: str) -> None:
        self.values = plain(values)
        self.family = family
        self.asked = {
            "quantization_config",
            "compression_config",
            *REFUSED,
        }  # names of fields that were asked for
        self.inner: HFConfig | None = None  # of the text, after `text`
        for name, remedy in REFUSED.items():
            if value := self.values.get(name):
                raise NotImplementedError(
                    f"{family}: {name} {reprlib.repr(value)} in config.json is not supported; {remedy}"
                )

    # --- single fields ----------------------------------------------------------------------------

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is there and not null; `REQUIRED` as default makes it an error."""
        self.asked.update(names)
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if default is REQUIRED:
            raise ValueError(f"{self.family}: config.json needs {' or '.join(names)}, it has none")
        return default

    def integer(
        self, *names: str, default: Any = REQUIRED, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> Any:
        """A whole number of at least `minimum`, and at most `maximum`."""
        value = self.get(*names, default=default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self._refuse(names, f"a whole number of at least {minimum}", value)
        if value > maximum:
            self._refuse(names, f"at most {maximum}", value)
        return value

    def number(self, *names: str, default: Any = REQUIRED, positive: bool = False) -> float:
        """A finite number; with `positive`, one above 0."""
        value = self.get(*names, default=default)
        what = "a positive number" if positive else "a finite number"
        return self.checked_number(names, value, what, positive)

    def checked_number(
        self, names: tuple[str, ...], value: Any, what: str, positive: bool
    ) -> float:
        """`value`, found under one of `names`, as a float."""
        good = isinstance(value, int | float) and not isinstance(value, bool)
        # an integer may be too large for a float
        if not good or not abs(value) <= sys.float_info.max or (positive and value <= 0):
            self._refuse(names, what, value)
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """So many finite numbers; all 1 where the field is absent."""
        value = self.get(name, default=[1.0] * count)
        what = f"{count} finite numbers"
        if not isinstance(value, list) or len(value) != count:
            self._refuse((name,), what, value)
        return [self.checked_number((name,), item, what, False) for item in value]

    def dt_rank(self, name: str, width: int) -> int:
        """The rank of the step sizes of Mamba: a sixteenth of the width, rounded up, unless the file says another."""
        if self.get(name, default="auto") == "auto":
            return -(-width // 16)
        return self.integer(name)

    def flag(self, *names: str, default: bool = False, null: bool | None = None) -> bool:
        """True or false; `null` is what null means, where that is not the default."""
        if null is not None and self.null(names[0]):
            return null
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            self._refuse(names, "true or false", value)
        return value

    def names(self, *names: str) -> list[str] | None:
        """A list of strings, or None where it is absent."""
        value = self.get(*names)
        if value is not None and not (
            isinstance(value, list) and value and all(isinstance(item, str) for item in value)
        ):
            self._refuse(names, "a list of names", value)
        return value

    def layers(self, name: str, num_layers: int, default: Iterable[int] = ()) -> set[int]:
        """The numbers of some of `num_layers` layers, counted from 0."""
        given = self.get(name, default=list(default))
        if not isinstance(given, list) or not all(
            type(index) is int and 0 <= index < num_layers for index in given
        ):
            self._refuse((name,), f"a list of layers, each from 0 to {num_layers - 1}", given)
        return set(given)

    def only(self, name: str, supported: Collection, default: Any) -> Any:
        """The field, if it has one of the supported values; `default` stands for an absent one."""
        value = self.get(name, default=default)
        if value not in supported:
            known = " or ".join(repr(item) for item in supported)
            raise NotImplementedError(
                f"{self.family}: {name} {value!r} is not supported, only {known}"
            )
        return value

    def silu(self, name: str) -> None:
        """Requires the SiLU activation, which some configurations call swish."""
        self.only(name, ("silu", "swish"), "silu")

    def text(self) -> HFConfig:
        """The fields of the text part, where those of a model of text and images lie in `text_config`.

        What is not of the text alone may also stand outside. Whether the head is tied is said there, if anywhere.
        """
        own = self.get("text_config")
        if own is None:
            return self
        if not isinstance(own, dict):
            self._refuse(("text_config",), "an object", own)
        given = dict(own)
        for name in ("dtype", "torch_dtype", "bos_token_id", "eos_token_id"):
            if given.get(name) is None:
                given[name] = self.get(name)
        if (tied := self.get("tie_word_embeddings")) is not None:
            given["tie_word_embeddings"] = tied
        self.inner = HFConfig(given, self.family)
        return self.inner

    def _refuse(self, names: tuple[str, ...], what: str, value: Any) -> None:
        name = next((n for n in names if self.values.get(n) is not None), names[0])
        shown = reprlib.repr(value)
        raise ValueError(f"{self.family}: {name} in config.json must be {what}, got {shown}")

    def divides(self, group: str, num_groups: int, whole: str, size: int) -> None:
        """Checks that `size` is a multiple of `num_groups`; `whole` and `group` are the names of their fields."""
        if size % num_groups:
            raise ValueError(
                f"{self.family}: {whole} in config.json must be a multiple of {group}, "
                f"got {size} and {num_groups}"
            )

    def layer_kinds(
        self, name: str, kinds: list[str], known: Collection[str], num_layers: int
    ) -> None:
        """Checks that a list has one of the `known` kinds for each layer."""
        for place, kind in enumerate(kinds):
            if kind not in known:
                raise ValueError(
                    f"{self.family}: {name}[{place}] in config.json must be one of {', '.join(known)}, got {kind!r}"
                )
        if len(kinds) != num_layers:
            raise ValueError(
                f"{self.family}: {name} in config.json must name as many layers as num_hidden_layers, "
                f"{num_layers}, got {len(kinds)}"
            )

    def null(self, name: str) -> bool:
        """Whether the field is there and null, where that means something else than an absent field."""
        self.asked.add(name)
        return name in self.values and self.values[name] is None

    def with_values(self, values: dict) -> HFConfig:
        """Other values in place of these. What is asked of one was asked of both."""
        made = HFConfig(values, self.family)
        made.asked = self.asked
        return made

    def log_unread(self, harmless: Collection[str]) -> None:
        """Logs which fields were not read so far and are not known to make no difference."""
        names = self.values.keys() - self.asked - HARMLESS - harmless
        unread = sorted(name for name in names if not name.startswith("_"))
        if unread:
            LOG.info("%s: nothing reads these of config.json: %s", self.family, ", ".join(unread))
        if self.inner is not None:
            self.inner.log_unread(harmless)

    # --- groups of fields -------------------------------------------------------------------------

    def common(
        self,
        norm_eps: str,
        default_eps: float,
        default_length: Any = REQUIRED,
        *,
        tied: tuple[Names, bool] = (("tie_word_embeddings",), False),
    ) -> dict:
        """The arguments of `ModelConfig` that every family reads the same way.

        Args:
            norm_eps: name of the norms' epsilon. default_eps: its value where the file has none.
            default_length: longest sequence where the file names none; without it the field is required.
            tied: names of the field for tied embeddings, and its value where the file has none.
        """
        vocab_size = self.integer("vocab_size")
        eos = self.get("eos_token_id")
        try:
            eos_token_ids = check_token_ids("eos_token_id", eos, vocab_size)
        except ValueError as error:
            raise ValueError(f"{self.family}: {error} in config.json") from error
        return {
            "family": self.family,
            "vocab_size": vocab_size,
            "width": self.integer("hidden_size"),
            "norm_eps": self.number(norm_eps, default=default_eps, positive=True),
            "tie_embeddings": self.flag(*tied[0], default=tied[1]),
            "max_position": self.integer("max_position_embeddings", default=default_length),
            "dtype": self._dtype(),
            "eos_token_ids": eos_token_ids,
            "bos_token_id": self.get("bos_token_id"),
        }

    def _dtype(self) -> str:
        name = str(self.get("dtype", "torch_dtype", default="float32")).removeprefix("torch.")
        if name not in DTYPES:
            raise NotImplementedError(
                f"{self.family}: dtype {reprlib.repr(name)} is not supported, only {', '.join(DTYPES)}"
            )
        return name

    def attention(
        self,
        *,
        rope: bool,
        rope_fraction: float = 1.0,
        theta: float = 10_000.0,
        scale: float | None = None,
        kv_heads: int | None = None,
        head_size: int | None = None,
        biases: bool = True,
        fraction_beside: bool = True,
        **more: Any,
    ) -> Attention:
        """The attention mixer of a family.

        Args:
            rope: whether the family rotates. rope_fraction: share of each head that is rotated where the file names
                none; a family with 1 always rotates all of it. theta: base of the rotation where the file names none.
            scale: of the scores; None for head_dim ** -0.5.
            kv_heads, head_size: where a file lacks the fields. Where a field is null, there are as many KV heads as
                heads, and heads share the width.
            biases: whether the field for biases counts. Without it there are none.
            fraction_beside: whether a fraction beside the parameters of the rotation counts, and not only one in them.
            more: further fields of `config.Attention`.
        """
        if self.null("is_causal") or not self.get("is_causal", default=True):
            raise NotImplementedError(
                f"{self.family}: is_causal {self.values['is_causal']!r} in config.json is not supported, only true: "
                "attention to later tokens is not built"
            )
        bias = biases and self.flag("attention_bias")
        num_heads = self.integer("num_attention_heads")
        head_dim = self.integer("head_dim", default=None)
        if head_dim is None and "head_dim" not in self.values:
            head_dim = head_size
        if head_dim is None:
            width = self.integer("hidden_size")
            self.divides("num_attention_heads", num_heads, "hidden_size", width)
            head_dim = width // num_heads
        if head_dim % 2:
            self._refuse(("head_dim",), "an even number", head_dim)
        silent = "num_key_value_heads" not in self.values and kv_heads is not None
        num_kv_heads = self.integer(
            "num_key_value_heads", default=kv_heads if silent else num_heads
        )
        self.divides("num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
        return Attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=self._rope(head_dim, rope_fraction, theta, fraction_beside) if rope else None,
            scale=scale,
            qkv_bias=bias,
            out_bias=bias,
            **more,
        )

    def _rope(
        self, head_dim: int, default_fraction: float, default_theta: float, fraction_beside: bool
    ) -> Rope:
        """`rope_parameters` (5.x), or `rope_theta`, `rope_scaling`, `partial_rotary_factor` (4.x).

        Where a file has both, transformers takes `rope_scaling`, unless it is empty.
        """
        given: Any = {}
        for name in ("rope_parameters", "rope_scaling"):
            found = self.get(name, default={})
            if not isinstance(found, dict):
                raise ValueError(
                    f"{self.family}: {name} in config.json must be an object, got {found!r}"
                )
            given = found or given
        there = {name: value for name, value in given.items() if value is not None}
        for name, value in there.items():
            if isinstance(value, dict):
                raise NotImplementedError(
                    f"{self.family}: a rotation of its own for {name} in rope_parameters in config.json is not "
                    f"supported, only one for all layers, got {reprlib.repr(value)}"
                )
        beside = self.values if fraction_beside else self.values | {"partial_rotary_factor": None}
        fields = self.with_values(beside | there)
        fraction = fields.get("partial_rotary_factor", default=default_fraction)
        if default_fraction == 1 and fraction != 1:
            raise NotImplementedError(
                f"{self.family}: partial_rotary_factor {fraction!r} is not supported, only 1.0"
            )
        asked = ("partial_rotary_factor",)
        fraction = self.checked_number(asked, fraction, "a number in (0, 1]", True)
        if fraction > 1:
            self._refuse(asked, "a number in (0, 1]", fraction)
        dim = int(head_dim * fraction)
        if dim % 2 or dim <= 0:
            raise NotImplementedError(
                f"{self.family}: partial_rotary_factor {fraction!r} rotates {dim} of head_dim "
                f"{head_dim} channels; only even counts are supported"
            )
        theta = fields.number("rope_theta", default=default_theta, positive=True)
        return Rope(dim=dim, theta=theta, scaling=self._scaling(given))

    def _scaling(self, given: dict) -> RopeScaling | None:
        kind = given.get("rope_type") or given.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise NotImplementedError(
                f"{self.family}: rope_type {kind!r} is not supported, only {', '.join(ROPE_KINDS)}"
            )
        if kind == "default":
            return None

        def positive(name: str) -> float:
            if given.get(name) is None:
                raise ValueError(f"{self.family}: rope_type {kind!r} in config.json needs {name}")
            return self.checked_number((f"{name} of {kind!r} rope",), given[name], "positive", True)

        factor = positive("factor")
        if kind == "linear":
            return RopeScaling(kind="linear", factor=factor)
        low, high = positive("low_freq_factor"), positive("high_freq_factor")
        name = "original_max_position_embeddings"
        # A length of the file itself counts more than that of the rotation, as in transformers.
        length = self.get(name, default=given.get(name))
        if length is None:
            length = self.integer("max_position_embeddings")
        given = given | {name: length}
        original = int(positive(name))
        if low >= high:
            raise ValueError(
                f"{self.family}: low_freq_factor in config.json must be below high_freq_factor, got {low} and {high}"
            )
        return RopeScaling(
            kind="llama3",
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=original,
        )

    def ssd_mixer(
        self,
        *,
        heads: str,
        head_dim: Names | int,
        state_size: Names,
        groups: Names,
        conv_width: Names,
        conv_bias: Names,
        proj_bias: str,
        norm_eps: float,
        dt_limits: Names = ("time_step_limit",),
        **more: Any,
    ) -> Mamba2:
        """The `config.Mamba2` mixer, from the fields that have these names.

        Args:
            head_dim: channels of a head, if they are known already.
            norm_eps: of its norm.
            more: further fields of `config.Mamba2`.
        """
        num_heads, num_groups = self.integer(heads), self.integer(*groups)
        self.divides(groups[-1], num_groups, heads, num_heads)
        given: dict[str, Any] = {"norm_groups": num_groups} | more
        return Mamba2(
            num_heads=num_heads,
            head_dim=head_dim if isinstance(head_dim, int) else self.integer(*head_dim),
            state_size=self.integer(*state_size),
            num_groups=num_groups,
            conv_width=self.integer(*conv_width, minimum=2),
            conv_bias=self.flag(*conv_bias, default=True, null=False),
            proj_bias=self.flag(proj_bias),
            dt_limits=self._dt_limits(dt_limits),
            norm_eps=norm_eps,
            **given,
        )

    def _dt_limits(self, names: Names) -> tuple[float, float]:
        """Bounds of the step size; absent means none.

        The published implementations bound the step by this field alone. `time_step_min`, `_max` and
        `_floor` describe how dt_bias was drawn before training and play no part in inference.
        """
        value = self.get(*names, default=[0.0, math.inf])
        numbers = isinstance(value, list) and len(value) == 2
        if not numbers or not all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in value
        ):
            self._refuse(names, "two numbers", value)
        low, high = max(0.0, value[0]), value[1]
        if not low < high:
            self._refuse(names, "two numbers, the second one larger and above 0", value)
        return (float(low), float(high))

    def check_inner(
        self, inner: int, expanded: int, what: str, other: str = "the expanded hidden_size"
    ) -> None:
        """Checks the inner width of a recurrent mixer, which the file gives in two ways."""
        if inner != expanded:
            raise ValueError(
                f"{self.family}: {what} in config.json must equal {other}, got {inner} and {expanded}"
            )


def check_token_ids(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """A field of token ids as a file writes it: one id, a list of them, or null.

    Raises:
        ValueError: something else, or an id outside the vocabulary.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else (value,)
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
            raise ValueError(
                f"{name} must be token ids below vocab_size {vocab_size}, got {reprlib.repr(value)}"
            )
    return tuple(ids)
