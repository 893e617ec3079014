# SPDX-License-Identifier: Apache-2.0
.PHONY: programs unit
programs: $(B)/kvd

$(B)/kvd: $(B)/daemon/main.o $(CORE)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) $^ -o $@ $(LIBS)

unit: $(UNIT_BIN) ## build and run the unit tests
	$(Q)set -e; for t in $(UNIT_BIN); do echo "== $$t"; $$t; done
