/* SPDX-License-Identifier: Apache-2.0 */
/* chunk.publish, chunk.withdraw: chunks that remain in the pages of their engine. */
#include "daemon/store/commands_chunk.h"

#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"

#define GRACE_MS_PRESET 100
#define GRACE_MS_MAX 60000

/* put_args without `durable`. */
static const struct field publish_fields[] = {
	F_SPACE(put_args), F_IDS(put_args), F_PLACE(put_args), F_WAIT(put_args), F_END,
};

static int publish_run(struct request *req)
{
	return err_pass(chunk_put(req, true));
}

struct withdraw_args {
	struct ids_args ids;
	uint32_t grace_ms;
};
static const struct field withdraw_fields[] = {
	F_SPACE(withdraw_args),
	F_IDS(withdraw_args),
	F_INT("grace_ms", withdraw_args, grace_ms, DEFAULT(GRACE_MS_PRESET), 0,
	      GRACE_MS_MAX,
	      "Milliseconds for which reads in progress may continue; after that they "
	      "fail"),
	F_END,
};

static int withdraw_run(struct request *req)
{
	const struct withdraw_args *args = request_args(req);
	cleanup_free uint8_t *bytes = NULL;
	struct store_handle *handle;
	struct store_move *move;
	struct store_ids ids;
	int r = chunk_ids_begin(req, &args->ids, &handle, &bytes, &ids);

	if (r >= 0)
		r = store_withdraw(handle, &ids, args->grace_ms * LOOP_NS_PER_MS, &move);
	return r < 0 ? err_pass(r) : chunk_move_reply(req, move);
}

const struct command chunk_pages_commands[] = {
	{"chunk.publish",
	 "Publish chunks in place: the pages of the pool must not change until "
	 "chunk.withdraw has ended",
	 publish_fields, 0, publish_run,
	 "as chunk.put; left_out: over the limit of published chunks per daemon, or "
	 "stored at another position. After success, other sessions and daemons read "
	 "the pages until chunk.withdraw has ended"},
	{"chunk.withdraw", "Withdraw published chunks", withdraw_fields, 0, withdraw_run,
	 "as chunk.put; chunks: number withdrawn; left_out: chunks that this session "
	 "had not published. After it has ended the pages are no longer read"},
	{.name = NULL},
};
