# SPDX-License-Identifier: Apache-2.0
"""Push in two chunks: the first goes while the model computes the second.

python push.py PREFILL_SOCKET DECODE_SOCKET   (both engines in one program)"""
import secrets
import sys

import kvd
from engine import Engine, same

prefill, decode = Engine(sys.argv[1], "prefill"), Engine(sys.argv[2], "decode")

ticket = secrets.token_hex(16)  # of the router, with the number
rx = decode.client.recv(50, decode.pool, [prefill.client.endpoint], ticket=ticket)
rx.bind({"kv": [3, 9, 4]})  # where tokens 0 to 47 shall land

tx = prefill.client.send(50, prefill.pool, ticket=ticket)
tx.wait(kvd.WAITING_FOR_INPUT, timeout=60)
prefill.fill([7])
tx.send({"kv": kvd.View([7], tokens=(0, 16))}, seq=0, last=False)
prefill.fill([8, 12])
tx.send({"kv": kvd.View([8, 12], first_token=16, tokens=(16, 48))}, seq=1)

rx.wait(timeout=60)
tx.wait(timeout=60)
assert same(decode.pages([3, 9, 4]), prefill.pages([7, 8, 12]))
print("%d bytes in two chunks" % tx.read().total)
