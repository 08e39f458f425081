"""Writes the picture of the home page from what was measured: python docs/home_picture.py"""

from __future__ import annotations

import json
from pathlib import Path

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "cache" / "cached_prompts_cpu.json"
PICTURE = DOCS / "pictures" / "shared_prefix.svg"
WIDTH, BAR, LEFT, RIGHT = 640, 26, 190, 70
STYLE = "font: 14px system-ui, sans-serif; fill: #777"


def picture() -> str:
    """Two bars: 64 prompts that begin alike, with and without the prefix cache."""
    shared = json.loads(RESULTS.read_text(encoding="utf-8"))["shared"]
    sides = {"without the prefix cache": ("off", "#999"), "with it": ("adaptive", "#0072B2")}
    seconds = {label: shared[name]["seconds"]["median"] for label, (name, _) in sides.items()}
    longest = max(seconds.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {40 + 2 * (BAR + 10)}" role="img">',
        "<title>64 prompts that share 1,536 of their 1,552 tokens: seconds for all</title>",
        f'<text x="0" y="16" style="{STYLE}">64 prompts that share 1,536 of their 1,552 tokens: seconds for all</text>',
    ]
    for place, (label, (_, colour)) in enumerate(sides.items()):
        top, width = 30 + place * (BAR + 10), (WIDTH - LEFT - RIGHT) * seconds[label] / longest
        middle = top + BAR / 2 + 5
        lines += [
            f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end" style="{STYLE}">{label}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<text x="{LEFT + width + 8:.1f}" y="{middle}" style="{STYLE}">{seconds[label]:.2f} s</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(), encoding="utf-8")
