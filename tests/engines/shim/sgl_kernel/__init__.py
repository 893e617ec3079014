# SPDX-License-Identifier: Apache-2.0
"""Stands in for SGLang's kernels for CPU, which no registry has.

The CPU engine takes names that end in _cpu from here when it is imported. The one below
is used; none of the others is called by a dense model without AMX, and each says so."""


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError("sgl_kernel.%s is not in this stand-in" % name)
    return absent


def assign_req_to_token_pool_cpu(rows, table, begin, end, places, stride):
    at = 0
    for row, first, last in zip(rows.tolist(), begin.tolist(), end.tolist()):
        table[row, first:last] = places[at:at + last - first].to(table.dtype)
        at += last - first
