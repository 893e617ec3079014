# SPDX-License-Identifier: Apache-2.0
# Fuzzing of what peers say: frames and bodies, and the handshake behind them.
.PHONY: fuzz-link
FUZZ_LINK := wire peer
FUZZ_LINK_SECONDS ?= 60
FUZZ_LINK_SRC := $(wildcard daemon/base/*.c daemon/peer/*.c daemon/bootstrap/*.c) \
	daemon/link/link.c tests/sim/link_mem.c daemon/loop/loop.c daemon/config/config.c \
	daemon/config/config_table.c daemon/config/setting.c proto/wire.c
FUZZ_LINK_FLAGS := -std=gnu11 -O1 -g -fno-omit-frame-pointer \
	-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined

$(FUZZ_LINK:%=build/fuzz/fuzz_%): build/fuzz/fuzz_%: tests/fuzz/fuzz_%.c $(FUZZ_LINK_SRC)
	@mkdir -p $(@D)
	$(SAY) CC $@
	$(Q)clang $(CPPFLAGS) -U_FORTIFY_SOURCE $(FUZZ_LINK_FLAGS) $^ -o $@ $(LIBS)

fuzz-link: $(FUZZ_LINK:%=build/fuzz/fuzz_%) ## fuzz peer messages and the handshake
	$(Q)set -e; for t in $(FUZZ_LINK); do mkdir -p build/fuzz/corpus/$$t; \
		build/fuzz/fuzz_$$t -max_total_time=$(FUZZ_LINK_SECONDS) -timeout=20 \
			-rss_limit_mb=2048 -max_len=4096 -print_final_stats=1 \
			-artifact_prefix=build/fuzz/ build/fuzz/corpus/$$t \
			tests/fuzz/corpus/$$t; done

# the corpus is a test with any compiler
$(FUZZ_LINK:%=$(B)/fuzz/replay_%): $(B)/fuzz/replay_%: $(B)/tests/fuzz/fuzz_%.o \
		$(B)/tests/fuzz/replay.o $(B)/tests/sim/link_mem.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)
ifneq ($(wildcard tests/fuzz/replay.c),)
TEST_TARGETS += $(FUZZ_LINK:%=$(B)/fuzz/replay_%)
endif
