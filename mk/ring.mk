# SPDX-License-Identifier: Apache-2.0
# The submission ring against the real daemon, by libkvd and by hand.
$(B)/test-ring: $(B)/tests/integration/live_ring.o $(B)/libkvd.so $(B)/kvd
	$(SAY) LD $@
	$(Q)$(CC) $(USER_LD) $(filter %.o,$^) -o $@ -L$(B) -lkvd -lcmocka
TEST_TARGETS += $(B)/test-ring
