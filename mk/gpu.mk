# SPDX-License-Identifier: Apache-2.0
# GPUs. No CUDA takes part in the build; tests bring a driver of their own, of
# today and (old/) of before memory by file descriptors and batched copies.
FAKE_CUDA_SRC := $(wildcard tests/gpu/fake_*.c)
FAKE_CUDA     := $(B)/fakegpu/libcuda.so.1 $(B)/fakegpu/old/libcuda.so.1

# the kernels' reference, and those that run as they are: what the fake has for kernels
FAKE_KERNELS := $(B)/fakegpu/kernels_ref.o $(B)/fakegpu/attend_fiber.o
$(B)/fakegpu/kernels_ref.o: tests/gpu/kernels_ref.c $(B)/.flags
	@mkdir -p $(@D)
	$(SAY) CC '$< (fake)'
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -fPIC -fvisibility=hidden -MMD -MP -c $< -o $@

$(B)/fakegpu/old/%.o: tests/gpu/%.c $(B)/.flags
	@mkdir -p $(@D)
	$(SAY) CC '$< (old)'
	$(Q)$(CC) $(CPPFLAGS) -DFAKE_CUDA_OLD $(CFLAGS) -fPIC -fvisibility=hidden -MMD -MP \
		-c $< -o $@

$(B)/fakegpu/%.o: tests/gpu/%.c $(B)/.flags
	@mkdir -p $(@D)
	$(SAY) CC $<
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -fPIC -fvisibility=hidden -MMD -MP -c $< -o $@

$(B)/fakegpu/libcuda.so.1: $(FAKE_CUDA_SRC:tests/gpu/%.c=$(B)/fakegpu/%.o) $(FAKE_KERNELS)
$(B)/fakegpu/old/libcuda.so.1: $(FAKE_CUDA_SRC:tests/gpu/%.c=$(B)/fakegpu/old/%.o) $(FAKE_KERNELS)
# It names the libraries that the real one names: a bundle has to bring them.
FAKE_CUDA_LIBS := -Wl,--no-as-needed -l:libm.so.6 -l:libdl.so.2 -l:libpthread.so.0 -l:librt.so.1
$(FAKE_CUDA):
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -shared -Wl,-soname,$(@F) $(if $(SAN),,-Wl,-z,defs) $^ \
		$(FAKE_CUDA_LIBS) -o $@

TEST_NEEDS += $(FAKE_CUDA)
$(B)/unit/test_gpu $(B)/unit/test_kernels $(B)/unit/test_copy_gpu \
$(B)/unit/test_copy_gpu_faults $(B)/unit/test_region_gpu \
$(B)/unit/test_verbs_gpu $(B)/unit/test_keep $(CONFORM): | $(FAKE_CUDA)

# gpu-works: kvd's work with GPU memory on any driver, see tests/gpu/works/works.h.
# KVD_CUDA_LIB=… chooses the driver; without one, or without a GPU, it skips by name.
GPU_WORKS := $(B)/gpu-works
$(B)/tests/gpu/works/%.o: CPPFLAGS += -Ilib
$(GPU_WORKS): $(patsubst %.c,$(B)/%.o,$(wildcard tests/gpu/works/*.c)) $(CORE)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

TEST_NEEDS += $(GPU_WORKS)
export TEST_LONG += tests/integration/test_gpu_works.sh=2 # some 1700 plays of its sweeps

.PHONY: gpu-test gpu-bench gpu-bundle
gpu-test: all $(GPU_WORKS) ## kvd on this machine's GPU (KVD_CUDA_LIB=driver)
	@$(GPU_WORKS) test $(ONLY); s=$$?; [ $$s -eq 77 ] || exit $$s

gpu-bench: all $(GPU_WORKS) ## the same, how fast (ONLY=words)
	@$(GPU_WORKS) bench $(ONLY); s=$$?; [ $$s -eq 77 ] || exit $$s

gpu-bundle: all $(GPU_WORKS) ## a folder that runs both on a bare machine with a GPU
	@scripts/gpu-bundle.sh $(B)

# the suite's own run has kernels, in every build
TEST_TARGETS += tests/gpu/conform_engines.sh
export TEST_LONG += tests/gpu/conform_engines.sh=3
export TEST_WEIGHT += $(patsubst %,tests/%=2,gpu/conform_engines.sh integration/test_gpu_works.sh)
tests/gpu/conform_engines.sh: | $(CONFORM)

# What lists of rows for a GPU cost the processor; no GPU is needed.
.PHONY: bench-gpu
$(B)/bench/bench_gpu: $(B)/tests/bench/bench_gpu.o $(B)/tests/lib/gpu_owner.o $(CORE) | $(FAKE_CUDA)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) $^ -o $@ $(LIBS)

bench-gpu: $(B)/bench/bench_gpu ## ns a row of lists for a GPU, over the tests' driver
	$(Q)$<
