# SPDX-License-Identifier: Apache-2.0
# make test: every test there is, one total at the end.
#
# Found by pattern: tests/unit/test_*.c (one program each) and
# tests/integration/test_*.{sh,py} (run as they are, KVD_BUILD names the build
# folder). A mk/NAME.mk adds more:
#   TEST_TARGETS += FILE   a program that make can build, or a script; it is run
#                          without arguments and counted
#   TEST_NEEDS   += FILE   built before the tests run, not run itself
#   TEST_LONG    += NAME=N it may take N times as long as others (1: as long); it starts first
#                          (exported)
#   TEST_WEIGHT  += NAME=Q it uses Q quarters of a core, rounded up; 4 unless said here
#                          (exported)
#   TEST_SHARDS  += NAME=N it runs as N processes, each with TEST_SHARD=K/N in its
#                          environment, which runs its share of the cases (exported)
#   TEST_ALONE   += NAME   it judges times: beside it run at most two tests that wait for
#                          most of their time, of weight 1 (exported)
# A test tells its counts as cmocka does, or in a last line "N passed, N failed"
# (", N skipped" may follow). One that tells none counts as one: exit status 0
# passed, 77 skipped (its last line names the missing need), else failed. Which case
# failed and why is read from its log by scripts/failures.awk, in the forms named there;
# tests/lib/check.sh has one for tests in sh.
# Tests run beside each other, on TEST_JOBS=n cores (scripts/run-tests.sh): ports, names
# and files are each one's own.
# `make test ONLY=unit/test_loop` runs those whose path holds the words.
SCRIPT_TESTS := $(sort $(wildcard tests/integration/test_*.sh tests/integration/test_*.py))
# who is told of a death in time
export TEST_ALONE += $(patsubst %,tests/integration/test_%.py,\
	detect faults fences overload rooms)
# they wait for much of their time; measured alone: user + sys by wall
export TEST_WEIGHT += $(patsubst %,unit/test_%=1,commands copy_gpu disk etcd etcd_faults etcd_hostile \
	gate link_curve tcp tcp_crypto ucx_fence verbs vm xfer_file) \
	$(patsubst %,unit/test_%=2,alloc_commands attend_gpu shm_hostile verbs_fault verbs_gpu \
	verbs_stage) \
	$(patsubst %,unit/test_%=3,ucx verbs_rail) \
	$(patsubst %,tests/integration/test_%.py=1,cluster cluster_etcd daemon doctor load soak top) \
	$(patsubst %,tests/integration/test_%.py=2,ctl_bench gpu group reach rooms_ctl)
export TEST_LONG += tests/integration/test_cluster_etcd.py=1 unit/test_etcd_faults=1
# refuses each allocation of each command in turn
export TEST_LONG += unit/test_alloc_commands=2
EVERY_TEST = $(UNIT_BIN) $(TEST_TARGETS) $(SCRIPT_TESTS)
having = $(foreach t,$(EVERY_TEST),$(if $(findstring $1,$t),$t))
CHOSEN = $(if $(ONLY),$(sort $(foreach w,$(ONLY),$(call having,$w))),$(EVERY_TEST))

# all cores, unless the caller chose a number
JOBS = $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc))

.PHONY: test unit run-tests deps
test: ## build and run all tests (ONLY=words chooses)
	@scripts/install-deps.sh --if-needed
	@$(MAKE) --no-print-directory $(JOBS) run-tests

unit: $(UNIT_BIN) ## build and run the unit tests only
	@scripts/run-tests.sh $(B) $(UNIT_BIN)

run-tests: all $(UNIT_BIN) $(TEST_TARGETS) $(TEST_NEEDS)
	@scripts/run-tests.sh $(B) $(CHOSEN)

deps: ## install from Debian what is missing (as root)
	@scripts/install-deps.sh --if-needed

# make core-test: rooms and transfers work without the modules cluster, store, attend and ucx,
# which are not even compiled.
CORE_TESTS := $(UNIT_BIN) $(CONFORM) $(SIM) $(patsubst %,tests/integration/test_%.py,\
	rooms rooms_ctl xfer gpu fences detect) tests/integration/test_demo.sh

.PHONY: core-test run-core-tests
core-test: ## build kvd without its modules (MODULES=) and run the tests of what is left
	@scripts/install-deps.sh --if-needed
	@$(MAKE) --no-print-directory $(JOBS) MODULES= run-core-tests

run-core-tests: all $(UNIT_BIN) $(CONFORM) $(SIM) $(DEMO_BIN) $(FAKE_CUDA) $(FAKE_NVML)
	@scripts/run-tests.sh $(B) $(CORE_TESTS)
