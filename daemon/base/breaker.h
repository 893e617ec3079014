/* SPDX-License-Identifier: Apache-2.0 */
/*
 * breaker: a circuit breaker. A late target is skipped for a while, then tried once, and
 * nothing waits for that trial. Each time that it opens without a success in between it
 * stays open twice as long. Pure; all zeros means closed; the owner resets it after a
 * success.
 */
#ifndef KVD_BASE_BREAKER_H
#define KVD_BASE_BREAKER_H

#include <stdbool.h>
#include <stdint.h>

#define BREAKER_FIRST_NS UINT64_C(10000000000)
#define BREAKER_MOST_NS UINT64_C(300000000000)

enum breaker_state {
	BREAKER_CLOSED,
	BREAKER_OPEN,
	BREAKER_TRIAL, /* it has been open for long enough */
};

struct breaker {
	uint64_t until_ns;
	uint32_t trips; /* since the last success */
	bool open;
};

enum breaker_state breaker_state(const struct breaker *breaker, uint64_t now_ns);
/* The target was late, or its trial starts: no other trial starts until that one has a
 * result. */
void breaker_trip(struct breaker *breaker, uint64_t now_ns);
/* A trial was answered, which is half a success: requests to it may be waited for again,
 * and the next trip counts as one more. */
void breaker_close(struct breaker *breaker);

#endif
