# SPDX-License-Identifier: Apache-2.0
# Fuzzing of the tcp backend: its wire's parts, and a peer that does as it likes on real
# sockets. The backend is compiled for the fuzzer, what is below it comes from $(CORE).
.PHONY: fuzz-tcp
FUZZ_TCP_SECONDS ?= 60
FUZZ_TCP_SRC := tests/fuzz/fuzz_tcp.c $(wildcard daemon/transport/tcp/*.c) \
	daemon/transport/spans.c daemon/memory/stage.c daemon/base/cursor.c

build/fuzz/fuzz_tcp: $(FUZZ_TCP_SRC) $(CORE)
	@mkdir -p $(@D)
	$(SAY) CC $@
	$(Q)clang $(CPPFLAGS) -U_FORTIFY_SOURCE -std=gnu11 -O1 -g -fno-omit-frame-pointer \
		-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
		$(FUZZ_TCP_SRC) $(CORE) -o $@ $(LIBS)

fuzz-tcp: build/fuzz/fuzz_tcp ## fuzz the tcp backend (FUZZ_TCP_SECONDS)
	$(Q)mkdir -p build/fuzz/corpus/tcp
	$(Q)build/fuzz/fuzz_tcp -max_total_time=$(FUZZ_TCP_SECONDS) -timeout=20 \
		-rss_limit_mb=2048 -max_len=512 -len_control=0 -print_final_stats=1 \
		-artifact_prefix=build/fuzz/ build/fuzz/corpus/tcp tests/fuzz/corpus/tcp

# the corpus is a test with any compiler
$(B)/fuzz/replay_tcp: $(B)/tests/fuzz/fuzz_tcp.o $(B)/tests/fuzz/replay.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)
TEST_TARGETS += $(B)/fuzz/replay_tcp
