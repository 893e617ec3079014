# SPDX-License-Identifier: Apache-2.0
# make bench-homes: the directory of chunks with ten million entries.
#   MIB=n HOLDERS=n HOMES=n   of a home, 8; 1000; 32
.PHONY: bench-homes

$(B)/bench/bench_homes: $(B)/tests/bench/bench_homes.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)
TEST_NEEDS += $(B)/bench/bench_homes

bench-homes: $(B)/bench/bench_homes ## homes of chunks are told ten million, and asked
	$(Q)$< $(or $(MIB),8) $(or $(HOLDERS),1000) $(or $(HOMES),32)

$(B)/bench/bench_homes_cluster: $(B)/tests/bench/bench_homes_cluster.o $(TESTLIB_SRC:%.c=$(B)/%.o) \
		$(SIMLIB_SRC:%.c=$(B)/%.o) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)
TEST_NEEDS += $(B)/bench/bench_homes_cluster
