# SPDX-License-Identifier: Apache-2.0
# kvd: `make help` lists the targets. Sources are found by pattern: a new .c
# file in a known folder needs no line here.
include mk/flags.mk

BASE_SRC   := $(wildcard daemon/base/*.c daemon/plan/*.c daemon/cost/*.c)
DAEMON_SRC := $(BASE_SRC) $(filter-out daemon/main.c,$(wildcard daemon/*.c)) \
	      $(wildcard gpu/*.c daemon/transport/*.c proto/*.c)
CTL_SRC    := $(wildcard ctl/*.c)
LIB_SRC    := $(wildcard proto/*.c) daemon/base/err.c daemon/base/mem.c daemon/base/cursor.c
UNIT_SRC   := $(wildcard tests/unit/test_*.c)
TESTLIB_SRC := $(wildcard tests/lib/*.c)

DAEMON_OBJ := $(DAEMON_SRC:%.c=$(B)/%.o)
TESTLIB_OBJ := $(TESTLIB_SRC:%.c=$(B)/%.o)
UNIT_BIN   := $(UNIT_SRC:tests/unit/%.c=$(B)/unit/%)
CORE       := $(B)/libkvdcore.a

.DEFAULT_GOAL := all
.PHONY: all clean help
all: programs ## build everything

$(CORE): $(DAEMON_OBJ)
	$(Q)rm -f $@ && $(AR) rcs $@ $^

$(B)/%.o: %.c $(B)/.flags
	@mkdir -p $(@D)
	$(SAY) CC $<
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

$(B)/unit/%: $(B)/tests/unit/%.o $(TESTLIB_OBJ) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) $^ -o $@ -lcmocka $(LIBS)

clean: ## remove build/
	rm -rf build

help: ## list the targets
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | sort | expand -t 16

include $(filter-out mk/flags.mk,$(wildcard mk/*.mk))
-include $(shell find $(B) -name '*.d' 2>/dev/null)
