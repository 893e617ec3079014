# SPDX-License-Identifier: Apache-2.0
# make bench: what rooms cost, against named limits measured in the same run.
$(B)/bench-rooms: $(B)/tests/bench/bench_rooms.o $(B)/libkvd.so
	$(SAY) LD $@
	$(Q)$(CC) $(USER_LD) $(filter %.o,$^) -o $@ -L$(B) -lkvd

.PHONY: bench
bench: all $(B)/bench-rooms ## room latency, polls, pages against memcpy, 10 000 rooms
	@scripts/bench.sh $(B)
