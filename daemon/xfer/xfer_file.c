/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transfers between memory and files of one session, by an attachment to itself: NIXL's
 * FILE section.
 *
 * No transport takes part. With one there would be an order: requests of a peer, and this
 * daemon is a peer of its own, are served in the order of their posts, so the next room
 * would wait for a slow disk. There would also be its fence: a transfer that has not
 * quiesced in time ends its connection, which is wrong for a disk that does not answer.
 * So both lists are searched in the session's own regions, and the plan is passed to the
 * copier, which has threads for files. The copier guarantees all that is needed here:
 * on_done is called once, when the memory and the file are not accessed any more, also
 * after a cancel.
 *
 * Regions of files are not shared with any daemon, including this one as its own peer; so
 * no list of another session finds them, with any secret. A list is of files or of
 * memory, according to its addresses (REGION_FILE_ADDRESS).
 */
#include <assert.h>
#include <errno.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/memory/copy.h"
#include "daemon/peer/peer.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/xfer/xfer_impl.h"

struct xfer_file {
	struct copy_job job;
	struct transfer *transfer;
	struct copy_buffer buffers[]; /* of the source, then of the destination */
};

bool attach_is_own(const struct attach *attach)
{
	const struct session *session = attach->xs->session;

	return attach->remote && attach->remote->peer->self &&
	       attach->epoch == session->epoch &&
	       mem_equal(attach->secret, session->secret, sizeof(session->secret));
}

int xfer_file_look(struct transfer *t)
{
	int r = attach_is_own(t->attach)
			? 0
			: err_raise(ERR_INVAL, "file transfers are limited to memory "
					       "of the same session");

	for (int i = LOCAL; i <= REMOTE && r >= 0; i++)
		r = locate_local(&t->at[i], t->xs->session,
				 dlist_of_files(t->at[i].dlist)
					 ? SEARCH_FILES
					 : t->attach->remote->transport_index);
	for (int i = LOCAL; i <= REMOTE && r < 0; i++)
		locate_drop(&t->at[i]);
	return r < 0 ? err_pass(r) : 0;
}

static void xfer_file_on_done(struct copy_job *job)
{
	struct xfer_file *file = container_of(job, struct xfer_file, job);
	struct transfer *t = file->transfer;
	struct err why = job->err;
	int result = job->result;

	t->file = NULL;
	mem_free(file);
	transfer_done(t, result, &why);
}

/* The regions are pinned by the places, and hold their memory. */
static void end_fill(struct copy_end *end, struct copy_buffer *buffers,
		     const struct places *places)
{
	for (uint32_t i = 0; i < places->buffer_count; i++)
		buffers[i] = (struct copy_buffer){.memory = places->regions[i]->memory,
						  .length = places->regions[i]->length};
	*end = (struct copy_end){.buffers = buffers,
				 .buffer_count = places->buffer_count};
}

int xfer_file_post(struct transfer *t)
{
	const struct places *src = t->at[t->kind == XP_WRITE ? LOCAL : REMOTE].places;
	const struct places *dst = t->at[t->kind == XP_WRITE ? REMOTE : LOCAL].places;
	struct xfer_file *file;
	int r;

	assert(!t->file && src->regions && dst->regions);
	file = mem_zalloc(sizeof(*file) +
			  ((size_t)src->buffer_count + dst->buffer_count) *
				  sizeof(file->buffers[0]));
	if (!file)
		return err_pass(-ENOMEM);
	file->transfer = t;
	file->job = (struct copy_job){
		.plan = t->plan, .end = t->plan->bytes, .on_done = xfer_file_on_done};
	end_fill(&file->job.src, file->buffers, src);
	end_fill(&file->job.dst, file->buffers + src->buffer_count, dst);
	r = copier_submit(t->xs->xfers->kvd->copier, &file->job);
	if (r < 0) {
		mem_free(file);
		return err_pass(r);
	}
	t->file = file;
	sm_move(&t->sm, XFER_POSTED);
	return 0;
}

void xfer_file_cancel(struct transfer *t)
{
	if (t->file) /* else its end is being reported */
		copier_cancel(t->xs->xfers->kvd->copier, &t->file->job);
}

uint64_t xfer_file_moved(const struct transfer *t)
{
	return atomic_load(&t->file->job.copied);
}
