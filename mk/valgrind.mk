# SPDX-License-Identifier: Apache-2.0
# Unit tests under valgrind's memcheck (Debian: valgrind): it sees decisions on memory that
# was never written, which gcc's sanitizers do not. The list: those that end within
# minutes. Not in it are the sweeps (alloc_*, *_property, *_chaos), the tests of copies
# and transports, whose threads valgrind runs one at a time, and those that need system
# calls that Debian 12's valgrind does not know (openat2).
VALGRIND := wire json cursor text hex fields err list idmap pack rows coverage dlist histogram \
	cover room_map inbox config sm search lock link_name mem tcp_wire \
	layout http log cpu plan_builder plan_ctl shapes mailbox notify plan loop_parts \
	offload peer peer_hostile peer_parts peer_past peer_express rooms_forged \
	rooms_early rooms_leave gate session \
	cost_golden cost_rules cost_fit cost_page cost_live decide
VALGRIND_TESTS := $(VALGRIND:%=$(B)/unit/test_%)

.PHONY: valgrind
valgrind: ## unit tests under valgrind's memcheck
	@command -v valgrind > /dev/null || { echo 'valgrind: install it'; exit 1; }
	@$(MAKE) --no-print-directory $(JOBS) $(VALGRIND_TESTS)
	$(Q)set -e; for t in $(VALGRIND_TESTS); do echo "$${t##*/}"; \
		KVD_TEST_SANDBOX=no valgrind -q --error-exitcode=9 --child-silent-after-fork=yes \
			--log-file=$$t.valgrind $$t > $$t.out 2>&1 || \
			{ tail -n 20 $$t.out; cat $$t.valgrind; exit 1; }; done; \
	echo '$(words $(VALGRIND_TESTS)) programs, nothing found'
