# SPDX-License-Identifier: Apache-2.0
.PHONY: programs unit
programs: $(CORE)

unit: $(UNIT_BIN) ## build and run the unit tests
	$(Q)set -e; for t in $(UNIT_BIN); do echo "== $$t"; $$t; done
