/* SPDX-License-Identifier: Apache-2.0 */
/* board_directory_impl: shared by board_directory.c (sites, reading) and board_said.c
 * (publications). Nobody else includes it. */
#ifndef KVD_CLUSTER_BOARD_DIRECTORY_IMPL_H
#define KVD_CLUSTER_BOARD_DIRECTORY_IMPL_H

#include "daemon/base/idmap.h"
#include "daemon/cluster/board.h"
#include "daemon/cluster/board_directory.h"
#include "daemon/cluster/roster.h"

#define BOARD_NAMES_MAX (2u * WIRE_STR_MAX)

struct board_site {
	struct board_directory *directory;
	unsigned int index;
	char endpoint[LINK_ENDPOINT_MAX];
	struct peer *peer; /* held; NULL: the own daemon's, or not dialled yet */
	struct board_local local;
	bool own, up;
	struct err why; /* not up: why, as far as it is known */
};

struct board_said {
	struct publication *publication; /* NULL: nobody asks any more */
	struct board_directory *directory;
	struct list link;
	struct place place;
	char *record, *load;
	uint64_t cookie;
	unsigned int taken, refused;   /* sites, a bit each */
	unsigned int contested;	       /* those that said that somebody has it, once */
	uint8_t owed[BOARD_SITES_MAX]; /* what a site is to be sent: SAID_… */
	bool done;
};

struct board_directory {
	struct directory base;
	struct loop *loop;
	struct peers *peers;
	struct board_site sites[BOARD_SITES_MAX];
	unsigned int count;
	struct board_site *reading; /* NULL: none is up */
	struct list said, readers;
	struct strmap said_at; /* by group and place */
	uint64_t cookies, lease_ns;
	struct loop_timer tick; /* what was refused, and what goes */
	struct loop_defer say, start;
	struct loop_timer say_timer;
	struct directory_state state;
};

struct board_directory *board_directory_of(const struct directory *directory);
int board_site_say(struct board_site *site, enum wire_type type, const void *body,
		   size_t len);
/* Once, in a third of the lease: what has no answer is said and asked again. */
void board_tick_start(struct board_directory *d);

/* ---- board_said.c ---- */
void board_said_init(struct board_directory *d);
void board_said_fini(struct board_directory *d);
int board_publish(struct directory *directory, struct publication *publication,
		  const struct place *place, const char *record, const char *load);
int board_update(struct publication *publication, const char *record, const char *load);
void board_withdraw(struct publication *publication);
int board_said_on_ack(struct board_site *site, struct cursor *body);
void board_said_site_up(struct board_site *site);
void board_said_site_down(struct board_site *site);
/* True: some are still without an answer. */
bool board_said_again(struct board_directory *d);

#endif
