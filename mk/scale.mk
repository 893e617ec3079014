# SPDX-License-Identifier: Apache-2.0
# make bench-scale: what each daemon of a large cluster has to do, in virtual time.
$(B)/bench/bench_cluster: $(B)/tests/bench/bench_cluster.o $(TESTLIB_OBJ) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)
TEST_NEEDS += $(B)/bench/bench_cluster

.PHONY: bench-scale
bench-scale: $(B)/bench/bench_cluster ## daemons in virtual time, 1000 to 10 000 (DAEMONS="n …")
	$(Q)python3 tests/bench/bench_scale.py $(B)/bench/bench_cluster \
		$(or $(DAEMONS),1000 2000 5000 10000)
