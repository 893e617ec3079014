/* SPDX-License-Identifier: Apache-2.0 */
/*
 * zmqnet: two daemons' links over real loopback sockets, on the real loop, for
 * the tests of link_zmq and link_curve. Waits are on conditions with a deadline.
 */
#ifndef KVD_TESTS_ZMQNET_H
#define KVD_TESTS_ZMQNET_H

#include <sys/types.h>

#include "daemon/config/config.h"
#include "daemon/link/link.h"
#include "daemon/loop/loop.h"
#include "daemon/peer/peer.h"

#define ZMQNET_DEADLINE_NS (20 * LOOP_NS_PER_S)

struct zmqnet_node {
	struct config config;
	struct link *link;
	struct peers *peers;
	unsigned int frames, lines_up, lines_down, ups, downs;
	size_t last_len;
	uint8_t last[64];
	uint64_t sum; /* of the first 8 bytes of each frame, in order: a hash */
	char user[LINK_USER_MAX];
	struct err why;
};

extern struct loop *zmqnet_loop;
extern struct zmqnet_node zmqnet_a, zmqnet_b;
extern char zmqnet_keys[3][2][41]; /* of a, b, mallory: public, secret */

#define zmqnet_wait(condition)                                                      \
	do {                                                                        \
		uint64_t end_ns_ = loop_clock_ns(zmqnet_loop) + ZMQNET_DEADLINE_NS; \
		while (!(condition)) {                                              \
			assert_true(loop_clock_ns(zmqnet_loop) < end_ns_);          \
			loop_turn(zmqnet_loop, 10 * LOOP_NS_PER_MS);                \
		}                                                                   \
	} while (0)

int zmqnet_group_setup(void **state); /* keys, a folder for files */
int zmqnet_group_teardown(void **state);
int zmqnet_setup(void **state);
int zmqnet_teardown(void **state);
void zmqnet_turn(uint64_t ns);
void zmqnet_defaults(struct zmqnet_node *node);
void zmqnet_listen(struct zmqnet_node *node);
void zmqnet_stop(struct zmqnet_node *node);
struct link_line *zmqnet_dial(struct zmqnet_node *from, const char *endpoint);
int zmqnet_send(struct zmqnet_node *from, struct link_line *line, const char *text);
/* The node's endpoint without its key. */
void zmqnet_plain(const struct zmqnet_node *node, char text[LINK_ENDPOINT_MAX]);
/* Files of the folder. */
void zmqnet_path(char path[CONFIG_PATH_BYTES], const char *name);
void zmqnet_write(const char *name, mode_t mode, const char *text);
/* The node has the key of this number (0 a, 1 b, 2 mallory) and the list "allow". */
void zmqnet_use_curve(struct zmqnet_node *node, unsigned int key);
void zmqnet_allow(bool with_b); /* write "allow": alice (a), bob (b) */

#endif
