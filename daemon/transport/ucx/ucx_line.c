/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection as seen by the owner of the worker: its endpoint, and received messages.
 *
 * One endpoint at a time. Raising the endpoint number (ucx_peer.c has the reason) closes
 * the current one and makes others until the number is reached: one call. The path is
 * read then, too: an endpoint made of a worker's address has its lanes at once.
 *
 * A message is looked up by its token and is passed to the loop as an entry, with a copy
 * of its data; of a rendezvous it holds libucp's descriptor, and nothing is fetched
 * before the loop has given an address. Messages without a valid token are dropped here.
 * A correct peer's messages are bounded by its limit in flight, so more of them than that
 * unread, or more bytes, are a flood, and cost the connection. If memory for an entry is
 * short, a reserved one is used, which has room for anything but a payload.
 *
 * The call `end` is the last: it is over when every endpoint of the line is closed, and
 * since libucp's reports keep their order, nothing of the line follows it.
 */
#include "daemon/transport/ucx/ucx_impl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"

static struct ucx_worker *worker_of(const struct ucx_line *line)
{
	return &line->peer->transport->worker;
}

static const struct ucx_lib *ucx_line_lib_of(const struct ucx_line *line)
{
	return worker_of(line)->lib;
}

/* ---- trouble ---- */

static void tell_trouble(struct ucx_line *line, const struct ucx_trouble *trouble)
{
	struct ucx_worker *worker = worker_of(line);

	pthread_mutex_lock(&worker->lock);
	if (trouble->number > line->trouble.number) {
		line->trouble.number = trouble->number;
		line->trouble.status = trouble->status;
	}
	line->trouble.flood |= trouble->flood;
	line->trouble.no_memory |= trouble->no_memory;
	pthread_mutex_unlock(&worker->lock);
	ucx_tell(worker, &line->event);
}

static void on_trouble(struct ucx_call *call)
{
	struct ucx_line *line = container_of(call, struct ucx_line, event);
	struct ucx_trouble trouble;

	pthread_mutex_lock(&worker_of(line)->lock);
	trouble = line->trouble;
	line->trouble = (struct ucx_trouble){0};
	pthread_mutex_unlock(&worker_of(line)->lock);
	ucx_peer_trouble(line->peer, &trouble);
}

/* ---- the endpoint ---- */

static void on_endpoint_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
	struct ucx_line *line = arg;
	struct ucx_trouble trouble = {.status = status, .number = line->number};

	if (ep == line->ep) /* else: one that was passed over */
		tell_trouble(line, &trouble);
}

static void on_endpoint_closed(void *request, ucs_status_t status, void *user_data)
{
	struct ucx_line *line = user_data;

	(void)status; /* it is closed in either case */
	ucx_line_lib_of(line)->ucp_request_free(request);
	line->closing--;
	worker_of(line)->closing--;
	if (line->ended && line->closing == 0)
		ucx_call_over(&line->end, UCS_OK, 0);
}

static void close_endpoint(struct ucx_line *line)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
				UCP_OP_ATTR_FIELD_FLAGS,
		.flags = UCP_EP_CLOSE_FLAG_FORCE,
		.cb.send = on_endpoint_closed,
		.user_data = line,
	};
	ucp_ep_h ep = line->ep;

	line->ep = NULL;
	if (!ep || !UCS_PTR_IS_PTR(ucx_line_lib_of(line)->ucp_ep_close_nbx(ep, &param)))
		return;
	line->closing++;
	worker_of(line)->closing++;
}

static ucs_status_t make_endpoint(struct ucx_line *line)
{
	ucp_ep_params_t params = {
		.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
			      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
			      UCP_EP_PARAM_FIELD_ERR_HANDLER,
		.address = line->address,
		.err_mode = UCP_ERR_HANDLING_MODE_PEER,
		.err_handler = {.cb = on_endpoint_error, .arg = line},
	};
	ucs_status_t status = ucx_line_lib_of(line)->ucp_ep_create(
		worker_of(line)->handle, &params, &line->ep);

	if (status == UCS_OK)
		line->number = atomic_fetch_add(&line->pairing->count, 1) + 1;
	return status;
}

/* libucp 1.13 reports an endpoint's lanes only as text:
 *   "#    lane[0]:  0:tcp/lo.0 md[0]  -> md[0]/tcp/sysdev[255] am am_bw#0 …" */
static bool lane_of_line(const char *line, char *lane, size_t size)
{
	char transport[16], device[24];
	const char *at = strstr(line, "lane[");
	char *dot;

	at = at ? strstr(at, "]:") : NULL;
	if (!at || sscanf(at, "]: %*d:%15[^/ ]/%23[^ ]", transport, device) != 2)
		return false;
	dot = strrchr(device, '.');
	if (dot)
		*dot = '\0';
	snprintf(lane, size, "%s %s", transport, device);
	return true;
}

static void find_path(struct ucx_line *line)
{
	char *text = NULL, *save = NULL, lane[48], *path = line->path;
	size_t size = 0, used;
	bool tcp = true;
	FILE *out = open_memstream(&text, &size);

	line->rows_max = 1;
	snprintf(path, sizeof(line->path), "ucx");
	if (!out)
		return;
	ucx_line_lib_of(line)->ucp_ep_print_info(line->ep, out);
	fclose(out);
	for (char *row = strtok_r(text, "\n", &save); row;
	     row = strtok_r(NULL, "\n", &save)) {
		if (!lane_of_line(row, lane, sizeof(lane)) || strstr(path, lane))
			continue;
		tcp = tcp && strncmp(lane, "tcp ", 4) == 0;
		used = strcmp(path, "ucx") ? strlen(path) : 0;
		snprintf(path + used, sizeof(line->path) - used, "%s%s", used ? ", " : "",
			 lane);
	}
	free(text); /* open_memstream's own */
	if (tcp && strcmp(path, "ucx") != 0)
		line->rows_max = PACK_SLICE_ROWS;
}

/* ---- calls ---- */

void ucx_call(struct ucx_peer *peer, struct ucx_call *call,
	      void (*start)(struct ucx_call *call), void (*done)(struct ucx_call *call))
{
	call->start = start;
	call->done = done;
	peer->busy++;
	ucx_submit(&peer->transport->worker, call);
}

static void start_climb(struct ucx_call *call)
{
	struct ucx_line *line = container_of(call, struct ucx_line, climb);
	ucs_status_t status;

	do {
		close_endpoint(line);
		status = make_endpoint(line);
	} while (status == UCS_OK && line->number < line->wanted);
	if (status == UCS_OK)
		find_path(line);
	ucx_call_over(call, status, 0);
}

void ucx_line_climb(struct ucx_line *line, uint64_t number)
{
	line->wanted = number;
	line->climb.heavy = true;
	ucx_call(line->peer, &line->climb, start_climb, ucx_peer_climbed);
}

static void start_flush(struct ucx_call *call)
{
	struct ucx_line *line = container_of(call, struct ucx_line, flush);
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
		.cb.send = ucx_on_sent,
		.user_data = call,
	};

	if (line->ep)
		ucx_call_began(call,
			       ucx_line_lib_of(line)->ucp_ep_flush_nbx(line->ep, &param),
			       0);
	else
		ucx_call_over(call, UCS_ERR_CANCELED, 0);
}

void ucx_line_flush(struct ucx_line *line)
{
	ucx_call(line->peer, &line->flush, start_flush, ucx_peer_flushed);
}

/* For libucp: adds to its parameters, and returns the value to pass. */
static void rows_pass(struct ucx_rows *rows, ucp_request_param_t *param, void **buffer_p,
		      size_t *count_p)
{
	*buffer_p = rows->at[0].buffer;
	*count_p = rows->at[0].length;
	if (rows->count > 1) {
		param->op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
		param->datatype = ucp_dt_make_iov();
		*buffer_p = rows->at;
		*count_p = rows->count;
	} else if (rows->memh) {
		param->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
		param->memh = rows->memh;
	}
}

void ucx_line_send(struct ucx_line *line, struct ucx_call *call, const uint8_t *header,
		   struct ucx_rows *rows, bool eager)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
				UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
		.flags = eager ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV,
		.memory_type = UCS_MEMORY_TYPE_HOST,
		.cb.send = ucx_on_sent,
		.user_data = call,
	};
	size_t count;
	void *bytes;

	if (!line->ep) {
		ucx_call_over(call, UCS_ERR_CANCELED, 0);
		return;
	}
	rows_pass(rows, &param, &bytes, &count);
	ucx_call_began(call,
		       call->worker->lib->ucp_am_send_nbx(line->ep, UCX_AM_ID, header,
							  UCX_FRAME_BYTES, bytes, count,
							  &param),
		       0);
}

void ucx_line_fetch(struct ucx_call *call, void *desc, struct ucx_rows *rows,
		    size_t length)
{
	size_t got = length;
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
				UCP_OP_ATTR_FIELD_MEMORY_TYPE |
				UCP_OP_ATTR_FIELD_RECV_INFO,
		.memory_type = UCS_MEMORY_TYPE_HOST,
		.cb.recv_am = ucx_on_received,
		.user_data = call,
		.recv_info.length = &got,
	};
	ucs_status_ptr_t ptr;
	size_t count;
	void *bytes;

	rows_pass(rows, &param, &bytes, &count);
	ptr = call->worker->lib->ucp_am_recv_data_nbx(call->worker->handle, desc, bytes,
						      count, &param);
	ucx_call_began(call, ptr, got);
}

static void start_end(struct ucx_call *call)
{
	struct ucx_line *line = container_of(call, struct ucx_line, end);

	line->ended = true;
	close_endpoint(line);
	if (line->closing == 0)
		ucx_call_over(call, UCS_OK, 0);
}

void ucx_line_end(struct ucx_line *line)
{
	line->end.heavy = true;
	ucx_call(line->peer, &line->end, start_end, ucx_peer_line_ended);
}

/* ---- messages in ---- */

static void on_entry(struct ucx_call *call)
{
	struct ucx_entry *entry = container_of(call, struct ucx_entry, call);
	struct ucx_peer *peer = entry->peer;

	atomic_fetch_sub(&peer->line.unread, 1);
	atomic_fetch_sub(&peer->line.unread_bytes, entry->desc ? 0 : entry->len);
	if (net_peer_live(&peer->net) && ucx_frame_sequenced(&entry->frame)) {
		ucx_order_entry(peer, entry);
	} else if (net_peer_live(&peer->net) && entry->frame.type != UCX_HELLO) {
		ucx_sink_entry(peer, entry);
	} else {
		if (net_peer_live(&peer->net))
			ucx_peer_hello(peer, &entry->frame);
		ucx_entry_drop(entry);
	}
}

int ucx_line_reserve(struct ucx_line *line)
{
	struct ucx_worker *worker = worker_of(line);
	struct ucx_entry *entry;

	pthread_mutex_lock(&worker->lock);
	entry = line->reserve;
	pthread_mutex_unlock(&worker->lock);
	if (entry) /* only the loop puts one there */
		return 0;
	entry = mem_zalloc(sizeof(*entry) + UCX_TEXT_MAX);
	if (!entry)
		return err_pass(-ENOMEM);
	pthread_mutex_lock(&worker->lock);
	line->reserve = entry;
	pthread_mutex_unlock(&worker->lock);
	return 0;
}

static struct ucx_entry *ucx_line_entry_new(struct ucx_line *line,
					    const struct ucx_frame *frame, size_t len,
					    bool rndv)
{
	struct ucx_worker *worker = worker_of(line);
	size_t bytes = rndv ? 0 : len;
	struct ucx_entry *entry = mem_zalloc(sizeof(*entry) + bytes);
	bool starved = !entry && bytes > UCX_TEXT_MAX;

	if (!entry) {
		err_clear();
		pthread_mutex_lock(&worker->lock);
		entry = mem_steal(line->reserve);
		pthread_mutex_unlock(&worker->lock);
	}
	if (!entry)
		return NULL;
	entry->peer = line->peer;
	entry->frame = *frame;
	entry->len = len;
	entry->starved = starved;
	entry->payload = entry->bytes;
	entry->call.done = on_entry;
	list_init(&entry->call.link);
	list_init(&entry->link);
	return entry;
}

/* NULL: no peer. Its peer exists at least until the line's end is over. */
static struct ucx_peer *find_peer(struct ucx_transport *transport, const void *header,
				  size_t header_len, struct ucx_frame *frame_p)
{
	struct ucx_peer *peer;

	if (ucx_frame_get(header, header_len, frame_p) < 0) {
		err_clear();
		return NULL;
	}
	pthread_mutex_lock(&transport->worker.lock);
	peer = strmap_get_bytes(&transport->tokens, frame_p->token,
				sizeof(frame_p->token));
	pthread_mutex_unlock(&transport->worker.lock);
	return peer;
}

ucs_status_t ucx_line_message(void *arg, const void *header, size_t header_len,
			      void *data, size_t len, const ucp_am_recv_param_t *param)
{
	struct ucx_transport *transport = arg;
	bool rndv = param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV;
	size_t bytes = rndv ? 0 : len;
	struct ucx_trouble trouble = {0};
	struct ucx_entry *entry = NULL;
	struct ucx_frame frame;
	struct ucx_peer *peer = find_peer(transport, header, header_len, &frame);

	if (!peer) {
		atomic_fetch_add(&transport->frames_dropped, 1);
		log_debug("ucx", NULL, "message of an unknown sender dropped",
			  "bytes=%zu", len);
		return UCS_OK; /* a rendezvous is answered without taking its data */
	}
	trouble.flood = atomic_load(&peer->line.unread) >= UCX_UNREAD_MAX ||
			atomic_load(&peer->line.unread_bytes) + bytes > UCX_UNREAD_BYTES;
	if (!trouble.flood)
		entry = ucx_line_entry_new(&peer->line, &frame, len, rndv);
	if (!entry) {
		trouble.no_memory = !trouble.flood;
		tell_trouble(&peer->line, &trouble);
		return UCS_OK;
	}
	atomic_fetch_add(&peer->line.unread, 1);
	atomic_fetch_add(&peer->line.unread_bytes, bytes);
	if (rndv)
		entry->desc = data;
	else if (bytes && !entry->starved)
		memcpy(entry->payload, data, bytes);
	ucx_tell(&transport->worker, &entry->call);
	return rndv ? UCS_INPROGRESS : UCS_OK;
}

/* ---- made and unmade ---- */

void ucx_line_init(struct ucx_line *line, struct ucx_peer *peer,
		   struct ucx_pairing *pairing, const void *address)
{
	line->peer = peer;
	line->pairing = pairing;
	line->address = address;
	line->event.done = on_trouble;
	list_init(&line->event.link);
}

void ucx_line_fini(struct ucx_line *line)
{
	mem_free(line->reserve);
}

int ucx_line_listen(struct ucx_line *line)
{
	struct ucx_peer *peer = line->peer;
	int r;

	pthread_mutex_lock(&worker_of(line)->lock);
	r = strmap_put_bytes(&peer->transport->tokens, peer->net.token_in,
			     sizeof(peer->net.token_in), peer);
	pthread_mutex_unlock(&worker_of(line)->lock);
	return err_pass(r);
}

void ucx_line_deafen(struct ucx_line *line)
{
	struct ucx_peer *peer = line->peer;

	pthread_mutex_lock(&worker_of(line)->lock);
	strmap_remove_bytes(&peer->transport->tokens, peer->net.token_in,
			    sizeof(peer->net.token_in));
	pthread_mutex_unlock(&worker_of(line)->lock);
}
