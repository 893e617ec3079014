# SPDX-License-Identifier: Apache-2.0
"""Prefix hit: the decode engine has the first 16 of 48 tokens and asks for the rest. The
prefill engine learns that by first_token().

python prefix.py PREFILL_SOCKET DECODE_SOCKET   (both engines in one program)"""
import secrets
import sys

import kvd
from engine import Engine, same

prefill, decode = Engine(sys.argv[1], "prefill"), Engine(sys.argv[2], "decode")

ticket = secrets.token_hex(16)  # of the router, with the number
rx = decode.client.recv(52, decode.pool, [prefill.client.endpoint], ticket=ticket)
# page 9 begins with token 16 of the request
rx.bind({"kv": kvd.View([9, 4], first_token=16, tokens=(16, 48))})

pages = [7, 8, 12]  # where the prefill engine has tokens 0 to 47
prefill.fill(pages)
tx = prefill.client.send(52, prefill.pool, ticket=ticket)
tx.wait(kvd.WAITING_FOR_INPUT, timeout=60)
first = tx.first_token()
tx.send({"kv": kvd.View(pages[first // 16:], first_token=first, tokens=(first, 48))})

rx.wait(timeout=60)
tx.wait(timeout=60)
assert same(decode.pages([9, 4]), prefill.pages([8, 12]))
print("sent tokens %d to 47" % first)
