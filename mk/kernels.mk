# SPDX-License-Identifier: Apache-2.0
# The kernels: gpu/kernels.cu by nvcc where there is one, for CUDA_ARCHS and as PTX
# of the lowest of them, made into one image that the programs hold. `make NVCC=`
# builds without: GPUs then move everything by their copy engines.
NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
KERNELS_WANT := sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_120
KERNELS :=
ifneq ($(NVCC),)
KERNELS_CAN := $(shell $(NVCC) --list-gpu-code 2>/dev/null)
CUDA_ARCHS ?= $(filter $(KERNELS_CAN),$(KERNELS_WANT))
ifneq ($(strip $(CUDA_ARCHS)),)
KERNELS := build/kernels/kernels.fatbin
KERNELS_LOW := $(patsubst sm_%,compute_%,$(firstword $(CUDA_ARCHS)))
KERNELS_GEN := $(foreach a,$(CUDA_ARCHS),-gencode arch=$(a:sm_%=compute_%),code=$a) \
	-gencode arch=$(KERNELS_LOW),code=$(KERNELS_LOW)
KERNELS_TEXT := $(CUDA_ARCHS) $(KERNELS_LOW)
endif
endif
KERNELS_CMD := $(NVCC) -I. -std=c++17 -O3 -Xptxas -warn-spills -Werror all-warnings \
	--no-compress -fatbin $(KERNELS_GEN)

# made anew when another compiler or list is asked for
build/kernels/.flags: FORCE
	@mkdir -p $(@D)
	@echo '$(KERNELS_CMD) $(ATTEND_CMD)' | cmp -s - $@ || \
		echo '$(KERNELS_CMD) $(ATTEND_CMD)' > $@

build/kernels/kernels.fatbin: gpu/kernels.cu gpu/kern.h build/kernels/.flags
	$(SAY) NVCC $<
	$(Q)$(KERNELS_CMD) $< -o $@.part && mv $@.part $@

$(B)/gpu/kernels_image.o: CPPFLAGS += $(if $(KERNELS),-DKERNELS_FILE='"$(KERNELS)"' \
	-DKERNELS_TEXT='"$(strip $(KERNELS_TEXT))"')
$(B)/gpu/kernels_image.o: $(KERNELS) build/kernels/.flags

# attend.cu: products of bf16, so from 8.0 on; in an image of its own, and without
# contraction: its merge and splice have the bits of the CPU's
ATTEND_ARCHS := $(filter-out sm_75,$(CUDA_ARCHS))
ifneq ($(and $(KERNELS),$(ATTEND_ARCHS)),)
ATTEND := build/kernels/attend.fatbin
ATTEND_LOW := $(patsubst sm_%,compute_%,$(firstword $(ATTEND_ARCHS)))
ATTEND_GEN := $(foreach a,$(ATTEND_ARCHS),-gencode arch=$(a:sm_%=compute_%),code=$a) \
	-gencode arch=$(ATTEND_LOW),code=$(ATTEND_LOW)
endif
ATTEND_NVCC := $(NVCC) -I. -std=c++17 -O3 --fmad=false -Xptxas -warn-spills \
	-Werror all-warnings --no-compress -fatbin
ATTEND_CMD := $(ATTEND_NVCC) $(ATTEND_GEN)
SPLICE_CMD := $(ATTEND_NVCC) $(KERNELS_GEN) -DSPLICE_ALONE
ATTEND_DEPS := gpu/attend.cu gpu/attend_kern.h gpu/kern.h build/kernels/.flags \
	$(addprefix daemon/math/,merge.h merge_row.h splice.h value.h)

build/kernels/attend.fatbin: $(ATTEND_DEPS)
	$(SAY) NVCC $<
	$(Q)$(ATTEND_CMD) $< -o $@.part && mv $@.part $@

# of it kvd_splice alone, for libkvd: any device
ifneq ($(KERNELS),)
SPLICE := build/kernels/splice.fatbin
endif
build/kernels/splice.fatbin: $(ATTEND_DEPS)
	$(SAY) NVCC '$< (splice)'
	$(Q)$(SPLICE_CMD) $< -o $@.part && mv $@.part $@

SPLICE_OBJ := $(patsubst %,$(B)/%client_splice_gpu.o,lib/ pic/lib/)
$(SPLICE_OBJ): CPPFLAGS += $(if $(SPLICE),-DSPLICE_FILE='"$(SPLICE)"')
$(SPLICE_OBJ): $(SPLICE) build/kernels/.flags

$(B)/gpu/attend_image.o: CPPFLAGS += $(if $(ATTEND),-DATTEND_FILE='"$(ATTEND)"')
$(B)/gpu/attend_image.o: $(ATTEND) build/kernels/.flags
# as nvcc's --fmad=false
ATTEND_FIBER := $(B)/tests/gpu/attend_fiber.o $(B)/fakegpu/attend_fiber.o
$(ATTEND_FIBER): private CFLAGS += -ffp-contract=off
$(ATTEND_FIBER): gpu/attend.cu
# a switch of fibers a product, which a sanitizer makes dear
export TEST_LONG += unit/test_attend_gpu=2

.PHONY: attend-mistakes
attend-mistakes: ## mistakes planted in gpu/attend.cu, each of which its test must see (2 min)
	@tests/gpu/attend_mistakes.sh

.PHONY: kernels
kernels: $(if $(KERNELS),$(KERNELS) $(ATTEND) $(SPLICE),no-nvcc) ## compile the GPU kernels (NVCC=, CUDA_ARCHS=)
.PHONY: no-nvcc
no-nvcc:
	@echo 'kernels: no nvcc here (NVCC=path): the build goes without'
