# SPDX-License-Identifier: Apache-2.0
# make check: what compiler and tests do not see. clang-tidy looks at a file
# again only when the file, a header of it or the rules have changed. Its analyser
# takes nearly all of its time: make check lets it look at few paths, make check-deep at
# all that it knows.
TIDY_SRC := $(filter-out daemon/main.c,$(DAEMON_SRC)) daemon/main.c $(CTL_SRC)

.PHONY: fmt check check-deep check-style check-docs check-glibc check-cppcheck check-arm check-tidy
fmt: ## format all C sources by .clang-format
	$(Q)git ls-files '*.c' '*.h' | xargs clang-format -i

check: ## style, generated files, links, cppcheck, aarch64, clang-tidy
	@scripts/install-deps.sh --for-check
	@$(MAKE) --no-print-directory $(JOBS) -k check-style check-docs check-glibc check-cppcheck \
		check-arm check-tidy
	@echo 'check: clean'

check-style: ## include direction, lengths, essays, forbidden words
	@scripts/check-style.sh
	@tests/sim/mutants.py --places

check-docs: $(B)/kvd $(B)/reference ## generated files, links, quoted messages
	@scripts/gen-docs.sh $(B) '$(PUBLIC_HEADERS)' --check
	@scripts/check-links.py
	@scripts/check-messages.py
	@scripts/dist.sh --check

check-glibc: $(B)/kvd $(B)/kvd-ctl $(B)/libkvd.so ## no symbol newer than the wheel's tag allows
	@scripts/check-glibc.sh $^

# Headers of libraries are this machine's, behind the cross compiler's own: nothing is linked.
ARM_CC := aarch64-linux-gnu-gcc
ARM_SRC := $(DAEMON_SRC) $(CTL_SRC) $(wildcard lib/*.c proto/*.c)
check-arm: ## compile every source for aarch64, too (gcc-aarch64-linux-gnu)
	$(SAY) CHECK $(ARM_CC)
	$(Q)echo $(sort $(ARM_SRC)) | xargs -n 16 -P $(or $(NPROC),2) $(ARM_CC) -fsyntax-only \
		$(CPPFLAGS) -std=gnu11 -O1 $(WARN) -pthread -idirafter /usr/include \
		-idirafter /usr/include/$(shell gcc -print-multiarch)

# cppcheck takes a define to end at ';', so the loop macro is told without one
check-cppcheck:
	@mkdir -p $(B)/cppcheck
	$(SAY) CHECK cppcheck
	$(Q)cppcheck -q -j $(shell nproc) --std=c11 --enable=warning,performance,portability --inline-suppr \
		--error-exitcode=1 --suppressions-list=mk/cppcheck.supp --library=posix,gnu \
		--cppcheck-build-dir=$(B)/cppcheck -I. -D_GNU_SOURCE '-DKVD_VERSION="$(VERSION)"' \
		'-DKVD_SOVERSION="$(SOVERSION)"' \
		'-DcJSON_ArrayForEach(e,a)=while((e=(a)->child))' $(TIDY_SRC)

check-tidy: $(TIDY_SRC:%.c=$(B)/tidy/%.ok)

check-deep: ## clang-tidy with its analyser's full depth (15 minutes)
	@scripts/install-deps.sh --for-check
	@$(MAKE) --no-print-directory $(JOBS) -k $(TIDY_SRC:%.c=$(B)/tidy/%.deep)

# the object stands for all headers of the file
define TIDY
	@mkdir -p $(@D)
	$(SAY) TIDY $*.c
	$(Q)timeout 900 clang-tidy --quiet $*.c -- -std=gnu11 $(CPPFLAGS) $(ISA) $1 2>$@.err || \
		{ cat $@.err; exit 1; }
	@rm -f $@.err && touch $@
endef
$(B)/tidy/%.ok: $(B)/%.o .clang-tidy
	$(call TIDY,-Xclang -analyzer-config -Xclang mode=shallow)

$(B)/tidy/%.deep: $(B)/%.o .clang-tidy
	$(call TIDY)
