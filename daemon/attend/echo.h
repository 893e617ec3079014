/* SPDX-License-Identifier: Apache-2.0 */
/* echo: ATTENDs without chunks, served: their bytes at once, or how fast this daemon
 * attends in a form. */
#ifndef KVD_ATTEND_ECHO_H
#define KVD_ATTEND_ECHO_H

struct attends;
struct remote;
struct wire_attend;

/* Echoes of a peer: so many bytes at once, and a second. */
#define ECHO_BYTES (16u << 20)
#define ECHO_BYTES_A_S (64u << 20)
/* Speeds of a peer that nobody asked for before: so many at once, and then one each. */
#define ECHO_SPEEDS 8u
#define ECHO_SPEED_NS (60 * LOOP_NS_PER_S)

/* Answers now or later. ERR_BUSY: more than a peer's share; and speed_ask()'s. */
int echo_serve(struct attends *attends, struct remote *remote,
	       const struct wire_attend *msg);
void echo_on_down(struct attends *attends, const struct remote *remote);
void echoes_close(struct attends *attends);

#endif
