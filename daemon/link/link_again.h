/* SPDX-License-Identifier: Apache-2.0 */
/* link_again: calls of libzmq that a signal interrupts. */
#ifndef KVD_LINK_AGAIN_H
#define KVD_LINK_AGAIN_H

#include <errno.h>

/* A call of libzmq, repeated if a signal interrupts it. */
#define LINK_AGAIN(call)                                                           \
	({                                                                         \
		int again_result, again_tries = 0;                                 \
		do                                                                 \
			again_result = (call);                                     \
		while (again_result != 0 && errno == EINTR && ++again_tries < 16); \
		again_result;                                                      \
	})

#endif
