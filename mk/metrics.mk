# SPDX-License-Identifier: Apache-2.0
# The metrics endpoint: by hand, by Prometheus; the page in a browser.
TEST_TARGETS += tests/metrics/test_endpoint.py tests/metrics/test_prometheus.py \
	tests/metrics/test_page.py

$(B)/daemon/metrics/page.o: daemon/metrics/page.html
