# SPDX-License-Identifier: Apache-2.0
# kvd: `make help` lists the targets. Sources are found by pattern: a new .c
# file in a known folder needs no line here. What a part of the tree needs
# beyond that goes into a mk/NAME.mk of its own; mk/test.mk tells how to add
# tests.
include mk/flags.mk

BASE_SRC   := $(wildcard daemon/base/*.c daemon/plan/*.c)
# what only a module that is left out uses
WITHOUT    := $(LEFT_OUT:%=daemon/%/%) $(LEFT_OUT:%=daemon/transport/%/%) \
	      $(if $(filter store,$(LEFT_OUT)),daemon/base/breaker.c daemon/plan/canon.c \
		$(addprefix daemon/cost/,fit.c live.c pace.c)) \
	      $(if $(filter attend,$(LEFT_OUT)),daemon/math/% gpu/attend_%.c)
CTL_SRC    := $(wildcard ctl/*.c)
# libkvd: libc, libm and cJSON are all it may need
LIB_SRC    := $(wildcard lib/*.c) $(addprefix proto/,base64.c out.c) \
	      $(addprefix daemon/base/,err.c hex.c mem.c text.c) \
	      $(addprefix daemon/cost/,cost.c page.c preset.c) \
	      $(addprefix daemon/math/,splice.c value.c) \
	      $(addprefix daemon/plan/,layout.c layout_json.c layout_text.c token_shard.c) \
	      gpu/cudrv.c
# and what libkvd has of the parts that are left out: kvd-ctl is linked with it
DAEMON_SRC := $(sort $(LIB_SRC) $(filter-out daemon/main.c $(WITHOUT),\
		$(wildcard daemon/*.c daemon/*/*.c daemon/*/*/*.c gpu/*.c proto/*.c lib/*.c)))
UNIT_SRC   := $(wildcard tests/unit/test_*.c)
# the simulation's transport and link serve other tests too
SIMLIB_SRC := $(wildcard tests/sim/fake*.c) tests/sim/link_mem.c
TESTLIB_SRC := $(wildcard tests/lib/*.c) $(SIMLIB_SRC) tests/gpu/kernels_ref.c \
	       tests/gpu/attend_fiber.c

CORE     := $(B)/libkvdcore.a
TESTLIB_OBJ := $(TESTLIB_SRC:%.c=$(B)/%.o)
# tests of what is left out, and what they share
ifneq ($(LEFT_OUT),)
NOT_TESTED  := $(shell scripts/tests-of.sh $(LEFT_OUT))
UNIT_SRC    := $(filter-out $(NOT_TESTED),$(UNIT_SRC))
TESTLIB_SRC := $(filter-out $(NOT_TESTED),$(TESTLIB_SRC))
TESTLIB_OBJ := $(TESTLIB_SRC:%.c=$(B)/%.o)
endif
UNIT_BIN := $(UNIT_SRC:tests/unit/%.c=$(B)/unit/%)
PROGRAMS := $(B)/kvd $(if $(CTL_SRC),$(B)/kvd-ctl)
LIBKVD   := $(B)/libkvd.so.$(SOVERSION)
LIBKVD_A := $(B)/libkvd.a

.DEFAULT_GOAL := all
.PHONY: all clean help
all: $(PROGRAMS) $(LIBKVD) $(LIBKVD_A) ## build the programs and the library
# in the build folder -lkvd must find the library too
all: $(B)/libkvd.so

$(B)/%.o: %.c $(B)/.flags
	@mkdir -p $(@D)
	$(SAY) CC $<
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -fPIE -MMD -MP -c $< -o $@

$(B)/pic/%.o: %.c $(B)/.flags
	@mkdir -p $(@D)
	$(SAY) CC '$< (pic)'
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -fPIC -MMD -MP -c $< -o $@

$(CORE): $(DAEMON_SRC:%.c=$(B)/%.o)
	$(Q)rm -f $@ && $(AR) rcs $@ $^

$(B)/kvd: $(B)/daemon/main.o $(CORE)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

$(B)/kvd-ctl: $(CTL_SRC:%.c=$(B)/%.o) $(CORE)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

# -z defs: a symbol that is not in libkvd is a fault here, not at the engine's
$(B)/libkvd.so.$(SOVERSION): $(LIB_SRC:%.c=$(B)/pic/%.o) lib/libkvd.map
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -shared -Wl,-soname,$(@F) $(if $(SAN),,-Wl,-z,defs) \
		-Wl,--version-script,lib/libkvd.map $(filter %.o,$^) -o $@ -lcjson -lm

$(B)/libkvd.so: $(B)/libkvd.so.$(SOVERSION)
	$(Q)ln -sf $(<F) $@

# one object, in which the symbols of libkvd.map are global and no others
$(LIBKVD_A): $(LIB_SRC:%.c=$(B)/pic/%.o) lib/libkvd.map
	$(SAY) AR $@
	$(Q)sed -n '/^global:/,/^local:/s/^\t\(.*\);/\1/p' lib/libkvd.map > $@.syms
	$(Q)$(CC) -r -nostdlib $(filter %.o,$^) -o $@.o
	$(Q)$(OBJCOPY) --wildcard --keep-global-symbols=$@.syms $@.o
	$(Q)rm -f $@ && $(AR) rcs $@ $@.o

# two hundred programs, by the fastest linker there is
FASTEST_LD := $(firstword $(foreach l,lld gold,$(if $(shell command -v ld.$l),-fuse-ld=$l)))
$(B)/unit/% $(B)/fuzz/%: private LDFLAGS += $(FASTEST_LD)
$(B)/unit/%: $(B)/tests/unit/%.o $(TESTLIB_OBJ) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)

clean: ## remove build/
	rm -rf build

help: ## list the targets
	@printf 'make [TARGET] [SAN=address|undefined|thread] [V=1] [DESTDIR=] [PREFIX=/usr/local]\n\n'
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | sort | expand -t 16

# test.mk last: it sums up what the others add
include $(filter-out mk/flags.mk mk/test.mk,$(sort $(wildcard mk/*.mk))) mk/test.mk
-include $(shell find $(B) -name '*.d' -type f 2>/dev/null)

# objects are kept, also those made on the way
.SECONDARY:
