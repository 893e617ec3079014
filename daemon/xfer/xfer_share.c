/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The regions of a session that each daemon knows.
 *
 * The target of an attachment sends its regions to the initiator's daemon, which names
 * them; the initiator sends its own to a daemon that copies by itself and must reach
 * them. A share is sent again when regions were added or removed, and operations that
 * need the new list wait for its acknowledgement, because REGISTER may use the control
 * line and requests the data line. It is sent as soon as a region was added, so that the
 * other daemon maps it while the engine makes its lists; for a session with very many
 * regions it is sent when a transfer needs it, because each list contains all.
 *
 * A daemon only gets the regions whose secrets it has presented: over RDMA, a key gives
 * access to the memory. It may have presented several, so a share keeps the grants, and
 * each list is made from their current regions. The session's own secret includes all,
 * and so does attaching to a session of that daemon: its transfers may name any region.
 * Files are not shared (xfer_file.c).
 */
#include <assert.h>
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/xfer/grant.h"
#include "daemon/xfer/xfer.h"
#include "daemon/xfer/xfer_impl.h"

static struct share *share_find(struct xfer_session *xs, const struct remote *remote)
{
	struct share *share;

	list_foreach(share, &xs->shares, link) {
		if (share->remote == remote)
			return share;
	}
	return NULL;
}

/* Drop revoked ones. */
static void grants_prune(struct share *share)
{
	size_t kept = 0;

	for (size_t i = 0; i < share->grant_count; i++) {
		if (share->grants[i]->xs)
			share->grants[kept++] = share->grants[i];
		else
			grant_unref(share->grants[i]);
	}
	share->grant_count = kept;
}

static bool share_has(const struct share *share, const struct grant *grant)
{
	for (size_t i = 0; i < share->grant_count; i++) {
		if (share->grants[i] == grant)
			return true;
	}
	return false;
}

static int share_widen(struct share *share, struct grant *grant)
{
	struct grant **grants;

	if (share->all || (grant && share_has(share, grant)))
		return 0;
	if (!grant) {
		share->all = true;
	} else {
		grants_prune(share);
		grants = mem_regrow(share->grants, share->grant_count + 1,
				    sizeof(struct grant *));
		if (!grants)
			return err_pass(-ENOMEM);
		share->grants = grants;
		grant_ref(grant);
		grants[share->grant_count++] = grant;
	}
	share->version = UINT64_MAX;
	return 0;
}

int share_open(struct xfer_session *xs, struct remote *remote, struct grant *grant,
	       struct share **share_p)
{
	struct share *share = share_find(xs, remote);

	if (!share) {
		share = mem_zalloc(sizeof(*share));
		if (!share)
			return err_pass(-ENOMEM);
		share->remote = remote;
		remote->reaches++;
		share->version = UINT64_MAX; /* never sent */
		list_push_back(&xs->shares, &share->link);
		list_push_back(&xfer_remote(remote)->shares, &share->at_remote);
	}
	*share_p = share;
	return err_pass(share_widen(share, grant));
}

void share_free(struct share *share)
{
	list_remove(&share->link);
	list_remove(&share->at_remote);
	for (size_t i = 0; i < share->grant_count; i++)
		grant_unref(share->grants[i]);
	mem_free(share->grants);
	handshake_release(share->remote);
	mem_free(share);
}

static bool share_tells(const struct region *region, const void *arg)
{
	const struct share *share = arg;
	uint64_t now_ns = loop_now_ns(region->session->kvd->loop);

	if (region->kind == REGION_FILE)
		return false;
	for (size_t i = 0; !share->all && i < share->grant_count; i++) {
		if (grant_covers(share->grants[i], region->id, now_ns))
			return true;
	}
	return share->all;
}

int share_update(struct xfer_session *xs, struct share *share)
{
	int r;

	assert(share->acked <= share->sent);
	if (share->version != xs->session->regions_version) {
		r = handshake_share_session(xs->xfers->kvd->handshake, share->remote,
					    xs->session, share_tells, share);
		if (r < 0)
			return err_pass(r);
		share->version = xs->session->regions_version;
		share->sent++;
	}
	return share->sent == share->acked ? 0 : 1;
}

/* Transfers that wait until the remote has this list fail; the next one shares again. */
static void xfer_share_refused(struct xfer_session *xs, const struct remote *remote,
			       const struct err *why)
{
	struct idmap_cursor at;
	struct share *share;

	list_foreach(share, &xs->shares, link) {
		if (share->remote != remote || share->acked == share->sent)
			continue;
		share->sent--;
		share->version = UINT64_MAX;
	}
	idmap_foreach(&xs->transfers, at) {
		struct transfer *transfer = at.value;

		if (sm_state(&transfer->sm) == XFER_SHARING &&
		    transfer->attach->remote == remote)
			transfer_cancel(transfer, why);
	}
}

/* The remote must release regions that a new list cannot report: else its mapping
 * stays. */
static void share_without(struct xfer_session *xs, struct share *share)
{
	struct err why;

	if (xs->draining || xs->session->ending || !share->remote->ready ||
	    share_update(xs, share) >= 0)
		return;
	err_take(&why);
	if (why.code == ERR_NOMEM)
		peer_end_later(share->remote->peer, &why);
}

/* One list in transit at a time: later changes are sent with the next. */
static void share_eagerly(struct xfer_session *xs, struct share *share)
{
	if (share->sent != share->acked || xs->draining || xs->session->ending ||
	    !share->remote->ready ||
	    idmap_count(&xs->session->regions) > XFER_EAGER_REGIONS)
		return;
	if (share_update(xs, share) < 0)
		err_clear(); /* out of date: a transfer that needs it shares again */
}

void shares_without(struct xfer_session *xs)
{
	struct share *share;

	list_foreach(share, &xs->shares, link)
		share_without(xs, share);
}

void shares_regrant(struct xfer_session *xs, const struct grant *grant)
{
	struct share *share;

	list_foreach(share, &xs->shares, link) {
		if (share->all || !share_has(share, grant))
			continue;
		share->version = UINT64_MAX;
		if (grant->xs)
			share_eagerly(xs, share);
		else
			share_without(xs, share);
	}
}

void xfers_region_coming(struct session *session)
{
	struct xfer_session *xs = session->part[MODULE_XFER];
	struct share *share;

	if (!xs)
		return;
	list_foreach(share, &xs->shares, link)
		share_eagerly(xs, share);
}

void xfers_on_shared(struct remote *remote, uint64_t epoch, const struct err *why)
{
	struct session *session = xfer_session_by_epoch(xfers_of(remote->kvd), epoch);
	struct xfer_session *xs = session ? session->part[MODULE_XFER] : NULL;
	struct idmap_cursor at;
	struct share *share;

	if (xs && why)
		xfer_share_refused(xs, remote, why);
	if (!xs || why)
		return;
	list_foreach(share, &xs->shares, link) {
		if (share->remote == remote && share->acked < share->sent)
			share->acked++;
	}
	idmap_foreach(&xs->attaches, at) {
		struct attach *attach = at.value;

		if (attach->remote == remote)
			transfers_go(attach);
	}
	list_foreach(share, &xs->shares, link) {
		if (share->remote == remote)
			share_eagerly(xs, share);
	}
}
