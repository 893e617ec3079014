# SPDX-License-Identifier: Apache-2.0
"""The address of an engine as a member of a group in the cluster's directory (docs/cluster.md)."""
import logging
import os
from urllib.parse import urlsplit

from .errors import Error

logger = logging.getLogger("kvd.place")
AXES = ("tp", "pp", "dp", "cp")
CALL_S = 1.0  # seconds; the daemon completes the call in any case


class Place:
    """Published once, and again after a restart of the daemon: call keep() now and then, on the
    client's thread. A refusal is logged as a warning: the engine serves without it."""

    def __init__(self, client, group, worker=None, ranks=None, **record):
        """ranks: {"tp": (rank, size), …}; record: endpoint, pool, url, engine, bootstrap, model,
        summary."""
        self.client, self.epoch = client, None
        self.args = {name: value for name, value in dict(record, worker=worker).items() if value}
        self.args["group"] = group
        for axis, (rank, size) in (ranks or {}).items():
            if axis not in AXES or not 0 <= rank < size:
                raise ValueError("ranks: %r is not a rank of %r" % ((rank, size), axis))
            self.args.update({axis + "_rank": rank, axis + "_size": size})

    def keep(self):
        epoch = self.client.info["epoch"]
        if epoch == self.epoch:
            return
        self.epoch = epoch
        try:
            self.client.command("group.publish", timeout=CALL_S, **self.args)
        except Error as why:
            logger.warning("group %r: this engine is not in the directory (yet): "
                           "%s", self.args["group"], why)

    def load(self, figures):
        """Report the engine's load (session.report), which is valid for ten seconds."""
        try:
            self.client.command("session.report", timeout=CALL_S, **figures)
        except Error as why:
            logger.warning("group %r: this engine's load is not reported: %s", self.args["group"],
                           why)


def from_environment(client, engine, ranks, bootstrap_port=None, **record):
    """From KVD_GROUP, KVD_WORKER and KVD_URL; None without KVD_GROUP."""
    group, url = os.environ.get("KVD_GROUP"), os.environ.get("KVD_URL")
    if not group:
        return None
    host = urlsplit(url).hostname if url else None
    if host and bootstrap_port:
        record["bootstrap"] = "%s:%d" % ("[%s]" % host if ":" in host else host, bootstrap_port)
    return Place(client, group, os.environ.get("KVD_WORKER"), ranks, url=url, engine=engine,
                 **record)
