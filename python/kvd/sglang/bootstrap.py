# SPDX-License-Identifier: Apache-2.0
"""SGLang's bootstrap server, with an entry for kvd (route.py) per prefill rank. A rank sends it in
PUT /route and receives the server's secret in the reply."""
import json
import secrets

from aiohttp import web
from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer


class _Routes(CommonKVBootstrapServer):
    def __init__(self, host, port):
        self.secret, self.kvd_rows = secrets.token_hex(32), {}
        super().__init__(host, port)

    async def _handle_route_put(self, request):
        data = await request.json()
        if not isinstance(data.get("kvd"), dict):
            return web.Response(status=400, text="this prefill server uses kvd, and the rank "
                                "does not: --disaggregation-transfer-backend kvd on all nodes")
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
        if row is None:  # the server's own sizes
            return answer
        told = json.loads(answer.text)
        return web.json_response(dict(told, kvd=dict(row, secret=self.secret)))


class BootstrapServer(BaseKVBootstrapServer):
    """Not a class that SGLang replaces: its Rust registry takes the place of those, without
    kvd's entries."""

    def __init__(self, host, port):
        self._routes = _Routes(host, port)

    def close(self):
        self._routes.close()
