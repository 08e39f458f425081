"""Progress as all formats report it; the directory of a model is `models.files`' business."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
