# SPDX-License-Identifier: Apache-2.0
# The reference page of the control socket's commands.

$(B)/reference: $(B)/docs/reference.o $(B)/docs/pages.o $(CORE)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

$(B)/unit/test_reference: $(B)/tests/unit/test_reference.o $(B)/docs/pages.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)
