# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments before use: TypeError for another type, ValueError for a value
outside its limits. The text names the argument, its value, and the limit. A bool is not a
number."""
import operator

import numpy as np

U32, U64 = 0xffffffff, 0xffffffffffffffff


def came(value):
    """The value, shortened."""
    text = repr(value)
    return "%s (%s)" % (text if len(text) <= 60 else text[:57] + "...", type(value).__name__)


def wrong(name, value, allowed):
    return TypeError("%s: %s is not %s" % (name, came(value), allowed))


def integer(name, value, low=0, high=U64):
    """An int; numpy's integers are accepted."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is not None:
            if not low <= number <= high:
                raise ValueError("%s: %d is not in %d to %d" % (name, number, low, high))
            return number
    raise wrong(name, value, "an integer of %d to %d" % (low, high))


def text(name, value):
    """A str, or None."""
    if value is not None and not isinstance(value, str):
        raise wrong(name, value, "a str or None")
    return value


def flag(name, value):
    if not isinstance(value, (bool, np.bool_)):
        raise wrong(name, value, "a bool")
    return bool(value)


def number(name, value, allowed="a number"):
    if isinstance(value, (bool, np.bool_, str)) or not hasattr(value, "__float__"):
        raise wrong(name, value, allowed)
    return float(value)


def seconds(name, value):
    """A number of seconds above 0, or None."""
    if value is None:
        return None
    got = number(name, value, "a number of seconds or None")
    if not got > 0:
        raise ValueError("%s: %s is not above 0 seconds" % (name, came(value)))
    return got


def span(name, value, high=U64):
    """(begin, end) with begin < end, or None: all, which is (0, 0) for the daemon."""
    if value is None:
        return 0, 0
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise wrong(name, value, "a pair (begin, end) or None")
    begin, end = (integer("%s[%d]" % (name, i), v, 0, high) for i, v in enumerate(value))
    if end < begin or end == 0:
        raise ValueError("%s: (%d, %d): begin must be less than end; None means all"
                         % (name, begin, end))
    return begin, end


def u32s(name, value):
    """A list, tuple, range or one-dimensional array of numbers, as bytes of u32."""
    allowed = "a list, tuple, range or one-dimensional array of integers"
    if isinstance(value, range):
        got = np.arange(value.start, value.stop, value.step)
    elif isinstance(value, (str, bytes, bytearray, dict, set, frozenset)):
        raise wrong(name, value, allowed)
    else:
        try:
            got = np.asarray(value)
        except (TypeError, ValueError, RuntimeError):
            raise wrong(name, value, allowed) from None
    if got.ndim != 1:
        raise wrong(name, value, allowed)
    if got is value and got.dtype == np.uint32:
        return got.tobytes()
    if got.size and got.dtype.kind not in "iu" or \
            isinstance(value, (list, tuple)) and {bool, np.bool_} & set(map(type, value)):
        for i, number in enumerate(value):
            integer("%s[%d]" % (name, i), number, 0, U32)
        raise wrong(name, value, allowed)
    if got.size and (got.min() < 0 or got.max() > U32):
        at = int(np.argmax((got < 0) | (got > U32)))
        integer("%s[%d]" % (name, at), got[at], 0, U32)
    return got.astype(np.uint32).tobytes()


def numbers(name, value):
    """A count, which means 0, 1, …, or numbers of 32 bits: as a list."""
    if isinstance(value, (str, bytes, bytearray)) or isinstance(value, dict):
        raise wrong(name, value, "a count or a list of numbers")
    try:
        listed = list(value)
    except TypeError:
        return list(range(integer(name, value, 0, 1 << 20)))
    return [integer("%s[%d]" % (name, i), n, 0, U32) for i, n in enumerate(listed)]


def instance(name, value, kind, allowed):
    if not isinstance(value, kind):
        raise wrong(name, value, allowed)
    return value
