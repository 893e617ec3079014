# SPDX-License-Identifier: Apache-2.0
# The metrics endpoint: by hand, by Prometheus; alerts and board.
TEST_TARGETS += tests/metrics/test_endpoint.py tests/metrics/test_prometheus.py \
	tests/metrics/test_contrib.py
export TEST_WEIGHT += tests/metrics/test_endpoint.py=2
