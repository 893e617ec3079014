# SPDX-License-Identifier: Apache-2.0
# What a decision costs.
.PHONY: bench-cost

$(B)/bench/bench_cost: $(B)/tests/bench/bench_cost.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

bench-cost: $(B)/bench/bench_cost ## ns of kvd_decide(), by holders and page
	$(Q)$<
