# SPDX-License-Identifier: Apache-2.0
"""Agent metadata: all that another agent needs to access this one's memory.

    8 bytes  "KVDNIXL1"
    u32      length of all of it        u32  CRC-32 of what follows
    u32      length of the JSON part    u32  number of regions
    JSON     {"name", and with connection information: "endpoint", "instance", "epoch",
              "secret"; "full": if these are all regions, the number of the change
              to them that this describes}
    regions  u64 memory type + 256 * device, u64 address, u64 bytes each

All little-endian. It is a secret: its holder may read and write all regions that the agent has put
into any metadata so far."""
import json
import re
import struct
import zlib

import numpy as np

from ._status import nixlMismatchError

MAGIC = b"KVDNIXL1"
_HEAD = struct.Struct("<8sIIII")
REGIONS_MAX = 1 << 20
_SECRET = re.compile("[0-9a-f]{32}").fullmatch
_ENDPOINT = re.compile("tcp://[!-~]{1,121}").fullmatch  # an endpoint, as the daemon checks it


def pack(head, regions):
    """regions: (N, 3) of memory type, address, bytes."""
    text = json.dumps(head).encode()
    table = np.ascontiguousarray(regions, "<u8").tobytes()
    body = struct.pack("<II", len(text), len(regions)) + text + table
    return struct.pack("<8sII", MAGIC, 16 + len(body), zlib.crc32(body)) + body


def _name_ok(name):
    """A valid name of an agent: bytes, which are passed as surrogates."""
    try:
        return isinstance(name, str) and \
            0 < len(name.encode("utf-8", "surrogateescape")) < 1 << 16
    except UnicodeEncodeError:
        return False


def _is(kind, check, value):
    return type(value) is kind and bool(check(value))


def _head_check(head):
    ok = isinstance(head, dict) and _name_ok(head.get("name")) and \
        _is(int, lambda n: 0 <= n < 1 << 64, head.get("full", 0))
    if ok and "endpoint" in head:
        ok = _is(str, _ENDPOINT, head["endpoint"]) and \
            _is(int, lambda n: 0 <= n < 1 << 64, head.get("epoch")) and \
            _is(str, _SECRET, head.get("secret"))
    if not ok:
        raise nixlMismatchError("metadata: a field is missing or invalid")


def unpack(blob):
    """(head, regions); nixlMismatchError for anything that pack() did not make."""
    if isinstance(blob, str):
        blob = blob.encode("utf-8", "surrogateescape")
    if not isinstance(blob, (bytes, bytearray, memoryview)):
        raise TypeError("metadata: not bytes but %s" % type(blob).__name__)
    blob = bytes(blob)
    if len(blob) < _HEAD.size or blob[:8] != MAGIC:
        raise nixlMismatchError("metadata: not of a kvd agent")
    _, length, crc, text, count = _HEAD.unpack_from(blob)
    if length != len(blob) or zlib.crc32(blob[16:]) != crc:
        raise nixlMismatchError("metadata: truncated or corrupted")
    if count > REGIONS_MAX or _HEAD.size + text + 24 * count != len(blob):
        raise nixlMismatchError("metadata: lengths of its parts are inconsistent")
    try:
        head = json.loads(blob[_HEAD.size:_HEAD.size + text])
    except (ValueError, RecursionError):
        raise nixlMismatchError("metadata: not readable") from None
    _head_check(head)
    regions = np.frombuffer(blob, "<u8", 3 * count, _HEAD.size + text).reshape(-1, 3)
    return head, regions
