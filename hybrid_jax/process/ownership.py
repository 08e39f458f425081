"""Who may write where this package keeps code: whoever may can run code here."""

from __future__ import annotations

import os


def others_may_write(info: os.stat_result) -> bool:
    """Whether somebody else than this user and root may write to a folder."""
    own = not hasattr(os, "getuid") or info.st_uid in (os.getuid(), 0)
    return not own or bool(info.st_mode & 0o022)
