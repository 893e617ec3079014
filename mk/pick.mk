# SPDX-License-Identifier: Apache-2.0
# Picks and scaling in virtual time, and what a pick takes of a processor. `make test` has a share
# of the former (tests/python/test_router_sim.py).
#   DOC=1  longer runs, which write a page of docs/runs (bench-pick: hours)
#   TRACES="FILE…"  for bench-prefix: traces as Mooncake's, beside the synthetic ones
.PHONY: bench-pick bench-prefix
bench-pick: build/python/installed ## picks beside an oracle, a day of scaling, the time of a pick
	@[ -e $(PYDIR)/installed ] || { cat $(PYDIR)/why; exit 1; }
	$(Q)$(PYDIR)/venv/bin/python tests/bench/bench_pick.py
	$(Q)$(if $(DOC),scripts/doc-run.py picks "Picks and scaling" --) $(PYDIR)/venv/bin/python \
		tests/pick/pick_sim.py $(if $(DOC),--doc)
bench-prefix: build/python/installed ## time to the first token with policy prefix, and the cost of its index
	@[ -e $(PYDIR)/installed ] || { cat $(PYDIR)/why; exit 1; }
	$(Q)$(PYDIR)/venv/bin/python tests/bench/bench_prefix.py
	$(Q)$(if $(DOC),scripts/doc-run.py prefix "Prefix routing" --) $(PYDIR)/venv/bin/python \
		tests/pick/prefix_sim.py $(if $(DOC),--doc) $(TRACES)
