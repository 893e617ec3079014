# SPDX-License-Identifier: Apache-2.0
# What test_adopt loads: a driver that knows registered memory.
TEST_NEEDS += $(B)/adopt/libcuda.so.1
$(B)/unit/test_adopt: | $(B)/adopt/libcuda.so.1 $(B)/libkvd.so

$(B)/adopt/libcuda.so.1: $(B)/pic/tests/adopt/fake_cuda.o
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -shared -Wl,-soname,$(@F) $^ -o $@
