# SPDX-License-Identifier: Apache-2.0
# make demo, and examples/: programs that see lib/kvd.h only.
DEMO_BIN := $(B)/demo-prefill $(B)/demo-decode
EXAMPLES := $(patsubst %.c,$(B)/%,$(wildcard examples/*.c))

$(B)/demo-%: $(B)/tests/demo/%.o $(B)/tests/demo/cache.o $(B)/libkvd.so
	$(SAY) LD $@
	$(Q)$(CC) $(USER_LD) $(filter %.o,$^) -o $@ -L$(B) -lkvd

$(EXAMPLES): %: %.o $(B)/libkvd.so
	$(SAY) LD $@
	$(Q)$(CC) $(USER_LD) -Wl,-rpath,'$$ORIGIN/..' $(filter %.o,$^) -o $@ -L$(B) -lkvd

.PHONY: demo
demo: ## two daemons, two engines, every byte verified (under a minute)
	@scripts/install-deps.sh --if-needed
	@$(MAKE) --no-print-directory $(JOBS) all $(DEMO_BIN)
	@scripts/demo.sh $(B)

# as an engine outside this tree would: <kvd.h>, nothing else of ours
$(EXAMPLES:=.o): CPPFLAGS := -I. -Ilib -Iproto
TEST_NEEDS += $(EXAMPLES) $(DEMO_BIN)

# libkvd against the real daemon
$(B)/test-libkvd: $(B)/tests/integration/live_libkvd.o $(B)/tests/lib/live_daemon.o $(B)/libkvd.so $(B)/kvd
	$(SAY) LD $@
	$(Q)$(CC) $(USER_LD) $(filter %.o,$^) -o $@ -L$(B) -lkvd -lcmocka -lrt
TEST_TARGETS += $(B)/test-libkvd
