# SPDX-License-Identifier: Apache-2.0
# Compiler flags by configuration: build/rel, build/address, build/undefined, …
SAN ?=
CFG := $(if $(SAN),$(SAN),rel)
B   := build/$(CFG)
V   ?= 0
Q   := $(if $(filter 1,$(V)),,@)
SAY := $(if $(filter 1,$(V)),@:,@printf '  %-5s %s\n')
VERSION := 0.1.0

CC ?= gcc
CPPFLAGS += -I. -D_GNU_SOURCE -DKVD_VERSION='"$(VERSION)"'
WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wconversion \
	-Wno-sign-conversion -Wvla -Wpointer-arith -Wwrite-strings -Wundef -Werror
HARDEN := -fstack-protector-strong -fPIC
ifeq ($(SAN),)
CPPFLAGS += -D_FORTIFY_SOURCE=2
OPT := -O2 -g
else
OPT := -O1 -g -fno-omit-frame-pointer -fsanitize=$(SAN)
ifeq ($(SAN),undefined)
OPT += -fno-sanitize-recover=all
endif
endif
CFLAGS  := -std=gnu11 $(OPT) $(HARDEN) $(WARN) -pthread
LDFLAGS := -pie -Wl,-z,relro,-z,now -Wl,--as-needed -pthread
LIBS    := -lev -lzmq -lcjson -linih -lsystemd -lxxhash -ldl -lm

# objects are made anew when the flags change
$(B)/.flags: FORCE
	@mkdir -p $(B)
	@echo '$(CC) $(CPPFLAGS) $(CFLAGS)' | cmp -s - $@ || echo '$(CC) $(CPPFLAGS) $(CFLAGS)' > $@
FORCE:
.PHONY: FORCE
