# SPDX-License-Identifier: Apache-2.0
# daemon/math: one file for each instruction set, which pick.c calls only where it is.
# Where the compiler makes code for another processor these files are empty.
MATH_AVX2   := -mavx2 -mfma
MATH_AVX512 := $(MATH_AVX2) -mavx512f -mavx512bw -mavx512dq -mavx512vl
MATH_BF16   := $(MATH_AVX512) -mavx512bf16
MATH_AMX    := $(MATH_BF16) -mamx-tile -mamx-bf16
MATH_X86    := $(findstring x86_64,$(shell $(CC) -dumpmachine 2>/dev/null))
MATH_FLAGS   = $(if $(MATH_X86),$($1))

# for clang-tidy, too; private: .flags, which objects need, is of what all are made with
MATH_OF = $(B)/daemon/math/attend_$1.o $(addprefix $(B)/tidy/daemon/math/attend_$1.,ok deep)
$(call MATH_OF,avx2):   private ISA := $(call MATH_FLAGS,MATH_AVX2)
$(call MATH_OF,avx512): private ISA := $(call MATH_FLAGS,MATH_AVX512)
$(call MATH_OF,bf16):   private ISA := $(call MATH_FLAGS,MATH_BF16)
$(call MATH_OF,amx):    private ISA := $(call MATH_FLAGS,MATH_AMX)
$(B)/daemon/math/attend_avx2.o $(B)/daemon/math/attend_avx512.o \
	$(B)/daemon/math/attend_bf16.o $(B)/daemon/math/attend_amx.o: private CFLAGS += $(ISA)
# gcc 12 puts a function's variables to where they are not aligned as their vectors
# want it, when it is to find uses after the function's return
ifeq ($(SAN),address)
$(B)/daemon/math/%.o: private CFLAGS += --param asan-use-after-return=0
endif
# the same bits on every machine
$(foreach f,merge splice,$(B)/daemon/math/$f.o $(B)/pic/daemon/math/$f.o): private CFLAGS += -ffp-contract=off

$(B)/bench/bench_attend: $(B)/tests/bench/bench_attend.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

TEST_NEEDS += $(B)/bench/bench_attend

.PHONY: bench-attend
bench-attend: $(B)/bench/bench_attend ## attention kernels beside memory and oneDNN (PYTHON=)
	@KVD_BUILD=$(B) $(or $(PYTHON),python3) tests/bench/bench_attend.py
