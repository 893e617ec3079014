# SPDX-License-Identifier: Apache-2.0
# make attack: what adversaries do, against real daemons (tests/attack/README.md).
# make test plays the quick ones, without a judgement of times.
TEST_TARGETS += tests/attack/quick.py
export TEST_WEIGHT += tests/attack/quick.py=3
export TEST_LONG += tests/attack/quick.py=3

# at a fixed address
$(B)/attack-victim: tests/attack/victim.c
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) -O1 -fno-pie -no-pie $< -o $@
TEST_NEEDS += $(B)/attack-victim

.PHONY: attack
attack: ## attacks on real daemons (ONLY=words or causes chooses; as root)
	@scripts/install-deps.sh --if-needed
	@$(MAKE) --no-print-directory $(JOBS) all $(B)/attack-victim
	@KVD_BUILD=$(abspath $(B)) tests/attack/run.py $(ONLY)
