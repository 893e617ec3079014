# SPDX-License-Identifier: Apache-2.0
# The planner's own targets: bench, full property run.
.PHONY: bench-plan property

$(B)/bench/bench_plan: $(B)/tests/bench/bench_plan.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

bench-plan: $(B)/bench/bench_plan ## ns a row of a plan, and its ratio to a plain loop
	$(Q)$<

# kvd-ctl plan is tested without the program around it
$(B)/unit/test_plan_ctl: $(B)/tests/unit/test_plan_ctl.o $(CTL_LIB) $(TESTLIB_OBJ) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)

property: $(B)/unit/test_plan_property ## the planner against its oracle, 1 000 000 pairs
	$(Q)KVD_PROPERTY_PAIRS=$${KVD_PROPERTY_PAIRS:-1000000} $<
