# SPDX-License-Identifier: Apache-2.0
# Compiler flags by configuration: build/rel, build/address, build/undefined, …
SAN ?=
ifneq ($(filter-out address undefined thread fuzz,$(SAN)),)
$(error SAN is one of address, undefined, thread, fuzz)
endif
# The core is rooms, transfers and what they need; these can be left out: MODULES=
LEAVABLE := cluster store attend ucx
MODULES ?= $(LEAVABLE)
ifneq ($(filter-out $(LEAVABLE),$(MODULES)),)
$(error MODULES are of $(LEAVABLE))
endif
ifneq ($(and $(filter attend,$(MODULES)),$(if $(filter store,$(MODULES)),,1)),)
$(error the module attend needs the module store: it attends to chunks)
endif
LEFT_OUT := $(filter-out $(MODULES),$(LEAVABLE))
space := $(subst ,, )
CFG := $(if $(SAN),$(SAN),rel)$(if $(LEFT_OUT),-without-$(subst $(space),-,$(LEFT_OUT)))
B   := build/$(CFG)
V   ?= 0
Q   := $(if $(filter 1,$(V)),,@)
SAY := $(if $(filter 1,$(V)),@:,@printf '  %-5s %s\n')
VERSION := 0.1.0
SOVERSION := 0

ifeq ($(origin CC),default)
CC := gcc
endif
OBJCOPY ?= objcopy
# The environment's flags come behind our own. Sub-makes get them by these names, and
# nobody the sum of both.
ifndef CALLER_FLAGS
export CALLER_FLAGS    := yes
export CALLER_CPPFLAGS := $(CPPFLAGS)
export CALLER_CFLAGS   := $(CFLAGS)
export CALLER_LDFLAGS  := $(LDFLAGS)
endif
unexport CPPFLAGS CFLAGS LDFLAGS
# a release is built by compilers that nobody has tried, and fuzzed by clang
WERROR ?= $(if $(filter fuzz,$(SAN)),-w,$(if $(wildcard .git),-Werror))
# proto: kvd.h is installed beside kvd_status.h, and includes it so
CPPFLAGS := -I. -Iproto -D_GNU_SOURCE -DKVD_VERSION='"$(VERSION)"' \
	-DKVD_SOVERSION='"$(SOVERSION)"' $(MODULES:%=-DKVD_WITH_%)
WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wconversion \
	-Wno-sign-conversion -Wvla -Wpointer-arith -Wwrite-strings -Wundef $(WERROR)
HARDEN := -fstack-protector-strong -fstack-clash-protection
ifeq ($(SAN),)
CPPFLAGS += $(if $(findstring _FORTIFY_SOURCE,$(CALLER_CPPFLAGS) $(CALLER_CFLAGS)),,-D_FORTIFY_SOURCE=2)
OPT := -O2 -g
else ifeq ($(SAN),fuzz)
# clang; OSS-Fuzz says in CFLAGS what it wants instead
FUZZ_FLAGS ?= -O1 -fno-omit-frame-pointer -fsanitize=fuzzer-no-link,address,undefined \
	-fno-sanitize-recover=undefined
OPT := -g $(FUZZ_FLAGS)
else
OPT := -O1 -g -fno-omit-frame-pointer -fsanitize=$(SAN)
ifeq ($(SAN),undefined)
OPT += -fno-sanitize-recover=all
endif
endif
# all but the code model: programs are -fPIE, what goes into libkvd is -fPIC
CPPFLAGS += $(CALLER_CPPFLAGS)
CFLAGS   := -std=gnu11 $(OPT) $(HARDEN) $(WARN) -pthread $(CALLER_CFLAGS)
LDFLAGS  := -Wl,-z,relro,-z,now -Wl,--as-needed -pthread $(CALLER_LDFLAGS)
LIBS    := -lev -lzmq -lcjson -linih -lxxhash -lseccomp -lcrypto -ldl -lm

# objects are made anew when the flags change
$(B)/.flags: FORCE
	@mkdir -p $(B)
	@echo '$(CC) $(CPPFLAGS) $(CFLAGS)' | cmp -s - $@ || echo '$(CC) $(CPPFLAGS) $(CFLAGS)' > $@
FORCE:
.PHONY: FORCE
