# SPDX-License-Identifier: Apache-2.0
# The units under a booted systemd. Its Debian is made once, in build/systemd-root.
TEST_TARGETS += tests/systemd/test_service.py
TEST_NEEDS   += $(B)/demo-prefill $(B)/demo-decode
export TEST_ALONE += tests/systemd/test_service.py
