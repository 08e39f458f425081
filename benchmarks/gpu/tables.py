"""Tables of a report of `hybrid_7b.py`."""

from __future__ import annotations

from collections.abc import Iterator

GOALS = (
    ("MFU of the best prefill, of the measured rate", ">= 50 %"),
    ("the same of the data sheet's 989 TFLOP/s", "-"),
    ("share of the bytes floor, decode of 64 rows", ">= 75 %"),
    ("time to first token, 90 % hit / cold", "<= 0.15"),
)


def tables(report: dict) -> str:
    """The report in lines: ceilings, one row per side and case, the roofline, and the goals."""
    return "\n".join(_lines(report))


def _lines(report: dict) -> Iterator[str]:
    found, ceilings = report["header"], report["ceilings"]
    yield ", ".join(f"{name} {value}" for name, value in found.items())
    yield (f"ceilings: {ceilings['copy'] / 1e12:.3g} TB/s, {ceilings['matmul'] / 1e12:.3g} TFLOP/s")
    if report.get("peak_bytes"):
        yield f"most device memory in use: {report['peak_bytes'] / 1e9:.1f} GB"
    yield from _sides(report)
    yield from _compilation(report)
    yield from _roofline(report)
    yield from _goals(report)


def _measured(report: dict, *sections: str) -> Iterator[tuple[str, str, str, dict, dict]]:
    """(section, case, side, its result, all of its case) of what was measured."""
    for section in sections:
        for case, sides in report.get(section, {}).items():
            for side, result in sides.items():
                yield section, case, side, result, sides


def _sides(report: dict) -> Iterator[str]:
    yield ""
    yield f"{'case':24} {'side':14} {'tokens/s':>9} {'ms':>9} {'MFU':>6} {'floor':>6}  ratio to the first of its turns"
    for section, case, side, result, sides in _measured(report, "decode", "prefill", "ttft"):
        label = f"{section} {case}"
        if "error" in result:
            yield f"{label:24} {side:14} {result['error']}"
            continue
        ms = 1e3 * result["seconds"]["median"]
        rate = f"{result['tokens_per_s']['median']:9.0f}" if "tokens_per_s" in result else " " * 9
        mfu = f"{result['mfu']['median']:6.1%}" if "mfu" in result else " " * 6
        share = result["floor_share"]["median"]
        yield f"{label:24} {side:14} {rate} {ms:9.3f} {mfu} {share:6.1%}  {_ratio(side, sides)}"


def _ratio(side: str, sides: dict) -> str:
    """How many times faster than the first side of the same turns; and whether first tokens agree."""
    result, first = sides[side], sides[side]["beside"][0]
    baseline = sides.get(first, {})
    if first == side or baseline.get("beside") != result["beside"]:
        return ""
    text = f"{baseline['seconds']['median'] / result['seconds']['median']:.2f}x"
    if "first_tokens" in result:
        pairs = list(zip(result["first_tokens"], baseline["first_tokens"], strict=True))
        text += f", {sum(a == b for a, b in pairs)} of {len(pairs)} first tokens agree"
    return text


def _compilation(report: dict) -> Iterator[str]:
    for _, kernel, run, result, _ in _measured(report, "compile"):
        yield ""
        if "error" in result:
            yield f"warm-up, {kernel}, {run}: {result['error']}"
            continue
        ended = "" if result["complete"] else ", stopped by the budget"
        if not result.get("same_tokens", True):
            ended += ", and tokens are not those of the first start"
        yield (
            f"warm-up, {kernel}, {run}: {result['start_s']:.1f} s to start and {result['warmup_s']:.1f} s of programs"
            f"{ended}"
        )
        for kind, times in result["kinds"].items():
            yield f"  {kind:12} {times['programs']:3} programs, median {times['median']:.2f} s"


def _roofline(report: dict) -> Iterator[str]:
    yield ""
    yield f"{'case':24} {'side':14} {'GB':>9} {'GFLOP':>10} {'floor ms':>9} {'took ms':>9} {'share':>6}"
    for section, case, side, result, _ in _measured(report, "decode", "prefill", "ttft"):
        if "error" in result:
            continue
        yield (
            f"{f'{section} {case}':24} {side:14} {result['bytes'] / 1e9:9.4g} {result['flops'] / 1e9:10.4g} "
            f"{1e3 * result['floor_s']:9.3f} {1e3 * result['seconds']['median']:9.3f} "
            f"{result['floor_share']['median']:6.1%}"
        )


def _goals(report: dict) -> Iterator[str]:
    """The goals beside what was reached; a dash for what was not measured."""
    sides = _measured(report, "decode", "prefill", "ttft")
    good = [entry for entry in sides if "error" not in entry[3]]
    mfu = [r["mfu"]["median"] for _, _, _, r, _ in good if "mfu" in r]
    datasheet = [r["mfu_datasheet"]["median"] for _, _, _, r, _ in good if "mfu" in r]
    share = [r["floor_share"]["median"] for _, _, _, r, _ in good if r.get("rows") == 64]
    ratios = []
    for section, _, side, result, sides in good:
        cold = sides.get(side.replace("hit", "cold"), {})
        if section == "ttft" and side.endswith("hit") and "seconds" in cold:
            ratios.append(result["seconds"]["median"] / cold["seconds"]["median"])
    reached = (
        f"{max(mfu):.1%}" if mfu else "-",
        f"{max(datasheet):.1%}" if datasheet else "-",
        f"{max(share):.1%}" if share else "-",
        f"{min(ratios):.3f}" if ratios else "-",
    )
    yield ""
    for (what, goal), value in zip(GOALS, reached, strict=True):
        yield f"{what:48} {value:>7}  goal {goal}"
