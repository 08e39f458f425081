"""What the fields of a quantisation say of the weights of one module, checked for their form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Lists of modules that stay as they are. Tensors tell which do; published lists name others, too.
LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
FORMATS = (
    *("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision"),
)
CLASS = re.compile(r"\w*(Linear|Experts|MoE|Moe)\w*")  # of modules that are matrices


@dataclass(frozen=True, kw_only=True)
class Said:
    """What is said of the weights of some modules.

    Attributes:
        place: where it is said, for messages.
        targets: the modules, as compressed-tensors names them: names, "re:..." or classes. None for all.
        kind: "int" or "float"; None where tensors tell, as for all that follows.
        bits: of a code.
        strategy: what shares a scale, one of STRATEGIES.
        group: elements that share a scale.
        block: columns and elements that share a scale.
        symmetric: there are no zero points.
        ordered: there is an order.
        absent: nothing is said of weights, so that modules must have none that are codes.
    """

    place: str
    targets: tuple[str, ...] | None = None
    kind: str | None = None
    bits: int | None = None
    strategy: str | None = None
    group: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool | None = None
    ordered: bool = False
    absent: bool = False

    def rank(self, modules: Sequence[str]) -> int:
        """How well a module is meant, by any of its names: 3 by name, 2 by an expression, 1 by its class, 0 not."""
        if self.targets is None:
            return 1
        best = 0
        for target in self.targets:
            if target.startswith("re:"):
                found = 2 * any(re.match(target[3:], module) for module in modules)
            elif CLASS.fullmatch(target):
                found = 1
            else:
                found = 3 * any(
                    module == target or module.startswith(f"{target}.") for module in modules
                )
            best = max(best, found)
        return best


def said_of_group(name: str, group: Any, place: str, where: str) -> Said:
    """What a group of compressed-tensors says.

    Raises:
        ValueError: a field is malformed. NotImplementedError: codes that are not read.
    """
    place = f"{place}: config_groups.{name}"
    if not isinstance(group, dict):
        raise ValueError(f"{where}: {place} must be an object, got {group!r}")
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise ValueError(f"{where}: {place}.targets must be a list of names, got {targets!r}")
    for target in targets:
        expression(target, f"{place}.targets", where)
    check_format(group.get("format"), place, where)
    weights = group.get("weights")
    if weights is None:
        return Said(place=f"{place}.weights", targets=tuple(targets), absent=True)
    place = f"{place}.weights"
    if not isinstance(weights, dict):
        raise ValueError(f"{where}: {place} must be an object, got {weights!r}")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if type(bits) is not int:
        raise ValueError(f"{where}: {place}: num_bits must be a number, got {bits!r}")
    if bits not in (4, 8):
        raise NotImplementedError(f"{where}: {place}: num_bits must be 4 or 8, got {bits}")
    _one_of(kind, ("int", "float"), f"{place}: type", where)
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if size is not None and (type(size) is not int or size < -1 or size == 0):
        raise ValueError(f"{where}: {place}: group_size must be positive or -1, got {size!r}")
    if strategy is None:  # as compressed-tensors takes it
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    _one_of(strategy, STRATEGIES, f"{place}: strategy", where)
    grouped = strategy in ("group", "tensor_group")
    if grouped and (size is None or size < 1):
        raise ValueError(
            f"{where}: {place}: group_size must be positive for the strategy {strategy}, got {size!r}"
        )
    order = weights.get("actorder")
    if order is True or order is False:
        order = "group" if order else None
    _one_of(order, (None, "group", "weight", "static", "dynamic"), f"{place}: actorder", where)
    symmetric = weights.get("symmetric", True)
    if type(symmetric) is not bool:
        raise ValueError(f"{where}: {place}: symmetric must be true or false, got {symmetric!r}")
    return Said(
        place=place,
        targets=tuple(targets),
        kind=kind,
        bits=bits,
        strategy=strategy,
        group=size if grouped else None,
        block=_structure(weights.get("block_structure"), place, where)
        if strategy == "block"
        else None,
        symmetric=symmetric,
        ordered=order == "group",
    )


def check_format(format: Any, place: str, where: str) -> None:
    """NotImplementedError for a `format` of compressed-tensors that is not read."""
    if format is not None and format not in FORMATS:
        raise NotImplementedError(
            f"{where}: {place}: format must be one of {', '.join(FORMATS)}, got {format!r}; fetch the model in another "
            "form"
        )


def check_lists(said: Mapping[str, Any], place: str, where: str) -> None:
    """ValueError unless the lists of modules are lists of names."""
    for name in LISTS:
        names = said.get(name)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise ValueError(f"{where}: {place}: {name} must be a list of names, got {names!r}")


def expression(target: str, what: str, where: str) -> None:
    """ValueError for a regular expression that is none."""
    try:
        re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
    except re.error as error:
        raise ValueError(f"{where}: {what} has {target!r}, which is malformed: {error}") from error


def pair(size: Any, what: str, where: str) -> tuple[int, int]:
    """Two positive numbers."""
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if not is_pair or any(type(n) is not int or n <= 0 for n in size):
        raise ValueError(f"{where}: {what} must be two positive numbers, got {size!r}")
    return size[0], size[1]


def _structure(said: Any, place: str, where: str) -> tuple[int, int]:
    """A `block_structure`, which older files have as "128x128"."""
    if isinstance(said, str) and (found := re.fullmatch(r"(\d{1,9})x(\d{1,9})", said)):
        said = [int(found[1]), int(found[2])]
    return pair(said, f"{place}: block_structure", where)


def _one_of(value: Any, known: tuple, what: str, where: str) -> None:
    if not isinstance(value, str | None) or value not in known:
        names = ", ".join(str(one) for one in known)
        raise ValueError(f"{where}: {what} must be one of {names}, got {value!r}")
