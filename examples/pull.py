# SPDX-License-Identifier: Apache-2.0
"""Pull: the prefill engine offers pages, the decode engine fetches them when it likes.

python pull.py PREFILL_SOCKET DECODE_SOCKET   (both engines in one program)"""
import secrets
import sys

from engine import Engine, same

prefill, decode = Engine(sys.argv[1], "prefill"), Engine(sys.argv[2], "decode")

prefill.fill([7, 8])
ticket = secrets.token_hex(16)  # of the router, with the number
offer = prefill.client.offer(51, prefill.pool, {"kv": [7, 8]}, lease_ms=60000,
                              ticket=ticket)
pull = decode.client.pull(51, decode.pool, prefill.client.endpoint, {"kv": [30, 31]},
                          ticket=ticket)
pull.wait(timeout=60)
offer.wait(timeout=60)
assert same(decode.pages([30, 31]), prefill.pages([7, 8]))
print("pages 7 and 8 are in pages 30 and 31")
