/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection manager: how queue pairs find each other.
 *
 * The dialer opens every queue pair by a separate connection to the peer's rail of the
 * same number. Each carries in its private data the token from the peer's handshake, the
 * number of the queue pair and how many there are; the answer carries the token of the
 * other direction, so each side has proved itself before a work request is posted. Each
 * number is taken once, and when all are the token is forgotten: it serves no second
 * connection, which matters because private data travels in plain text.
 *
 * An unexpected connection is refused. It may come from a peer whose handshake finished a
 * moment earlier, so a refused dialer dials again for DIAL_NS; a waiting side never gives
 * up because of an unknown connection.
 *
 * Queue pairs are spread over the rails that both sides have, paired by number. One that
 * gets no answer over its rail (a port is down here or there) is dialled over another:
 * fewer rails are slower, not the end.
 *
 * Events are copied and acknowledged before they are acted on: destroying an id
 * waits for the acknowledgement of all its events.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define RESOLVE_MS 2000
#define RNR_RETRIES 6u /* finite: 7 would retry without limit */
#define RD_ATOMIC_MAX 16
#define PRIVATE_MAX 256u
#define LINGER_NS (5 * LOOP_NS_PER_S)
#define REJECT_TEXT 100u
#define DIAL_AGAIN_NS (100 * LOOP_NS_PER_MS)
#define ATTEMPT_NS (2 * LOOP_NS_PER_S) /* over one rail, when another one leads there */
/* a rejection's reason, where the kernel has one: ib_cm's "consumer defined" */
#define REJECT_CONSUMER 28

/* of which the original is acknowledged */
struct cm_event {
	enum rdma_cm_event_type type;
	struct rdma_cm_id *id, *listener;
	int status;
	uint8_t data[PRIVATE_MAX];
	size_t len;
	uint8_t responder, initiator; /* READs: that it serves, that it starts */
};

static void fill_hello(const struct verbs_qp *qp, uint8_t buf[VERBS_HELLO_BYTES])
{
	const struct verbs_peer *peer = qp->peer;
	struct verbs_hello hello = {
		.qp = (uint8_t)qp->index,
		.total = (uint8_t)peer->qp_count,
		.rail = (uint8_t)qp->rail->index,
		.depth = (uint16_t)VERBS_DEPTH,
	};

	memcpy(hello.token, peer->net.token_out, sizeof(hello.token));
	verbs_hello_put(&hello, buf);
}

static uint8_t verbs_cm_least(int a, int b)
{
	int n = a < b ? a : b;

	return (uint8_t)(n < RD_ATOMIC_MAX ? n : RD_ATOMIC_MAX);
}

static void set_options(const struct verbs_transport *transport, struct rdma_cm_id *id)
{
	uint8_t tos = transport->tos, timeout = transport->ack_timeout;

	/* both are wishes: an older kernel has its own idea of the timeout */
	if (tos)
		transport->lib->set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos,
					   sizeof(tos));
	transport->lib->set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT,
				   &timeout, sizeof(timeout));
}

/* ---- dialling ---- */

/* The attempt failed: retry a little later, until the deadline. */
static void verbs_cm_again(struct verbs_qp *qp, const struct err *why)
{
	struct verbs_peer *peer = qp->peer;

	log_debug("verbs", peer->net.name, "dial failed", "qp=%u why=\"%s\"", qp->index,
		  why->text);
	peer->dial_err = *why;
	verbs_qp_reset(qp);
	peer->dial_again_ns = loop_now_ns(peer->net.timer.loop) + DIAL_AGAIN_NS;
	net_peer_watch(&peer->net, peer->dial_again_ns);
}

static void again_last(struct verbs_qp *qp)
{
	struct err err;

	err_take(&err);
	verbs_cm_again(qp, &err);
}

static int verbs_cm_begin(struct verbs_qp *qp)
{
	struct verbs_peer *peer = qp->peer;
	struct verbs_transport *transport = peer->transport;
	struct sockaddr_storage from = qp->rail->address;
	struct sockaddr_storage to = peer->address.rail[qp->rail->index];

	if (transport->lib->create_id(transport->cm, &qp->id, qp, RDMA_PS_TCP) != 0)
		return err_raise_errno(errno, "verbs: rdma_create_id");
	set_options(transport, qp->id);
	verbs_address_port(&from, 0);
	if (transport->lib->resolve_addr(qp->id, (struct sockaddr *)&from,
					 (struct sockaddr *)&to, RESOLVE_MS) != 0)
		return err_raise(ERR_TRANSPORT, "verbs: %s to %s: resolve: %s",
				 qp->rail->name, peer->net.name, strerror(errno));
	return 0;
}

/* ---- rails that do not lead there ---- */

static bool rail_is_good(const struct verbs_peer *peer, uint32_t i)
{
	const struct verbs_rail *rail = &peer->transport->rails[i];

	return !(peer->bad_rails & 1u << i) && !rail->down && !rail->device->fatal;
}

/* Over a rail that is not known to lead nowhere; all are tried again when none is. */
static void choose_rail(struct verbs_qp *qp)
{
	struct verbs_peer *peer = qp->peer;
	uint32_t from = qp->rail->index;

	if (rail_is_good(peer, from))
		return;
	for (uint32_t step = 1; step < peer->rails; step++) {
		uint32_t i = (from + step) % peer->rails;

		if (!rail_is_good(peer, i))
			continue;
		log_info("verbs", peer->net.name, "dialled over another rail",
			 "qp=%u rail=%s instead=%s", qp->index,
			 peer->transport->rails[i].name, qp->rail->name);
		qp->rail = &peer->transport->rails[i];
		return;
	}
	peer->bad_rails = 0;
}

static bool other_rail_is_up(const struct verbs_peer *peer, const struct verbs_rail *rail)
{
	for (uint32_t i = 0; i < peer->qp_count; i++)
		if (sm_state(&peer->qps[i].sm) == VERBS_QP_UP &&
		    peer->qps[i].rail != rail)
			return true;
	return false;
}

void verbs_dial_elsewhere(struct verbs_peer *peer, uint64_t now)
{
	struct err err;

	for (uint32_t i = 0; i < peer->qp_count; i++) {
		struct verbs_qp *qp = &peer->qps[i];

		if (sm_state(&qp->sm) != VERBS_QP_CONNECTING ||
		    now < qp->dial_ns + ATTEMPT_NS || !other_rail_is_up(peer, qp->rail))
			continue;
		err_set(&err, ERR_TIMEOUT, "verbs: %s to %s: no answer", qp->rail->name,
			peer->net.name);
		peer->bad_rails |= 1u << qp->rail->index;
		verbs_cm_again(qp, &err);
	}
}

void verbs_dial(struct verbs_peer *peer)
{
	for (uint32_t i = 0; i < peer->qp_count; i++) {
		struct verbs_qp *qp = &peer->qps[i];

		if (sm_state(&qp->sm) != VERBS_QP_IDLE)
			continue;
		choose_rail(qp);
		qp->dial_ns = loop_now_ns(peer->net.timer.loop);
		sm_move(&qp->sm, VERBS_QP_CONNECTING);
		if (verbs_cm_begin(qp) < 0)
			again_last(qp);
	}
}

static int send_connect(struct verbs_qp *qp)
{
	const struct verbs_transport *transport = qp->peer->transport;
	const struct ibv_device_attr *attr = &qp->rail->device->attr;
	uint8_t hello[VERBS_HELLO_BYTES];
	struct rdma_conn_param param = {
		.private_data = hello,
		.private_data_len = sizeof(hello),
		.responder_resources =
			verbs_cm_least(attr->max_qp_rd_atom, RD_ATOMIC_MAX),
		.initiator_depth =
			verbs_cm_least(attr->max_qp_init_rd_atom, RD_ATOMIC_MAX),
		.retry_count = VERBS_RETRIES,
		.rnr_retry_count = RNR_RETRIES,
	};
	int r = verbs_qp_make(qp);

	if (r < 0)
		return err_pass(r);
	fill_hello(qp, hello);
	if (transport->lib->connect(qp->id, &param) != 0)
		return err_raise(ERR_TRANSPORT, "verbs: %s to %s: connect: %s",
				 qp->rail->name, qp->peer->net.name, strerror(errno));
	return 0;
}

static void on_resolved(struct verbs_qp *qp)
{
	const struct verbs_lib *lib = qp->peer->transport->lib;

	if (qp->id->verbs != qp->rail->device->context)
		err_raise(ERR_TRANSPORT,
			  "verbs: %s: the route to %s leaves by another device",
			  qp->rail->name, qp->peer->net.name);
	else if (lib->resolve_route(qp->id, RESOLVE_MS) != 0)
		err_raise(ERR_TRANSPORT, "verbs: %s to %s: route: %s", qp->rail->name,
			  qp->peer->net.name, strerror(errno));
	else
		return;
	again_last(qp);
}

/* The other side's token: is it the peer of the handshake? */
static int check_answer(struct verbs_qp *qp, const struct cm_event *event)
{
	struct verbs_peer *peer = qp->peer;
	struct verbs_hello hello;
	int r = verbs_hello_get(event->data, event->len, &hello);

	if (r < 0)
		return err_pass(r);
	if (memcmp(hello.token, peer->net.token_in, sizeof(hello.token)) != 0)
		return err_raise(ERR_AUTH,
				 "verbs: the answer from %s has the wrong token",
				 peer->net.name);
	if (hello.qp != qp->index || hello.total != peer->qp_count)
		return err_raise(ERR_PROTO, "verbs: %s answers queue pair %u of %u",
				 peer->net.name, hello.qp, hello.total);
	if (qp->index == 0)
		peer->peer_depth = peer->credits = hello.depth;
	return 0;
}

/* ---- being dialled ---- */

static void verbs_cm_refuse(struct verbs_transport *transport, struct rdma_cm_id *id,
			    const char *why)
{
	log_debug("verbs", NULL, "connection refused", "why=\"%s\"", why);
	transport->lib->reject(id, why, (uint8_t)strnlen(why, REJECT_TEXT));
	transport->lib->destroy_id(id);
}

static int send_accept(struct verbs_qp *qp, const struct cm_event *event)
{
	const struct ibv_device_attr *attr = &qp->rail->device->attr;
	uint8_t hello[VERBS_HELLO_BYTES];
	struct rdma_conn_param param = {
		.private_data = hello,
		.private_data_len = sizeof(hello),
		.responder_resources =
			verbs_cm_least(attr->max_qp_rd_atom, event->responder),
		.initiator_depth =
			verbs_cm_least(attr->max_qp_init_rd_atom, event->initiator),
		.rnr_retry_count = RNR_RETRIES,
	};
	int r = verbs_qp_make(qp);

	if (r < 0)
		return err_pass(r);
	fill_hello(qp, hello);
	if (qp->peer->transport->lib->accept(qp->id, &param) != 0)
		return err_raise(ERR_TRANSPORT, "verbs: %s: accept: %s", qp->rail->name,
				 strerror(errno));
	return 0;
}

/* The first connection of a dialing peer carries the number of its queue pairs. */
static const char *verbs_cm_expect(struct verbs_peer *peer,
				   const struct verbs_hello *hello,
				   const struct verbs_rail *rail)
{
	uint32_t rails = peer->transport->rail_count;

	if (peer->qp_count == 0) {
		peer->qps = mem_calloc(hello->total, sizeof(*peer->qps));
		if (!peer->qps) {
			err_clear();
			return "no memory";
		}
		peer->qp_count = hello->total;
		for (uint32_t i = 0; i < peer->qp_count; i++)
			verbs_qp_init(&peer->qps[i], peer, i);
	}
	if (hello->total != peer->qp_count)
		return "another number of queue pairs than before";
	if (hello->rail != rail->index || hello->rail >= rails)
		return "another rail than announced";
	if (sm_state(&peer->qps[hello->qp].sm) != VERBS_QP_IDLE)
		return "this queue pair is in use";
	return NULL;
}

static void on_connect_request(struct verbs_transport *transport,
			       const struct cm_event *event)
{
	struct verbs_rail *rail = event->listener->context;
	struct verbs_hello hello;
	struct verbs_peer *peer;
	struct verbs_qp *qp;
	const char *no;

	if (verbs_hello_get(event->data, event->len, &hello) < 0) {
		verbs_cm_refuse(transport, event->id, err_last()->text);
		err_clear();
		return;
	}
	peer = strmap_get_bytes(&transport->tokens, hello.token, sizeof(hello.token));
	no = peer && net_peer_live(&peer->net) ? verbs_cm_expect(peer, &hello, rail)
					       : "no peer waits with this token";
	if (no) {
		verbs_cm_refuse(transport, event->id, no);
		return;
	}
	qp = &peer->qps[hello.qp];
	qp->rail = rail;
	qp->id = event->id;
	qp->id->context = qp;
	set_options(transport, qp->id);
	if (hello.qp == 0)
		peer->peer_depth = peer->credits = hello.depth;
	sm_move(&qp->sm, VERBS_QP_CONNECTING);
	if (send_accept(qp, event) < 0) {
		log_warn("verbs", peer->net.name, "cannot accept", "why=\"%s\"",
			 err_last()->text);
		err_clear();
		transport->lib->reject(qp->id, "no resources", 12);
		verbs_qp_reset(qp);
	}
}

/* ---- farewells ---- */

/*
 * rdma_disconnect() sends a datagram, and repeats it until it is answered; but not for an
 * id that is destroyed. A side that only receives would never notice it.
 */
struct verbs_linger {
	struct list link;
	struct rdma_cm_id *id;
	uint64_t until_ns;
};

static void linger_free(struct verbs_transport *transport, struct verbs_linger *linger)
{
	list_remove(&linger->link);
	transport->lib->destroy_id(linger->id);
	mem_free(linger);
}

void verbs_linger(struct verbs_transport *transport, struct rdma_cm_id *id)
{
	struct verbs_linger *linger = mem_zalloc(sizeof(*linger));

	id->context = NULL;
	if (!linger) {
		err_clear();
		transport->lib->destroy_id(id);
		return;
	}
	linger->id = id;
	linger->until_ns = loop_now_ns(transport->net.base.env.loop) + LINGER_NS;
	list_push_back(&transport->lingering, &linger->link);
	if (!loop_timer_running(&transport->linger_timer))
		loop_timer_start(&transport->linger_timer, LINGER_NS);
}

void verbs_on_linger(struct loop_timer *timer)
{
	struct verbs_transport *transport =
		container_of(timer, struct verbs_transport, linger_timer);
	uint64_t now = loop_now_ns(timer->loop);
	struct verbs_linger *linger;

	while ((linger = list_first(&transport->lingering, struct verbs_linger, link)) &&
	       linger->until_ns <= now)
		linger_free(transport, linger);
	if (linger)
		loop_timer_start(timer, linger->until_ns - now);
}

void verbs_linger_end(struct verbs_transport *transport)
{
	struct verbs_linger *linger;

	while ((linger = list_first(&transport->lingering, struct verbs_linger, link)))
		linger_free(transport, linger);
	loop_timer_stop(&transport->linger_timer);
}

/* It was acknowledged, or has ended by itself. */
static void on_lingering(struct verbs_transport *transport, const struct cm_event *event)
{
	struct verbs_linger *linger;

	if (event->type != RDMA_CM_EVENT_DISCONNECTED &&
	    event->type != RDMA_CM_EVENT_TIMEWAIT_EXIT)
		return;
	list_foreach(linger, &transport->lingering, link) {
		if (linger->id == event->id) {
			linger_free(transport, linger);
			return;
		}
	}
}

/* ---- events of a queue pair ---- */

static void on_established(struct verbs_qp *qp, const struct cm_event *event)
{
	struct verbs_peer *peer = qp->peer;

	if (sm_state(&qp->sm) != VERBS_QP_CONNECTING || !net_peer_live(&peer->net))
		return;
	if (peer->net.dial && check_answer(qp, event) < 0) {
		net_peer_fail_last(&peer->net);
		return;
	}
	verbs_qp_up(qp);
	net_peer_kick(&peer->net);
}

static void verbs_cm_on_refused(struct verbs_qp *qp, const struct cm_event *event)
{
	char text[80] = "";
	struct err err;

	if (event->type == RDMA_CM_EVENT_REJECTED && event->status == REJECT_CONSUMER) {
		size_t len = strnlen((const char *)event->data, event->len);

		snprintf(text, sizeof(text), ": %.*s", (int)(len < 60 ? len : 60),
			 (const char *)event->data);
		for (char *c = text; *c; c++)
			if (*c < ' ' || *c > '~')
				*c = '?';
	}
	err_set(&err, ERR_TIMEOUT, "verbs: %s to %s: %s (%d)%s", qp->rail->name,
		qp->peer->net.name,
		event->type == RDMA_CM_EVENT_REJECTED	   ? "refused"
		: event->type == RDMA_CM_EVENT_UNREACHABLE ? "unreachable"
		: event->type == RDMA_CM_EVENT_ADDR_ERROR ? "its address does not resolve"
		: event->type == RDMA_CM_EVENT_ROUTE_ERROR ? "no route"
							   : "no connection",
		event->status, text);
	if (sm_state(&qp->sm) != VERBS_QP_CONNECTING)
		return;
	if (event->type != RDMA_CM_EVENT_REJECTED) /* no process was left to report
						    * that */
		qp->peer->bad_rails |= 1u << qp->rail->index;
	if (qp->peer->net.dial && net_peer_live(&qp->peer->net))
		verbs_cm_again(qp, &err);
	else if (net_peer_live(&qp->peer->net))
		verbs_qp_reset(qp); /* it may dial again */
}

static void on_disconnected(struct verbs_qp *qp)
{
	struct verbs_peer *peer = qp->peer;
	struct err err;

	if (sm_state(&qp->sm) != VERBS_QP_UP && sm_state(&qp->sm) != VERBS_QP_CONNECTING)
		return;
	if (sm_state(&peer->net.sm) == NET_PEER_READY)
		verbs_qp_poll(&peer->qps[0], VERBS_DEPTH); /* its BYE arrived before */
	err_set(&err, ERR_PEER, "verbs: %s closed the connection over %s", peer->net.name,
		qp->rail->name);
	if (!verbs_rail_fail(qp, &err))
		peer->net.bye_came = true;
}

static void verbs_cm_take_event(struct verbs_transport *transport,
				const struct cm_event *event)
{
	struct verbs_qp *qp = event->id ? event->id->context : NULL;

	if (!qp && event->type != RDMA_CM_EVENT_CONNECT_REQUEST) {
		on_lingering(transport, event);
		return;
	}
	switch (event->type) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		on_connect_request(transport, event);
		return;
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		on_resolved(qp);
		return;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		if (send_connect(qp) < 0)
			again_last(qp);
		return;
	case RDMA_CM_EVENT_ESTABLISHED:
		on_established(qp, event);
		return;
	case RDMA_CM_EVENT_ADDR_ERROR:
	case RDMA_CM_EVENT_ROUTE_ERROR:
	case RDMA_CM_EVENT_CONNECT_ERROR:
	case RDMA_CM_EVENT_UNREACHABLE:
	case RDMA_CM_EVENT_REJECTED:
		verbs_cm_on_refused(qp, event);
		return;
	case RDMA_CM_EVENT_DISCONNECTED:
		on_disconnected(qp);
		return;
	case RDMA_CM_EVENT_DEVICE_REMOVAL: /* the adapter's own event does the rest */
		log_warn("verbs", NULL, "an adapter is being removed", "status=%d",
			 event->status);
		return;
	default: /* TIMEWAIT_EXIT, ADDR_CHANGE: nothing to do */
		return;
	}
}

void verbs_on_cm(struct loop_fd *watch, int events)
{
	struct verbs_transport *transport =
		container_of(watch, struct verbs_transport, cm_watch);
	struct rdma_cm_event *event;

	(void)events;
	while (transport->lib->get_cm_event(transport->cm, &event) == 0) {
		struct cm_event copy = {
			.type = event->event,
			.id = event->id,
			.listener = event->listen_id,
			.status = event->status,
			.len = event->param.conn.private_data
				       ? event->param.conn.private_data_len
				       : 0,
			.responder = event->param.conn.responder_resources,
			.initiator = event->param.conn.initiator_depth,
		};

		if (copy.len)
			memcpy(copy.data, event->param.conn.private_data, copy.len);
		transport->lib->ack_cm_event(event);
		verbs_cm_take_event(transport, &copy);
	}
}
