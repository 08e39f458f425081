"""Reads the fields of a Hugging Face config.json, in the dialects of transformers 4 and 5.

Where a field was renamed between the two, the families name both; null counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from hybrid_jax.config import DTYPES, Attention, Mamba2, Rope, RopeScaling

REQUIRED = object()
ROPE_KINDS = ("default", "linear", "llama3")


def plain(value: Any) -> Any:
    """Replaces {"__float__": "Infinity"}, as transformers 5 writes non-finite numbers, at any depth."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class HFConfig:
    """The fields of one config.json; every error names the family, the field and its value."""

    def __init__(self, values: dict, family: str) -> None:
        self.values = plain(values)
        self.family = family
        if self.values.get("quantization_config"):
            method = self.values["quantization_config"].get("quant_method", "unknown")
            raise NotImplementedError(
                f"{family}: quantization_config (quant_method {method!r}) is not supported; "
                "use a checkpoint in float32, bfloat16 or float16"
            )

    # --- single fields ----------------------------------------------------------------------------

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is there and not null; `REQUIRED` as default makes it an error."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if default is REQUIRED:
            raise ValueError(f"{self.family}: config.json needs {' or '.join(names)}, it has none")
        return default

    def integer(self, *names: str, default: Any = REQUIRED, minimum: int = 1) -> Any:
        """A whole number of at least `minimum`."""
        value = self.get(*names, default=default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self._refuse(names, f"a whole number of at least {minimum}", value)
        return value

    def number(self, *names: str, default: Any = REQUIRED) -> float:
        """A finite number."""
        value = self.get(*names, default=default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
        ):
            self._refuse(names, "a finite number", value)
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
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

    def only(self, name: str, supported: Collection, default: Any) -> Any:
        """The field, where just some values are supported; `default` stands for an absent one."""
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

    def _refuse(self, names: tuple[str, ...], what: str, value: Any) -> None:
        name = next((n for n in names if self.values.get(n) is not None), names[0])
        raise ValueError(f"{self.family}: {name} in config.json must be {what}, got {value!r}")

    # --- groups of fields -------------------------------------------------------------------------

    def common(self, norm_eps: str, default_eps: float, default_length: int | None = None) -> dict:
        """The arguments of `ModelConfig` that every family reads the same way.

        Args:
            norm_eps: name of the norms' epsilon. default_eps: its value where the file has none.
            default_length: longest sequence where the file names none; None requires the field.
        """
        length_default = REQUIRED if default_length is None else default_length
        return {
            "family": self.family,
            "vocab_size": self.integer("vocab_size"),
            "width": self.integer("hidden_size"),
            "norm_eps": self.number(norm_eps, default=default_eps),
            "tie_embeddings": self.flag("tie_word_embeddings"),
            "max_position": self.integer("max_position_embeddings", default=length_default),
            "dtype": self._dtype(),
            "eos_token_ids": token_ids(self.get("eos_token_id")),
            "bos_token_id": self.get("bos_token_id"),
        }

    def _dtype(self) -> str:
        name = str(self.get("dtype", "torch_dtype", default="float32")).removeprefix("torch.")
        if name not in DTYPES:
            raise NotImplementedError(
                f"{self.family}: dtype {name!r} is not supported, only {', '.join(DTYPES)}"
            )
        return name

    def attention(
        self, *, rope: bool, rope_fraction: float | None = None, **extra: Any
    ) -> Attention:
        """The attention mixer of a family; `extra` goes to `Attention` as it is.

        Args:
            rope: whether the family rotates. rope_fraction: share of each head that is rotated where the
                file names none, for families that rotate a part; None for those that rotate all of it.
        """
        num_heads = self.integer("num_attention_heads")
        head_dim = self.integer("head_dim", "attention_head_dim", default=None)
        if head_dim is None:
            head_dim = self.integer("hidden_size") // num_heads
        return Attention(
            num_heads=num_heads,
            num_kv_heads=self.integer("num_key_value_heads", default=num_heads),
            head_dim=head_dim,
            rope=self._rope(head_dim, rope_fraction) if rope else None,
            **extra,
        )

    def _rope(self, head_dim: int, default_fraction: float | None) -> Rope:
        """`rope_parameters` (5.x), or `rope_theta`, `rope_scaling`, `partial_rotary_factor` (4.x)."""
        given = self.get("rope_parameters", "rope_scaling", default={})
        if not isinstance(given, dict):
            raise ValueError(
                f"{self.family}: rope_parameters in config.json must be an object, got {given!r}"
            )

        def pick(name: str) -> Any:
            value = given.get(name)
            return value if value is not None else self.get(name)

        fraction = pick("partial_rotary_factor")
        if default_fraction is None and fraction not in (None, 1):
            raise NotImplementedError(
                f"{self.family}: partial_rotary_factor {fraction!r} is not supported, only 1.0"
            )
        if fraction is None:
            fraction = 1.0 if default_fraction is None else default_fraction
        dim = int(head_dim * fraction)
        if dim % 2 or dim <= 0:
            raise NotImplementedError(
                f"{self.family}: partial_rotary_factor {fraction!r} rotates {dim} of head_dim "
                f"{head_dim} channels; only even counts are supported"
            )
        theta = pick("rope_theta")
        return Rope(
            dim=dim, theta=10_000.0 if theta is None else float(theta), scaling=self._scaling(given)
        )

    def _scaling(self, given: dict) -> RopeScaling | None:
        kind = given.get("rope_type") or given.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise NotImplementedError(
                f"{self.family}: rope_type {kind!r} is not supported, only {', '.join(ROPE_KINDS)}"
            )
        if kind == "default":
            return None
        names = {"factor": "factor"}
        if kind == "llama3":
            names |= {key: key for key in ("low_freq_factor", "high_freq_factor")}
        missing = [name for name in names if given.get(name) is None]
        if missing:
            raise ValueError(f"{self.family}: rope_type {kind!r} in config.json needs {missing[0]}")
        values = {key: float(given[name]) for key, name in names.items()}
        if kind == "llama3":
            original = given.get("original_max_position_embeddings")
            values["original_max_position"] = int(
                original if original is not None else self.integer("max_position_embeddings")
            )
        return RopeScaling(kind=kind, **values)

    def dt_limits(self, *names: str) -> tuple[float, float]:
        """Bounds of the step size; absent means none.

        The published implementations bound the step by this field alone. `time_step_min`, `_max` and
        `_floor` describe how dt_bias was drawn before training and play no part in inference.
        """
        value = self.get(*names, default=[0.0, math.inf])
        numbers = isinstance(value, list) and len(value) == 2
        if not numbers or not all(isinstance(v, int | float) for v in value):
            self._refuse(names, "two numbers", value)
        return (max(0.0, float(value[0])), float(value[1]))

    def bamba_mixer(self) -> Mamba2:
        """The Mamba-2 mixer under the field names that Bamba and Granite share."""
        width, heads = self.integer("hidden_size"), self.integer("mamba_n_heads")
        expand = self.integer("mamba_expand", default=2)
        head_dim = self.get("mamba_d_head", default="auto")
        if head_dim == "auto":
            head_dim = expand * width // heads
        else:
            head_dim = self.integer("mamba_d_head")
        self.check_inner(heads * head_dim, expand * width, "mamba_n_heads * mamba_d_head")
        groups = self.integer("mamba_n_groups")
        return Mamba2(
            num_heads=heads,
            head_dim=head_dim,
            state_size=self.integer("mamba_d_state"),
            num_groups=groups,
            conv_width=self.integer("mamba_d_conv", minimum=2),
            conv_bias=self.flag("mamba_conv_bias", default=True),
            proj_bias=self.flag("mamba_proj_bias"),
            dt_limits=self.dt_limits("time_step_limit"),
            norm_groups=groups,
            norm_eps=self.number("rms_norm_eps", default=1e-5),
        )

    def check_inner(self, inner: int, expanded: int, what: str) -> None:
        """The inner width of a Mamba-2 mixer, said twice in the file, must agree with itself."""
        if inner != expanded:
            raise ValueError(
                f"{self.family}: {what} must equal the expanded hidden_size, "
                f"got {inner} and {expanded}"
            )


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` as a file writes it: one id, a list of them, or null."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else (value,)
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise ValueError(f"eos_token_id must be token ids, got {value!r}")
    return tuple(ids)
