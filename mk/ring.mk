# SPDX-License-Identifier: Apache-2.0
# The submission ring against the real daemon, by libkvd and by hand.
$(B)/test-ring: $(B)/tests/integration/live_ring.o $(B)/tests/lib/live_daemon.o $(B)/libkvd.so $(B)/kvd
	$(SAY) LD $@
	$(Q)$(CC) $(USER_LD) $(filter %.o,$^) -o $@ -L$(B) -lkvd -lcmocka
TEST_TARGETS += $(B)/test-ring
$(B)/test-ring-rooms: $(B)/tests/integration/live_ring_rooms.o $(B)/tests/lib/live_daemon.o \
		$(B)/libkvd.so $(B)/kvd
	$(SAY) LD $@
	$(Q)$(CC) $(USER_LD) $(filter %.o,$^) -o $@ -L$(B) -lkvd -lcmocka
TEST_TARGETS += $(B)/test-ring-rooms

# What posting costs, and what it does to the daemons' loops.
$(B)/bench/bench_ring: $(B)/tests/bench/bench_ring.o $(B)/libkvd.so
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie -Wl,-rpath,'$$ORIGIN/..' $(filter %.o,$^) -o $@ \
		-L$(B) -lkvd -lcjson
TEST_NEEDS += $(B)/bench/bench_ring

.PHONY: bench-ring
bench-ring: all $(B)/bench/bench_ring ## what posting costs
	@KVD_BUILD=$(B) scripts/bench-ring.py
