# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: with TEST_SHARD=K/N only the K-th of N shares of the files runs."""
import collections
import os


def pytest_collection_modifyitems(config, items):
    number, _, shards = os.environ.get("TEST_SHARD", "").partition("/")
    if not shards:
        return
    cases = collections.Counter(item.path for item in items)
    load = [0] * int(shards)
    mine = set()
    # the largest first, each to the shard with the fewest cases so far
    for path in sorted(cases, key=lambda path: (-cases[path], path)):
        shard = load.index(min(load))
        load[shard] += cases[path]
        if shard + 1 == int(number):
            mine.add(path)
    config.hook.pytest_deselected(items=[item for item in items if item.path not in mine])
    items[:] = [item for item in items if item.path in mine]
