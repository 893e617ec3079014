/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lists, transfers and notifications are made in three steps: begin (on the loop: named
 * objects are found and held), work (the long part: rows and indices are read from the
 * payload and checked), end (on the loop: the object gets its number). Small ops take all
 * three at once; for large ones a helper does the work, and the reader of the entry keeps
 * its engine's next request waiting meanwhile, so that an engine that prepares a list and
 * posts on it need not wait in between.
 *
 * Bounds: memory for lists, indices and notifications of a session is charged to it
 * (xfer_impl.h) before it is allocated: first the amount that the op names, then the
 * amount that is kept.
 */
#include "daemon/xfer/xfer_op.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"

#define INLINE_ROWS 1024u /* of a list or a transfer, read and checked on the loop */
#define INLINE_BYTES (32u << 10) /* of a payload */

/* ---- payloads ---- */

int payload_notif(const struct ring_payload *payload, uint64_t offset, uint32_t bytes,
		  uint8_t **notif_p)
{
	if (bytes > XFER_NOTIF_MAX)
		return err_raise(ERR_TOOBIG, "notification of %u bytes (limit %u)", bytes,
				 XFER_NOTIF_MAX);
	return err_pass(ring_payload_copy(payload, offset, bytes, notif_p));
}

/* ---- lists ---- */

/* By its first row; a session without any is not searched. */
static int list_of_files(const struct xfer_op *op, bool *files_p)
{
	uint64_t address = 0;
	int r = op->xs->session->files ? ring_payload_read(&op->payload, op->offset,
							   &address, sizeof(address))
				       : 0;

	*files_p = address >= REGION_FILE_ADDRESS;
	return err_pass(r);
}

/* The regions that the session exports now, or those of the attached one. */
static int list_begin(struct xfer_op *op)
{
	struct attach *attach;
	bool files;
	int r;

	if (op->rows == 0 || op->rows > DLIST_ENTRIES_MAX)
		return err_raise(op->rows ? ERR_LIMIT : ERR_INVAL,
				 "list of %u rows (allowed: 1 … %u)", op->rows,
				 DLIST_ENTRIES_MAX);
	op->gid = loop_random_u64(op->xs->xfers->kvd->loop);
	r = list_of_files(op, &files);
	if (r < 0)
		return err_pass(r);
	if (!op->attach)
		return err_pass(search_begin_local(
			op->xs->session, files ? SEARCH_FILES : 0, &op->search));
	attach = attach_find(op->xs, op->attach);
	if (!attach)
		return err_pass(-ENOENT);
	if (files && attach_is_own(attach))
		return err_pass(
			search_begin_local(op->xs->session, SEARCH_FILES, &op->search));
	if (!attach->pool)
		return err_raise(ERR_PEER, "the remote session is currently not "
					   "reachable");
	return err_pass(search_begin_remote(attach->pool, &op->search));
}

static int read_rows(const struct xfer_op *op, struct dlist_entry *entries)
{
	uint32_t columns = op->columns, done = 0;
	uint64_t raw[2048];

	while (done < op->rows) {
		uint32_t n = ARRAY_LEN(raw) / columns;
		int r;

		n = n < op->rows - done ? n : op->rows - done;
		r = ring_payload_read(&op->payload,
				      op->offset + (uint64_t)done * columns * 8, raw,
				      (size_t)n * columns * 8);
		if (r < 0)
			return err_pass(r);
		for (uint32_t i = 0; i < n; i++) {
			const uint64_t *row = &raw[(size_t)i * columns];

			entries[done + i] = (struct dlist_entry){
				.address = row[0],
				.bytes = row[1],
				.stride = columns == 4 ? row[2] : 0,
				.count = columns == 4 && row[3] ? row[3] : 1,
			};
		}
		done += n;
	}
	return 0;
}

/* The arena may have changed when it is read again; that is the engine's own affair,
 * everything is checked each time. */
static int list_try(struct xfer_op *op, bool squeezed)
{
	struct dlist_entry *entries = mem_calloc(op->rows, sizeof(*entries));
	uint32_t count = op->rows;
	int r = entries ? read_rows(op, entries) : -ENOMEM;

	if (r < 0) {
		mem_free(entries);
		return err_pass(r);
	}
	if (squeezed)
		count = dlist_squeeze(entries, count);
	r = dlist_new(entries, count, op->gid, &op->dlist);
	return r < 0 ? err_pass(r) : search_run(op->search, op->dlist);
}

/* Engines give rows where they mean grids: all blocks of a layer. One entry then
 * replaces thousands, here, on the wire and there. A grid that crosses from one region
 * into the next does not qualify: then row by row. */
static int list_work(struct xfer_op *op)
{
	int r = list_try(op, true);

	if (r >= 0 || err_last()->code != ERR_NOTFOUND)
		return r < 0 ? err_pass(r) : 0;
	dlist_free(op->dlist);
	op->dlist = NULL;
	err_clear();
	return list_try(op, false);
}

static int xfer_op_list_end(struct xfer_op *op)
{
	struct attach *attach = NULL;

	if (op->attach) {
		attach = attach_find(op->xs, op->attach);
		if (!attach)
			return err_pass(-ENOENT);
	}
	return err_pass(prepared_add(op->xs, attach, mem_steal(op->dlist), op->id,
				     &op->search, &op->list));
}

/* ---- transfers ---- */

static int move_begin(struct xfer_op *op)
{
	static const char *const names[] = {"local", "remote"};
	struct prepared *sides[2];
	int r;

	for (int i = LOCAL; i <= REMOTE; i++) {
		sides[i] = prepared_find(op->xs, op->lists[i]);
		if (!sides[i])
			return err_prefix(-ENOENT, "%s", names[i]);
		op->count[i] = op->reads[i] ? op->reads[i] : sides[i]->dlist->descs;
	}
	r = lists_fit(sides[LOCAL], sides[REMOTE]);
	if (r < 0)
		return err_pass(r);
	for (int i = LOCAL; i <= REMOTE; i++) {
		op->sides[i] = sides[i];
		sides[i]->refs++;
	}
	return 0;
}

static int move_work(struct xfer_op *op)
{
	struct dlist_pick picks[2];
	uint64_t at = op->offset;
	int r = 0;

	for (int i = LOCAL; i <= REMOTE && r >= 0; i++) {
		size_t bytes = (size_t)op->reads[i] * sizeof(*op->index[i]);

		if (bytes) {
			op->index[i] = mem_alloc(bytes);
			r = op->index[i] ? ring_payload_read(&op->payload, at,
							     op->index[i], bytes)
					 : -ENOMEM;
		}
		at += bytes;
		picks[i] = (struct dlist_pick){op->sides[i]->dlist, NULL, op->index[i],
					       op->count[i]};
	}
	if (r >= 0 && op->has_notif)
		r = payload_notif(&op->payload, at, (uint32_t)op->notif_len, &op->notif);
	return r < 0 ? err_pass(r)
		     : err_pass(dlist_check_picks(&picks[LOCAL], &picks[REMOTE]));
}

static int xfer_move_end(struct xfer_op *op)
{
	int r = transfer_new(op, &op->transfer);

	if (r >= 0 && op->posts)
		r = transfer_post(op->transfer);
	return err_pass(r);
}

/* ---- notifications ---- */

static int note_op_begin(struct xfer_op *op)
{
	struct attach *attach = attach_find(op->xs, op->attach);

	return attach ? err_pass(note_begin(attach, op->notif_len, &op->note))
		      : err_pass(-ENOENT);
}

static int note_op_work(struct xfer_op *op)
{
	return err_pass(ring_payload_read(&op->payload, op->offset, op->note->tail,
					  op->notif_len));
}

static int note_op_end(struct xfer_op *op)
{
	struct attach *attach = attach_find(op->xs, op->attach);

	if (!attach)
		return err_pass(-ENOENT);
	note_post(mem_steal(op->note), attach);
	return 0;
}

/* ---- all ---- */

static const struct {
	int (*begin)(struct xfer_op *op);
	int (*work)(struct xfer_op *op); /* on a helper, if it is long */
	int (*end)(struct xfer_op *op);
} steps[] = {
	[XFER_OP_LIST] = {list_begin, list_work, xfer_op_list_end},
	[XFER_OP_MOVE] = {move_begin, move_work, xfer_move_end},
	[XFER_OP_NOTE] = {note_op_begin, note_op_work, note_op_end},
};

/* Upper limit of memory for reading the payload; a list's rows are not squeezed yet. */
static uint64_t xfer_op_bytes(const struct xfer_op *op)
{
	if (op->kind == XFER_OP_LIST)
		return op->rows * (uint64_t)sizeof(struct dlist_entry);
	if (op->kind == XFER_OP_NOTE)
		return 0; /* XFER_NOTE_BYTES_MAX */
	return ((uint64_t)op->reads[LOCAL] + op->reads[REMOTE]) * sizeof(*op->index[0]) +
	       op->notif_len;
}

static int op_begin(struct xfer_op *op)
{
	int r = charge_take(&op->charge, op->xs->session->account, ACCOUNT_LISTS,
			    xfer_op_bytes(op));

	if (r < 0)
		return err_pass(r);
	return err_pass(steps[op->kind].begin(op));
}

void xfer_op_drop(struct xfer_op *op)
{
	struct xfer_session *xs = op->xs;

	charge_drop(&op->charge);
	for (int i = LOCAL; i <= REMOTE; i++) {
		if (op->sides[i])
			prepared_unref(op->sides[i]);
		mem_free(op->index[i]);
	}
	search_free(op->search);
	dlist_free(op->dlist);
	mem_free(op->notif);
	note_free(op->note);
	mem_free_large(op->payload.data, op->payload.bytes);
	mem_free(op);
	xs->notes--;
	if (xs->draining)
		xfer_session_try_free(xs);
}

struct xfer_op *xfer_op_new(struct xfer_session *xs, enum xfer_op_kind kind,
			    void (*on_done)(struct xfer_op *op, int r), void *owner)
{
	struct xfer_op *op = mem_zalloc(sizeof(*op));

	assert(on_done);
	if (!op)
		return NULL;
	op->kind = kind;
	op->xs = xs;
	op->on_done = on_done;
	op->owner = owner;
	op->payload.fd = -1;
	xs->notes++;
	return op;
}

static int op_end(struct xfer_op *op)
{
	charge_drop(&op->charge); /* kept memory has its own charge */
	if (op->job.result < 0)
		return err_reraise(&op->job.err);
	if (op->xs->draining)
		return err_raise(ERR_SESSION, "the session has ended");
	return err_pass(steps[op->kind].end(op));
}

static void on_work(struct offload_job *job)
{
	struct xfer_op *op = container_of(job, struct xfer_op, job);

	job->result = steps[op->kind].work(op);
	if (job->result < 0)
		err_take(&job->err);
}

static void on_worked(struct offload_job *job)
{
	struct xfer_op *op = container_of(job, struct xfer_op, job);

	op->on_done(op, op_end(op));
	xfer_op_drop(op); /* may free the session later */
}

static bool is_long(const struct xfer_op *op)
{
	uint64_t rows = op->kind == XFER_OP_LIST ? op->rows : op->count[LOCAL];

	return rows > INLINE_ROWS || op->charge.bytes > INLINE_BYTES ||
	       op->notif_len > INLINE_BYTES;
}

int xfer_op_run(struct xfer_op *op)
{
	int r = op_begin(op);

	assert(op->on_done);
	if (r < 0) {
		op->on_done(op, r);
		xfer_op_drop(op);
		return 0;
	}
	op->job = (struct offload_job){.work = on_work,
				       .done = on_worked,
				       .principal = session_principal(op->xs->session)};
	list_init(&op->job.link);
	if (is_long(op)) {
		op->later = true;
		offload_submit(op->xs->xfers->kvd->offload, &op->job);
		return XFER_OP_LATER;
	}
	on_work(&op->job);
	on_worked(&op->job);
	return 0;
}
