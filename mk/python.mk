# SPDX-License-Identifier: Apache-2.0
# The Python package. Tests run it in a virtual environment of their own, made from
# PyPI (numpy, pytest) and kept in build/python; without Python's headers or without
# PyPI they are skipped by name.
PYTHON ?= python3
PYDIR  := build/python
PYPKG  := $(shell find python -name '*.py' -o -name '*.pyi' -o -name '*.toml' \
	  2>/dev/null | grep -v '^python/build/')
PYSRC  := $(wildcard python/src/*.[ch]) $(wildcard lib/*.[ch]) \
	  $(wildcard proto/*.[ch] daemon/base/*.[ch] daemon/plan/*.[ch] \
	  daemon/cost/*.[ch]) $(PYPKG)

TEST_TARGETS += tests/python/run.sh
TEST_NEEDS   += $(PYDIR)/installed

.PHONY: wheel wheel-check bench-python bench-nixl-files
# never fails: tests/python/run.sh tells what is missing
$(PYDIR)/installed: $(PYSRC) python/README.md
	@mkdir -p $(@D)
	$(SAY) VENV $(PYDIR)
	$(Q)scripts/python-venv.sh $(PYDIR) $(PYTHON) && touch $@ || :

wheel: $(PROGRAMS) ## build one wheel for all Pythons, with the daemon, in build/wheel
	$(SAY) WHEEL build/wheel
	$(Q)scripts/python-wheel.sh $(PYDIR) $(PYTHON) $(B) build/wheel

wheel-check: wheel ## its files, and its daemon where there is nothing but Python (root)
	@KVD_WHEEL_TOOLS=$(PYDIR)/wheel-tools tests/wheel/test_wheel.py build/wheel

#   REPS=n processes of each module (3), TRANSPORT=shm|tcp
bench-python: all $(PYDIR)/installed ## kvd's nixl beside the real one (PyPI)
	@[ -e $(PYDIR)/installed ] || { cat $(PYDIR)/why; exit 1; }
	@tests/bench/peers/setup.sh build/peers
	@KVD_BUILD=$(B) scripts/bench-python.py --peers build/peers \
		$(if $(REPS),--reps $(REPS)) $(if $(TRANSPORT),--transport $(TRANSPORT))

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
