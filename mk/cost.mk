# SPDX-License-Identifier: Apache-2.0
# What a decision costs.
.PHONY: bench-cost

$(B)/bench/bench_cost: $(B)/tests/bench/bench_cost.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

bench-cost: $(B)/bench/bench_cost ## ns of kvd_decide(), by holders and page
	$(Q)$<

# Query rows that go to the KV, beside their floors: the goals of routing in one run of some
# three minutes.
#   PARTS='words'  of echo sweep fan out crowd
#   DOC=1          a page of docs/runs and docs/route-break-even.svg, too
ROUTE_DOC := --doc docs/runs --plot docs/route-break-even.svg
# make bench-route-figures: figures of what it and bench-vllm-route have measured, in FIGURES.
FIGURES ?= build/route-figures
.PHONY: bench-route bench-route-doc bench-route-figures

$(B)/bench/bench_trip: $(B)/tests/bench/bench_trip.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

bench-route: all $(B)/bench/bench_trip build/python/installed ## routing beside its floors, break-evens, a crowd; see mk/cost.mk
	@[ -e $(PYDIR)/installed ] || { cat $(PYDIR)/why; exit 1; }
	@KVD_BUILD=$(CURDIR)/$(B) $(PYDIR)/venv/bin/python tests/bench/bench_route.py \
		--json build/bench-route.json $(if $(PARTS),--part $(PARTS)) $(if $(DOC),$(ROUTE_DOC))

bench-route-doc: ## build/bench-route.json as a page of docs/runs, and its plot
	@$(PYDIR)/venv/bin/python tests/bench/bench_route.py --from build/bench-route.json $(ROUTE_DOC)

bench-route-figures: ## figures of bench-route and bench-vllm-route as SVG (FIGURES=folder)
	@tests/bench/route_figures.py build/bench-route.json build/bench-vllm-route.json $(FIGURES)
