# SPDX-License-Identifier: Apache-2.0
"""Many pushes at a time with asyncio.

python async_push.py PREFILL_SOCKET DECODE_SOCKET   (both engines in one program)"""
import asyncio
import secrets
import sys

import kvd
from engine import LAYOUT


async def pool_of(client):
    regions = [await client.register(kvd.Memory(n)) for n in LAYOUT.buffers]
    return await client.pool(LAYOUT, regions)


async def send(client, pool, number, ticket, page):
    tx = await client.send(number, pool, ticket=ticket)
    await tx.wait(kvd.WAITING_FOR_INPUT)
    await tx.send({"kv": [page]})
    await tx.wait()
    await tx.close()


async def recv(client, pool, number, ticket, page, endpoint):
    rx = await client.recv(number, pool, [endpoint], ticket=ticket)
    await rx.bind({"kv": [page]})
    await rx.wait()
    await rx.close()


async def main(prefill_socket, decode_socket):
    async with kvd.AsyncClient(prefill_socket, role="prefill") as prefill, \
            kvd.AsyncClient(decode_socket, role="decode") as decode:
        source, target = await pool_of(prefill), await pool_of(decode)
        tickets = [secrets.token_hex(16) for i in range(32)]  # the router's
        rooms = [send(prefill, source, 1000 + i, t, i) for i, t in enumerate(tickets)]
        rooms += [recv(decode, target, 1000 + i, t, 63 - i, prefill.endpoint)
                  for i, t in enumerate(tickets)]
        await asyncio.wait_for(asyncio.gather(*rooms), 60)
        print("32 rooms")

asyncio.run(main(*sys.argv[1:]))
