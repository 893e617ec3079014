# SPDX-License-Identifier: Apache-2.0
# Parts of kvd-ctl that are tested without the program around them.
$(B)/unit/test_display: $(B)/tests/unit/test_display.o $(B)/ctl/display.o $(B)/ctl/table.o \
		$(B)/ctl/amount.o $(TESTLIB_OBJ) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)

# kvd-ctl for other programs: its main() is ctl_main()
CTL_LIB := $(B)/unit/ctl_main.o $(filter-out $(B)/ctl/main.o,$(CTL_SRC:%.c=$(B)/%.o))

$(B)/unit/ctl_main.o: $(B)/ctl/main.o
	@mkdir -p $(@D)
	$(Q)$(OBJCOPY) --redefine-sym main=ctl_main $< $@

$(B)/ctl/completion.o: $(wildcard ctl/completion.*.in)
