# SPDX-License-Identifier: Apache-2.0
# make bench-files: the start of a store over a million chunks, and its index.
#   CHUNKS=n         so many
#   DIR=path         in files there, which are made first; else headers are made up
.PHONY: bench-files

$(B)/bench/bench_files: $(B)/tests/bench/bench_files.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)
TEST_NEEDS += $(B)/bench/bench_files

bench-files: $(B)/bench/bench_files ## a store finds a million chunks in its directory
	$(Q)$< $(or $(CHUNKS),1000000) $(DIR)

# a hundred thousand schedules
export TEST_LONG += unit/test_files_power=2
