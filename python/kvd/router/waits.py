# SPDX-License-Identifier: Apache-2.0
"""Waiting with an end. asyncio.wait_for() before Python 3.12 loses a cancellation that comes when
the call is just done."""
import asyncio


async def within(seconds, call):
    """What it gives; asyncio.TimeoutError. What it gives too late is closed."""
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait((task,), timeout=seconds)
        if done:
            return task.result()
    except asyncio.CancelledError:
        await ended(task)
        raise
    await ended(task)
    raise asyncio.TimeoutError


async def ended(task):
    """Cancels it; what it gives all the same is closed."""
    task.cancel()
    await asyncio.wait((task,))
    late = None if task.cancelled() or task.exception() else task.result()
    if hasattr(late, "close"):
        late.close()
