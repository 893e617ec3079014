# SPDX-License-Identifier: Apache-2.0
# make bench-fair: what requests of 1 MiB wait beside one room of 10 GiB (or of half
# the memory that is free), by shm, ucx and tcp. FAIR='shm 4096' chooses one transport and
# the large room's MiB.
.PHONY: bench-fair
bench-fair: bench-programs ## latency of small rooms beside a large one
	@KVD_BUILD=$(B) scripts/bench_fair.py $(FAIR)
