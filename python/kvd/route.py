# SPDX-License-Identifier: Apache-2.0
"""The entry of a prefill rank in GET /route of a bootstrap server, SGLang's or kvd.vllm's, under
`kvd`:

endpoint, pool, rank         location of its pages
heads, views, states, aux    their shape, so that decode can report differences
layers                       {view: numbers}; vLLM's
secret                       of the server; each room's ticket is derived from it"""
import hashlib
import hmac
import re

from . import _check

WORDS = 64  # views, states
TEXT = 256
LAYERS = 1024


def secret_of(params):
    secret = params.get("secret") if isinstance(params, dict) else None
    if not isinstance(secret, str) or not re.fullmatch("[0-9a-f]{64}", secret):
        raise ValueError("kvd.secret is not 64 hex digits: the bootstrap server is not kvd's")
    return secret


def ticket_of(secret, room):
    """Of a room: the same on both sides."""
    return hmac.new(bytes.fromhex(secret), b"kvd room %d" % room,
                    hashlib.sha256).hexdigest()[:32]


def _text(name, value):
    if not isinstance(value, str) or not 0 < len(value) <= TEXT:
        raise ValueError("kvd.%s: %s is not a text of 1 to %d characters"
                         % (name, _check.came(value), TEXT))
    return value


def _words(name, value):
    if not isinstance(value, list) or len(value) > WORDS:
        raise ValueError("kvd.%s: %s is not a list of at most %d names"
                         % (name, _check.came(value), WORDS))
    return [_text("%s[%d]" % (name, i), word) for i, word in enumerate(value)]


def number(name, value, low, high=_check.U32):
    """An int received from a server; ValueError names the field."""
    try:
        return _check.integer(name, value, low, high)
    except TypeError as error:
        raise ValueError(str(error)) from None


def layers_of(layers):
    """{view: layers}, checked."""
    if not isinstance(layers, dict) or len(layers) > WORDS:
        raise ValueError("kvd.layers: %s names no views" % _check.came(layers))
    for numbers in layers.values():
        if not isinstance(numbers, list) or len(numbers) > LAYERS:
            raise ValueError("kvd.layers: not a list of at most %d" % LAYERS)
        for i, layer in enumerate(numbers):
            number("kvd.layers[%d]" % i, layer, 0)
    return layers


def row_of(info):
    """The entry of one rank, checked; ValueError names the field."""
    row = info.get("kvd") if isinstance(info, dict) else None
    if not isinstance(row, dict):
        raise ValueError("the prefill server does not use kvd: SGLang's needs "
                         "--disaggregation-transfer-backend kvd, vLLM's KvdConnector")
    try:
        heads, aux, layers = row.get("heads"), row.get("aux"), row.get("layers")
        return {"endpoint": _text("endpoint", row.get("endpoint")),
                "pool": _text("pool", row.get("pool")),
                "rank": number("kvd.rank", row.get("rank"), 0),
                "heads": None if heads is None else number("kvd.heads", heads, 1),
                "views": _words("views", row.get("views")),
                "states": _words("states", row.get("states")),
                "aux": None if aux is None else number("kvd.aux", aux, 1),
                "layers": None if layers is None else layers_of(layers),
                "secret": secret_of(row)}
    except ValueError as error:
        raise ValueError("GET /route: %s" % error) from None
