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

#define F_END                                      \
	{                                          \
		NULL, FIELD_ANY, false, 0, 0, NULL \
	}
#define F_XFER                                                            \
	{                                                                 \
		"xfer", FIELD_INT, true, 0, JSON_INT_MAX, "of xfer.start" \
	}

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

static int run_attach(struct request *req)
{
	const char *endpoint = NULL, *hex = NULL;
	struct xfer_session *xs = session_of(req);
	int64_t ms = ATTACH_MS_DEFAULT;
	uint64_t epoch = 0;
	uint8_t secret[16];
	int r = xs ? 0 : -ENOMEM;

	if (r >= 0)
		r = json_get_str(req->args, "endpoint", true, LINK_ENDPOINT_MAX - 1,
				 &endpoint);
	if (r >= 0)
		r = json_get_u64(req->args, "session", true, &epoch);
	if (r >= 0)
		r = json_get_str(req->args, "secret", true, 32, &hex);
	if (r >= 0)
		r = parse_secret(hex, secret);
	if (r >= 0)
		r = json_get_int(req->args, "timeout_ms", false, 1, 600000, &ms);
	if (r >= 0)
		r = attach_open(xs, endpoint, epoch, secret,
				(uint64_t)ms * LOOP_NS_PER_MS, waiter_of(req));
	return r < 0 ? err_pass(r) : 0;
}

/* Is the session there still, as far as this daemon knows, or as its owner's? */
static int run_attached(struct request *req)
{
	struct xfer_session *xs = session_of(req);
	int64_t id = 0, ms = ATTACH_MS_DEFAULT;
	struct attach *attach;
	bool fresh = false;
	int r = xs ? json_get_int(req->args, "attach", true, 0, JSON_INT_MAX, &id)
		   : -ENOMEM;

	if (r >= 0)
		r = json_get_bool(req->args, "fresh", false, &fresh);
	if (r >= 0)
		r = json_get_int(req->args, "timeout_ms", false, 1, 600000, &ms);
	if (r < 0)
		return err_pass(r);
	attach = attach_find(xs, (uint64_t)id);
	if (!attach)
		return err_pass(-ENOENT);
	if (fresh) {
		r = attach_refresh(xs, attach, (uint64_t)ms * LOOP_NS_PER_MS,
				   waiter_of(req));
		return r < 0 ? err_pass(r) : 0;
	}
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

/* Either a list, or a memfd of so many. */
static int check_descs(struct request *req, const cJSON **list_p, uint32_t *count_p,
		       int *fd_p)
{
	int64_t count = 0, fd = -1;
	struct stat st;
	int r = json_get_array(req->args, "descs", false, DESCS_JSON_MAX, list_p);

	if (r >= 0)
		r = json_get_int(req->args, "count", false, 1, DLIST_ENTRIES_MAX, &count);
	if (r >= 0)
		r = json_get_int(req->args, "fd", false, 0, REQUEST_FDS_MAX - 1, &fd);
	if (r < 0)
		return err_pass(r);
	if (!*list_p == (fd < 0) || (fd >= 0 && count == 0))
		return err_raise(ERR_INVAL, "descs, or fd with count, is wanted");
	if (*list_p)
		return 0;
	if (fstat(req->fds[fd], &st) < 0 || !S_ISREG(st.st_mode))
		return err_raise(ERR_INVAL, "fd: not a memfd"); /* a pipe would block */
	*count_p = (uint32_t)count;
	*fd_p = req->fds[fd];
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
	struct xfer_session *xs = session_of(req);
	struct dlist_entry *entries = NULL;
	struct attach *attach = NULL;
	struct prepared *prepared;
	const cJSON *list = NULL;
	int64_t peer = -1;
	uint32_t count = 0;
	int fd = -1;
	int r = xs ? json_get_int(req->args, "peer", false, 0, JSON_INT_MAX, &peer)
		   : -ENOMEM;

	if (r < 0)
		return err_pass(r);
	if (peer >= 0) {
		attach = attach_find(xs, (uint64_t)peer);
		if (!attach)
			return err_prefix(-ENOENT, "peer");
	}
	r = check_descs(req, &list, &count, &fd);
	if (r >= 0 && !list && count > PREP_INLINE && (!attach || attach->pool))
		return err_pass(prep_begin(req, xs, attach, count, fd));
	if (r >= 0)
		r = list ? descs_from_json(list, &entries, &count)
			 : descs_from_fd(fd, count, &entries);
	if (r >= 0)
		r = prepared_new(xs, attach, entries, count, &prepared);
	if (r < 0)
		return err_pass(r);
	prep_reply(req, prepared);
	return 0;
}

static int run_dlist_free(struct request *req)
{
	struct xfer_session *xs = session_of(req);
	struct prepared *prepared;
	int64_t id = 0;
	int r = xs ? json_get_int(req->args, "dlist", true, 0, JSON_INT_MAX, &id)
		   : -ENOMEM;

	prepared = r < 0 ? NULL : prepared_find(xs, (uint64_t)id);
	if (!prepared)
		return err_pass(r < 0 ? r : -ENOENT);
	prepared_release(prepared);
	request_reply(req, NULL);
	return 0;
}

/* ---- xfer.start ---- */

static int parse_index(const cJSON *args, const char *name, uint32_t **index_p,
		       uint64_t *count_p)
{
	size_t n = 0;
	int r;

	if (!cJSON_GetObjectItemCaseSensitive(args, name))
		return 0;
	r = json_get_pages(args, name, true, UINT32_MAX, INDEX_MAX, index_p, &n);
	*count_p = n;
	return r < 0 ? err_pass(r) : 0;
}

/* Any bytes, as base64. *data_p is heap. */
static int parse_bytes(const cJSON *args, const char *name, bool required,
		       uint8_t **data_p, size_t *len_p)
{
	const char *text = NULL;
	int r = json_get_str(args, name, required, BASE64_CHARS(XFER_NOTIF_MAX), &text);

	if (r < 0 || !text)
		return r < 0 ? err_pass(r) : 0;
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

static int parse_lists(struct request *req, struct xfer_session *xs,
		       struct transfer_args *out)
{
	const char *op = NULL;
	int64_t local = 0, remote = 0;
	int r = json_get_str(req->args, "op", true, 8, &op);

	if (r >= 0 && strcmp(op, "read") != 0 && strcmp(op, "write") != 0)
		r = err_raise(ERR_INVAL, "op: '%.8s' is not read or write", op);
	if (r >= 0)
		r = json_get_int(req->args, "local", true, 0, JSON_INT_MAX, &local);
	if (r >= 0)
		r = json_get_int(req->args, "remote", true, 0, JSON_INT_MAX, &remote);
	if (r < 0)
		return err_pass(r);
	out->kind = strcmp(op, "read") == 0 ? XP_READ : XP_WRITE;
	out->local = prepared_find(xs, (uint64_t)local);
	out->remote = out->local ? prepared_find(xs, (uint64_t)remote) : NULL;
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

static int start_new(struct request *req, struct xfer_session *xs)
{
	struct transfer_args args = {0};
	cleanup_free uint8_t *notif = NULL;
	struct transfer *t;
	int r = parse_lists(req, xs, &args);

	if (r >= 0)
		r = parse_index(req->args, "local_index", &args.local_index,
				&args.local_count);
	if (r >= 0)
		r = parse_index(req->args, "remote_index", &args.remote_index,
				&args.remote_count);
	if (r >= 0)
		r = parse_bytes(req->args, "notif", false, &notif, &args.notif_len);
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

static int start_again(struct request *req, struct xfer_session *xs, uint64_t id)
{
	struct transfer *t = transfer_find(xs, id);
	uint8_t *notif = NULL;
	size_t len = 0;
	int r;

	if (!t)
		return err_pass(-ENOENT);
	r = parse_bytes(req->args, "notif", false, &notif, &len);
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
	struct xfer_session *xs = session_of(req);
	int64_t id = -1;
	int r = xs ? json_get_int(req->args, "xfer", false, 0, JSON_INT_MAX, &id)
		   : -ENOMEM;

	if (r < 0)
		return err_pass(r);
	return id >= 0 ? start_again(req, xs, (uint64_t)id) : start_new(req, xs);
}

/* ---- xfer.state, cancel, release ---- */

static struct transfer *find(struct request *req)
{
	struct xfer_session *xs = session_of(req);
	int64_t id = 0;

	if (!xs || json_get_int(req->args, "xfer", true, 0, JSON_INT_MAX, &id) < 0)
		return NULL;
	return transfer_find(xs, (uint64_t)id);
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
	struct transfer *t = find(req);
	const struct err *fault = NULL;
	int64_t id = 0;

	if (t)
		return reply_state(req, t);
	(void)json_get_int(req->args, "xfer", true, 0, JSON_INT_MAX, &id);
	fault = ring_fault_of(req->session->ring, (uint64_t)id);
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
	struct transfer *t = find(req);
	bool wait = false;
	int r = t ? json_get_bool(req->args, "wait", false, &wait) : -ENOENT;

	if (r < 0)
		return err_pass(r);
	if (t->phase != XFER_ENDED)
		cancel(req, t);
	if (t->phase == XFER_ENDED) {
		transfer_free(t);
		request_reply(req, NULL);
		return 0;
	}
	if (!wait)
		return err_raise(ERR_BUSY, "xfer %llu: canceled, not still yet",
				 (unsigned long long)t->id);
	t->release = true;
	t->releaser = waiter_of(req);
	return 0;
}

/* ---- xfer.submit: the ring's entries by the socket ---- */

static int run_submit(struct request *req)
{
	struct ring *ring = ring_of(req->session);
	cleanup_free uint8_t *raw = NULL;
	struct ring_source source = {.fd = -1};
	struct kvd_ring_entry entry;
	size_t len = 0;
	int r = ring ? parse_bytes(req->args, "entry", true, &raw, &len) : -ENOMEM;

	if (r >= 0 && len != sizeof(entry))
		r = err_raise(ERR_INVAL, "entry: %zu bytes, %zu are wanted", len,
			      sizeof(entry));
	if (r >= 0)
		r = parse_bytes(req->args, "data", true, &source.data, &len);
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

static int run_notif_send(struct request *req)
{
	struct xfer_session *xs = session_of(req);
	cleanup_free uint8_t *data = NULL;
	struct attach *attach;
	int64_t id = 0;
	size_t len = 0;
	int r = xs ? json_get_int(req->args, "attach", true, 0, JSON_INT_MAX, &id)
		   : -ENOMEM;

	attach = r < 0 ? NULL : attach_find(xs, (uint64_t)id);
	if (!attach)
		return err_pass(r < 0 ? r : -ENOENT);
	r = parse_bytes(req->args, "data", true, &data, &len);
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

static const struct command_field attach_fields[] = {
	{"endpoint", FIELD_STR, true, 0, LINK_ENDPOINT_MAX - 1,
	 "of the session's daemon"},
	{"session", FIELD_U64, true, 0, 0, "the session's epoch"},
	{"secret", FIELD_STR, true, 0, 32, "the session's secret, 32 hex digits"},
	{"timeout_ms", FIELD_INT, false, 1, 600000, "5000 if absent"},
	F_END,
};
static const struct command_field attached_fields[] = {
	{"attach", FIELD_INT, true, 0, JSON_INT_MAX, "of peer.attach"},
	{"fresh", FIELD_BOOL, false, 0, 0,
	 "true: ask its daemon; regions registered there before are known after"},
	{"timeout_ms", FIELD_INT, false, 1, 600000, "fresh: 5000 if absent"},
	F_END,
};
static const struct command_field prep_fields[] = {
	{"peer", FIELD_INT, false, 0, JSON_INT_MAX, "of peer.attach; absent: own memory"},
	{"descs", FIELD_ARRAY, false, 0, DESCS_JSON_MAX,
	 "[\"address\", length] or [\"address\", length, stride, count]"},
	{"fd", FIELD_FD, false, 0, 0,
	 "instead: a memfd of {address, length, stride, count}, u64 little-endian each"},
	{"count", FIELD_INT, false, 1, DLIST_ENTRIES_MAX, "entries in the memfd"},
	F_END,
};
static const struct command_field dlist_fields[] = {
	{"dlist", FIELD_INT, true, 0, JSON_INT_MAX, "of dlist.prep"}, F_END};
static const struct command_field start_fields[] = {
	{"xfer", FIELD_INT, false, 0, JSON_INT_MAX, "post this ended transfer again"},
	{"op", FIELD_STR, false, 0, 8, "read or write"},
	{"local", FIELD_INT, false, 0, JSON_INT_MAX, "a list of own memory"},
	{"remote", FIELD_INT, false, 0, JSON_INT_MAX, "a list of an attached session's"},
	{"local_index", FIELD_ARRAY, false, 0, INDEX_MAX,
	 "which descriptors: numbers or runs [first, count]; absent: all"},
	{"remote_index", FIELD_ARRAY, false, 0, INDEX_MAX, "the same of the remote list"},
	{"notif", FIELD_STR, false, 0, BASE64_CHARS(XFER_NOTIF_MAX),
	 "base64; for the remote session when the bytes are there"},
	F_END,
};
static const struct command_field xfer_fields[] = {F_XFER, F_END};
static const struct command_field release_fields[] = {
	F_XFER,
	{"wait", FIELD_BOOL, false, 0, 0, "answer when it is still, not EBUSY at once"},
	F_END,
};
static const struct command_field submit_fields[] = {
	{"entry", FIELD_STR, true, 0, BASE64_CHARS(KVD_RING_ENTRY_BYTES),
	 "base64 of an entry of proto/kvd_ring.h; its offset counts in data"},
	{"data", FIELD_STR, true, 0, BASE64_CHARS(XFER_NOTIF_MAX),
	 "base64, perhaps empty"},
	F_END,
};
static const struct command_field notif_fields[] = {
	{"attach", FIELD_INT, true, 0, JSON_INT_MAX, "of peer.attach"},
	{"data", FIELD_STR, true, 0, BASE64_CHARS(XFER_NOTIF_MAX), "base64"},
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
	{NULL, NULL, NULL, 0, NULL, NULL},
};
