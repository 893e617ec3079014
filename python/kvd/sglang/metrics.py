# SPDX-License-Identifier: Apache-2.0
"""sglang:kvd_store_* in /metrics of a server with --enable-metrics."""
import functools

from ..stores.metrics import COUNTERS, HISTOGRAMS


@functools.cache
def made(labels):
    """{name in the code: metric}. A process has one of each name, also if the store is attached
    again. prometheus_client is imported once SGLang has set its directory for several processes."""
    from prometheus_client import Counter, Histogram
    out = {name: Histogram("sglang:kvd_" + metric, text, labelnames=labels, buckets=buckets)
           for name, (metric, text, buckets) in HISTOGRAMS.items()}
    out.update((name, Counter("sglang:kvd_" + metric, text, labelnames=labels))
               for name, (metric, text) in COUNTERS.items())
    return out


def counting(config):
    """count(name=value) of a rank. config: HiCacheStorageConfig"""
    if not config.enable_storage_metrics:
        return lambda **values: None
    labels = {"tp_rank": config.tp_rank, "dp_rank": config.dp_rank}
    metrics = {name: metric.labels(**labels) for name, metric in made(tuple(labels)).items()}

    def count(**values):
        for name, value in values.items():
            metric = metrics[name]
            (metric.observe if name in HISTOGRAMS else metric.inc)(value)
    return count
