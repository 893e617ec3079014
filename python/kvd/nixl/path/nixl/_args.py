# SPDX-License-Identifier: Apache-2.0
"""Arguments of NIXL's calls, converted for the daemon and the extension."""
import functools
import os
import re
import struct
import zlib

import numpy as np

from kvd.errors import Error

from ._status import from_error
from .logging import get_logger

logger = get_logger("bindings")

NAME_MAX = 63  # bytes of a name that the daemon carries
LONG_NAME = "~nixl~"
_PLAIN = re.compile("[A-Za-z0-9_.:/@#+=-][A-Za-z0-9_.:/@#+= -]*").fullmatch


def telemetry_wanted(config):
    """NIXL_TELEMETRY_ENABLE decides, also against the configuration."""
    word = os.environ.get("NIXL_TELEMETRY_ENABLE", "").lower()
    if word in ("y", "yes", "on", "1", "true", "enable"):
        return True
    if word in ("n", "no", "off", "0", "false", "disable"):
        return False
    if word:
        logger.warning("NIXL_TELEMETRY_ENABLE: '%s' is neither yes nor no", word)
    return bool(config.captureTelemetry)


def text_of(name, what="an agent's name"):
    if isinstance(name, str):
        return name
    if isinstance(name, (bytes, bytearray)):
        return bytes(name).decode("utf-8", "surrogateescape")
    raise TypeError("%s: str or bytes, not %s" % (what, type(name).__name__))


def bytes_of(message):
    if isinstance(message, bytes):
        return message
    if isinstance(message, str):
        return message.encode("utf-8", "surrogateescape")
    if isinstance(message, bytearray):
        return bytes(message)
    raise TypeError("a notification: str or bytes, not %s" % type(message).__name__)


def wire_name(name):
    """The name that the daemon sends with notifications, and a prefix of each: a name that the
    daemon's log cannot show is sent in the prefix."""
    if len(name) <= NAME_MAX and _PLAIN(name):
        return name, b""
    raw = name.encode("utf-8", "surrogateescape")
    return "%s%08x" % (LONG_NAME, zlib.crc32(raw)), struct.pack("<H", len(raw)) + raw


def index_pack(indices):
    """An index list in the form of _kvd.Xfer, and the object that keeps it alive."""
    if isinstance(indices, np.ndarray):
        if indices.ndim != 1:
            raise ValueError("indices numpy array must be 1D")
        if indices.dtype.kind == "b":
            indices = indices.astype(np.uint8)
        elif indices.dtype.kind not in "iu":
            indices = indices.astype(np.int64)
        elif not indices.dtype.isnative:
            indices = indices.astype(indices.dtype.newbyteorder("="))
        view = indices.__array_interface__
        return ((view["data"][0], len(indices), indices.strides[0] if len(indices) else 0,
                 indices.dtype.kind, indices.dtype.itemsize),), indices
    return (indices if isinstance(indices, list) else list(indices)), None


def plain_abi(method):
    """Converts kvd's errors to NIXL's."""
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except Error as error:
            raise from_error(error) from error
    return call
