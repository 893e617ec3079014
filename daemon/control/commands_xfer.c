/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer.attach, dlist.*, xfer.*, notif.*: the transfer layer's commands. What an
 * engine can get wrong (an address that is not registered, an index outside the
 * list, unequal lengths) is refused in the answer, before any byte moves.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/control/brief.h"
#include "daemon/control/commands.h"
#include "daemon/base/context.h"
#include "daemon/xfer/ring_ops.h"
#include "daemon/session/session.h"
#include "daemon/xfer/xfer_impl.h"
#include "proto/base64.h"
#include "proto/json.h"
#include "proto/kvd_status.h"

#define DESCS_JSON_MAX 1024
#define INDEX_MAX (1 << 18)
#define PREP_INLINE 1024u /* longer lists are read by a helper */
#define ATTACH_MS_DEFAULT 5000

#define NO_ID UINT64_MAX
#define ATTACH_MS_MAX 600000

static struct xfer_session *session_of(struct request *req)
{
	return xfer_session_of(req->session);
}

/* ---- peer.attach ---- */

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static int parse_secret(const char *hex, uint8_t secret[16])
{
	if (strlen(hex) != 32)
		return err_raise(ERR_INVAL, "secret: 32 hex digits are wanted");
	for (size_t i = 0; i < 16; i++) {
		int hi = hex_digit(hex[2 * i]), lo = hex_digit(hex[2 * i + 1]);

		if (hi < 0 || lo < 0)
			return err_raise(ERR_INVAL, "secret: '%c%c' is not hex",
					 hex[2 * i], hex[2 * i + 1]);
		secret[i] = (uint8_t)(hi << 4 | lo);
	}
	return 0;
}

/* What the request asked for has come to its end. */
static void on_end(void *arg, const struct err *why, uint64_t id)
{
	struct request *req = arg;
	struct brief brief;

	if (why) {
		request_fail(req, why);
		return;
	}
	brief_init(&brief);
	if (id)
		brief_number(&brief, "attach", (double)id);
	request_reply_brief(req, &brief);
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

/* Is the session there still, as far as this daemon knows, or as its owner's? */
static int run_attached(struct request *req)
{
	const struct attached_args *args = request_args(req);
	struct xfer_session *xs = session_of(req);
	struct attach *attach = xs ? attach_find(xs, args->attach) : NULL;

	if (!attach)
		return err_pass(xs ? -ENOENT : -ENOMEM);
	if (args->fresh)
		return err_pass(attach_refresh(
			xs, attach, args->timeout_ms * LOOP_NS_PER_MS, waiter_of(req)));
	request_reply(req, NULL);
	return 0;
}

/* ---- dlist.prep, dlist.free ---- */

static int parse_desc(const cJSON *item, size_t index, struct dlist_entry *e)
{
	int n = cJSON_GetArraySize(item);
	int64_t v[4] = {0, 0, 0, 1};
	const char *address = cJSON_GetStringValue(cJSON_GetArrayItem(item, 0));

	if (!cJSON_IsArray(item) || (n != 2 && n != 4) || !address ||
	    !json_parse_u64(address, &e->address))
		return err_raise(ERR_INVAL,
				 "descs[%zu]: [\"address\", length] or [\"address\", "
				 "length, stride, count] is wanted",
				 index);
	for (int i = 1; i < n; i++) {
		if (!json_number_is_int(cJSON_GetArrayItem(item, i), &v[i]) || v[i] < 0)
			return err_raise(ERR_INVAL,
					 "descs[%zu][%d]: a whole number is wanted",
					 index, i);
	}
	e->bytes = (uint64_t)v[1];
	e->stride = (uint64_t)v[2];
	e->count = (uint64_t)v[3];
	return 0;
}

static int descs_from_json(const cJSON *list, struct dlist_entry **entries_p,
			   uint32_t *count_p)
{
	size_t n = (size_t)cJSON_GetArraySize(list), i = 0;
	struct dlist_entry *entries = mem_calloc(n, sizeof(*entries));
	const cJSON *item;

	if (!entries)
		return err_pass(-ENOMEM);
	cJSON_ArrayForEach(item, list) {
		int r = parse_desc(item, i, &entries[i]);

		if (r < 0) {
			mem_free(entries);
			return err_pass(r);
		}
		i++;
	}
	*entries_p = entries;
	*count_p = (uint32_t)n;
	return 0;
}

/* `count` quads in a memfd. read(), not mmap(): its owner may cut it. */
static int descs_from_fd(int fd, uint32_t count, struct dlist_entry **entries_p)
{
	size_t size = (size_t)count * DLIST_ENTRY_BYTES, got = 0;
	cleanup_free uint8_t *raw = mem_zalloc(size);
	struct dlist_entry *entries = mem_calloc(count, sizeof(*entries));
	struct cursor in;

	while (raw && got < size) {
		ssize_t n = pread(fd, raw + got, size - got, (off_t)got);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			break;
		got += (size_t)n;
	}
	if (!raw || !entries || got < size) {
		mem_free(entries);
		return raw && entries ? err_raise(ERR_RANGE,
						  "fd: %zu bytes of the %zu for "
						  "%u descriptors",
						  got, size, count)
				      : err_pass(-ENOMEM);
	}
	cursor_read(&in, raw, size);
	for (uint32_t i = 0; i < count; i++) {
		entries[i].address = cursor_get_u64(&in);
		entries[i].bytes = cursor_get_u64(&in);
		entries[i].stride = cursor_get_u64(&in);
		entries[i].count = cursor_get_u64(&in);
	}
	*entries_p = entries;
	return 0;
}

struct prep_args {
	uint64_t peer; /* NO_ID: own memory */
	const cJSON *descs;
	int fd;
	uint32_t count;
};

/* Either a list, or a memfd of so many. */
static int check_descs(const struct request *req, const struct prep_args *args)
{
	struct stat st;

	if (!args->descs == (args->fd < 0) || (args->fd >= 0 && args->count == 0))
		return err_raise(ERR_INVAL, "descs, or fd with count, is wanted");
	if (args->descs)
		return 0;
	if (fstat(req->fds[args->fd], &st) < 0 || !S_ISREG(st.st_mode))
		return err_raise(ERR_INVAL, "fd: not a memfd"); /* a pipe would block */
	return 0;
}

/* ---- long lists, by a helper ---- */

struct prep {
	struct offload_job job;
	struct request *req; /* its descriptor is read */
	struct xfer_session *xs;
	struct session *session; /* takes no other line meanwhile: one list at a time */
	int fd;
	uint32_t count;
	uint64_t attach, gid;
	struct search *search;
	struct dlist *dlist;
};

static void prep_free(struct prep *prep)
{
	struct xfer_session *xs = prep->xs;

	search_free(prep->search);
	dlist_free(prep->dlist);
	mem_free(prep);
	xs->notes--;
	if (xs->draining)
		xfer_session_try_free(xs);
}

static void prep_work(struct offload_job *job)
{
	struct prep *prep = container_of(job, struct prep, job);
	struct dlist_entry *entries = NULL;
	int r = descs_from_fd(prep->fd, prep->count, &entries);

	if (r >= 0)
		r = dlist_new(entries, prep->count, prep->gid, &prep->dlist);
	if (r >= 0)
		r = search_run(prep->search, prep->dlist);
	if (r < 0)
		err_take(&job->err);
	job->result = r;
}

static void prep_reply(struct request *req, const struct prepared *prepared)
{
	struct brief brief;

	brief_init(&brief);
	brief_number(&brief, "dlist", (double)prepared->id);
	brief_number(&brief, "count", (double)prepared->dlist->descs);
	request_reply_brief(req, &brief);
}

static void prep_done(struct offload_job *job)
{
	struct prep *prep = container_of(job, struct prep, job);
	struct request *req = prep->req;
	struct attach *attach = NULL;
	struct prepared *prepared = NULL;
	int r = job->result;

	if (r < 0)
		r = err_reraise(&job->err);
	if (r >= 0 && prep->attach) {
		attach = attach_find(prep->xs, prep->attach);
		r = attach ? 0 : err_prefix(-ENOENT, "peer");
	}
	if (r >= 0 && req->session)
		r = prepared_add(prep->xs, attach, mem_steal(prep->dlist), 0,
				 &prep->search, &prepared);
	prep->session->walking--;
	if (!req->session)
		request_drop(req);
	else if (r < 0)
		request_fail_last(req);
	else
		prep_reply(req, prepared);
	prep_free(prep);
}

/* The request is answered later. */
static int prep_begin(struct request *req, struct xfer_session *xs,
		      const struct attach *attach, uint32_t count, int fd)
{
	struct prep *prep = mem_zalloc(sizeof(*prep));
	int r;

	if (!prep)
		return err_pass(-ENOMEM);
	r = attach ? search_begin_remote(attach->pool, &prep->search)
		   : search_begin_local(xs->session, 0, &prep->search);
	if (r < 0) {
		mem_free(prep);
		return err_pass(r);
	}
	prep->req = req;
	prep->xs = xs;
	prep->session = xs->session;
	prep->fd = fd;
	prep->count = count;
	prep->attach = attach ? attach->id : 0;
	prep->gid = loop_random_u64(req->kvd->loop);
	prep->job = (struct offload_job){.work = prep_work, .done = prep_done};
	prep->session->walking++;
	xs->notes++;
	offload_submit(req->kvd->offload, &prep->job);
	return 0;
}

static int run_prep(struct request *req)
{
	const struct prep_args *args = request_args(req);
	struct xfer_session *xs = session_of(req);
	struct dlist_entry *entries = NULL;
	struct attach *attach = NULL;
	struct prepared *prepared;
	uint32_t count = args->count;
	int fd, r;

	if (!xs)
		return err_pass(-ENOMEM);
	if (args->peer != NO_ID) {
		attach = attach_find(xs, args->peer);
		if (!attach)
			return err_prefix(-ENOENT, "peer");
	}
	r = check_descs(req, args);
	if (r < 0)
		return err_pass(r);
	fd = args->descs ? -1 : req->fds[args->fd];
	if (!args->descs && count > PREP_INLINE && (!attach || attach->pool))
		return err_pass(prep_begin(req, xs, attach, count, fd));
	r = args->descs ? descs_from_json(args->descs, &entries, &count)
			: descs_from_fd(fd, count, &entries);
	if (r >= 0)
		r = prepared_new(xs, attach, entries, count, &prepared);
	if (r < 0)
		return err_pass(r);
	prep_reply(req, prepared);
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
	request_reply(req, NULL);
	return 0;
}

/* ---- xfer.start ---- */

struct start_args {
	uint64_t xfer; /* NO_ID: a new one */
	int op;	       /* of op_names[] */
	uint64_t local, remote;
	const cJSON *local_index, *remote_index;
	const char *notif;
};

static const char *const op_names[] = {"read", "write", NULL};

static int parse_index(const cJSON *list, const char *name, uint32_t **index_p,
		       uint64_t *count_p)
{
	size_t n = 0;
	int r;

	if (!list)
		return 0;
	r = json_pages(list, name, UINT32_MAX, INDEX_MAX, index_p, &n);
	*count_p = n;
	return r < 0 ? err_pass(r) : 0;
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

static int missing(const struct start_args *args)
{
	if (args->op < 0)
		return err_raise(ERR_INVAL, "op: missing");
	if (args->local == NO_ID)
		return err_raise(ERR_INVAL, "local: missing");
	if (args->remote == NO_ID)
		return err_raise(ERR_INVAL, "remote: missing");
	return 0;
}

static int parse_lists(struct xfer_session *xs, const struct start_args *args,
		       struct transfer_args *out)
{
	int r = missing(args);

	if (r < 0)
		return err_pass(r);
	out->kind = args->op == 0 ? XP_READ : XP_WRITE;
	out->local = prepared_find(xs, args->local);
	out->remote = out->local ? prepared_find(xs, args->remote) : NULL;
	if (!out->remote)
		return err_prefix(-ENOENT, out->local ? "remote" : "local");
	r = lists_fit(out->local, out->remote);
	if (r < 0)
		return err_pass(r);
	out->local_count = out->local->dlist->descs;
	out->remote_count = out->remote->dlist->descs;
	return 0;
}

static int start_reply(struct request *req, const struct transfer *t)
{
	struct brief brief;
	char gen[16];

	snprintf(gen, sizeof(gen), "%u", t->slot_gen);
	brief_init(&brief);
	brief_number(&brief, "xfer", (double)t->id);
	brief_number(&brief, "slot", t->slot);
	brief_text(&brief, "gen", gen);
	request_reply_brief(req, &brief);
	return 0;
}

static int start_new(struct request *req, struct xfer_session *xs,
		     const struct start_args *in)
{
	struct transfer_args args = {0};
	cleanup_free uint8_t *notif = NULL;
	struct transfer *t;
	int r = parse_lists(xs, in, &args);

	if (r >= 0)
		r = parse_index(in->local_index, "local_index", &args.local_index,
				&args.local_count);
	if (r >= 0)
		r = parse_index(in->remote_index, "remote_index", &args.remote_index,
				&args.remote_count);
	if (r >= 0)
		r = parse_bytes(in->notif, "notif", &notif, &args.notif_len);
	args.notif = notif;
	args.has_notif = r == 1;
	if (r >= 0)
		r = transfer_new(xs, &args, &t);
	mem_free(args.local_index);
	mem_free(args.remote_index);
	if (r < 0)
		return err_pass(r);
	r = transfer_post(t);
	if (r < 0) {
		transfer_free(t); /* it has not begun: its number is given to nobody */
		return err_pass(r);
	}
	return start_reply(req, t);
}

static int start_again(struct request *req, struct xfer_session *xs,
		       const struct start_args *args)
{
	struct transfer *t = transfer_find(xs, args->xfer);
	uint8_t *notif = NULL;
	size_t len = 0;
	int r;

	if (!t)
		return err_pass(-ENOENT);
	r = parse_bytes(args->notif, "notif", &notif, &len);
	if (r < 0)
		return err_pass(r);
	if (r == 1 && t->phase == XFER_ENDED) { /* a re-post may carry other words */
		transfer_notif(t, notif, len);
		notif = NULL;
	}
	mem_free(notif);
	r = transfer_post(t);
	return r < 0 ? err_pass(r) : start_reply(req, t);
}

static int run_start(struct request *req)
{
	const struct start_args *args = request_args(req);
	struct xfer_session *xs = session_of(req);

	if (!xs)
		return err_pass(-ENOMEM);
	return args->xfer != NO_ID ? start_again(req, xs, args)
				   : start_new(req, xs, args);
}

/* ---- xfer.state, cancel, release ---- */

struct xfer_args {
	uint64_t xfer;
	bool wait; /* of xfer.release */
};

static struct transfer *find(struct request *req)
{
	const struct xfer_args *args = request_args(req);
	struct xfer_session *xs = session_of(req);

	return xs ? transfer_find(xs, args->xfer) : NULL;
}

static int reply_state(struct request *req, const struct transfer *t)
{
	unsigned int state = t->phase != XFER_ENDED ? KVD_TRANSFERRING
			     : t->failed	    ? KVD_FAILED
			     : t->posted	    ? KVD_SUCCESS
						    : KVD_BOOTSTRAPPING;
	struct brief brief;

	brief_init(&brief);
	brief_number(&brief, "state", state);
	brief_number(&brief, "bytes", (double)t->bytes);
	brief_number(&brief, "moved", (double)t->op.xp.moved);
	if (t->failed)
		brief_error(&brief, &t->err);
	request_reply_brief(req, &brief);
	return 0;
}

/* What the ring was given, and refused: words for the code in its slot. */
static int reply_fault(struct request *req, const struct err *err)
{
	struct brief brief;

	brief_init(&brief);
	brief_number(&brief, "state", KVD_FAILED);
	brief_error(&brief, err);
	request_reply_brief(req, &brief);
	return 0;
}

static int run_state(struct request *req)
{
	const struct xfer_args *args = request_args(req);
	const struct transfer *t = find(req);
	const struct err *fault;

	if (t)
		return reply_state(req, t);
	fault = ring_fault_of(req->session->ring, args->xfer);
	return fault ? reply_fault(req, fault) : err_pass(-ENOENT);
}

static void cancel(struct request *req, struct transfer *t)
{
	struct err why;

	err_set(&why, ERR_CANCELED, "canceled by its engine '%.40s'",
		req->session->client);
	transfer_cancel(t, &why);
}

static int run_cancel(struct request *req)
{
	struct transfer *t = find(req);

	if (!t)
		return err_pass(-ENOENT);
	cancel(req, t);
	return reply_state(req, t);
}

/* In flight: the cancel begins, the answer is EBUSY at once, and the transfer
 * goes by itself when it is still; "wait" asks for the answer then. */
static int run_release(struct request *req)
{
	const struct xfer_args *args = request_args(req);
	struct transfer *t = find(req);

	if (!t)
		return err_pass(-ENOENT);
	if (t->phase != XFER_ENDED)
		cancel(req, t);
	if (t->phase == XFER_ENDED) {
		transfer_free(t);
		request_reply(req, NULL);
		return 0;
	}
	if (!args->wait)
		return err_raise(ERR_BUSY, "xfer %llu: canceled, not still yet",
				 (unsigned long long)t->id);
	t->release = true;
	t->releaser = waiter_of(req);
	return 0;
}

/* ---- xfer.submit: the ring's entries by the socket ---- */

struct submit_args {
	const char *entry, *data;
};

static int run_submit(struct request *req)
{
	const struct submit_args *args = request_args(req);
	struct ring *ring = ring_of(req->session);
	cleanup_free uint8_t *raw = NULL;
	struct ring_source source = {.fd = -1};
	struct kvd_ring_entry entry;
	size_t len = 0;
	int r = ring ? parse_bytes(args->entry, "entry", &raw, &len) : -ENOMEM;

	if (r >= 0 && len != sizeof(entry))
		r = err_raise(ERR_INVAL, "entry: %zu bytes, %zu are wanted", len,
			      sizeof(entry));
	if (r >= 0)
		r = parse_bytes(args->data, "data", &source.data, &len);
	if (r < 0)
		return err_pass(r);
	source.bytes = len;
	memcpy(&entry, raw, sizeof(entry));
	r = ring_op(ring, &entry, &source);
	mem_free(source.data);
	if (r < 0)
		return err_pass(r);
	request_reply(req, NULL);
	return 0;
}

/* ---- notifications ---- */

struct notif_args {
	uint64_t attach;
	const char *data;
};

static int run_notif_send(struct request *req)
{
	const struct notif_args *args = request_args(req);
	struct xfer_session *xs = session_of(req);
	struct attach *attach = xs ? attach_find(xs, args->attach) : NULL;
	cleanup_free uint8_t *data = NULL;
	size_t len = 0;
	int r;

	if (!attach)
		return err_pass(xs ? -ENOENT : -ENOMEM);
	r = parse_bytes(args->data, "data", &data, &len);
	if (r >= 0)
		r = notif_post(attach, data, len, waiter_of(req));
	return r < 0 ? err_pass(r) : 0;
}

static bool add_notif(cJSON *list, const struct notif *notif)
{
	cleanup_free char *text = mem_zalloc(BASE64_CHARS(notif->len) + 1);
	cJSON *one = cJSON_CreateObject();

	if (!text || !one || !cJSON_AddItemToArray(list, one)) {
		cJSON_Delete(one);
		return false;
	}
	base64_encode(notif->data, notif->len, text);
	return cJSON_AddStringToObject(one, "from", notif->from) &&
	       cJSON_AddStringToObject(one, "data", text);
}

/* As many as fit an answer, moved to `out`; what does not fit stays for the next
 * call. */
static bool take_notifs(struct xfer_session *xs, cJSON *list, struct list *out)
{
	size_t left = notif_answer_max(xs->xfers), bytes;
	struct notif *notif;

	while ((notif = list_first(&xs->notifs, struct notif, link))) {
		bytes = notif_answer_bytes(notif->from, notif->len);
		if (bytes > left) /* every one of them fits alone: notif_queue() */
			break;
		left -= bytes;
		list_remove(&notif->link);
		list_push_back(out, &notif->link);
		if (!add_notif(list, notif))
			return false;
	}
	return true;
}

/* An engine that was not answered asks again: nothing may be lost. */
static int run_notif_drain(struct request *req)
{
	struct xfer_session *xs = session_of(req);
	cJSON *result = xs ? request_result() : NULL, *list;
	struct list taken = LIST_INIT(taken), *at;
	struct notif *notif;
	size_t bytes = 0;
	int r = -ENOMEM;

	list = result ? cJSON_AddArrayToObject(result, "notifs") : NULL;
	if (list && take_notifs(xs, list, &taken) &&
	    cJSON_AddBoolToObject(result, "more", !list_empty(&xs->notifs))) {
		list_foreach(notif, &taken, link)
			bytes += notif->len + sizeof(*notif);
		xs->notif_bytes -= bytes;
		r = request_try_reply(req, mem_steal(result));
		if (r < 0)
			xs->notif_bytes += bytes;
	}
	cJSON_Delete(result);
	while (r < 0 && (at = taken.prev) != &taken) {
		list_remove(at);
		list_push_front(&xs->notifs, at);
	}
	list_foreach_safe(notif, &taken, link)
		mem_free(notif);
	return r < 0 ? err_pass(r) : 0;
}

#define F_ATTACH_MS(s, text)                                                             \
	F_INT("timeout_ms", s, timeout_ms, DEFAULT(ATTACH_MS_DEFAULT), 1, ATTACH_MS_MAX, \
	      text)
#define F_NOTIF(name, s, m, need, text) \
	F_STR(name, s, m, need, BASE64_CHARS(XFER_NOTIF_MAX), text)
#define F_XFER F_ID("xfer", xfer_args, xfer, REQUIRED, "of xfer.start")

static const struct field attach_fields[] = {
	F_STR("endpoint", attach_args, endpoint, REQUIRED, LINK_ENDPOINT_MAX - 1,
	      "of the session's daemon"),
	F_U64("session", attach_args, session, REQUIRED, "the session's epoch"),
	F_STR("secret", attach_args, secret, REQUIRED, 32,
	      "the session's secret, 32 hex digits"),
	F_ATTACH_MS(attach_args, "5000 if absent"),
	F_END,
};
static const struct field attached_fields[] = {
	F_ID("attach", attached_args, attach, REQUIRED, "of peer.attach"),
	F_BOOL("fresh", attached_args, fresh,
	       "true: ask its daemon; regions registered there before are known after"),
	F_ATTACH_MS(attached_args, "fresh: 5000 if absent"),
	F_END,
};
static const struct field prep_fields[] = {
	F_ID("peer", prep_args, peer, DEFAULT(-1), "of peer.attach; absent: own memory"),
	F_ARRAY("descs", prep_args, descs, OPTIONAL, DESCS_JSON_MAX,
		"[\"address\", length] or [\"address\", length, stride, count]"),
	F_FD("fd", prep_args, fd,
	     "instead: a memfd of {address, length, stride, count}, u64 little-endian each"),
	F_INT("count", prep_args, count, OPTIONAL, 1, DLIST_ENTRIES_MAX,
	      "entries in the memfd"),
	F_END,
};
static const struct field dlist_fields[] = {
	F_ID("dlist", dlist_args, dlist, REQUIRED, "of dlist.prep"),
	F_END,
};
static const struct field start_fields[] = {
	F_ID("xfer", start_args, xfer, DEFAULT(-1), "post this ended transfer again"),
	F_CHOICE("op", start_args, op, DEFAULT(-1), op_names, "read or write"),
	F_ID("local", start_args, local, DEFAULT(-1), "a list of own memory"),
	F_ID("remote", start_args, remote, DEFAULT(-1),
	     "a list of an attached session's"),
	F_ARRAY("local_index", start_args, local_index, OPTIONAL, INDEX_MAX,
		"which descriptors: numbers or runs [first, count]; absent: all"),
	F_ARRAY("remote_index", start_args, remote_index, OPTIONAL, INDEX_MAX,
		"the same of the remote list"),
	F_NOTIF("notif", start_args, notif, OPTIONAL,
		"base64; for the remote session when the bytes are there"),
	F_END,
};
static const struct field xfer_fields[] = {F_XFER, F_END};
static const struct field release_fields[] = {
	F_XFER,
	F_BOOL("wait", xfer_args, wait, "answer when it is still, not EBUSY at once"),
	F_END,
};
static const struct field submit_fields[] = {
	F_STR("entry", submit_args, entry, REQUIRED, BASE64_CHARS(KVD_RING_ENTRY_BYTES),
	      "base64 of an entry of proto/kvd_ring.h; its offset counts in data"),
	F_NOTIF("data", submit_args, data, REQUIRED, "base64, perhaps empty"),
	F_END,
};
static const struct field notif_fields[] = {
	F_ID("attach", notif_args, attach, REQUIRED, "of peer.attach"),
	F_NOTIF("data", notif_args, data, REQUIRED, "base64"),
	F_END,
};

const struct command xfer_commands[] = {
	{"peer.attach", "use another session's exported memory, by its secret",
	 attach_fields, 0, run_attach, "attach"},
	{"peer.attached", "whether an attached session is there still", attached_fields,
	 0, run_attached, "nothing; the error that ended it"},
	{"dlist.prep", "prepare a descriptor list", prep_fields, COMMAND_FDS, run_prep,
	 "dlist, count"},
	{"dlist.free", "forget a prepared list", dlist_fields, 0, run_dlist_free,
	 "nothing"},
	{"xfer.start", "read or write descriptors of two prepared lists", start_fields, 0,
	 run_start, "xfer, slot and gen of the status page"},
	{"xfer.state", "how far a transfer is", xfer_fields, 0, run_state,
	 "state, bytes, moved, error"},
	{"xfer.cancel", "stop a transfer; poll until it has failed", xfer_fields, 0,
	 run_cancel, "as xfer.state"},
	{"xfer.release", "forget a transfer; cancels it first", release_fields, 0,
	 run_release, "nothing; EBUSY until it is still"},
	{"xfer.submit", "what does not go through the submission ring: one entry of it",
	 submit_fields, 0, run_submit, "nothing; its slot tells the rest"},
	{"notif.send", "send bytes to an attached session", notif_fields, 0,
	 run_notif_send, "nothing"},
	{"notif.drain", "take what was sent to this session", NULL, 0, run_notif_drain,
	 "notifs: {from, data as base64}; more"},
	{.name = NULL},
};
