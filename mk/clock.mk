# SPDX-License-Identifier: Apache-2.0
# a preloaded wall clock that the test moves (tests/integration/test_clock.py)
$(B)/clock-jump.so: tests/lib/preload/clock_jump.c
	$(SAY) LD $@
	$(Q)$(CC) $(filter-out -fsanitize%,$(CFLAGS)) -D_GNU_SOURCE -fPIC -shared $< -o $@ -ldl
TEST_NEEDS += $(B)/clock-jump.so
