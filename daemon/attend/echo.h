/* SPDX-License-Identifier: Apache-2.0 */
/* echo: ATTENDs without chunks: returns their bytes at once, or this daemon's attention
 * speed for a form. */
#ifndef KVD_ATTEND_ECHO_H
#define KVD_ATTEND_ECHO_H

struct attends;
struct remote;
struct wire_attend;

/* Limit of echoes of a peer: so many bytes at once, and per second. */
#define ECHO_BYTES (16u << 20)
#define ECHO_BYTES_A_S (64u << 20)
/* Limit of new speeds per peer: so many at once, and then one each. */
#define ECHO_SPEEDS 16u
#define ECHO_SPEED_NS (60 * LOOP_NS_PER_S)

/* wire_attend.pool of a request for a speed: that in GPU memory; 0: in host memory. */
#define ECHO_SPEED_GPU 1u

/* Replies now or later. ERR_BUSY: over a peer's share; and speed_ask()'s. */
int echo_serve(struct attends *attends, struct remote *remote,
	       const struct wire_attend *msg);
void echo_on_down(struct attends *attends, const struct remote *remote);
void echoes_close(struct attends *attends);

#endif
