# SPDX-License-Identifier: Apache-2.0
# A run of the integration tests in which every call that the main process of a daemon
# makes is judged: which may wait for a stranger (tests/still/rules.c). make test plays
# tests/integration/test_still.py, a selection of them.
# Instrumented by ThreadSanitizer the judge does not answer, and what it judges hangs.
$(B)/still: $(addprefix tests/still/,still.c rules.c rules.h) \
		$(addprefix daemon/base/,mem.c err.c hex.c)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CPPFLAGS) $(filter-out -fsanitize=thread,$(CFLAGS)) \
		$(filter-out -fsanitize=thread,$(LDFLAGS)) -fPIE -pie $(filter %.c,$^) -o $@
TEST_NEEDS += $(B)/still

.PHONY: test-still
test-still: ## the integration tests, with each call of a daemon's main process judged
	@scripts/install-deps.sh --if-needed
	@$(MAKE) --no-print-directory $(JOBS) all $(TEST_NEEDS)
	@KVD_STILL=1 scripts/run-tests.sh $(B) \
		$(if $(ONLY),$(CHOSEN),$(filter-out %/test_still.py,\
		$(wildcard tests/integration/test_*.py)))
