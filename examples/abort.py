# SPDX-License-Identifier: Apache-2.0
"""Abort: the decode engine gives a request up. Its pages may be used again once its room
has failed, not before; the prefill engine is told why.

python abort.py PREFILL_SOCKET DECODE_SOCKET   (both engines in one program)"""
import secrets
import sys

import kvd
from engine import Engine

prefill, decode = Engine(sys.argv[1], "prefill"), Engine(sys.argv[2], "decode")

ticket = secrets.token_hex(16)  # of the router, with the number
rx = decode.client.recv(53, decode.pool, [prefill.client.endpoint], ticket=ticket)
rx.bind({"kv": [3, 9]})
tx = prefill.client.send(53, prefill.pool, ticket=ticket)
tx.wait(kvd.WAITING_FOR_INPUT, timeout=60)
rx.abort("the user closed the window")

for side, room in (("decode", rx), ("prefill", tx)):
    try:
        room.wait(timeout=60)
    except kvd.AbortedError as error:
        print("%s: %s (retry: %s)" % (side, error, kvd.RETRY[error.code]))
try:
    tx.send({"kv": [3, 9]})  # whoever goes on all the same gets the room's own error
except kvd.AbortedError as error:
    print("send: %s" % error)
