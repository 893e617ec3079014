# SPDX-License-Identifier: Apache-2.0
# The simulation: whole clusters under scripted trouble, in virtual time.
# make sim [SIM_S=60] [SEED=n]; a failing seed prints its shortest script.
SIM_SRC := $(filter-out $(SIMLIB_SRC) $(NOT_TESTED),$(wildcard tests/sim/*.c))
SIM_SRC := $(filter-out $(if $(filter attend,$(LEFT_OUT)),,tests/sim/asks_none.c),$(SIM_SRC))
SIM     := $(B)/sim
SIM_S   ?= 60
SEED    ?=

$(SIM): $(SIM_SRC:%.c=$(B)/%.o) $(TESTLIB_SRC:%.c=$(B)/%.o) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)

TEST_TARGETS += $(SIM)

.PHONY: sim sim-mutants
sim: $(SIM) ## simulate clusters under faults (SIM_S=60 seconds from a random seed, or SEED=n)
	$(Q)$(SIM) --seconds $(SIM_S) --seed $(or $(SEED),$(shell date +%s)00000)

sim-mutants: ## planted bugs, each of which the simulation must find
	$(Q)tests/sim/mutants.py
