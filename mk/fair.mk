# SPDX-License-Identifier: Apache-2.0
# make bench-fair: what requests of 1 MiB wait beside one room of 10 GiB (or of half
# the memory that is free), and beside 10000 rooms of another session, by shm, ucx and
# tcp. FAIR='shm 4096 1000' chooses one transport, the large room's MiB, the rooms.
.PHONY: bench-fair
bench-fair: bench-programs ## latency of small rooms beside a large one
	@KVD_BUILD=$(B) scripts/bench_fair.py $(FAIR)
