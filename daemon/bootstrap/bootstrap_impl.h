/* SPDX-License-Identifier: Apache-2.0 */
/* bootstrap_impl: shared by bootstrap.c (calls, publications), bootstrap_io.c
 * (messages) and bootstrap_board.c (the meeting point's board). Nobody else
 * includes it. */
#ifndef KVD_BOOTSTRAP_IMPL_H
#define KVD_BOOTSTRAP_IMPL_H

#include "daemon/base/idmap.h"
#include "daemon/bootstrap/bootstrap.h"

/* Who may take a rank back: a session (peer NULL) or a remote daemon. */
struct board_owner {
	struct list link; /* in board.owners */
	uint64_t session;
	const struct peer *peer;
	struct list entries; /* struct board_entry.of_owner */
	unsigned int count;
};

struct board_group {
	char *name;
	struct list entries; /* struct board_entry.of_group */
	unsigned int count;
	size_t bytes; /* of all records, as ROUTE carries them */
};

struct board_entry {
	struct list of_owner, of_group;
	struct board_owner *owner;
	struct board_group *group;
	uint64_t end_ns; /* remote owners: not renewed until then = gone */
	struct bootstrap_rank rank;
};

struct board {
	struct strmap groups;
	struct list owners;
	unsigned int count, remote_count;
	unsigned int max, owner_max;
	size_t group_bytes_max;
};

struct publication {
	struct list link;  /* in bootstrap.publications */
	struct peer *peer; /* the meeting point, held */
	uint64_t session, cookie;
	char group[BOOTSTRAP_GROUP_MAX];
	struct bootstrap_rank rank;
	bool established;	     /* taken once */
	struct bootstrap_call *call; /* waits for the first answer */
};

struct bootstrap {
	struct loop *loop;
	struct peers *peers;
	struct bootstrap_options options;
	char endpoint[LINK_ENDPOINT_MAX];
	struct board board;
	struct list publications, calls;
	unsigned int publication_count, call_count;
	uint64_t cookies;
	bool closing;
	struct loop_timer tick; /* renews what is out, expires what is in */
};

/* Ends it; the owner may free it in on_done. */
void bootstrap_call_finish(struct bootstrap_call *call, const struct err *err,
			   const struct bootstrap_rank *ranks, unsigned int count);
void bootstrap_publication_free(struct bootstrap *bootstrap, struct publication *pub);
void bootstrap_tick_start(struct bootstrap *bootstrap); /* when there is work for it */

void board_init(struct board *board, const struct bootstrap_options *options);
void board_fini(struct board *board);
/* ERR_INVAL naming the field. */
int board_check(const char *group, const struct bootstrap_rank *rank);
/* end_ns: UINT64_MAX for sessions. ERR_EXIST, ERR_LIMIT, ERR_INVAL, ERR_NOMEM. */
int board_put(struct board *board, uint64_t session, const struct peer *peer,
	      const char *group, const struct bootstrap_rank *rank, uint64_t end_ns);
void board_take(struct board *board, uint64_t session, const struct peer *peer,
		const char *group, const struct bootstrap_rank *rank);
void board_owner_gone(struct board *board, uint64_t session, const struct peer *peer);
void board_expire(struct board *board, uint64_t now_ns);
const struct board_group *board_group(const struct board *board, const char *group);

/* Records of ranks, as in ROUTE. */
void rank_put(struct cursor *out, const struct bootstrap_rank *rank);
void rank_get(struct cursor *in, struct bootstrap_rank *rank);
bool rank_same_place(const struct bootstrap_rank *a, const struct bootstrap_rank *b);

#endif
