# SPDX-License-Identifier: Apache-2.0
"""Statistics of the transfers for vLLM's log, and vllm:kvd_* in /metrics."""
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (KVConnectorPromMetrics,
                                                                  KVConnectorStats)
from vllm.v1.metrics.utils import create_metric_per_engine

from ..stores import metrics

ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
HISTOGRAMS = {"seconds": ("xfer_time_seconds", "Time from the first to the last byte of a request.",
                          metrics.SECONDS),
              "bytes": ("bytes_transferred", "Bytes of a request, on this rank.", metrics.BYTES),
              "rows": ("num_rows", "Rows of the plan of a request, on this rank.", ROWS)}
COUNTERS = {"failed": ("num_failed_transfers", "Requests whose room failed."),
            "expired": ("num_kv_expired_reqs", "Requests that were not fetched within the lease.")}
STORE_COUNTERS = {
    **metrics.COUNTERS,
    "routed_posts": ("store_routed_posts", "Requests for attention sent to holders of chunks, one "
                                           "for each layer, document and step."),
    "routed_rows": ("store_routed_rows", "Query rows in these requests."),
    "routed_steps": ("store_routed_steps", "Steps with such requests."),
    "lost_steps": ("store_lost_steps", "Steps of requests that were repeated, because no holder "
                                       "answered."),
    "rents": ("store_rents", "Documents that were fetched to the engine's prefix cache while "
                             "requests were routed to them.")}


class KvdStats(KVConnectorStats):
    """data: a list of observations by name."""
    HISTOGRAMS, COUNTERS = HISTOGRAMS, COUNTERS

    def __init__(self, data=None):
        super().__init__(data=data or {})
        for name in (*self.HISTOGRAMS, *self.COUNTERS):
            self.data.setdefault(name, [])

    def add(self, name, value):
        self.data[name].append(value)

    def reset(self):
        for values in self.data.values():
            values.clear()

    def aggregate(self, other):
        for name, values in other.data.items():
            self.data.setdefault(name, []).extend(values)
        return self

    def is_empty(self):
        return not any(self.data.values())

    def reduce(self):
        seconds, nbytes = sum(self.data["seconds"]), sum(self.data["bytes"])
        return {"Transfers": len(self.data["bytes"]), "MB": round(nbytes / 1e6, 3),
                "MB/s": round(nbytes / 1e6 / seconds, 1) if seconds else 0.0,
                "Rows": sum(self.data["rows"]), "Failed": sum(self.data["failed"]),
                "Expired": sum(self.data["expired"])}


class StoreStats(KvdStats):
    """Of KvdStoreConnector, on either side."""
    HISTOGRAMS, COUNTERS = metrics.HISTOGRAMS, STORE_COUNTERS

    def reduce(self):
        sums = {name: sum(values) for name, values in self.data.items()}
        return {"Chunks asked": sums["asked"], "Chunks found": sums["found"],
                "Loads": len(self.data["bytes"]), "MB loaded": round(sums["bytes"] / 1e6, 3),
                "MB saved": round(sums["saved_bytes"] / 1e6, 3),
                "Failed": sums["failed_loads"] + sums["failed_saves"]}


class PromMetrics(KVConnectorPromMetrics):
    STATS = KvdStats

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._by_name = {}
        for key, (name, text, buckets) in self.STATS.HISTOGRAMS.items():
            self._add(key, self._histogram_cls(name="vllm:kvd_" + name, documentation=text,
                                               buckets=buckets, labelnames=labelnames))
        for key, (name, text) in self.STATS.COUNTERS.items():
            self._add(key, self._counter_cls(name="vllm:kvd_" + name, documentation=text,
                                             labelnames=labelnames))

    def _add(self, key, metric):
        self._by_name[key] = create_metric_per_engine(metric, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data, engine_idx=0):
        for key, metrics in self._by_name.items():
            metric = metrics[engine_idx]
            put = metric.observe if key in self.STATS.HISTOGRAMS else metric.inc
            for value in transfer_stats_data.get(key, ()):
                put(value)


class StorePromMetrics(PromMetrics):
    STATS = StoreStats
