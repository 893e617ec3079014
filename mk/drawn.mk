# SPDX-License-Identifier: Apache-2.0
# a preloaded getrandom() that notes what secrets are drawn (tests/integration/test_capture.py)
$(B)/drawn.so: tests/lib/preload/drawn.c
	$(SAY) LD $@
	$(Q)$(CC) $(filter-out -fsanitize%,$(CFLAGS)) -D_GNU_SOURCE -fPIC -shared $< -o $@ -ldl
TEST_NEEDS += $(B)/drawn.so
