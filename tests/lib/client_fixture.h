/* SPDX-License-Identifier: Apache-2.0 */
/* client_fixture: a libkvd client of a scripted daemon, for libkvd's tests. */
#ifndef KVD_TESTS_CLIENT_FIXTURE_H
#define KVD_TESTS_CLIENT_FIXTURE_H

#include "lib/client.h"
#include "proto/kvd_ring.h"
#include "tests/lib/fake_kvd.h"

#define OK "{\"id\":%ID%,\"ok\":true" /* the beginning of an answer */

struct client_fixture {
	struct fake_kvd *fake;
	struct kvd_client *client;
	unsigned int done;
	int result;
	struct kvd_error error;
};

int client_fixture_setup(void **state);	     /* reconnects when told */
int client_fixture_setup_auto(void **state); /* by itself */
int client_fixture_teardown(void **state);

/* A callback that counts in the fixture. */
void client_on_done(void *arg, int result, const struct kvd_reply *reply);
/* Turn until so many callbacks have run in all. */
void client_poll_until(struct client_fixture *f, unsigned int done);
/* Turn until nothing is unanswered: the script's next answer is for the next line. */
void client_poll_answered(struct client_fixture *f);
/* The n-th line that came in, from "cmd" on. */
const char *client_line_args(struct client_fixture *f, unsigned int n);
/* Made with an answer of the script: region 3; pool 4 of such a region; send room
 * 77 in this slot (hello, region, pool and room are lines 0 to 3). */
struct kvd_region *client_region_make(struct client_fixture *f);
struct kvd_pool *client_pool_make(struct client_fixture *f);
struct kvd_room *client_room_make(struct client_fixture *f, unsigned int slot,
				  uint32_t gen);

/* An attachment (2, by an answer of the script), a list of own memory and one of its:
 * `rows` rows of 64 bytes each. The daemon has no ring: all goes by the socket. */
struct client_lists {
	uint64_t attach;
	struct kvd_dlist *local, *remote;
};
void client_lists_make(struct client_fixture *f, uint32_t rows, struct client_lists *l);
/* Of the n-th line, an xfer.submit; how many bytes of data go with it. */
size_t client_submitted(struct client_fixture *f, unsigned int n,
			struct kvd_ring_entry *entry_p, uint8_t *data, size_t data_max);

#endif
