# SPDX-License-Identifier: Apache-2.0
# make bench-scale: what each daemon of a large cluster has to do, in virtual time; and
# what as many members are to a real etcd.
SCALE_PROGRAMS := $(B)/bench/bench_cluster $(B)/bench/bench_etcd
$(SCALE_PROGRAMS): $(B)/bench/%: $(B)/tests/bench/%.o $(TESTLIB_OBJ) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)
TEST_NEEDS += $(SCALE_PROGRAMS)

.PHONY: bench-scale
bench-scale: $(SCALE_PROGRAMS) ## daemons in virtual time, 1000 to 10 000 (DAEMONS="n …"), and in an etcd
	$(Q)python3 tests/bench/bench_scale.py $(B)/bench/bench_cluster \
		$(or $(DAEMONS),1000 2000 5000 10000)
	$(Q)$(B)/bench/bench_etcd $(or $(MEMBERS),10000)
	$(Q)KVD_BUILD=$(B) tests/bench/bench_daemons.py $(or $(HERE),200)
