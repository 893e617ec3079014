# SPDX-License-Identifier: Apache-2.0
# preloaded into daemons: stacks of turns that hold the loop too long
$(B)/long-turns.so: tests/lib/preload/long_turns.c
	$(SAY) LD $@
	$(Q)$(CC) $(filter-out -fsanitize%,$(CFLAGS)) -D_GNU_SOURCE -fPIC -shared $< -o $@ -ldl
TEST_NEEDS += $(B)/long-turns.so

# the control: a thread without a daemon
$(B)/bench/machine_turns: $(B)/tests/bench/machine_turns.o
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@
TEST_NEEDS += $(B)/bench/machine_turns

# BENCH='words': only these loads; STACKS=1: who held the loop
.PHONY: bench-turns
bench-turns: all $(B)/long-turns.so $(B)/bench/machine_turns ## the longest turn of a loop under each kind of load
	@KVD_BUILD=$(abspath $(B)) tests/bench/bench_turns.py $(if $(STACKS),--stacks) $(BENCH)
