/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunk.* and space.*: the chunk store as control commands (daemon/store/store.h), except
 * finds and holds, for which engines use the submission ring. Ids are hex here; the ring
 * takes them as bytes.
 *
 * A layout given as text is parsed on a helper while the request waits. The layout of a
 * pool has been parsed already.
 */
#include "daemon/request/ring_ops.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "proto/out.h"
#include "daemon/store/commands_chunk.h"
#include "daemon/handshake/handshake.h"
#include "daemon/loop/loop.h"
#include "daemon/peer/peer.h"
#include "daemon/plan/canon.h"
#include "daemon/plan/layout.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"
#include "daemon/store/far.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"

/* ---- space.open ---- */

struct space_args {
	const cJSON *layout, *views;
	uint64_t pool;
	const char *model, *revision, *scheme, *rope;
	uint32_t tokens;
};
static const struct field space_fields[] = {
	F_ID("pool", space_args, pool, DEFAULT(-1),
	     "Pool of this session that provides the layout. Give either pool or layout"),
	F_OBJECT("layout", space_args, layout, OPTIONAL,
		 "Layout in the form of pool.register; buffers may be omitted"),
	F_STR("model", space_args, model, REQUIRED, STORE_WORD_MAX, "Name of the model"),
	F_STR("revision", space_args, revision, OPTIONAL, STORE_WORD_MAX,
	      "Revision of the model's weights and adapters"),
	F_STR("scheme", space_args, scheme, REQUIRED, STORE_WORD_MAX,
	      "How ids are derived from tokens (hash, seed, block size). Engines with "
	      "equal schemes must give equal ids to equal tokens"),
	F_STR("rope", space_args, rope, OPTIONAL, STORE_WORD_MAX,
	      "Position encoding, if the model name does not determine it"),
	F_INT("tokens", space_args, tokens, REQUIRED, CANON_TOKENS_MIN, CANON_TOKENS_MAX,
	      "Tokens per chunk"),
	F_ARRAY("views", space_args, views, OPTIONAL, LAYOUT_VIEWS_MAX,
		"Names of the views that a chunk contains; default: all views of the "
		"layout except aux"),
	F_END,
};

static int space_views(const cJSON *array, const char **views, uint32_t *count_p)
{
	const cJSON *item;
	uint32_t n = 0;

	cJSON_ArrayForEach(item, array) {
		views[n] = cJSON_GetStringValue(item);
		if (!views[n])
			return err_raise(ERR_INVAL,
					 "views[%u]: not a string; give the name of a "
					 "view",
					 n);
		n++;
	}
	*count_p = n;
	return 0;
}

static int space_open(struct request *req, const struct layout *layout)
{
	const struct space_args *args = request_args(req);
	const char *views[LAYOUT_VIEWS_MAX];
	struct store_space_args space = {.model = args->model,
					 .revision = args->revision,
					 .scheme = args->scheme,
					 .rope = args->rope,
					 .tokens = args->tokens,
					 .layout = layout,
					 .views = args->views ? views : NULL};
	struct store_handle *handle;
	struct reply reply;
	struct text *out;
	int r = args->views ? space_views(args->views, views, &space.view_count) : 0;

	if (r >= 0)
		r = store_open(req->session, &space, &handle);
	if (r < 0)
		return err_pass(r);
	out = reply_begin(&reply, req);
	out_number(out, "space", handle->id);
	out_number(out, "tokens", handle->space->tokens);
	out_number(out, "part_bytes", handle->canon->slot_bytes);
	out_text(out, "tenant", handle->space->tenant->account->name);
	out_hex(out, "digest", handle->space->digest, 16);
	return reply_end(&reply);
}

struct space_job {
	struct offload_job job;
	struct request *req;
	const cJSON *json; /* owned by the request */
	struct layout *layout;
};

static void space_job_work(struct offload_job *job)
{
	struct space_job *parse = container_of(job, struct space_job, job);

	job->result = cJSON_GetObjectItemCaseSensitive(parse->json, "buffers")
			      ? layout_parse(parse->json, &parse->layout)
			      : layout_parse_ranks(parse->json, &parse->layout);
	if (job->result < 0) {
		err_prefix(job->result, "layout");
		err_take(&job->err);
	}
}

static void space_job_done(struct offload_job *job)
{
	struct space_job *parse = container_of(job, struct space_job, job);
	struct request *req = parse->req;

	if (job->result < 0)
		request_fail(req, &job->err);
	else if (!req->session)
		request_drop(req);
	else if (space_open(req, parse->layout) < 0)
		request_fail_last(req);
	layout_free(parse->layout);
	mem_free(parse);
}

static int space_run(struct request *req)
{
	const struct space_args *args = request_args(req);
	bool by_pool = cJSON_GetObjectItemCaseSensitive(req->line, "pool");
	struct space_job *parse;
	const struct pool *pool;

	if (by_pool == (args->layout != NULL))
		return err_raise(ERR_INVAL, "pool, layout: give exactly one of them");
	if (by_pool) {
		pool = pool_find(req->session, args->pool);
		return pool ? err_pass(space_open(req, pool->layout)) : err_pass(-ENOENT);
	}
	parse = mem_zalloc(sizeof(*parse));
	if (!parse)
		return err_pass(-ENOMEM);
	parse->req = req;
	parse->json = args->layout;
	parse->job = (struct offload_job){.work = space_job_work,
					  .done = space_job_done,
					  .principal = session_principal(req->session)};
	offload_submit(req->kvd->offload, &parse->job);
	return 0;
}

static const struct field space_key_fields[] = {
	F_ID("space", request_id_args, id, REQUIRED, "Space of this session"),
	F_END,
};

static int space_close_run(struct request *req)
{
	const struct request_id_args *args = request_args(req);
	struct store_handle *handle = store_handle_find(req->session, args->id);

	if (!handle)
		return err_pass(-ENOENT);
	store_close(handle);
	return request_reply(req);
}

/* ---- ids ---- */

_Static_assert(JSON_ID_BYTES == STORE_ID_BYTES, "ids of chunks");

int chunk_ids_begin(struct request *req, const struct ids_args *args,
		    struct store_handle **handle_p, uint8_t **bytes_p,
		    struct store_ids *ids)
{
	uint32_t count = 0;
	int r;

	*handle_p = store_handle_find(req->session, args->space);
	if (!*handle_p)
		return err_pass(-ENOENT);
	r = json_ids(args->ids, "ids", bytes_p, &count);
	if (r < 0)
		return err_pass(r);
	*ids = (struct store_ids){
		.bytes = *bytes_p, .count = count, .first = args->first};
	return 0;
}

struct drop_args {
	struct ids_args ids;
};
static const struct field drop_fields[] = {
	F_SPACE(drop_args),
	F_IDS(drop_args),
	F_END,
};

static int drop_run(struct request *req)
{
	const struct drop_args *args = request_args(req);
	cleanup_free uint8_t *bytes = NULL;
	struct store_handle *handle;
	struct store_ids ids;
	struct reply reply;
	struct text *out;
	int r = chunk_ids_begin(req, &args->ids, &handle, &bytes, &ids);

	if (r < 0)
		return err_pass(r);
	out = reply_begin(&reply, req);
	out_number(out, "chunks", store_drop(handle, &ids));
	return reply_end(&reply);
}

/* ---- holds ---- */

static const struct field hold_key_fields[] = {
	F_ID("hold", request_id_args, id, REQUIRED, "Hold of this session"),
	F_END,
};

static int holders_run(struct request *req)
{
	const struct request_id_args *args = request_args(req);
	const struct store_hold *hold = store_hold_find(req->session, args->id);
	const struct far_hold *far;
	struct reply reply;
	struct text *out;

	if (!hold)
		return err_pass(-ENOENT);
	out = reply_begin(&reply, req);
	out_array(out, "holders");
	for (far = store_hold_far(hold); far; far = far_hold_next(far)) {
		const struct peer *peer = far_hold_remote(far)->peer;

		out_object(out, NULL);
		out_hex(out, "instance", peer->instance, sizeof(peer->instance));
		out_text(out, "endpoint", peer->endpoint);
		out_number(out, "first", far_hold_first(far));
		out_number(out, "chunks", far_hold_chunks(far));
		out_number(out, "tokens", far_hold_tokens(far));
		out_bool(out, "gpu", far_hold_in_gpu(far));
		out_close(out, '}');
	}
	out_close(out, ']');
	return reply_end(&reply);
}

/* ---- moves ---- */

int chunk_move_reply(struct request *req, const struct store_move *move)
{
	struct store_move_facts facts;
	struct reply reply;
	struct text *out = reply_begin(&reply, req);

	store_move_facts(move, &facts);
	out_number(out, "move", facts.id);
	out_number(out, "slot", facts.slot);
	out_number(out, "gen", facts.slot_gen);
	out_text(out, "kind", store_kind_names[facts.kind]);
	out_number(out, "state", facts.poll_state);
	out_number(out, "chunks", facts.chunks);
	out_number(out, "done", facts.done);
	if (facts.kind != STORE_FETCH) {
		out_number(out, "there", facts.there);
		out_number(out, "left_out", facts.left_out);
	}
	out_number(out, "prefix_tokens", facts.prefix_tokens);
	out_number(out, "bytes", facts.bytes);
	out_number(out, "total", facts.total);
	if (facts.error->code != ERR_OK)
		out_error(out, facts.error);
	return reply_end(&reply);
}

static const struct field put_fields[] = {
	F_SPACE(put_args),
	F_IDS(put_args),
	F_PLACE(put_args),
	F_WAIT(put_args),
	F_BOOL("durable", put_args, durable,
	       "Succeed only after all chunks have been written to files and synced; "
	       "default: false"),
	F_END,
};

static int move_args(struct request *req, uint64_t pool_id,
		     const struct pages_args *pages, bool lands,
		     struct store_move_args *args)
{
	struct pages_args said = *pages;
	struct room_pages read = {0};
	int r;

	said.aux = -1;
	args->pool = pool_find(req->session, pool_id);
	if (!args->pool)
		return err_pass(-ENOENT);
	if (!said.views)
		return err_raise(ERR_INVAL, "views: missing");
	r = lands ? pool_check_target(args->pool) : 0;
	if (r >= 0)
		r = room_pages_parse(req->session, &said, args->pool->layout, lands,
				     &read);
	if (r < 0)
		return err_pass(r);
	args->maps = read.maps;
	args->wait = read.wait;
	return 0;
}

static void on_put_taken(void *arg, struct store_move *move)
{
	chunk_move_reply(arg, move);
}

int chunk_put(struct request *req, bool publish)
{
	const struct put_args *args = request_args(req);
	cleanup_free uint8_t *bytes = NULL;
	struct store_move_args move_args_ = {.durable = args->durable,
					     .publish = publish,
					     .on_taken = on_put_taken,
					     .arg = req};
	struct store_handle *handle;
	struct store_move *move;
	struct store_ids ids;
	int r = chunk_ids_begin(req, &args->ids, &handle, &bytes, &ids);

	if (r >= 0)
		r = move_args(req, args->pool, &args->pages, false, &move_args_);
	if (r >= 0)
		r = store_put(handle, &ids, &move_args_, &move);
	if (r < 0)
		return err_pass(r);
	return r == 0 ? chunk_move_reply(req, move) : 0;
}

static int put_run(struct request *req)
{
	return err_pass(chunk_put(req, false));
}

struct fetch_args {
	uint64_t hold, pool;
	struct pages_args pages;
	uint32_t deadline_ms;
};
static const struct field fetch_fields[] = {
	F_ID("hold", fetch_args, hold, REQUIRED, "Hold of this session"),
	F_PLACE(fetch_args),
	F_WAIT(fetch_args),
	F_INT("deadline_ms", fetch_args, deadline_ms, OPTIONAL, 1, ROOM_MS_MAX,
	      "Milliseconds after which the move fails if chunks are missing; default: "
	      "no deadline"),
	F_END,
};

static int fetch_run(struct request *req)
{
	const struct fetch_args *args = request_args(req);
	struct store_hold *hold = store_hold_find(req->session, args->hold);
	struct store_move_args move_args_ = {.deadline_ns =
						     args->deadline_ms * LOOP_NS_PER_MS};
	struct store_move *move;
	int r = hold ? 0 : -ENOENT;

	if (r >= 0)
		r = move_args(req, args->pool, &args->pages, true, &move_args_);
	if (r >= 0)
		r = store_fetch(hold, &move_args_, &move);
	return r < 0 ? err_pass(r) : chunk_move_reply(req, move);
}

static const struct field move_key_fields[] = {
	F_ID("move", request_id_args, id, REQUIRED, "Move of this session"),
	F_END,
};

static int move_run(struct request *req)
{
	const struct request_id_args *args = request_args(req);
	struct store_move *move = store_move_find(req->session, args->id);
	const struct err *why;

	if (move)
		return err_pass(chunk_move_reply(req, move));
	why = ring_fault_of(ring_of(req->session), args->id);
	return err_pass(why ? request_reply_refused(req, why) : -ENOENT);
}

static int abort_run(struct request *req)
{
	const struct request_id_args *args = request_args(req);
	struct store_move *move = store_move_find(req->session, args->id);
	struct err why;

	if (!move)
		return err_pass(-ENOENT);
	err_set(&why, ERR_ABORTED, "aborted by its engine '%.40s' (pid %d)",
		req->session->client, (int)req->session->pid);
	store_move_abort(move, &why);
	return chunk_move_reply(req, move);
}

static int close_run(struct request *req)
{
	const struct request_id_args *args = request_args(req);
	struct store_move *move = store_move_find(req->session, args->id);

	if (!move)
		return err_pass(-ENOENT);
	store_move_drop(move);
	return request_reply(req);
}

/* ---- chunk.list ---- */

static void put_spaces(struct text *out, const struct session *session, bool all)
{
	const struct store_space *space;

	out_array(out, "spaces");
	list_foreach(space, &store_of(session->kvd)->spaces, link) { /* at most 256 */
		if (!all && space->tenant->account != session->account)
			continue;
		out_object(out, NULL);
		out_text(out, "tenant", space->tenant->account->name);
		out_hex(out, "digest", space->digest, 16);
		out_text(out, "model", space->model);
		out_text(out, "revision", space->revision);
		out_text(out, "scheme", space->scheme);
		out_text(out, "rope", space->rope);
		out_number(out, "tokens", space->tokens);
		out_number(out, "chunks", space->chunks);
		out_number(out, "bytes", space->bytes);
		out_number(out, "classes", space->class_count);
		out_number(out, "handles", space->handles);
		out_close(out, '}');
	}
	out_close(out, ']');
}

static void put_files(struct text *out, const struct store_files *f)
{
	if (!f->dir)
		return;
	out_object(out, "files");
	out_text(out, "dir", f->dir);
	out_bool(out, "direct", f->direct);
	out_bool(out, "open", f->open);
	out_bool(out, "scanned", f->scanned);
	out_bool(out, "readonly", f->readonly);
	if (f->why->code != ERR_OK)
		out_text(out, "why", f->why->text);
	out_number(out, "bytes", f->bytes);
	out_number(out, "free_bytes", f->free_bytes);
	out_number(out, "disk_free_bytes", f->disk_free_bytes);
	out_bool(out, "full", f->full);
	out_bool(out, "stands", f->stands);
	out_number(out, "written_bytes", f->written_bytes);
	out_number(out, "read_bytes", f->read_bytes);
	out_number(out, "written", f->written);
	out_number(out, "read", f->read);
	out_number(out, "bad", f->bad);
	out_number(out, "faults", f->faults);
	out_number(out, "evicted", f->evicted);
	out_number(out, "queued", f->queued);
	out_close(out, '}');
}

static void put_remote(struct text *out, const struct store_remote_figures *f)
{
	out_object(out, "remote");
	out_number(out, "stores", f->stores);
	out_number(out, "up", f->up);
	out_number(out, "suspended", f->left_out);
	out_number(out, "found", f->found);
	out_number(out, "bytes", f->bytes);
	out_number(out, "retries", f->retries);
	out_number(out, "hedges", f->hedges);
	out_number(out, "hedges_won", f->hedges_won);
	out_number(out, "holds_total", f->holds_total);
	out_number(out, "holds", f->holds);
	out_close(out, '}');
}

static void put_homes(struct text *out, const struct store_homes *f)
{
	if (!f->homes)
		return;
	out_object(out, "index_nodes");
	out_number(out, "nodes", f->homes);
	out_number(out, "up", f->up);
	out_number(out, "updates", f->notes);
	out_number(out, "resyncs", f->resyncs);
	out_number(out, "queries", f->asks);
	out_number(out, "timeouts", f->late);
	out_number(out, "dials", f->dials);
	out_number(out, "dials_refused", f->dials_refused);
	out_close(out, '}');
}

static void put_home(struct text *out, const struct store_home *f)
{
	if (!f->most)
		return;
	out_object(out, "index");
	out_number(out, "bytes", f->bytes);
	out_number(out, "entries", f->used);
	out_number(out, "limit", f->most);
	out_number(out, "holders", f->holders);
	out_number(out, "updates", f->notes);
	out_number(out, "refused", f->refused);
	out_number(out, "unknown", f->unknown);
	out_number(out, "queries", f->finds);
	out_number(out, "resyncs", f->again);
	out_close(out, '}');
}

static int list_run(struct request *req)
{
	const struct request_list_args *args = request_args(req);
	struct store_figures f;
	struct reply reply;
	struct text *out;
	int r = request_all(req, args->all);

	if (r >= 0 && !store_of(req->kvd))
		r = store_ready(NULL);
	if (r < 0)
		return err_pass(r);
	store_figures(store_of(req->kvd), &f);
	out = reply_begin(&reply, req);
	out_bool(out, "ready", f.ready);
	out_number(out, "memory_bytes", f.memory_bytes);
	out_number(out, "free_bytes", f.slabs_free * f.slab_bytes);
	out_number(out, "chunks", f.chunks);
	out_number(out, "evicted", f.evicted);
	out_number(out, "spaces_evicted", f.spaces_evicted);
	out_number(out, "published", f.published);
	out_number(out, "found", f.found);
	out_number(out, "missed", f.missed);
	out_number(out, "put_bytes", f.put_bytes);
	out_number(out, "fetched_bytes", f.fetched_bytes);
	out_number(out, "holds", f.holds);
	out_number(out, "moves", f.moves);
	put_remote(out, &f.remote);
	put_homes(out, &f.homes);
	put_home(out, &f.home);
	put_files(out, &f.files);
	put_spaces(out, req->session, args->all);
	return reply_end(&reply);
}

static const struct field list_fields[] = {
	F_BOOL("all", request_list_args, all,
	       "Include the spaces of all users (administrators only)"),
	F_END,
};

const struct command chunk_commands[] = {
	{"space.open",
	 "Open a space: the namespace of chunks for one model, scheme and layout",
	 space_fields, 0, space_run,
	 "space; tokens; part_bytes: bytes stored per chunk; tenant; digest: "
	 "identifies the space in chunk.events"},
	{"space.close", "Close a space; its chunks stay in the store", space_key_fields,
	 0, space_close_run, "nothing"},
	{"chunk.holders", "List the daemons that have the remote chunks of a hold",
	 hold_key_fields, 0, holders_run,
	 "holders: {instance, endpoint, first: its first chunk in the hold; chunks, "
	 "tokens, gpu: most are in an engine's pages in GPU memory}, in the order of the "
	 "chunks. If a holder fails, the next one with the same `first` is asked"},
	{"chunk.put", "Store chunks from the pages of a pool", put_fields, 0, put_run,
	 "move; slot, gen: its entry in the status page; state; chunks: number "
	 "accepted; there: of these, already stored or being stored; left_out: not "
	 "stored for lack of space, or because the chunk is stored at another "
	 "position; done; prefix_tokens; bytes, total; error"},
	{"chunk.fetch", "Copy the chunks of a hold into the pages of a pool",
	 fetch_fields, 0, fetch_run, "as chunk.put"},
	{"chunk.move", "Show the progress of a put, fetch, publish or withdraw",
	 move_key_fields, 0, move_run,
	 "as chunk.put; prefix_tokens: tokens moved without a gap, from the first one"},
	{"chunk.abort", "Abort a move; its pages stay in use until its state is terminal",
	 move_key_fields, 0, abort_run, "as chunk.put"},
	{"chunk.close", "Close a move; abort it if it has not ended", move_key_fields, 0,
	 close_run, "nothing"},
	{"chunk.drop", "Remove chunks from the store", drop_fields, 0, drop_run,
	 "chunks: number removed"},
	{"chunk.list", "Show the contents and counters of the chunk store", list_fields,
	 0, list_run,
	 "ready: chunk_memory is allocated; memory_bytes, free_bytes; chunks; "
	 "published: chunk parts in engines' pages; evicted, found, missed: chunks "
	 "since the start; spaces_evicted: spaces removed with all of their chunks; "
	 "put_bytes, fetched_bytes; holds, moves: open now; remote (chunks of other "
	 "daemons): {stores, up: daemons of chunk_peers; suspended: those that "
	 "replied late; found, bytes, retries; hedges, hedges_won: late parts "
	 "requested from a second holder; holds_total, holds: granted to other "
	 "daemons since the start, open now}; index_nodes, with chunk_index: {nodes, "
	 "up; updates: sent; resyncs: full resynchronisations; queries, timeouts: "
	 "queries sent, and those that timed out; dials, dials_refused: connections "
	 "to holders that were not peers}; index, if this daemon is an index node: "
	 "{entries, limit: of them; holders; bytes; updates: received; refused: "
	 "updates dropped for lack of memory; unknown: chunks not indexed for lack of "
	 "memory; queries: received; resyncs: full resynchronisations requested}; "
	 "files, with chunk_dir: {dir, direct: past the page cache, open, "
	 "scanned: the initial scan has finished, readonly, why, bytes, free_bytes: "
	 "within the limit and the free space of the file system; disk_free_bytes: "
	 "free space of the file system; full: no space for another file; stands: the "
	 "disk does not respond; written, read, evicted: chunks; bad: chunks with "
	 "checksum errors; written_bytes, read_bytes, faults, queued}; spaces: "
	 "{tenant, digest, model, revision, scheme, rope, tokens, chunks, bytes, "
	 "classes: slot classes, handles: times opened by sessions}"},
	{.name = NULL},
};
