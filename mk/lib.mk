# SPDX-License-Identifier: Apache-2.0
# libkvd, kvd-ctl, and what is built from the public header alone.
SO_OBJ  := $(patsubst %.c,$(B)/%.o,$(wildcard proto/client*.c) daemon/base/err.c daemon/base/mem.c)
CTL_OBJ := $(CTL_SRC:%.c=$(B)/%.o)
USER_LD  = $(CFLAGS) $(LDFLAGS) -Wl,-rpath,'$$ORIGIN'

programs: $(B)/libkvd.so $(if $(CTL_SRC),$(B)/kvd-ctl)

$(B)/libkvd.so.0: $(SO_OBJ) proto/libkvd.map
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) -shared -Wl,-soname,libkvd.so.0 -Wl,--version-script=proto/libkvd.map \
		-Wl,-z,relro,-z,now $(if $(SAN),,-Wl,-z,defs) $(SO_OBJ) -o $@ -lcjson
$(B)/libkvd.so: $(B)/libkvd.so.0
	$(Q)ln -sf libkvd.so.0 $@

$(B)/kvd-ctl: $(CTL_OBJ) $(CORE)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) $^ -o $@ -lcjson -lzmq -lxxhash -lm
