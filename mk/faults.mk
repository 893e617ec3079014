# SPDX-License-Identifier: Apache-2.0
# make faults: who dies, when and how, on real daemons (tests/integration/faults).
FAULTS_ENGINE := $(B)/faults-engine
FAULTS        ?=
SOAK_ROOMS    ?= 100000

$(FAULTS_ENGINE): $(patsubst %.c,$(B)/%.o,$(wildcard tests/integration/faults/*.c)) \
		$(B)/libkvd.so
	$(SAY) LD $@
	$(Q)$(CC) $(USER_LD) $(filter %.o,$^) -o $@ -L$(B) -lkvd

TEST_NEEDS += $(FAULTS_ENGINE)

.PHONY: faults
faults: all $(FAULTS_ENGINE) ## every fault in every phase on real daemons (FAULTS=words chooses)
	$(Q)KVD_BUILD=$(CURDIR)/$(B) LD_LIBRARY_PATH=$(CURDIR)/$(B) \
		tests/integration/faults/faults.py $(FAULTS)

.PHONY: soak
soak: all $(FAULTS_ENGINE) ## rooms under random faults; what lives stays flat (SOAK_ROOMS=n)
	$(Q)KVD_BUILD=$(CURDIR)/$(B) LD_LIBRARY_PATH=$(CURDIR)/$(B) \
		tests/integration/faults/soak.py --rooms $(SOAK_ROOMS) $(if $(SEED),--seed $(SEED))
