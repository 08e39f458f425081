"""A generator's work in another thread, its items in this one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


async def in_thread(
    items: Generator[Item, None, None], executor: ThreadPoolExecutor
) -> AsyncGenerator[Item, None]:
    """Yields the items of a generator that runs in a thread, and closes it there, whatever happens.

    Args:
        items: not started.
        executor: of one thread, which ends what it has begun before it closes the generator.
    """
    loop, end = asyncio.get_running_loop(), object()
    try:
        while (item := await loop.run_in_executor(executor, next, items, end)) is not end:
            yield item
    finally:
        closing = executor.submit(items.close)  # even if nobody can wait for it any more
        await asyncio.wrap_future(closing)
