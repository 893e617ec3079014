/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer.attach, dlist.*, xfer.*, notif.*: commands of the transfer layer. Errors of an
 * engine (an unregistered address, an index outside the list, unequal lengths) are
 * refused in the reply, before any byte moves.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/hex.h"
#include "daemon/base/mem.h"
#include "proto/out.h"
#include "daemon/xfer/commands_xfer.h"
#include "daemon/request/ring_ops.h"
#include "daemon/session/session.h"
#include "daemon/xfer/xfer_op.h"
#include "proto/base64.h"
#include "proto/kvd_status.h"

#define INLINE_BYTES (32u << 10) /* of base64 that the loop reads or writes at once */
#define ROW_BYTES (4 * sizeof(uint64_t)) /* of a descriptor */
#define ATTACH_MS_DEFAULT 5000

#define NO_ID UINT64_MAX
#define ATTACH_MS_MAX 600000

static struct xfer_session *session_of(struct request *req)
{
	return xfer_session_of(req->session);
}

/* ---- peer.attach ---- */

static int parse_secret(const char *hex, uint8_t secret[16])
{
	if (strlen(hex) != HEX_CHARS(16) || !hex_read(hex, secret, 16))
		return err_raise(ERR_INVAL, "secret: not a session's secret; give 32 "
					    "hex digits");
	return 0;
}

/* The requested attach has ended. */
static void on_end(void *arg, const struct err *why, uint64_t id)
{
	struct request *req = arg;
	struct reply reply;
	struct text *out;

	if (why) {
		request_fail(req, why);
		return;
	}
	out = reply_begin(&reply, req);
	out_number(out, "attach", id);
	reply_end(&reply);
}

static struct xfer_waiter waiter_of(struct request *req)
{
	return (struct xfer_waiter){.on_end = on_end, .arg = req};
}

struct attach_args {
	const char *endpoint, *secret;
	uint64_t session;
	uint32_t timeout_ms;
};

static int run_attach(struct request *req)
{
	const struct attach_args *args = request_args(req);
	struct xfer_session *xs = session_of(req);
	uint8_t secret[16];
	int r = xs ? parse_secret(args->secret, secret) : -ENOMEM;

	if (r >= 0)
		r = attach_open(xs, args->endpoint, args->session, secret,
				args->timeout_ms * LOOP_NS_PER_MS, waiter_of(req));
	return r < 0 ? err_pass(r) : 0;
}

struct attached_args {
	uint64_t attach;
	bool fresh;
	uint32_t timeout_ms;
};

/* Does the session exist, according to this daemon or its owner's? */
static int run_attached(struct request *req)
{
	const struct attached_args *args = request_args(req);
	struct xfer_session *xs = session_of(req);
	struct attach *attach = xs ? attach_find(xs, args->attach) : NULL;

	if (!attach)
		return err_pass(xs ? -ENOENT : -ENOMEM);
	if (args->fresh)
		return err_pass(attach_open(
			xs, attach->remote->peer->endpoint, attach->epoch, attach->secret,
			args->timeout_ms * LOOP_NS_PER_MS, waiter_of(req)));
	return request_reply(req);
}

/* ---- dlist.prep, dlist.free ---- */

struct prep_args {
	uint64_t peer; /* NO_ID: own memory */
	int fd;
	uint32_t count;
};

/* Rows in a memfd: reading other files or a process's memory may block. */
static int descs_from_fd(int fd, uint32_t count, struct xfer_op *op)
{
	if (fcntl(fd, F_GET_SEALS) < 0)
		return err_raise(ERR_INVAL, "fd: not a memfd");
	op->payload.fd = fd;
	op->payload.bytes = (uint64_t)count * ROW_BYTES;
	op->rows = count;
	return 0;
}

static void on_listed(struct xfer_op *op, int r)
{
	struct request *req = op->owner;
	struct reply reply;
	struct text *out;

	op->xs->session->walking -= op->later;
	if (r < 0) {
		request_fail_last(req);
		return;
	}
	out = reply_begin(&reply, req);
	out_number(out, "dlist", op->list->id);
	out_number(out, "count", op->list->dlist->descs);
	reply_end(&reply);
}

static int run_prep(struct request *req)
{
	const struct prep_args *args = request_args(req);
	struct session *session = req->session;
	struct xfer_session *xs = session_of(req);
	struct xfer_op *op;
	int r;

	if (args->fd < 0)
		return err_raise(ERR_INVAL, "fd: missing");
	if (xs && args->peer != NO_ID && !attach_find(xs, args->peer))
		return err_prefix(-ENOENT, "peer");
	op = xs ? xfer_op_new(xs, XFER_OP_LIST, on_listed, req) : NULL;
	if (!op)
		return err_pass(-ENOMEM);
	op->attach = args->peer != NO_ID ? args->peer : 0;
	op->columns = 4;
	r = descs_from_fd(req->fds[args->fd], args->count, op);
	if (r < 0) {
		xfer_op_drop(op);
		return err_pass(r);
	}
	/* the session's next lines wait while a helper runs the op */
	if (xfer_op_run(op) == XFER_OP_LATER)
		session->walking++;
	return 0;
}

struct dlist_args {
	uint64_t dlist;
};

static int run_dlist_free(struct request *req)
{
	const struct dlist_args *args = request_args(req);
	struct xfer_session *xs = session_of(req);
	struct prepared *prepared = xs ? prepared_find(xs, args->dlist) : NULL;

	if (!prepared)
		return err_pass(xs ? -ENOENT : -ENOMEM);
	prepared_release(prepared);
	return request_reply(req);
}

/* Any bytes, as base64; 1: *data_p is heap. NULL is none. */
static int parse_bytes(const char *text, const char *name, uint8_t **data_p,
		       size_t *len_p)
{
	if (!text)
		return 0;
	*data_p = mem_zalloc(strlen(text) / 4 * 3 + 1);
	if (!*data_p)
		return err_pass(-ENOMEM);
	if (!base64_decode(text, strlen(text), *data_p, len_p)) {
		mem_free(*data_p);
		*data_p = NULL;
		return err_raise(ERR_INVAL, "%s: not base64", name);
	}
	return 1;
}

/* ---- xfer.state ---- */

struct xfer_args {
	uint64_t xfer;
};

static int reply_state(struct request *req, const struct transfer *t)
{
	unsigned int state = sm_state(&t->sm) != XFER_ENDED ? KVD_TRANSFERRING
			     : t->failed		    ? KVD_FAILED
			     : t->posted		    ? KVD_SUCCESS
							    : KVD_BOOTSTRAPPING;
	struct reply reply;
	struct text *out;

	out = reply_begin(&reply, req);
	out_number(out, "state", state);
	out_number(out, "bytes", t->bytes);
	out_number(out, "moved", t->file ? xfer_file_moved(t) : t->op.xp.moved);
	if (t->failed)
		out_error(out, &t->err);
	return reply_end(&reply);
}

static int run_state(struct request *req)
{
	const struct xfer_args *args = request_args(req);
	struct xfer_session *xs = session_of(req);
	const struct transfer *t = xs ? transfer_find(xs, args->xfer) : NULL;
	const struct err *fault;

	if (t)
		return reply_state(req, t);
	fault = ring_fault_of(ring_of(req->session), args->xfer);
	return fault ? request_reply_refused(req, fault) : err_pass(-ENOENT);
}

/* ---- xfer.submit: ring entries over the socket ---- */

struct submit_args {
	const char *entry, *data;
};

struct submit {
	struct kvd_ring_entry entry;
	struct ring_payload payload;
	struct err why; /* code != OK: the payload is not base64 */
};

static void submit_work(struct request *req)
{
	const struct submit_args *args = request_args(req);
	struct submit *submit = req->state;
	size_t len = 0;

	if (parse_bytes(args->data, "data", &submit->payload.data, &len) < 0)
		err_take(&submit->why);
	submit->payload.bytes = len;
}

static int submit_run(struct request *req)
{
	struct submit *submit = req->state;
	struct ring *ring = ring_of(req->session);

	if (submit->why.code)
		return err_reraise(&submit->why);
	if (ring->work) /* the line did not wait for it */
		return err_raise(ERR_BUSY, "an earlier entry is not complete");
	return ring_op(ring, &submit->entry, &submit->payload);
}

static void submit_done(struct request *req)
{
	struct submit *submit = req->state;

	if (!req->session)
		request_drop(req);
	else if (submit_run(req) < 0)
		request_fail_last(req);
	else
		request_reply(req);
	mem_free_large(submit->payload.data, submit->payload.bytes);
	mem_free(submit);
}

/* Short ones take no noticeable time on the loop. */
static int run_work(struct request *req, bool is_long)
{
	if (is_long) {
		request_offload(req);
		return 0;
	}
	req->work(req);
	req->done(req);
	return 0;
}

static int run_submit(struct request *req)
{
	const struct submit_args *args = request_args(req);
	struct ring *ring = ring_need(req->session);
	cleanup_free uint8_t *raw = NULL;
	struct submit *submit;
	size_t len = 0;
	int r = ring ? parse_bytes(args->entry, "entry", &raw, &len) : -ENOMEM;

	if (r >= 0 && len != sizeof(submit->entry))
		r = err_raise(ERR_INVAL, "entry: %zu bytes; must be %zu", len,
			      sizeof(submit->entry));
	submit = r >= 0 ? mem_zalloc(sizeof(*submit)) : NULL;
	if (!submit)
		return r < 0 ? err_pass(r) : err_pass(-ENOMEM);
	memcpy(&submit->entry, raw, sizeof(submit->entry));
	submit->payload.fd = -1;
	req->state = submit;
	req->work = submit_work;
	req->done = submit_done;
	return run_work(req, req->bytes > INLINE_BYTES);
}

/* ---- notifications ---- */

struct drain {
	struct list taken; /* struct notif.link */
	size_t bytes;	   /* of these, in xs->notif_bytes */
	bool more;
	struct text text;
};

/* As many as one reply takes, and at least one: each fits a reply alone (notif_new()).
 * The others stay for the next call. Returns the size of the reply. */
static size_t drain_take(struct drain *drain, struct xfer_session *xs)
{
	size_t total = 0, bytes;
	struct notif *notif;

	list_init(&drain->taken);
	while ((notif = list_first(&xs->notifs, struct notif, link))) {
		bytes = notif_answer_bytes(notif->from, notif->len);
		if (total && total + bytes > INLINE_BYTES)
			break;
		total += bytes;
		drain->bytes += notif->len + sizeof(*notif);
		list_remove(&notif->link);
		list_push_back(&drain->taken, &notif->link);
	}
	drain->more = notif;
	return total;
}

static void drain_work(struct request *req)
{
	struct drain *drain = req->state;
	struct text *out = &drain->text;
	const struct notif *notif;

	request_text_begin(req, out);
	out_array(out, "notifs");
	list_foreach(notif, &drain->taken, link) {
		out_object(out, NULL);
		out_text(out, "from", notif->from);
		out_base64(out, "data", notif->data, notif->len);
		out_close(out, '}');
	}
	out_close(out, ']');
	out_bool(out, "more", drain->more);
}

/* If the reply fails, the engine calls again: nothing may be lost. */
static void drain_done(struct request *req)
{
	struct xfer_session *xs = req->session ? session_of(req) : NULL;
	struct drain *drain = req->state;
	struct notif *notif;

	req->frees = true;
	if (!xs) {
		request_drop(req);
	} else if (request_text_reply(req, &drain->text) < 0) {
		list_append(&drain->taken, &xs->notifs);
		list_append(&xs->notifs, &drain->taken);
		request_fail_last(req);
	} else {
		xs->notif_bytes -= drain->bytes;
	}
	list_foreach_safe(notif, &drain->taken, link)
		notif_free(notif);
	text_fini(&drain->text);
	mem_free(drain);
}

static int run_notif_drain(struct request *req)
{
	struct xfer_session *xs = session_of(req);
	struct drain *drain = xs ? mem_zalloc(sizeof(*drain)) : NULL;

	if (!drain)
		return err_pass(-ENOMEM);
	req->state = drain;
	req->work = drain_work;
	req->done = drain_done;
	return run_work(req, drain_take(drain, xs) > INLINE_BYTES);
}

#define F_ATTACH_MS(s, text)                                                             \
	F_INT("timeout_ms", s, timeout_ms, DEFAULT(ATTACH_MS_DEFAULT), 1, ATTACH_MS_MAX, \
	      text)
#define F_NOTIF(name, s, m, need, text) \
	F_STR(name, s, m, need, BASE64_CHARS(XFER_NOTIF_MAX), text)

static const struct field attach_fields[] = {
	F_STR("endpoint", attach_args, endpoint, REQUIRED, LINK_ENDPOINT_MAX - 1,
	      "Endpoint of the session's daemon"),
	F_U64("session", attach_args, session, REQUIRED, "Epoch of the session"),
	F_STR("secret", attach_args, secret, REQUIRED, 32,
	      "Secret of the session, or from secret.create; 32 hex digits"),
	F_ATTACH_MS(attach_args, "Milliseconds to wait; default 5000"),
	F_END,
};
static const struct field attached_fields[] = {
	F_ID("attach", attached_args, attach, REQUIRED, "Number from peer.attach"),
	F_BOOL("fresh", attached_args, fresh,
	       "Query the session's daemon; regions registered there before are known "
	       "afterwards"),
	F_ATTACH_MS(attached_args, "With fresh: milliseconds to wait; default 5000"),
	F_END,
};
static const struct field prep_fields[] = {
	F_ID("peer", prep_args, peer, DEFAULT(-1),
	     "Number from peer.attach; default: own memory"),
	F_FD("fd", prep_args, fd,
	     "Required: a memfd with entries {address, length, stride, count}, u64 "
	     "little-endian each"),
	F_INT("count", prep_args, count, REQUIRED, 1, DLIST_ENTRIES_MAX,
	      "Number of entries in the memfd"),
	F_END,
};
static const struct field dlist_fields[] = {
	F_ID("dlist", dlist_args, dlist, REQUIRED, "Number from dlist.prep"),
	F_END,
};
static const struct field xfer_fields[] = {
	F_ID("xfer", xfer_args, xfer, REQUIRED,
	     "KVD_RING_IDS plus the slot that the engine chose"),
	F_END,
};
static const struct field submit_fields[] = {
	F_STR("entry", submit_args, entry, REQUIRED, BASE64_CHARS(KVD_RING_ENTRY_BYTES),
	      "Entry of proto/kvd_ring.h in base64; its offset refers to data"),
	F_NOTIF("data", submit_args, data, REQUIRED, "Payload in base64; may be empty"),
	F_END,
};
const struct command xfer_commands[] = {
	{"peer.attach",
	 "Attach to another session's exported memory, by its secret. A session that is "
	 "attached already has its number",
	 attach_fields, 0, run_attach, "attach"},
	{"peer.attached", "Check that an attached session still exists", attached_fields,
	 0, run_attached, "with fresh: attach; an error if the session has ended"},
	{"dlist.prep", "Prepare a descriptor list", prep_fields, COMMAND_FDS, run_prep,
	 "dlist, count"},
	{"dlist.free", "Free a prepared list", dlist_fields, 0, run_dlist_free,
	 "nothing"},
	{"xfer.state", "Show the progress of a transfer", xfer_fields, 0, run_state,
	 "state, bytes, moved, error"},
	{"xfer.submit", "Submit one entry of the submission ring over the socket",
	 submit_fields, 0, run_submit, "nothing; the result appears in its slot"},
	{"notif.drain", "Fetch the notifications sent to this session", NULL, 0,
	 run_notif_drain,
	 "notifs: {from, data in base64}; more: true if further ones are waiting"},
	{.name = NULL},
};
