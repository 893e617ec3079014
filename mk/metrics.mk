# SPDX-License-Identifier: Apache-2.0
# The metrics endpoint: by hand, by Prometheus.
TEST_TARGETS += tests/metrics/test_endpoint.py tests/metrics/test_prometheus.py
