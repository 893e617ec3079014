# SPDX-License-Identifier: Apache-2.0
# make rdma-vm: real ibverbs on any x86-64 machine, between two virtual machines
# with Soft-RoCE. Packages come from Debian once and stay in build/rdma-vm.
RDMA_ABORT := $(B)/rdma-abort

$(RDMA_ABORT): $(B)/tests/rdma-vm/abort.o $(B)/libkvd.so
	$(SAY) LD $@
	$(Q)$(CC) $(USER_LD) $(filter %.o,$^) -o $@ -L$(B) -lkvd

# what runs in the guests a second time, built with the address sanitizer
RDMA_SAN := $(addprefix build/address/,kvd kvd-ctl libkvd.so conform demo-prefill demo-decode)

.PHONY: rdma-vm rdma-vm-programs
rdma-vm-programs: all $(CONFORM) $(DEMO_BIN) $(RDMA_ABORT) $(B)/faults-engine
	$(Q)$(MAKE) --no-print-directory SAN=address $(RDMA_SAN)

rdma-vm: ## RDMA between two virtual machines (ONLY=words chooses)
	@scripts/install-deps.sh --if-needed
	@$(MAKE) --no-print-directory $(JOBS) rdma-vm-programs
	@RDMA_VM_SANITIZED=build/address python3 tests/rdma-vm/run.py $(B) $(ONLY)

# What it costs to post a work request, without an adapter.
VERBS_POST := $(B)/bench/verbs_post

$(VERBS_POST): $(B)/tests/bench/verbs_post.o $(TESTLIB_OBJ) $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) $^ -o $@ -lcmocka $(LIBS)

.PHONY: bench-verbs-post
bench-verbs-post: $(VERBS_POST) ## CPU time and instructions to post a work request (verbs)
	@scripts/bench-verbs-post.sh $(B)
