# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: with TEST_SHARD=K/N only the K-th of N shares of the files runs. Files of
others are not even read: to import them all takes seconds."""
import functools
import os

# CPU seconds of a file; others: 2. A wrong value only costs time.
SECONDS = dict(router=35, router_limits=25, router_members=25, chunk_pages=20, chunk_remote=20,
               attend=20, chunk_hedge=15, chunk_index=13, nixl=12, router_sim=10,
               chunk_files=10, chunk_keep=10, chunk_events=7, nixl_ends=7, attend_flood=6,
               math=13, chunk_sick=10, nixl_harsh=6, chunks=5, nixl_file=4, cost_live=4, sglang_store=4,
               router_pick=4)


@functools.cache
def shares(folder, count):
    """Each share's files: the longest first, each to the share that has least so far."""
    files = {name: SECONDS.get(name[len("test_"):-len(".py")], 2) for name in os.listdir(folder)
             if name.startswith("test_") and name.endswith(".py")}
    load, mine = [0] * count, [set() for _ in range(count)]
    for name in sorted(files, key=lambda name: (-files[name], name)):
        share = load.index(min(load))
        load[share] += files[name]
        mine[share].add(name)
    return mine


def pytest_ignore_collect(collection_path):
    number, _, count = os.environ.get("TEST_SHARD", "").partition("/")
    if not count or not collection_path.name.startswith("test_"):
        return None
    mine = shares(str(collection_path.parent), int(count))[int(number) - 1]
    return collection_path.name not in mine or None
