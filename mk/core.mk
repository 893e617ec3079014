# SPDX-License-Identifier: Apache-2.0
# make core-test: rooms and transfers work without the modules cluster, store and attend,
# which are not even compiled.
CORE_TESTS := $(UNIT_BIN) $(CONFORM) $(SIM) $(patsubst %,tests/integration/test_%.py,\
	rooms rooms_ctl xfer gpu fences detect) tests/integration/test_demo.sh

.PHONY: core-test run-core-tests
core-test: ## build kvd without its modules (MODULES=) and run the tests of what is left
	@scripts/install-deps.sh --if-needed
	@$(MAKE) --no-print-directory $(JOBS) MODULES= run-core-tests

run-core-tests: all $(UNIT_BIN) $(CONFORM) $(SIM) $(DEMO_BIN) $(FAKE_CUDA) $(FAKE_NVML)
	@scripts/run-tests.sh $(B) $(CORE_TESTS)
