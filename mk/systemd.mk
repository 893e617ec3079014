# SPDX-License-Identifier: Apache-2.0
# The units under a booted systemd. Its Debian is made once, in build/systemd-root: beside
# the compilers, since it is made by waiting for a mirror and for a disk.
TEST_TARGETS += tests/systemd/test_service.py
export TEST_WEIGHT += tests/systemd/test_service.py=1
TEST_NEEDS   += $(B)/demo-prefill $(B)/demo-decode $(if $(SAN)$(ONLY),,systemd-root)

# never fails: the test tells what is missing
.PHONY: systemd-root
systemd-root:
	@PYTHONDONTWRITEBYTECODE=1 $(PYTHON) tests/systemd/guest.py

# Faults and conformance under the unit's system call filters (libseccomp).
FILTERED := tests/systemd/filtered.py
.PHONY: filtered
filtered: all $(CONFORM) $(FAULTS_ENGINE) ## the fault matrix and conformance under the unit's filters
	$(Q)$(FILTERED) --fold $(B) $(B)-filtered
	$(Q)KVD_BUILD=$(CURDIR)/$(B)-filtered LD_LIBRARY_PATH=$(CURDIR)/$(B) \
		tests/integration/faults/faults.py $(FAULTS)
	$(Q)$(FILTERED) $(CONFORM)
