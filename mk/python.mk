# SPDX-License-Identifier: Apache-2.0
# The Python package. Tests run it in a virtual environment of their own, made from
# PyPI (numpy, pytest) and kept in build/python; without Python's headers or without
# PyPI they are skipped by name.
PYTHON ?= python3
PYDIR  := build/python
PYPKG  := $(shell find python -name '*.py' -o -name '*.pyi' -o -name '*.toml' \
	  2>/dev/null | grep -v '^python/build/')
PYSRC  := $(wildcard python/src/*.[ch]) $(wildcard lib/*.[ch]) gpu/cudrv.c gpu/cudrv.h \
	  gpu/attend_kern.h \
	  $(wildcard proto/*.[ch] daemon/base/*.[ch] \
	  daemon/cost/*.[ch] daemon/math/*.[ch]) mk/math.mk $(PYPKG)

TEST_TARGETS += tests/python/run.sh
export TEST_SHARDS += tests/python/run.sh=4
export TEST_WEIGHT += tests/python/run.sh=2
TEST_NEEDS   += $(PYDIR)/installed

.PHONY: wheel build-wheel wheel-check bench-python bench-nixl-files
WITH_SPLICE = $(if $(SPLICE),KVD_SPLICE=$(abspath $(SPLICE)))
# never fails: tests/python/run.sh tells what is missing
$(PYDIR)/installed: $(PYSRC) $(SPLICE) python/README.md
	@mkdir -p $(@D)
	$(SAY) VENV $(PYDIR)
	$(Q)$(WITH_SPLICE) scripts/python-venv.sh $(PYDIR) $(PYTHON) && touch $@ || :

wheel: ## build one wheel for all Pythons, with the daemon, in build/wheel
	@scripts/install-deps.sh --if-needed
	@$(MAKE) --no-print-directory $(JOBS) build-wheel

build-wheel: $(PROGRAMS)
	$(SAY) WHEEL build/wheel
	$(Q)$(WITH_SPLICE) scripts/python-wheel.sh $(PYDIR) $(PYTHON) $(B) build/wheel

wheel-check: wheel ## its files, and its daemon where there is nothing but Python (root)
	@KVD_WHEEL_TOOLS=$(PYDIR)/wheel-tools tests/wheel/test_wheel.py build/wheel

#   REPS=n processes of each module (3), TRANSPORT=shm|tcp
bench-python: all $(PYDIR)/installed ## kvd's nixl beside the real one (PyPI)
	@[ -e $(PYDIR)/installed ] || { cat $(PYDIR)/why; exit 1; }
	@tests/bench/peers/setup.sh build/peers
	@KVD_BUILD=$(B) scripts/bench-python.py --peers build/peers \
		$(if $(REPS),--reps $(REPS)) $(if $(TRANSPORT),--transport $(TRANSPORT))

# the extension's own memory errors, which end a test that plain Python survives
#   RACE_S=n of the stress (30), ONLY=words
PYASAN := build/python-asan
.PHONY: test-python-asan
test-python-asan: all $(PYDIR)/installed ## handles closed under other threads' calls, with AddressSanitizer
	@[ -e $(PYDIR)/installed ] || { cat $(PYDIR)/why; exit 1; }
	$(Q)CFLAGS='-fsanitize=address -fno-omit-frame-pointer -g' LDFLAGS=-fsanitize=address \
		$(PYDIR)/venv/bin/pip install -q --target $(PYASAN) --upgrade --no-deps \
		--no-build-isolation --no-index ./python
	@rm -rf python/build python/*.egg-info
	@LD_PRELOAD=$$($(CC) -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0:handle_segv=0 \
		PYTHONPATH=$(PYASAN) KVD_BUILD=$(CURDIR)/$(B) KVD_RACE_S=$(or $(RACE_S),30) \
		$(PYDIR)/venv/bin/python -m pytest -q -p no:cacheprovider \
		tests/python/test_close_race.py $(if $(ONLY),-k "$(ONLY)")

KILLS ?= 1000
.PHONY: chunk-kills
chunk-kills: all $(PYDIR)/installed ## kill -9 of daemons that keep chunks in files (KILLS=n)
	@KVD_BUILD=$(CURDIR)/$(B) $(PYDIR)/venv/bin/python tests/python/chunk_kills.py --kills $(KILLS) \
		--dir $(B) $(if $(SEED),--seed $(SEED))

#   REPS=n transfers of each kind (15), FOLDER=DIR of the files (/var/tmp)
bench-nixl-files: all $(PYDIR)/installed ## bytes of files: kvd's nixl beside the real one (PyPI)
	@[ -e $(PYDIR)/installed ] || { cat $(PYDIR)/why; exit 1; }
	@tests/bench/peers/setup.sh build/peers
	@KVD_BUILD=$(B) $(PYDIR)/venv/bin/python scripts/bench-nixl-files.py --peers build/peers \
		$(if $(REPS),--reps $(REPS)) $(if $(FOLDER),--folder $(FOLDER))

# kvd.transformers: torch and transformers from PyPI (5 GB), so neither is part of make test
#   ONLY='words'     tests whose names hold one
TRANSFORMERS := build/transformers
.PHONY: transformers demo-route transformers-venv
transformers-venv: all $(PYDIR)/installed
	@[ -e $(PYDIR)/installed ] || { cat $(PYDIR)/why; exit 1; }
	@scripts/transformers-venv.sh $(TRANSFORMERS) $(CURDIR)/$(PYDIR)/venv

transformers: transformers-venv ## tiny models whose documents lie on other daemons (PyPI; ONLY=words)
	@KVD_BUILD=$(CURDIR)/$(B) $(TRANSFORMERS)/venv/bin/python -m pytest -q -p no:cacheprovider \
		-p tests.python.counts tests/python/test_transformers.py $(if $(ONLY),-k "$(ONLY)")

#   AGENTS=4 STEPS=24 each TOKENS=4096 of the document MODEL=llama|v2 PRESET=h100-ibgda
demo-route: transformers-venv ## agents and one long document on another daemon (PyPI)
	@KVD_BUILD=$(CURDIR)/$(B) $(TRANSFORMERS)/venv/bin/python tests/demo/route.py \
		$(if $(MODEL),--model $(MODEL)) $(if $(AGENTS),--agents $(AGENTS)) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(TOKENS),--tokens $(TOKENS)) $(if $(PRESET),--preset $(PRESET))
