# SPDX-License-Identifier: Apache-2.0
# Picks and scaling in virtual time: short in make test, long here.
#   DOC=1  the section of docs/performance.md, too
PICK_SIM := $(B)/pick_sim
.PHONY: bench-pick

$(PICK_SIM): $(patsubst %.c,$(B)/%.o,$(wildcard tests/pick/*.c)) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)
TEST_TARGETS += $(PICK_SIM)

$(B)/bench/bench_pick: $(B)/tests/bench/bench_pick.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

bench-pick: $(PICK_SIM) $(B)/bench/bench_pick build/python/installed ## picks beside an oracle, a day of scaling, ns of a pick
	$(Q)$(B)/bench/bench_pick
	@[ -e $(PYDIR)/installed ] || { cat $(PYDIR)/why; exit 1; }
	$(Q)$(PYDIR)/venv/bin/python tests/bench/bench_pick.py
	$(Q)$(if $(DOC),scripts/doc-section.py docs/performance.md picks -- $(PICK_SIM) --doc,$(PICK_SIM) --long)
