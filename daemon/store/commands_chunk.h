/* SPDX-License-Identifier: Apache-2.0 */
/* What commands about chunks share (commands_chunk.c, commands_chunk_pages.c). */
#ifndef KVD_COMMANDS_CHUNK_H
#define KVD_COMMANDS_CHUNK_H

#include "daemon/request/commands.h"
#include "daemon/room/room_op.h"
#include "daemon/store/store.h"

#define CHUNK_FIRST_MAX UINT32_MAX

struct ids_args {
	uint64_t space;
	const cJSON *ids;
	uint64_t first;
};
#define F_SPACE(s) F_ID("space", s, ids.space, REQUIRED, "Space of this session")
#define F_IDS(s)                                                                       \
	F_ARRAY("ids", s, ids.ids, REQUIRED, STORE_IDS_MAX,                            \
		"Ids of consecutive chunks of one prompt, 64 hex digits each"),        \
		F_INT("first", s, ids.first, OPTIONAL, 0, CHUNK_FIRST_MAX,             \
		      "Index of the first chunk within its prompt: it starts at "      \
		      "token first x tokens. 4294967295: unknown, tokens are counted " \
		      "from the first chunk")

#define F_PLACE(s)                                                             \
	F_ID("pool", s, pool, REQUIRED,                                        \
	     "Pool of this session, with the layout of the space"),            \
		F_VIEWS(s, "Pages of the tokens: {name: {pages, first_token, " \
			   "tokens}} for each view of the space")

struct put_args {
	struct ids_args ids;
	uint64_t pool;
	struct pages_args pages;
	bool durable;
};

/* What commands with ids begin with. *bytes_p is the caller's (mem_free). */
int chunk_ids_begin(struct request *req, const struct ids_args *args,
		    struct store_handle **handle_p, uint8_t **bytes_p,
		    struct store_ids *ids);
int chunk_move_reply(struct request *req, const struct store_move *move);
/* Of struct put_args. */
int chunk_put(struct request *req, bool publish);

extern const struct command chunk_commands[];
extern const struct command chunk_event_commands[];
extern const struct command chunk_pages_commands[];

#endif
