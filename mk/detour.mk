# SPDX-License-Identifier: Apache-2.0
# a preloaded connect() that leads to who sits in between (tests/integration/test_tcp_crypto.py)
$(B)/detour.so: tests/lib/preload/detour.c
	$(SAY) LD $@
	$(Q)$(CC) $(filter-out -fsanitize%,$(CFLAGS)) -D_GNU_SOURCE -fPIC -shared $< -o $@
TEST_NEEDS += $(B)/detour.so
