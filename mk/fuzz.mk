# SPDX-License-Identifier: Apache-2.0
# Fuzzing. A target is tests/fuzz/fuzz_NAME.c with inputs in tests/fuzz/corpus/NAME; what
# it may need beside the daemon is in $(FUZZ_LIB).
#   any compiler   make test runs $(B)/fuzz/replay_NAME: every input of the corpus once
#   clang          make fuzz: libFuzzer with ASan and UBSan for FUZZ_SECONDS a target
#                  (FUZZ="wire gate": those only); new inputs go to build/fuzz/found
# What libFuzzer finds is worth keeping is put into the tree by make fuzz-cmin.
FUZZ_NAMES   := $(patsubst tests/fuzz/fuzz_%.c,%,$(filter-out $(NOT_TESTED),$(wildcard tests/fuzz/fuzz_*.c)))
FUZZ         ?= $(FUZZ_NAMES)
FUZZ_SECONDS ?= 60
FUZZ_LIB     := $(TESTLIB_OBJ) $(CTL_LIB) \
	$(patsubst %.c,$(B)/%.o,$(filter-out %/replay.c,$(wildcard tests/fuzz/lib/*.c)))
FUZZ_REPLAY  := $(FUZZ_NAMES:%=$(B)/fuzz/replay_%)
TEST_TARGETS += $(FUZZ_REPLAY)

.PHONY: fuzz fuzz-cmin fuzz-programs
$(B)/fuzz/replay_%: $(B)/tests/fuzz/fuzz_%.o $(B)/tests/fuzz/lib/replay.o $(FUZZ_LIB) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)

# the engine may be C++ (OSS-Fuzz), its linker's driver too
FUZZ_LINK ?= $(CC)
LIB_FUZZING_ENGINE ?= -fsanitize=fuzzer
$(B)/fuzz/fuzz_%: $(B)/tests/fuzz/fuzz_%.o $(FUZZ_LIB) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(FUZZ_LINK) $(filter-out -std=%,$(CFLAGS)) $(LDFLAGS) $^ -o $@ \
		$(LIB_FUZZING_ENGINE) $(FUZZ_STATIC) -lcmocka $(LIBS)

FUZZ_CC ?= clang
FUZZ_MAKE = +$(Q)$(MAKE) --no-print-directory $(JOBS) SAN=fuzz CC="$(FUZZ_CC)" NVCC=
fuzz: ## search on with libFuzzer, FUZZ_SECONDS=60 a target (FUZZ=names chooses; clang)
	$(FUZZ_MAKE) fuzz-programs
	@scripts/fuzz.sh run build/fuzz/fuzz $(FUZZ_SECONDS) $(FUZZ)

fuzz-cmin: ## put into the corpora what build/fuzz/found adds to them, drop what adds nothing
	$(FUZZ_MAKE) fuzz-programs
	@scripts/fuzz.sh cmin build/fuzz/fuzz $(FUZZ_SECONDS) $(FUZZ)

fuzz-programs: $(FUZZ:%=$(B)/fuzz/fuzz_%)
