# SPDX-License-Identifier: Apache-2.0
# The planner's own targets: bench, full property run, fuzzing.
.PHONY: bench-plan property fuzz-plan

$(B)/bench/bench_plan: $(B)/tests/bench/bench_plan.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) $^ -o $@ $(LIBS)

bench-plan: $(B)/bench/bench_plan ## ns a row of a plan, and its ratio to a plain loop
	$(Q)$<
