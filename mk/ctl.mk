# SPDX-License-Identifier: Apache-2.0
# Parts of kvd-ctl that are tested without the program around them.
$(B)/unit/test_words: $(B)/tests/unit/test_words.o $(B)/ctl/words.o $(B)/ctl/table.o \
		$(TESTLIB_OBJ) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)
