# SPDX-License-Identifier: Apache-2.0
# make nightly: all of what make check, make test and CI do a part of.
NIGHTLY := check check-deep test core-test 'test SAN=address' 'test SAN=thread' 'fuzz FUZZ_SECONDS=60'

.PHONY: nightly
nightly: ## deep checks, whole sweeps, sanitizers, a minute of each fuzz target (hours)
	@failed=; \
	for words in $(NIGHTLY); do \
		echo "make $$words"; \
		KVD_SWEEP='' $(MAKE) --no-print-directory $$words || failed="$$failed, make $$words"; \
	done; \
	[ -z "$$failed" ] || { echo "failed: $${failed#, }"; exit 1; }
