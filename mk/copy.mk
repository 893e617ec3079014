# SPDX-License-Identifier: Apache-2.0
# The copy threads' own bench.
.PHONY: bench-copy

$(B)/bench/bench_copy: $(B)/tests/bench/bench_copy.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) $^ -o $@ $(LIBS)

bench-copy: $(B)/bench/bench_copy ## strided copies by row length, and their ratio to memcpy
	$(Q)$<
