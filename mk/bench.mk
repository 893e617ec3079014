# SPDX-License-Identifier: Apache-2.0
# make bench: kvd, its limits and its peers in one run (scripts/bench.py --help).
#   BENCH='words'  only parts: memfd adopt vm (host), tcp (net), ucx and aes128gcm, which
#                  are measured only when named; cold warm;
#                  64k 4k 256 flat; write read; latency rate pages poll open idle (control)
#   PEERS=1        with NIXL and Mooncake, from PyPI into build/peers
#   REPS=n         repetitions (5)
#   PROFILE=1      perf's view of both daemons during each work, too
#   MINUTES=n      that it may take about (10; PEERS=1 needs some to start its peers)
#   KVD_BENCH_OPTIONS='tcp_crypto = aes128gcm; …'  in both daemons' [transport] (environment)
#   AGAINST=file   compare with an earlier build/bench/latest.json
#   DOC=1          write the figures as a page of docs/runs
BENCH_PROGRAMS := bench_xfer bench_rooms bench_hops tcp_floor
BENCH_COMMON := $(B)/tests/bench/rows.o $(B)/tests/bench/limit.o

$(BENCH_PROGRAMS:%=$(B)/bench/%): $(B)/bench/%: $(B)/tests/bench/%.o $(BENCH_COMMON) \
		$(B)/libkvd.so
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie -Wl,-rpath,'$$ORIGIN/..' $(filter %.o,$^) -o $@ \
		-L$(B) -lkvd -lcrypto -lzmq

TEST_NEEDS += $(BENCH_PROGRAMS:%=$(B)/bench/%)

BENCH_DOC := docs/runs

.PHONY: bench bench-programs bench-doc
bench-programs: all $(BENCH_PROGRAMS:%=$(B)/bench/%)

bench: ## kvd beside its limits and (PEERS=1) its peers; see mk/bench.mk
	@scripts/install-deps.sh --if-needed
	@scripts/install-deps.sh --bench
	@$(MAKE) --no-print-directory $(JOBS) bench-programs
	@$(if $(PEERS),tests/bench/peers/setup.sh build/peers)
	@KVD_BUILD=$(B) scripts/bench.py $(if $(PEERS),--peers build/peers) \
		$(if $(REPS),--reps $(REPS)) $(if $(AGAINST),--against $(AGAINST)) \
		$(if $(PROFILE),--profile) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(DOC),--doc $(BENCH_DOC)) $(BENCH)

.PHONY: bench-chunks
bench-chunks: all build/python/installed ## chunks in memory and files beside their limits
	@$(if $(PEERS),tests/bench/peers/setup.sh build/peers)
	@KVD_BUILD=$(B) build/python/venv/bin/python tests/bench/bench_chunks.py \
		$(if $(PEERS),--peers build/peers) $(if $(DIR),--dir $(DIR),--dir build) --json build/bench-chunks.json $(BENCH)

bench-doc: ## build/bench/latest.json as a page of docs/runs
	@scripts/bench.py --from build/bench/latest.json --doc $(BENCH_DOC)
