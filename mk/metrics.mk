# SPDX-License-Identifier: Apache-2.0
# The metrics endpoint: by hand, by Prometheus; the page in a browser; alerts and board.
TEST_TARGETS += tests/metrics/test_endpoint.py tests/metrics/test_prometheus.py \
	tests/metrics/test_page.py tests/metrics/test_contrib.py
export TEST_WEIGHT += tests/metrics/test_endpoint.py=2

$(B)/daemon/metrics/page.o: daemon/metrics/page.html
