# SPDX-License-Identifier: Apache-2.0
"""Metrics of a store: {name in the code: (name behind the engine's prefix and "kvd_", text …)}."""

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
BYTES = tuple(4 ** i for i in range(6, 18))
HISTOGRAMS = {
    "seconds": ("store_load_seconds", "Time of loading chunks for a request.", SECONDS),
    "bytes": ("store_load_bytes", "Bytes of chunks loaded for a request, on this rank.", BYTES)}
COUNTERS = {
    "asked": ("store_num_chunks_asked", "Chunks of prompts that were missing in the engine's "
                                        "cache."),
    "found": ("store_num_chunks_found", "Missing chunks that were found in the store."),
    "saved_bytes": ("store_saved_bytes", "Bytes of chunks put into the store."),
    "failed_loads": ("store_num_failed_loads", "Loads that failed, on a rank; their tokens are "
                                               "computed."),
    "failed_saves": ("store_num_failed_saves", "Puts that failed, on a rank.")}
