# SPDX-License-Identifier: Apache-2.0
# The planner's own targets: bench, full property run, fuzzing.
.PHONY: bench-plan property fuzz-plan

$(B)/bench/bench_plan: $(B)/tests/bench/bench_plan.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

bench-plan: $(B)/bench/bench_plan ## ns a row of a plan, and its ratio to a plain loop
	$(Q)$<

# kvd-ctl plan is tested without the program around it
$(B)/unit/test_plan_ctl: $(B)/tests/unit/test_plan_ctl.o $(B)/ctl/plan.o \
		$(B)/ctl/plan_explain.o $(TESTLIB_OBJ) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)

property: $(B)/unit/test_plan_property ## the planner against its oracle, 1 000 000 pairs
	$(Q)KVD_PROPERTY_PAIRS=$${KVD_PROPERTY_PAIRS:-1000000} $<

# Fuzzing: libFuzzer where clang is, FUZZ_SECONDS (60) for each target in turn.
# Any compiler builds the replay programs, which run the corpus as a test.
FUZZ_SECONDS ?= 60
FUZZ_PLAN := plan_json plan_wire
FUZZ_PLAN_SRC := tests/fuzz/fuzz_plan.c ctl/plan.c ctl/plan_explain.c proto/json.c \
	proto/json_check.c $(BASE_SRC)
FUZZ_FLAGS := -std=gnu11 -O1 -g -fno-omit-frame-pointer \
	-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined

build/fuzz/fuzz_%: tests/fuzz/fuzz_%.c tests/fuzz/fuzz_plan.h $(FUZZ_PLAN_SRC)
	@mkdir -p $(@D)
	$(SAY) CC $@
	$(Q)clang $(CPPFLAGS) -U_FORTIFY_SOURCE $(FUZZ_FLAGS) $(filter %.c,$^) -o $@ $(LIBS)

fuzz-plan: $(FUZZ_PLAN:%=build/fuzz/fuzz_%) ## fuzz the planner's JSON and wire forms
	$(Q)set -e; for t in $(FUZZ_PLAN); do mkdir -p build/fuzz/corpus/$$t; \
		build/fuzz/fuzz_$$t -max_total_time=$(FUZZ_SECONDS) -timeout=20 \
			-rss_limit_mb=2048 -max_len=4096 -print_final_stats=1 \
			-artifact_prefix=build/fuzz/ build/fuzz/corpus/$$t \
			tests/fuzz/corpus/$$t; done

$(B)/fuzz/replay_%: $(B)/tests/fuzz/fuzz_%.o $(B)/tests/fuzz/fuzz_plan.o \
		$(B)/tests/fuzz/replay.o $(B)/ctl/plan.o $(B)/ctl/plan_explain.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)
TEST_TARGETS += $(FUZZ_PLAN:%=$(B)/fuzz/replay_%)

