# SPDX-License-Identifier: Apache-2.0
# What a decision costs.
.PHONY: bench-cost

$(B)/bench/bench_cost: $(B)/tests/bench/bench_cost.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

bench-cost: $(B)/bench/bench_cost ## ns of kvd_decide(), by holders and page
	$(Q)$<

# What the way of query rows takes, beside a bare round trip of their bytes.
.PHONY: bench-attend-trip

$(B)/bench/bench_trip: $(B)/tests/bench/bench_trip.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

bench-attend-trip: all $(B)/bench/bench_trip ## echoes of query rows beside a bare ping-pong
	$(Q)KVD_BUILD=$(B) python3 tests/bench/bench_attend_trip.py
