# SPDX-License-Identifier: Apache-2.0
"""Waits with a time limit. asyncio.wait_for() before Python 3.12 loses a cancellation that occurs
when the call is just done."""
import asyncio


async def within(seconds, call):
    """Its result; asyncio.TimeoutError. A late result is closed."""
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
    """Cancels it; a result that it returns nevertheless is closed."""
    task.cancel()
    await asyncio.wait((task,))
    late = None if task.cancelled() or task.exception() else task.result()
    if hasattr(late, "close"):
        late.close()
