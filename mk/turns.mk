# SPDX-License-Identifier: Apache-2.0
# preloaded into daemons: stacks of turns that hold the loop too long
$(B)/long-turns.so: tests/lib/preload/long_turns.c
	$(SAY) LD $@
	$(Q)$(CC) $(filter-out -fsanitize%,$(CFLAGS)) -D_GNU_SOURCE -fPIC -shared $< -o $@ -ldl
TEST_NEEDS += $(B)/long-turns.so
