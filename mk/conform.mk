# SPDX-License-Identifier: Apache-2.0
# The conformance suite: one program that is driver, far end and memory owner.
CONFORM_SRC := $(wildcard tests/conform/*.c) tests/lib/gates.c tests/lib/gpu_owner.c $(SIMLIB_SRC)
CONFORM     := $(B)/conform

$(CONFORM): $(CONFORM_SRC:%.c=$(B)/%.o) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) $^ -o $@ $(LIBS)

TEST_TARGETS += $(CONFORM)
export TEST_SHARDS += conform=4 # ten backends, each in two ways
export TEST_WEIGHT += conform=2
# thousands of processes and threads, each slow to begin under this sanitizer
export TEST_LONG += $(if $(filter thread,$(SAN)),conform=4)

.PHONY: conform
conform: $(CONFORM) ## run the transport conformance suite
	$(Q)$(CONFORM)
