"""Tables of what `anatomy.py` found."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

MOST_KERNELS = 24  # lines of a table; the others are one more
PREFERRED, BEFORE = "graph", "outside"  # the form that an engine prefers, and what it replaced


def anatomy(report: dict) -> str:
    """The report as markdown."""
    return "\n\n".join(_parts(report))


def step_seconds(calls: dict[str, dict]) -> tuple[float, float]:
    """Seconds of a step, and of what a dispatch takes beside its steps.

    Args:
        calls: `anatomy.times`.
    """
    counts = sorted(map(int, calls))
    first, last = (calls[str(count)]["done_s"]["median"] for count in (counts[0], counts[-1]))
    step = (last - first) / (counts[-1] - counts[0])
    return step, first - counts[0] * step


def _parts(report: dict) -> Iterator[str]:
    known, forms = report["header"], report["forms"]
    yield "## Anatomy of a decode step"
    driver = f"driver of CUDA {known['driver']}" if known["driver"] else "no driver of CUDA"
    models = {f"{of['name']}, {of['context']:,} tokens a row" for of in _of_forms(forms, "model")}
    yield (
        f"{known['device']}, jax {known['jax']}, {driver}: {'; '.join(sorted(models))}. No row folds. A step is what "
        "one more step adds to a call. What is left of a call of one step is the dispatch."
    )
    if rates := _of_forms(forms, "rates"):
        copy, read = (_range([of[kind] / 1e12 for of in rates], ".2f") for kind in ("copy", "read"))
        yield (
            f"A copy moves {copy} TB/s here, read plus written, and a sum reads {read} TB/s. Shares are of these, as "
            "the same process measured them. Compare shares between cards, not milliseconds."
        )
    yield from _failures(forms)
    for rows in _all_rows(forms):
        yield f"### {_counted(rows)}"
        yield from _programs(forms, rows)
        measured = {name: _result(form, rows, "calls") for name, form in forms.items()}
        measured = {name: calls for name, calls in measured.items() if calls}
        if measured:
            yield _step_table(forms, rows, measured)
            yield _call_table(forms, measured)
        yield from _gain(measured)
        yield from _bits(forms, rows)
        yield from _trial(forms, rows)
        yield from _kernels(forms, rows, measured)


def _range(numbers: list[float], form: str) -> str:
    least, most = format(min(numbers), form), format(max(numbers), form)
    return least if least == most else f"{least} to {most}"


def _of_forms(forms: dict, what: str) -> list[Any]:
    """A result of each form that has it."""
    found = [form.get(what) for form in forms.values()]
    return [result for result in found if result and "error" not in result]


def _all_rows(forms: dict) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(rows for form in forms.values() for rows in form["rows"]))


def _result(form: dict, rows: str, what: str) -> Any:
    """A result that is there and no error; else None."""
    result = form["rows"].get(rows, {}).get(what)
    return None if result is None or "error" in result else result


def _counted(rows: str) -> str:
    return f"{rows} row" if rows == "1" else f"{rows} rows"


def _failures(forms: dict) -> Iterator[str]:
    for form in forms.values():
        places = {"": form, **{f"{_counted(rows)}, ": of for rows, of in form["rows"].items()}}
        for where, of in places.items():
            for what, result in of.items():
                if isinstance(result, dict) and "error" in result:
                    yield f"- failed: {form['name']}, {where}{what}: {result['error']}"
        if "running" in form:
            yield f"- {form['name']}: the process ended during: {form['running']}"


def _programs(forms: dict, rows: str) -> Iterator[str]:
    """What steps are made of, and how long a first result takes."""
    if found := [of for form in forms.values() if (of := _result(form, rows, "program"))]:
        made_of = "; ".join(sorted({of["kernels"] for of in found}))
        seconds = _range([of["first_s"] for of in found], ".0f")
        yield f"Steps are made of {made_of}. The first result of a process came after {seconds} s."


def _step_table(forms: dict, rows: str, measured: dict[str, dict]) -> str:
    """Steps and dispatches of each form."""
    lines = [
        "| form | a step, ms | of the copy rate | of the read rate | a dispatch beside its steps, ms "
        "| repeats with the same bits |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, calls in measured.items():
        form = forms[name]
        step, dispatch = step_seconds(calls)
        shares = ["", ""]
        if step > 0 and "error" not in form["rates"]:
            moved = form["rows"][rows]["program"]["bytes"] / step
            shares = [f"{moved / form['rates'][rate]:.0%}" for rate in ("copy", "read")]
        cells = [form["name"], f"{1e3 * step:.2f}", *shares, f"{1e3 * dispatch:.2f}"]
        lines.append(f"| {' | '.join([*cells, _same(form, rows)])} |")
    return "\n".join(lines)


def _call_table(forms: dict, measured: dict[str, dict]) -> str:
    """Calls as the host sees them."""
    counts = _counts(measured)[-2:]
    titles = [
        title
        for count in counts
        for title in (f"{count} steps: returns after, ms", "done after", "in a row, each")
    ]
    lines = [
        f"| a call | {' | '.join(titles)} |",
        f"| --- | {' | '.join('---:' for _ in titles)} |",
    ]
    for name, calls in measured.items():
        of = [calls[str(count)] for count in counts]
        seconds = [
            one
            for call in of
            for one in (
                call["returned_s"]["median"],
                call["done_s"]["median"],
                call["in_a_row_s"],
            )
        ]
        cells = [f"{1e3 * one:.2f}" for one in seconds]
        lines.append(f"| {forms[name]['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _counts(measured: dict[str, dict]) -> list[int]:
    """Steps of the calls that were timed."""
    return sorted({int(count) for calls in measured.values() for count in calls})


def _same(form: dict, rows: str) -> str:
    found = _result(form, rows, "bits")
    if found is None:
        return ""
    if found["different"] == 1:
        return f"all {found['repeats']}"
    return f"**{found['different']} digests in {found['repeats']}**"


def _gain(measured: dict[str, dict]) -> Iterator[str]:
    """What the loop in the graph changes."""
    if not {PREFERRED, BEFORE} <= measured.keys():
        return
    now, before = measured[PREFERRED], measured[BEFORE]
    few = _counts(measured)[-2]
    times = now[str(few)], before[str(few)]
    in_place = lambda new, old: f"{1e3 * new:.2f} ms in place of {1e3 * old:.2f}"  # noqa: E731
    in_a_row = [call["in_a_row_s"] for call in times]
    returned = [call["returned_s"]["median"] for call in times]
    step, dispatch = zip(step_seconds(now), step_seconds(before), strict=True)
    yield (
        f"What the loop in the graph changes: calls of {few} steps in a row take {in_place(*in_a_row)} each, "
        f"{in_a_row[1] / in_a_row[0]:.2f} times as fast. A call returns after {in_place(*returned)}. A step takes "
        f"{in_place(*step)}, a dispatch beside its steps {in_place(*dispatch)}."
    )


def _bits(forms: dict, rows: str) -> Iterator[str]:
    """Whether all forms leave the same bits."""
    groups: dict[str, list[str]] = {}
    for form in forms.values():
        if (found := _result(form, rows, "bits")) is not None:
            groups.setdefault(found["first"], []).append(form["name"])
    names = ["; ".join(names) for names in groups.values()]
    if len(names) == 1 and ";" in names[0]:
        yield f"These leave the same bits: {names[0]}."
    elif len(names) > 1:
        yield f"**Bits differ between forms.** Alike are: {' | '.join(names)}."


def _trial(forms: dict, rows: str) -> Iterator[str]:
    found = _result(forms.get(PREFERRED, {"rows": {}}), rows, "trial")
    if found is not None:
        result = "passes" if found["wrong"] is None else f"**fails: {found['wrong']}**"
        first, *_, again = 2 * found["seconds"]
        yield (
            f"An engine's trial of the loop {result}. It takes {again:.3f} s; the first one, which also compiles small "
            f"programs, took {first:.2f} s."
        )


def _kernels(forms: dict, rows: str, measured: dict[str, dict]) -> Iterator[str]:
    """A table of kernels; or what the profiles have in place of them."""
    per_step: dict[str, dict[str, tuple[float, float]]] = {}
    for name, form in forms.items():
        if (found := _result(form, rows, "profile")) is None:
            continue
        if found["kernels"]:
            per_step[name] = _per_step(found)
        else:
            lines = ", ".join(f"{line} ({count})" for line, count in found["planes"].items())
            yield f"- {form['name']}: its profile has no kernels. Lines and events there: {lines or 'none'}"
    if per_step:
        yield _kernel_table(forms, rows, per_step, measured)


def _per_step(profile: dict) -> dict[str, tuple[float, float]]:
    """Launches and microseconds of a step by kernel. XLA numbers the kernels of one name; here they are one."""
    launches: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)
    for name, (count, us) in profile["kernels"].items():
        base = re.sub(r"(_+\d+)+$", "", name)
        launches[base] += count
        spent[base] += us
    steps = profile["steps"]
    return {base: (launches[base] / steps, spent[base] / steps) for base in spent}


def _kernel_table(forms: dict, rows: str, per_step: dict, measured: dict) -> str:
    # A profiler may see nothing of what a graph starts, so the fullest profile leads.
    totals = {name: sum(us for _, us in each.values()) for name, each in per_step.items()}
    lead = max(totals, key=lambda name: totals[name])
    longest: dict[str, float] = {}
    for each in per_step.values():
        for kernel, (_, us) in each.items():
            longest[kernel] = max(longest.get(kernel, 0.0), us)
    order = sorted(longest, key=lambda kernel: -longest[kernel])
    titles = " | ".join(f"{forms[name]['name']}, us" for name in per_step)
    lines = [
        f"Kernels of a step, {_counted(rows)}. Launches and shares are from the profile of: {forms[lead]['name']}.",
        "",
        f"| kernel | launches | share | {titles} |",
        f"| --- | ---: | ---: | {' | '.join('---:' for _ in per_step)} |",
    ]

    def line(label: str, kernels: list[str]) -> str:
        parts = {name: [each[k] for k in kernels if k in each] for name, each in per_step.items()}
        count = sum(launches for launches, _ in parts[lead])
        us = {name: sum(us for _, us in of) for name, of in parts.items()}
        cells = [f"{us[name]:.1f}" if of else "" for name, of in parts.items()]
        return f"| {label} | {count:.4g} | {us[lead] / totals[lead]:.1%} | {' | '.join(cells)} |"

    lines += [line(f"`{kernel}`", [kernel]) for kernel in order[:MOST_KERNELS]]
    if others := order[MOST_KERNELS:]:
        lines.append(line(f"{len(others)} others", others))
    lines.append(line("all", order))
    steps = {name: 1e6 * step_seconds(measured[name])[0] for name in per_step if name in measured}
    cells = [f"{steps[name]:.1f}" if name in steps else "" for name in per_step]
    lines.append(f"| the step, timed without a profiler | | | {' | '.join(cells)} |")
    left = [f"{steps[name] - totals[name]:.1f}" if name in steps else "" for name in per_step]
    lines.append(f"| of it not in kernels | | | {' | '.join(left)} |")
    return "\n".join(lines)
