# SPDX-License-Identifier: Apache-2.0
# make bench-homes: the directory of chunks with ten million entries: a home alone, then a
# cluster of daemons in virtual time (10 GB of memory and some minutes at this size).
#   HOLDERS=n HOMES=n CHUNKS=n   1000; 32; 10000 of a holder, the cluster's
#   MIB=n                        of a home, 8
HOMES_PROGRAMS := bench_homes bench_homes_cluster

$(B)/bench/bench_homes: $(B)/tests/bench/bench_homes.o $(CORE)
$(B)/bench/bench_homes_cluster: $(B)/tests/bench/bench_homes_cluster.o $(TESTLIB_OBJ) $(CORE)
$(HOMES_PROGRAMS:%=$(B)/bench/%):
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)
TEST_NEEDS += $(HOMES_PROGRAMS:%=$(B)/bench/%)

.PHONY: bench-homes
bench-homes: $(HOMES_PROGRAMS:%=$(B)/bench/%) ## homes of chunks are told ten million, and asked
	$(Q)$(B)/bench/bench_homes $(or $(MIB),8) $(or $(HOLDERS),1000) $(or $(HOMES),32)
	$(Q)$(B)/bench/bench_homes_cluster $(or $(HOLDERS),1000) $(or $(HOMES),32) \
		$(or $(CHUNKS),10000)
