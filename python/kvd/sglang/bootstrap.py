# SPDX-License-Identifier: Apache-2.0
"""The bootstrap server, and what it tells of a prefill rank in GET /route:

    kvd: {endpoint, pool, rank}                where its pages are
         {heads, views, states, aux}           what they are, so that decode can say what differs
         {secret}                              of the server; each room's ticket is made of it

A rank tells its row in PUT /route and gets the secret in the answer."""
import json
import re
import secrets

from aiohttp import web
from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer


def secret_of(told):
    secret = told.get("secret") if isinstance(told, dict) else None
    if not isinstance(secret, str) or not re.fullmatch("[0-9a-f]{64}", secret):
        raise ValueError("its answer has no secret: it is not kvd's")
    return secret


def row_of(info):
    """What GET /route says of a rank, checked."""
    row = info.get("kvd")
    if not isinstance(row, dict):
        raise ValueError("the prefill server is not on kvd: start it with "
                         "--disaggregation-transfer-backend kvd")
    kinds = {"endpoint": str, "pool": str, "rank": int, "heads": (int, type(None)),
             "views": list, "aux": (int, type(None)), "states": list}
    for name, kind in kinds.items():
        if not isinstance(row.get(name, ()), kind):
            raise ValueError("GET /route: kvd.%s is %.60r" % (name, row.get(name)))
    try:
        return dict(row, secret=secret_of(row))
    except ValueError:
        raise ValueError("GET /route: kvd.secret is not 64 hex digits") from None


class _Routes(CommonKVBootstrapServer):
    def __init__(self, host, port):
        self.secret, self.kvd_rows = secrets.token_hex(32), {}
        super().__init__(host, port)

    async def _handle_route_put(self, request):
        data = await request.json()
        if not isinstance(data.get("kvd"), dict):
            return web.Response(status=400, text="this prefill server is on kvd, and the rank "
                                "is not: --disaggregation-transfer-backend kvd on all nodes")
        answer = await super()._handle_route_put(request)
        if answer.status != 200:
            return answer
        dp = data["attn_dp_rank"] if data["system_dp_size"] == 1 else data["system_dp_rank"]
        key = (dp, data["attn_cp_rank"], data["attn_tp_rank"], data["pp_rank"])
        self.kvd_rows[tuple(int(k) for k in key)] = data["kvd"]
        return web.json_response({"kvd": {"secret": self.secret}})

    async def _handle_route_get(self, request):
        answer = await super()._handle_route_get(request)
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        if answer.status != 200:
            return answer
        row = self.kvd_rows.get(tuple(int(request.query[n]) for n in names))
        if row is None:  # the server's own figures
            return answer
        told = json.loads(answer.text)
        return web.json_response(dict(told, kvd=dict(row, secret=self.secret)))


class BootstrapServer(BaseKVBootstrapServer):
    """Not one of SGLang's kind: their Rust registry stands in for those, and it knows no
    rows of ours."""

    def __init__(self, host, port):
        self._routes = _Routes(host, port)

    def close(self):
        self._routes.close()
