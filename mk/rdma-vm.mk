# SPDX-License-Identifier: Apache-2.0
# make rdma-vm: real ibverbs on any x86-64 machine, between two virtual machines
# with Soft-RoCE. Packages come from Debian once and stay in build/rdma-vm.
.PHONY: rdma-vm
rdma-vm: all $(CONFORM) $(DEMO_BIN) ## RDMA between two virtual machines (ONLY=words chooses)
	@python3 tests/rdma-vm/run.py $(B) $(ONLY)
