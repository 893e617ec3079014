# SPDX-License-Identifier: Apache-2.0
# What transfers between two daemons of one host cost, against memcpy.
$(B)/bench-host: $(B)/tests/bench/bench_host.o $(B)/libkvd.so
	$(SAY) LD $@
	$(Q)$(CC) $(USER_LD) $(filter %.o,$^) -o $@ -L$(B) -lkvd

.PHONY: bench-host
bench-host: all $(B)/bench-host ## transfers on one host against memcpy of the same rows
	@scripts/bench-host.sh $(B)
